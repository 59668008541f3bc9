"""Processes that spare importing: Python programs forked from one process that has imported what they need.

A start costs hundreds of milliseconds of a processor otherwise, and a cluster under test has hundreds of them.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

CRADLE: Final = Path(__file__).with_name("cradle.py")
IMPORTS: Final = (
    "controlplane.plugin",
    "grpc.experimental",
    "migd.agent.node.program",
    "migd.agent.node.simulated",
    "migd.cli.agent",
    "migd.cli.main",
    "migd_operator.program",
    "pydantic.type_adapter",
)
"""What programs of a simulated cluster import."""
_START_S: Final = 60.0
_STOP_S: Final = 10.0
_ROOM: Final = 1000


class Forked:
    """One process; of `subprocess.Popen` it has what a `Child` needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None
        self._over = threading.Event()

    def ended(self, status: int) -> None:
        """Be told of its end; by then its number may be another process's."""
        self._status = status
        self._over.set()

    def poll(self) -> int | None:
        """Its exit status, a signal as a negative number; None while it runs."""
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status at its end; subprocess.TimeoutExpired where that is not within so many seconds."""
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self._status is not None
        return self._status


class Nursery:
    """Where they come from. Use it as a context; every process dies with it.

    path: of modules, for all of them. imports: what is imported beforehand.
    """

    def __init__(self, path: str, imports: Sequence[str] = IMPORTS) -> None:
        self._starting = threading.Lock()
        self._started: queue.SimpleQueue[Forked] = queue.SimpleQueue()
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._cradle = subprocess.Popen(
                [sys.executable, "-u", str(CRADLE), str(there.fileno()), *imports],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                env={**os.environ, "PYTHONPATH": path, "GRPC_VERBOSITY": "ERROR"},
            )
        self._listener = threading.Thread(target=self._listen, name="nursery", daemon=True)
        self._listener.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process that others are forked from."""
        return self._cradle.pid

    def close(self) -> None:
        """End all that came from here."""
        self._here.shutdown(socket.SHUT_WR)  # both of us then hear the end of the other
        self._cradle.wait(_STOP_S)
        self._listener.join()
        self._here.close()

    def start(self, words: Sequence[str], log: int, environment: Mapping[str, str], folder: Path) -> Forked:
        """A process that runs `python -m MODULE …` or `python FILE …` in a folder. log: the file for its output."""
        request = {"words": list(words), "environment": dict(environment), "folder": str(folder)}
        with self._starting:
            socket.send_fds(self._here, [json.dumps(request).encode()], [log])
            return self._started.get(timeout=_START_S)

    def _listen(self) -> None:
        living: dict[int, Forked] = {}
        while said := self._here.recv(_ROOM):
            told: dict[str, int] = json.loads(said)
            if "ended" in told:
                living.pop(told["ended"]).ended(told["status"])
            else:
                living[told["pid"]] = Forked(told["pid"])
                self._started.put(living[told["pid"]])
        for one in living.values():  # they died with it
            one.ended(-signal.SIGKILL)
