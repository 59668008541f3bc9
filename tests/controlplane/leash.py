"""`python leash.py PARENT PROGRAM …`: becomes the program, and dies with the process that started it.

A test run that is killed outright cannot stop what it started; the kernel then does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def main(words: list[str]) -> None:
    """Ask the kernel for the signal, see that the parent is still there, and become the program."""
    parent, *command = words
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit("the process that started this is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
