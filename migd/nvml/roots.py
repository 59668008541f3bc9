"""A driver under a root of its own, as a container mounts the host's: its library and its programs are found there.

The loader's path is left alone: with the host's library folders in it, everything else would come from there too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from ctypes import CDLL, RTLD_GLOBAL
from pathlib import Path
from typing import Any, Final

import pynvml

from migd.nvml.calls import Library
from migd.nvml.errors import NoDriverError

ROOT: Final = "MIGD_DRIVER_ROOT"
"""The environment variable that names the root; deploy/ sets it."""
NAME: Final = "libnvidia-ml.so.1"
FOLDERS: Final = (
    *("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64"),
    *("usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/aarch64-linux-gnu/nvidia/current"),
    *("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib64"),
)
"""Where drivers install it, under the root. Source: nvidia-container-toolkit, internal/lookup/library.go."""
_PROGRAMS: Final = ("usr/bin", "usr/sbin", "bin", "sbin")


def _load(path: str) -> object:
    return CDLL(path, RTLD_GLOBAL)


class RootedLibrary:
    """The pynvml module, for a driver under a root.

    It is looked for at each nvmlInit, since a driver that comes in a container may come later. What is loaded under its
    full path is what the loader then takes for its short name, as pynvml asks for it. The programs that we start get
    the same by LD_PRELOAD, and find nvidia-smi by PATH, after the image's own programs. Source: ld.so(8).
    """

    def __init__(
        self,
        root: Path,
        environment: MutableMapping[str, str] = os.environ,
        load: Callable[[str], object] = _load,
        library: Library = pynvml,
    ) -> None:
        self._root = root
        self._environment = environment
        self._load = load
        self._library = library
        self._loaded: object = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def nvmlInit(self) -> None:  # noqa: N802  pynvml's name
        """Load the root's library if it is there, then as pynvml does; NoDriverError where neither finds one."""
        if self._loaded is None:
            self._find()
        try:
            self._library.nvmlInit()
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                raise
            hint = f"it is neither under {self._root}, as {ROOT} has it, nor on the loader's path"
            raise NoDriverError("nvmlInit", "", error.value, hint) from error

    def _find(self) -> None:
        for path in (self._root / folder / NAME for folder in FOLDERS):
            if not path.exists():
                continue
            try:
                self._loaded = self._load(str(path))
            except OSError:
                continue  # of another architecture
            self._environment["LD_PRELOAD"] = str(path)
            programs = [str(self._root / folder) for folder in _PROGRAMS]
            self._environment["PATH"] = ":".join([self._environment.get("PATH", os.defpath), *programs])
            return


def this_library() -> Library:
    """The pynvml module, or what stands for it where the environment names a driver root."""
    root = os.environ.get(ROOT)
    return RootedLibrary(Path(root)) if root else pynvml
