"""Control messages to a running server: hold and release instances, reset, faults, switches, the log of calls."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from migd.sim.cface.records import Call
from migd.sim.cface.wire import connect, hear, socket_of
from migd.sim.errors import ResetRefusedError, SimulationError
from migd.sim.faults import Fault
from migd.sim.machine import Machine, from_json


class NoServerError(SimulationError):
    """Nobody serves there, or not any more."""


class ControlClient:
    """One connection to the server of a driver root, or at a socket's path. What it holds ends with it.

    SimulationError where the server cannot do what is asked, NoServerError where there is none.
    """

    def __init__(self, root: Path | None = None, *, path: Path | None = None) -> None:
        self._path = path if path is not None else socket_of(root or Path("/"))
        try:
            self._link = connect(self._path)
        except OSError as error:
            raise NoServerError(
                f"{self._path}: no server answers there ({error.strerror}); start one with `migd sim serve --root ROOT`"
            ) from error

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and what it holds."""
        self._link.close()

    def ask(self, do: str, **what: Any) -> Any:
        """Send one message and wait for its answer."""
        try:
            self._link.sendall(_packet({"do": do, **what}))
            told = hear(self._link.recv)
        except OSError as error:
            raise NoServerError(f"{self._path}: the server has ended") from error
        if "error" in told:
            raise (ResetRefusedError if told["error"] == "refused" else SimulationError)(told["message"])
        return told["answer"]

    def hold(self, uuid: str, *, silent: bool = False) -> int:
        """Hold a MIG device, or a GPU with MIG off, as an open device file does; this process' pid for the server."""
        return int(self.ask("hold", uuid=uuid, silent=silent))

    def release(self, uuid: str) -> None:
        """Let go of what `hold` holds."""
        self.ask("release", uuid=uuid)

    def reset(self, gpu: str | int) -> str:
        """Reset a GPU, by UUID, index or PCI address; its UUID. ResetRefusedError says why not."""
        return str(self.ask("reset", gpu=gpu))

    def calls(self, pid: int | None = None, after: int = 0) -> list[Call]:
        """The log of calls, by when they began; of one program; those that ended after the one of this number."""
        return [Call(**call) for call in self.ask("calls", pid=pid, after=after)]

    def newest(self) -> int:
        """The number of the newest call, for `calls(after=…)`; 0 before there is one."""
        return int(self.ask("newest"))

    def unsimulated(self) -> dict[str, int]:
        """How often each function was called that is not simulated."""
        found: dict[str, int] = self.ask("unsimulated")
        return found

    def inject(self, fault: Fault) -> None:
        """Arm a fault."""
        fields = ("call", "action", "code", "gpu", "when", "nth", "times", "delay_s")
        self.ask("inject", **{name: getattr(fault, name) for name in fields})

    def clear_faults(self) -> None:
        """Disarm all faults."""
        self.ask("clear")

    def switch(self, name: str, value: Any, gpu: int | None = None) -> None:
        """Set a switch, as SimHost.switch does."""
        self.ask("switch", name=name, value=value, gpu=gpu)

    def snapshot(self) -> Machine:
        """The machine as it is."""
        return from_json(self.ask("snapshot"))


def _packet(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()
