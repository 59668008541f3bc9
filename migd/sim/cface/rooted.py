"""A server under a driver root with all that a program may look for there: library, nvidia-smi, the driver's files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from migd.sim.cface.installing import place
from migd.sim.cface.serving import Server
from migd.sim.cface.smi import nvidia_smi
from migd.sim.files.rooting import Root
from migd.sim.host import SimHost

NVIDIA_SMI: Final = "usr/bin/nvidia-smi"


def rooted_server(host: SimHost, path: Path) -> Server:
    """A server of this machine under this folder, to be started; the files follow the machine from then on.

    RootError where the folder is somebody else's, NotBuiltError where gcc is missing, OSError where the disk fails.
    """
    root = Root(path)
    root.claim()
    place(nvidia_smi(), root.path / NVIDIA_SMI)
    return Server(host, root.path, root.write)
