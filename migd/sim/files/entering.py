"""A program of its own: runs another where a driver root lies over /proc, /sys and /dev, in a private mount namespace.

    python -I -S entering.py ROOT PARENT REPORT MODULES PROGRAM [ARGUMENT …]

ROOT: the driver root. PARENT: the pid with which it ends. REPORT: a descriptor that is told the namespace's number.
MODULES: 1 to show /proc/modules also where the kernel has none. It needs the standard library alone, since it is run as
a file: to import the package would take longer than all that it does. Sources: mount_namespaces(7),
user_namespaces(7), mount(2), prctl(2).

Folders are bound, so what the server changes in them is seen at once. Nothing outside the namespace changes, and it is
gone with its last process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_BIND, MS_MOVE, MS_REC, MS_SLAVE = 2, 4096, 8192, 16384, 1 << 19
PR_SET_PDEATHSIG = 1
FAILED, CANNOT_RUN, NOT_FOUND = 1, 126, 127  # the last two as shells say it
FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What `migd sim exec` passes on; blocked until the program runs."""

_libc = ctypes.CDLL(None, use_errno=True)


class EnterError(Exception):
    """The namespace cannot be made, or something cannot be laid over what is there; the text says what to do."""


def main(words: Sequence[str]) -> int:
    """Become the program; its return is the exit status where that failed, with a sentence on standard error."""
    root, parent, report, modules, *command = words
    if not command[0]:
        return _say("the program has no name: give one after --", NOT_FOUND)
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(parent):
        return FAILED  # it ended before we could ask to end with it
    try:
        enter(root, modules == "1")
    except EnterError as error:
        return _say(str(error), FAILED)
    os.write(int(report), b"%d\n" % os.stat("/proc/self/ns/mnt").st_ino)
    os.close(int(report))
    _give_signals_back()
    try:
        os.execvp(command[0], command)  # noqa: S606  what the user asked for
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        return _say(f"cannot run {command[0]}: {error.strerror}", NOT_FOUND if missing else CANNOT_RUN)


def enter(root: str, modules: bool) -> None:
    """Leave the machine's mounts for a copy of them, in which the driver root's files lie over the kernel's."""
    _unshare()
    _mount("none", "/", MS_REC | MS_SLAVE)  # what is mounted outside still comes in; nothing goes out
    _lay_devices(root)
    _lay_pci(root)
    _lay_proc(root, modules)


def _unshare() -> None:
    """A mount namespace; where that is not allowed, within a user namespace in which it is."""
    if _libc.unshare(CLONE_NEWNS) == 0:
        return
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(CLONE_NEWNS | CLONE_NEWUSER) != 0:
        why = os.strerror(ctypes.get_errno())
        raise EnterError(
            f"a private mount namespace cannot be made ({why}): run it as root with CAP_SYS_ADMIN, or on a kernel that "
            "lets users make namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone)"
        )
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    except OSError as error:
        raise EnterError(f"a user namespace cannot be set up ({error.strerror}): run it as root") from error


def _lay_devices(root: str) -> None:
    """The driver root's /dev, with the machine's own devices in it where both have one of a name."""
    theirs = os.open("/dev", os.O_PATH | os.O_DIRECTORY)
    _mount(f"{root}/dev", "/dev", MS_BIND)
    for name in os.listdir("/dev"):
        source = f"/proc/self/fd/{theirs}/{name}"
        if name.startswith("nvidia") or os.path.islink(f"/dev/{name}") or not os.path.exists(source):
            continue
        _mount(source, f"/dev/{name}", MS_BIND | MS_REC)
    os.close(theirs)


def _lay_pci(root: str) -> None:
    """The driver root's PCI bus; its devices beside the machine's, where the links of the bus lead."""
    if not os.path.isdir("/sys/bus/pci"):
        raise EnterError("there is no /sys/bus/pci here to lay the GPUs over: mount sysfs at /sys first")
    _mount(f"{root}/sys/bus/pci", "/sys/bus/pci", MS_BIND)
    theirs = os.open("/sys/devices", os.O_RDONLY | os.O_DIRECTORY)
    names = os.listdir(theirs)
    _mount("tmpfs", "/sys/devices", MS_NOSUID, kind="tmpfs", data="mode=755")
    for name in os.listdir(f"{root}/sys/devices"):
        os.mkdir(f"/sys/devices/{name}")
        _mount(f"{root}/sys/devices/{name}", f"/sys/devices/{name}", MS_BIND)
    for name in names:
        if not os.path.exists(f"/sys/devices/{name}"):
            _make_like(f"/proc/self/fd/{theirs}/{name}", f"/sys/devices/{name}")
            _mount(f"/proc/self/fd/{theirs}/{name}", f"/sys/devices/{name}", MS_BIND | MS_REC)
    os.close(theirs)


def _lay_proc(root: str, modules: bool) -> None:
    if modules and not os.path.exists("/proc/modules"):
        _replace_proc()
    _mount(f"{root}/proc/driver", "/proc/driver", MS_BIND)
    for name in ("devices", "modules"):
        if os.path.exists(f"/proc/{name}"):
            _mount(f"{root}/proc/{name}", f"/proc/{name}", MS_BIND)


def _replace_proc() -> None:
    """A folder of links into the real /proc, in which names can be that the kernel does not have.

    It cannot follow which processes there are: of /proc/PID it has the program's own alone, and /proc/self.
    """
    names = [name for name in os.listdir("/proc") if not name.isdigit() and name not in ("driver", "devices")]
    _mount("tmpfs", "/proc/driver", MS_NOSUID, kind="tmpfs", data="mode=755")
    os.mkdir("/proc/driver/.kernel")
    _mount("/proc", "/proc/driver/.kernel", MS_BIND)
    for name in (*names, str(os.getpid())):
        os.symlink(f".kernel/{name}", f"/proc/driver/{name}")
    os.mkdir("/proc/driver/driver")
    for name in ("devices", "modules"):
        _make_like("/dev/null", f"/proc/driver/{name}")
    _mount("/proc/driver", "/proc", MS_MOVE)


def _make_like(source: str, target: str) -> None:
    """Something that the source can be bound over."""
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def _mount(source: str, target: str, flags: int, *, kind: str = "none", data: str = "") -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()) != 0:
        why = os.strerror(ctypes.get_errno())
        raise EnterError(f"{source} cannot be laid over {target}: {why}")


def _give_signals_back() -> None:
    """As the program would have found them, had it been run by itself: python changes some, our parent blocks some."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*FORWARDED, signal.SIGCHLD))


def _say(text: str, status: int) -> int:
    sys.stderr.write(f"migd: {text}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
