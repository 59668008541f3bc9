"""NVML clients on the C face: the real pynvml, pointed for each of them at a copy of the library of its own.

A copy states who it is, and the server of a test believes it: so one test has several clients, of any pid and privilege.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml

from migd.sim import SimHost
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
