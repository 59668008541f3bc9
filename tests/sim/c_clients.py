"""NVML clients on the C face: the real pynvml, pointed for each of them at a copy of the library of its own.

A copy states who it is, and the server of a test believes it: one test has clients of several pids and privileges.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml

from migd.sim import SimHost
from migd.sim.cface import wire
from migd.sim.cface.building import library
from migd.sim.cface.serving import Server

_NUMBERS = itertools.count()


class CClient:
    """pynvml for one client: its functions call the library given, everything else is pynvml's own."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._loaded = loaded
        self._pointers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(pynvml, name)
        if isinstance(found, types.FunctionType) and name.startswith("nvml"):
            return self._pointed(found)
        return found

    def _pointed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            before = pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache
            pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache = self._loaded, self._pointers
            try:
                return function(*arguments, **keywords)
            finally:
                pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache = before

        return call


class CBox:
    """A SimHost whose clients are on the C face."""

    def __init__(self, host: SimHost, server: Server, folder: Path) -> None:
        self._host, self.server, self._folder = host, server, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def nvml(self, pid: int | None = None, *, privilege: str = "root") -> CClient:
        """As SimHost.nvml."""
        copy = self._folder / f"libnvidia-ml-{next(_NUMBERS)}.so.1"
        shutil.copyfile(library(), copy)
        loaded = ctypes.CDLL(str(copy))
        loaded.migd_sim_be(os.fsencode(self.server.socket), os.getpid() if pid is None else pid, privilege.encode())
        return CClient(loaded)


@contextmanager
def served(host: SimHost, folder: Path) -> Iterator[CBox]:
    """A server on this machine that believes its clients; fails where it met what must not happen."""
    root = folder / f"root-{next(_NUMBERS)}"
    with Server(host, root, trusting=True) as server:
        yield CBox(host, server, root)
    assert not server.troubles, "\n".join(server.troubles)


class Raw:
    """A client that writes packets itself: requests that come twice, break off, or are no requests."""

    def __init__(self, server: Server, *, token: int = 7, upcoming: int = 1, pid: int = 4711) -> None:
        self._link = wire.connect(server.socket)
        greeting = wire.GREETING.pack(wire.HELLO, wire.PROTOCOL, 1, pid, token, upcoming, b"root")
        self._link.sendall(greeting)
        assert self._link.recv(64)

    def send(self, name: str, number: int, *values: int, pointees: tuple[bytes, ...] = (), again: bool = False) -> None:
        """Send a request; its answer is not waited for. pointees: of the arguments from the first on."""
        texts = [*pointees, *[b""] * (len(values) - len(pointees))]
        fields = [field for value, text in zip(values, texts, strict=True) for field in (value, len(text), 0)]
        packet = wire.REQUEST.pack(wire.CALL, len(values), len(name), again, number)
        self._link.sendall(packet + wire.ARGUMENTS[len(values)].pack(*fields) + name.encode() + b"".join(texts))

    def call(self, name: str, number: int, *values: int, again: bool = False) -> tuple[int, dict[int, bytes]]:
        """The code, and what is written where, by argument."""
        self.send(name, number, *values, again=again)
        return self.answer()

    def answer(self) -> tuple[int, dict[int, bytes]]:
        """The answer to what was sent."""
        told = self._link.recv(wire.PACKET_MAX)
        if not told:
            raise ConnectionError("the server ended the connection")
        code, _, _ = wire.REPLY.unpack_from(told)
        written, at = {}, wire.REPLY.size
        while at < len(told):
            place, size = wire.OUTPUT.unpack_from(told, at)
            at += wire.OUTPUT.size
            written[place] = told[at : at + size]
            at += size
        return code, written

    def close(self) -> None:
        """Break the connection."""
        self._link.close()

    def __del__(self) -> None:
        self._link.close()


def everybodys_python() -> str | None:
    """A Python that other users may run; one under root's home they may not."""
    for interpreter in (sys.executable, "/usr/bin/python3"):
        try:
            subprocess.run([interpreter, "-c", ""], user=65534, group=65534, extra_groups=[], check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return interpreter
    return None


def python(server: Server, code: str, *words: str, interpreter: str = sys.executable, **options: Any) -> Any:
    """A Python program on the library of this server's root, as any program would be: its Popen."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(server.library.parent), **options.pop("env", {})}
    command = [interpreter, "-c", code, *words]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
    )
