"""One migd at a time on a machine: a lock of the kernel's, which ends with its holder, however that ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

FILE: Final = "lock"


class LockHeldError(Exception):
    """Another process works on this machine's GPUs now. pid: its id, None where it is not written."""

    def __init__(self, path: Path, pid: int | None) -> None:
        self.pid = pid
        who = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"{who} holds {path}: it is changing this machine's GPUs. Wait for it, or end it")


class StateDirError(Exception):
    """The state folder cannot be used; the text says why."""


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the machine's lock. LockHeldError where a live process has it; StateDirError where it cannot be made."""
    path = folder / FILE
    with ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, handle)  # the lock goes with it; the file stays, so that all lock the same one
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode("ascii"), 0)
        except BlockingIOError:
            text = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
            raise LockHeldError(path, int(text) if text.isdigit() else None) from None
        except OSError as error:
            what_to_do = "Run as root, or name" if isinstance(error, PermissionError) else "Name"
            raise StateDirError(
                f"cannot use the state folder {folder}: {error.strerror}. {what_to_do} another with --state-dir"
            ) from error
        yield
