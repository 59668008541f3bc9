"""`migd` commands as processes of their own without each starting an interpreter: forked off one that has it all.

What is forked off is a process like any other: it holds its own files and locks, and a signal ends it alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from migd.cli.main import COMMANDS, main


class Forked:
    """Runs commands, one at a time, in processes forked off a single one."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def __call__(self, *words: str) -> int:
        """The exit code of a command whose output nobody reads; negative for a signal."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(words) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the process that commands are forked off has ended"
        return int(answer)


@contextmanager
def forking() -> Iterator[Forked]:
    """A process to fork commands off, started once; it ends when nobody writes to it any more."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield Forked(server)


def serve() -> None:
    """Read commands, a line of JSON each; answer each with its exit code."""
    for module, _ in COMMANDS.values():
        import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become("migd", *json.loads(line))
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


def _become(*words: str) -> None:
    """Do what the command does, in a process that has just been forked, and end it."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.argv = list(words)
    code: object = 1
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    finally:
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve()
