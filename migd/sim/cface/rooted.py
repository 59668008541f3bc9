"""A server under a driver root with all that a program may look for there: library, nvidia-smi, the driver's files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from migd.sim.cface.serving import Server
from migd.sim.cface.smi import nvidia_smi
from migd.sim.host import SimHost
from migd.sim.rooting import Root

NVIDIA_SMI: Final = "usr/bin/nvidia-smi"


def rooted_server(host: SimHost, path: Path) -> Server:
    """A server of this machine under this folder, to be started; the files follow the machine from then on.

    RootError where the folder is somebody else's, NotBuiltError where gcc is missing, OSError where the disk fails.
    """
    root = Root(path)
    root.claim()
    _place(nvidia_smi(), root.path / NVIDIA_SMI)
    return Server(host, root.path, root.write)


def _place(built: Path, where: Path) -> None:
    """The program at its place, whole at any moment; who runs the old one keeps that."""
    where.parent.mkdir(parents=True, exist_ok=True)
    if where.exists() and where.read_bytes() == built.read_bytes():
        return
    part = where.with_name(f".{where.name}.{os.getpid()}.new")
    shutil.copyfile(built, part)
    part.chmod(0o755)
    part.replace(where)
