"""A program of its own: when the one that started it has ended, in whatever way, ends and removes what that has left.

    python -I -S guarding.py FOLDER      (FOLDER: what to remove; "" for nothing)

Standard input is the only thread between them: it carries the numbers of the mount namespaces whose processes are to
go, a line each, and ends when its last writer does, also by SIGKILL. Standard library alone, as it is run as a file.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator

GRACE_S = 2.0
"""So long a process has after SIGTERM."""
PATIENCE_S = 10.0
PAUSE_S = 0.02


def main(folder: str) -> None:
    """Wait for the end of standard input, then leave nothing."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    spaces = {int(line) for line in sys.stdin if line.strip().isdigit()}
    end_all(spaces)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def end_all(spaces: set[int]) -> None:
    """End every process in these mount namespaces: asked first, then made to."""
    began = time.monotonic()
    number = signal.SIGTERM
    told: set[int] = set()
    while time.monotonic() - began < PATIENCE_S:
        left = list(_inside(spaces))
        if not left:
            return
        if number == signal.SIGTERM and time.monotonic() - began > GRACE_S:
            number, told = signal.SIGKILL, set()
        for pid in left:
            if pid not in told:
                told.add(pid)
                _signal(pid, number, spaces)
        time.sleep(PAUSE_S)


def _inside(spaces: set[int]) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and _space(int(name)) in spaces:
            yield int(name)


def _space(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino
    except OSError:
        return None  # ended, or not ours to look at


def _signal(pid: int, number: signal.Signals, spaces: set[int]) -> None:
    """Signal a process that is still the one that was seen: a descriptor of it outlives its number."""
    try:
        found = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _space(pid) in spaces:
            signal.pidfd_send_signal(found, number)
            signal.pidfd_send_signal(found, signal.SIGCONT)  # a stopped one hears nothing else
    except OSError:
        pass
    finally:
        os.close(found)


if __name__ == "__main__":
    main(sys.argv[1])
