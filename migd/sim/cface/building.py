"""Builds the simulated libnvidia-ml.so.1 with gcc into a cache outside the clone, once for all that it is made of."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Final

from migd.sim.cface.handlers import ARRAYS, HANDLERS
from migd.sim.cface.header import NoHeaderError, find_compiler, find_header, read_header
from migd.sim.cface.shim import source
from migd.sim.face.system import ERROR_TEXTS

NAME: Final = "libnvidia-ml.so.1"
_FLAGS: Final = (
    *("-std=gnu11", "-D_GNU_SOURCE", "-DNVML_NO_UNVERSIONED_FUNC_DEFS=1", "-O2", "-g0", "-shared", "-fPIC", "-pthread"),
    *("-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations", "-Wno-unused-parameter"),
    *(f"-Wl,-soname,{NAME}", "-Wl,-z,nodelete", "-Wl,-z,now", "-Wl,--no-undefined"),
)
"""nodelete: go-nvml closes the library and opens it again, with threads inside. now: a missing symbol shows at once."""


class NotBuiltError(Exception):
    """The library cannot be built here; the text says what is missing and what to do."""


def cache_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Where caches go: $XDG_CACHE_HOME/migd, or ~/.cache/migd."""
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "migd"


def library(environment: Mapping[str, str] = os.environ) -> Path:
    """The library, built where it is not yet; about 2 s on one core. NotBuiltError where it cannot be."""
    try:
        compiler, header = find_compiler(), find_header()
        folder = cache_home(environment) / "nvml" / _key(header)
        built = folder / NAME
        if built.exists():
            return built
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / ".building"):
            if not built.exists():
                _compile(compiler, source(read_header(header), HANDLERS, ARRAYS, ERROR_TEXTS), header, built)
    except NoHeaderError as error:
        raise NotBuiltError(str(error)) from error
    return built


def _key(header: Path) -> str:
    """A name for what would be built: all that goes into it, and this kind of machine."""
    told = hashlib.sha256(f"{platform.system()} {platform.machine()} {_FLAGS}\n".encode())
    told.update(repr((sorted(HANDLERS), sorted(ARRAYS.items()), sorted(ERROR_TEXTS.items()))).encode())
    told.update(header.read_bytes())
    for name in ("shim.c", "shim.py", "header.py"):
        told.update((resources.files("migd.sim.cface") / name).read_bytes())
    return told.hexdigest()[:16]


def _compile(compiler: str, text: str, header: Path, built: Path) -> None:
    """Put in place whole: an interrupted build leaves nothing that looks finished."""
    written = built.with_name("nvml.c")
    written.write_text(text, encoding="utf-8")
    part = built.with_name(f".{NAME}.part")
    command = [compiler, *_FLAGS, f"-I{header.parent}", "-o", str(part), str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotBuiltError(f"gcc could not build the simulated {NAME}:\n{done.stderr[-4000:]}")
    part.replace(built)


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
