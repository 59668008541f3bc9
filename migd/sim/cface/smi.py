"""Builds what stands for nvidia-smi, with gcc, into the same cache as the library."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from migd.sim.cface.building import NotBuiltError, cache_home
from migd.sim.cface.header import NoHeaderError, find_compiler

SOURCE: Final = Path(__file__).with_name("nvidia_smi.c")
_FLAGS: Final = ("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g0", "-Wall", "-Wextra")


def nvidia_smi(environment: Mapping[str, str] = os.environ) -> Path:
    """The program, built where it is not yet; a tenth of a second. NotBuiltError where it cannot be."""
    text = SOURCE.read_bytes()
    told = hashlib.sha256(f"{platform.system()} {platform.machine()} {_FLAGS}\n".encode() + text).hexdigest()
    built = cache_home(environment) / "nvidia-smi" / told[:16] / "nvidia-smi"
    if built.exists():
        return built
    try:
        compiler = find_compiler()
    except NoHeaderError as error:
        raise NotBuiltError(str(error)) from error
    built.parent.mkdir(parents=True, exist_ok=True)
    part = built.with_name(f".nvidia-smi.{os.getpid()}.part")  # two who build at once do it twice, and both are right
    done = subprocess.run(
        [compiler, *_FLAGS, "-o", str(part), str(SOURCE)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise NotBuiltError(f"gcc could not build the simulated nvidia-smi:\n{done.stderr[-4000:]}")
    part.replace(built)
    return built
