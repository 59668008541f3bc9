"""`python cradle.py SOCKET MODULE…`: imports these modules once, and then forks whoever is asked for.

What it forks is a process like any other, in a session of its own, and becomes the program that its words name; only
importing is spared. One thread, nothing but imports before a fork. On the socket, a file descriptor, each request comes
as JSON with the file for the output beside it, and each end of a process goes out. All die with it, and it with the
other end of the socket.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import os
import selectors
import signal
import socket
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

ROOM: Final = 200_000
"""So many bytes a request may have."""
PR_SET_PDEATHSIG: Final = 1  # prctl(2)
PR_SET_NAME: Final = 15


def main(words: Sequence[str]) -> None:
    """Serve until nobody is at the other end. In a forked process: become its program."""
    there = socket.socket(fileno=int(words[0]))
    for name in words[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each process would copy what all could share
    program = _forking(there)
    if program is not None:
        _run(program)


def _forking(there: socket.socket) -> types.CodeType | None:
    """None at the end; in a forked process its program."""
    waiting = selectors.DefaultSelector()
    waiting.register(there, selectors.EVENT_READ)
    living: dict[int, int] = {}  # what becomes readable at its end -> process
    cradle = os.getpid()
    while True:
        for key, _ in waiting.select():
            if key.fileobj is not there:
                _end(there, waiting, living, key.fd)
                continue
            asked, files = _asked(there)
            if not asked:
                for pid in living.values():
                    _killed(pid)
                return None
            request = json.loads(asked)
            try:
                program = _program_of(*request["words"][1:3])
            except (OSError, SyntaxError, ImportError) as error:
                program = compile(f"import sys; sys.exit({str(error)!r})", "none", "exec")
            pid = os.fork()
            if pid == 0:
                there.close()
                waiting.close()
                for left in living:
                    os.close(left)
                _settle(request, files[0], cradle)
                return program
            os.close(files[0])
            there.send(json.dumps({"pid": pid}).encode())
            living[ended := os.pidfd_open(pid)] = pid
            waiting.register(ended, selectors.EVENT_READ)


def _asked(there: socket.socket) -> tuple[bytes, list[int]]:
    try:
        asked, files, _, _ = socket.recv_fds(there, ROOM, 1)
    except ConnectionResetError:  # it was killed, and had not read all
        return b"", []
    return asked, files


def _end(there: socket.socket, waiting: selectors.BaseSelector, living: dict[int, int], ended: int) -> None:
    pid = living.pop(ended)
    waiting.unregister(ended)
    os.close(ended)
    _killed(pid)  # what is left of its group, as long as the number is its own
    _, status = os.waitpid(pid, 0)
    try:
        there.send(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode())
    except OSError:  # nobody is there any more, which the next look shows
        return


def _killed(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _settle(request: Mapping[str, Any], output: int, cradle: int) -> None:
    """What `exec` does, and what a leash does."""
    os.setsid()
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != cradle:
        sys.exit("the process that started this is gone")
    words = list(request["words"][1:])
    sys.argv = words[1:] if words[0] == "-m" else words
    libc.prctl(PR_SET_NAME, " ".join([Path(sys.argv[0]).stem, *sys.argv[1:2]]).encode(), 0, 0, 0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(program: types.CodeType) -> NoReturn:
    """Run it to its end, and end as Python does, without taking apart what was imported: that would copy all of it."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = sys.argv[0]
    status = 0
    try:
        exec(program, main.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter that ends does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)


def _program_of(word: str, name: str = "") -> types.CodeType:
    """The program of a command line: `python -m NAME …` or `python WORD …`."""
    if word != "-m":
        return _compiled(word, os.stat(word).st_mtime_ns)
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = None if spec is None or spec.loader is None else spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    if not isinstance(code, types.CodeType):
        raise ImportError(f"No module named {name}")
    return code


@functools.cache
def _compiled(file: str, _changed_ns: int) -> types.CodeType:
    return compile(Path(file).read_bytes(), file, "exec")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the test run, which then ends this
    main(sys.argv[1:])
