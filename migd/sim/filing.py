"""A simulated machine in a file: one JSON document, one caller at a time, replaced whole, read only when changed."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from migd.sim.errors import SimFileError
from migd.sim.machine import Machine, from_json, to_json


class MachineFile:
    """One machine's file. lock() before read and write; a crash at any point leaves the old document or the new one.

    The lock is the kernel's, on a hidden file beside the document (which is itself replaced and cannot carry it).
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))  # a link stays one: what it names is replaced
        self._beside = self.path.with_name(f".{self.path.name}.lock")
        self._descriptor: int | None = None
        self._seen: tuple[int, int, int] | None = None
        self._kept: Machine | None = None

    def lock(self) -> None:
        """Wait until no other process is inside, and enter."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise SimFileError(f"{self.path}: cannot be locked: {error.strerror}") from error

    def unlock(self) -> None:
        """Let the next process in."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def exists(self) -> bool:
        """Whether there is a document."""
        try:
            return self.path.exists()
        except OSError as error:  # a name too long, a folder that may not be entered
            raise SimFileError(f"{self.path}: cannot be read: {error.strerror}") from error

    def read_if_changed(self) -> Machine | None:
        """The machine, where the document is not the one read or written last; else None."""
        try:
            state = self.path.stat()
            seen = (state.st_ino, state.st_mtime_ns, state.st_size)
            if seen == self._seen:
                return None
            text = self.path.read_text("utf-8")
            document = json.loads(text)
            machine, kept = from_json(document), from_json(document)
        except OSError as error:
            raise SimFileError(f"{self.path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise SimFileError(f"{self.path}: not a simulated machine: it holds no JSON document ({error})") from error
        except SimFileError as error:
            raise SimFileError(f"{self.path}: {error}; give another path, or remove the file yourself") from error
        self._seen, self._kept = seen, kept
        return machine

    def write(self, machine: Machine) -> None:
        """Replace the document, if it would differ."""
        if machine == self._kept:  # most calls only read; comparing takes a fiftieth of encoding
            return
        document = to_json(machine)
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        try:
            new.write_text(json.dumps(document, separators=(",", ":")), "utf-8")
            os.replace(new, self.path)
            state = self.path.stat()
        except OSError as error:
            new.unlink(missing_ok=True)
            raise SimFileError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._seen, self._kept = (state.st_ino, state.st_mtime_ns, state.st_size), from_json(document)

    def close(self) -> None:
        """Give the lock file back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
