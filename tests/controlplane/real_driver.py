"""The driver of a real node's GPUs: `migd sim serve` in the node's space; its root is where drivers are."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Final

from controlplane.nodes_programs import python_path
from controlplane.processes import Child
from controlplane.real_config import DRIVER
from controlplane.real_space import Space
from migd.sim.cface.client import ControlClient

SOCKET: Final = Path("run/migd/nvml.sock")
"""Under the driver's root."""
_START_S: Final = 60.0


class Driver:
    """One driver. `start`, `stop`; `server.kill` and `start` again is one that crashes, which keeps the GPUs' state.

    space: of the node, with the simulated GPUs in its folder already.
    """

    def __init__(self, space: Space) -> None:
        self._place = space.place
        words = ("-m", "migd", "sim", "serve", f"--root={DRIVER}", f"--state={self._place.machine_file}")
        self.server: Child = space.child("driver", sys.executable, *words, environment={"PYTHONPATH": python_path()})

    def start(self) -> None:
        """Start it, and wait until it serves; StartError, with the end of its log, where it does not."""
        self.server.start()
        self.server.wait_until(self._serves, _START_S)

    def stop(self) -> None:
        """End it."""
        self.server.stop()

    def client(self) -> ControlClient:
        """A connection to it from outside of the node, that also says who asked it for what; use it as a context."""
        return ControlClient(path=self._socket)

    @property
    def _socket(self) -> Path:
        return self._place.driver / SOCKET

    def _serves(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trial:
            return trial.connect_ex(str(self._socket)) == 0
