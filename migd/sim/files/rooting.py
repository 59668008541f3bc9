"""A driver root on disk: keeps the files that a driver shows of a simulated machine in step with it."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from migd.sim.errors import SimulationError
from migd.sim.files.shown import CharDevice, File, Folder, Kernel, Link, Node, driver_files, fingerprint
from migd.sim.machine import Machine

MARKER: Final = ".migd-driver-root"
_MARKED: Final = b"A simulated NVIDIA driver's files, kept by `migd sim`: proc, sys and dev here are written over.\n"
_KEPT: Final = ("dev", "sys", "proc")
_NEW: Final = ".migd.new"
_HERE: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RootError(SimulationError):
    """The folder cannot be a driver root: it is somebody else's, or cannot be written."""


def this_kernel(proc: Path = Path("/proc")) -> Kernel:
    """What the kernel that really runs shows; what it lacks is empty."""

    def text(name: str) -> str:
        try:
            return (proc / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    return Kernel(text("devices"), text("modules"))


class Root:
    """A folder as a driver container's root, in which proc, sys and dev follow a simulated machine.

    path: absent, empty, or a driver root from before; anything else is refused. Only what differs is touched: each file
    is replaced as a whole, new nodes come before the files that tell of them, and what is gone goes last, in reverse.
    No link in it is followed. Device nodes are made where the kernel lets us, as it lets root, else plain files.
    One thread at a time; several processes wait for each other.
    """

    def __init__(self, path: str | Path, kernel: Kernel | None = None) -> None:
        self.path = Path(os.path.realpath(path))
        self._kernel = this_kernel() if kernel is None else kernel
        self._written: tuple[object, ...] | None = None
        self._there: dict[str, Node] = {}

    def write(self, machine: Machine) -> None:
        """Make the files say what the machine is now; nothing is looked at where they already do.

        The machine must stand still meanwhile. The first call, and the one after an error, compare all with what lies
        there, and so repair what an interrupted one has left. RootError: not ours, or not to be written.
        """
        shown = fingerprint(machine)
        if shown == self._written:
            return
        wanted = driver_files(machine, self._kernel)
        known = self._written is not None
        self._written = None
        try:
            with self._claimed() as (root, was_ours):
                if not (known and was_ours):
                    self._there = _found(root)
                _change(root, self._there, wanted)
        except OSError as error:
            where = error.filename or self.path
            raise RootError(f"{self.path}: the driver's files cannot be written: {where}: {error.strerror}") from error
        self._there, self._written = wanted, shown

    def claim(self) -> None:
        """Make the folder ours, so that others may put things into it; RootError where it is somebody else's."""
        try:
            with self._claimed():
                return
        except OSError as error:
            raise RootError(f"{self.path}: cannot be a driver root: {error.strerror}") from error

    @contextmanager
    def _claimed(self) -> Iterator[tuple[int, bool]]:
        """The folder's descriptor, with no other process writing in it, and whether it has been ours before."""
        self.path.mkdir(parents=True, exist_ok=True)
        root = os.open(self.path, _HERE)
        try:
            if not _is_ours(root):
                raise RootError(
                    f"{self.path} is not empty and no driver root of ours (it lacks {MARKER}): give another folder"
                )
            marker = os.open(MARKER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=root)
            try:
                fcntl.flock(marker, fcntl.LOCK_EX)
                was_ours = os.fstat(marker).st_size > 0
                if not was_ours:
                    os.write(marker, _MARKED)
                yield root, was_ours
            finally:
                os.close(marker)
        finally:
            os.close(root)


def _is_ours(root: int) -> bool:
    names = set(os.listdir(root))
    return not names or (MARKER in names and stat.S_ISREG(os.stat(MARKER, dir_fd=root, follow_symlinks=False).st_mode))


# ---- what lies there


def _found(root: int) -> dict[str, Node]:
    """Everything in the folders that we keep, read from the disk."""
    found: dict[str, Node] = {}
    device = os.fstat(root).st_dev
    for name in _KEPT:
        with suppress(FileNotFoundError):
            _find(root, name, name, device, found)
    return found


def _find(folder: int, name: str, path: str, device: int, found: dict[str, Node]) -> None:
    state = os.stat(name, dir_fd=folder, follow_symlinks=False)
    mode = stat.S_IMODE(state.st_mode)
    if stat.S_ISDIR(state.st_mode):
        found[path] = Folder(opaque=state.st_dev != device)
        if state.st_dev != device:  # something is mounted there: not ours to look into
            return
        inner = os.open(name, _HERE, dir_fd=folder)
        try:
            for entry in sorted(os.listdir(inner)):
                _find(inner, entry, f"{path}/{entry}", device, found)
        finally:
            os.close(inner)
    elif stat.S_ISLNK(state.st_mode):
        found[path] = Link(os.readlink(name, dir_fd=folder))
    elif stat.S_ISCHR(state.st_mode):
        found[path] = CharDevice(os.major(state.st_rdev), os.minor(state.st_rdev), mode)
    elif stat.S_ISREG(state.st_mode):
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        with os.fdopen(opened, "rb") as file:
            found[path] = File(file.read(), mode)
    else:
        found[path] = Link("")  # a socket or a pipe: equal to nothing that is wanted


# ---- making it what is wanted


def _change(root: int, there: dict[str, Node], wanted: dict[str, Node]) -> None:
    opaque = tuple(f"{path}/" for path, node in wanted.items() if isinstance(node, Folder) and node.opaque)
    for path, node in wanted.items():
        was = there.get(path)
        if isinstance(node, Folder) and isinstance(was, Folder):
            continue
        if was != node and not (was is not None and _stands_for(was, node) and not _may_mknod(root)):
            _put(root, path, node)
    for path in reversed([p for p in there if p not in wanted and not p.startswith(opaque)]):
        with _parent(root, path) as (folder, name):
            if folder is not None:
                _remove(folder, name)


def _stands_for(was: Node, node: Node) -> bool:
    """Whether what lies there is the plain file that we write where we may make no device node."""
    return isinstance(node, CharDevice) and was == File(b"", node.mode)


def _put(root: int, path: str, node: Node) -> None:
    with _parent(root, path, make=True) as (folder, name):
        assert folder is not None
        if isinstance(node, Folder):
            os.close(_folder(folder, name))
            return
        _remove(folder, _NEW)
        _make(folder, _NEW, node)
        try:
            os.replace(_NEW, name, src_dir_fd=folder, dst_dir_fd=folder)
        except IsADirectoryError:
            _remove(folder, name)
            os.replace(_NEW, name, src_dir_fd=folder, dst_dir_fd=folder)


def _make(folder: int, name: str, node: File | Link | CharDevice) -> None:
    if isinstance(node, Link):
        os.symlink(node.target, name, dir_fd=folder)
        return
    if isinstance(node, CharDevice):
        try:
            os.mknod(name, stat.S_IFCHR | node.mode, os.makedev(node.major, node.minor), dir_fd=folder)
        except PermissionError:
            node = File(b"", node.mode)
        else:
            os.chmod(name, node.mode, dir_fd=folder)  # whatever the umask is
            return
    opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with os.fdopen(opened, "wb") as file:
        file.write(node.content)
        os.fchmod(opened, node.mode)


def _may_mknod(root: int) -> bool:
    _remove(root, _NEW)
    try:
        os.mknod(_NEW, stat.S_IFCHR | 0o600, os.makedev(1, 3), dir_fd=root)
    except PermissionError:
        return False
    _remove(root, _NEW)
    return True


@contextmanager
def _parent(root: int, path: str, *, make: bool = False) -> Iterator[tuple[int | None, str]]:
    """The descriptor of the folder in which a path lies, and its last name; None where there is none, unless made."""
    *folders, name = path.split("/")
    here = os.dup(root)
    try:
        for folder in folders:
            try:
                inner = _folder(here, folder) if make else os.open(folder, _HERE, dir_fd=here)
            except (FileNotFoundError, NotADirectoryError):
                yield None, name
                return
            os.close(here)
            here = inner
        yield here, name
    finally:
        os.close(here)


def _folder(here: int, name: str) -> int:
    """The descriptor of a folder of this name, made where there is none; a link or a file is in the way and goes."""
    try:
        return os.open(name, _HERE, dir_fd=here)
    except NotADirectoryError:  # also where it is a link
        _remove(here, name)
    except FileNotFoundError:
        pass
    with suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=here)
    made = os.open(name, _HERE, dir_fd=here)
    os.fchmod(made, 0o755)
    return made


def _remove(folder: int, name: str) -> None:
    """Remove a file, a link or a whole folder; what is not there is well."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        inner = os.open(name, _HERE, dir_fd=folder)
        try:
            for entry in os.listdir(inner):
                _remove(inner, entry)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=folder)
