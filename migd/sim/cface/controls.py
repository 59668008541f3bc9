"""Control messages: what a test, an operator or nvidia-smi's stand-in asks of a running server, beside NVML."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from migd.sim.cface.holding import hold, release
from migd.sim.cface.peers import Peer
from migd.sim.errors import ResetRefusedError, SimulationError
from migd.sim.faults import Fault
from migd.sim.machine import to_json

if TYPE_CHECKING:
    from migd.sim.cface.serving import Server

_NUMBERS = itertools.count(1)
FOR_ALL: Final = frozenset({"hold", "release", "gpus", "calls", "newest", "unsimulated", "snapshot"})
"""What everybody may ask; the rest is root's."""


class Controller:
    """Does what one connection asks. Messages are JSON objects: "do" says what, the rest with what."""

    def __init__(self, server: Server, peer: Peer) -> None:
        self._server = server
        self._host = server.host
        self._peer = peer
        self._holds: dict[str, list[str]] = {}
        self._does: dict[str, Callable[..., Any]] = {
            "hold": self._hold,
            "release": self._release,
            "gpus": self._gpus,
            "reset": self._reset,
            "calls": self._calls,
            "newest": lambda: server.records.newest,
            "unsimulated": server.records.unsimulated,
            "snapshot": lambda: self._host.core.read(to_json),
            "inject": lambda **fault: self._host.inject(Fault(**fault)),
            "clear": self._host.clear_faults,
            "switch": self._host.switch,
            "log_calls": self._host.log_calls,
            "raise_xid": self._host.raise_xid,
            "lose": self._host.lose_gpu,
            "find": self._host.find_gpu,
            "reboot": self._host.reboot,
            "reload_driver": self._host.reload_driver,
            "clock": self._host.use_clock,
        }

    def do(self, message: bytes) -> dict[str, Any]:
        """{"answer": …}, or {"error": kind, "message": for people}; kinds: refused, usage, forbidden."""
        try:
            asked = json.loads(message)
            name = asked.pop("do", None)
            act = self._does.get(name)
            if act is None:
                return _error("usage", f"nothing is called {name!r}; known: {', '.join(sorted(self._does))}")
            if name not in FOR_ALL and self._peer.uid != 0:
                return _error("forbidden", f"{name} is for root")
            answer = act(**asked)
        except ResetRefusedError as error:
            return _error("refused", str(error))
        except (SimulationError, TypeError, ValueError) as error:
            return _error("usage", str(error))
        finally:
            self._server.look()
        return {"answer": answer}

    def end(self) -> None:
        """The connection is over: what it held is let go of."""
        for uuid in tuple(self._holds):
            self._release(uuid)

    def _hold(self, uuid: str, silent: bool = False) -> int:
        key = self._host.core.change(lambda machine: hold(machine, uuid, self._peer, next(_NUMBERS), silent))
        self._holds.setdefault(uuid, []).append(key)
        return self._peer.pid

    def _release(self, uuid: str) -> None:
        core = self._host.core
        for key in self._holds.pop(uuid, ()):
            core.change(partial(release, key=key, now_s=core.now_s()))

    def _gpus(self) -> list[dict[str, Any]]:
        return self._host.core.read(
            lambda machine: [
                {"index": g.index, "uuid": g.uuid, "name": g.name, "bus_id": g.bus_id, "minor": g.minor}
                for g in sorted(machine.gpus, key=lambda g: g.index)
            ]
        )

    def _reset(self, gpu: str | int) -> str:
        """By UUID, index or PCI address; the GPU's UUID."""
        wanted = str(gpu)
        for found in self._gpus():
            if wanted in (found["uuid"], str(found["index"])) or found["bus_id"].endswith(wanted.upper()):
                self._host.reset(found["uuid"])
                return str(found["uuid"])
        raise ResetRefusedError(f"GPU {wanted} is not found")

    def _calls(self, pid: int | None = None, after: int = 0) -> list[dict[str, Any]]:
        return [asdict(call) for call in self._server.records.calls(pid, after)]


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": kind, "message": message}
