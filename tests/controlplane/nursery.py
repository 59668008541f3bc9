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
import time
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
_POLL_S: Final = 0.02


class Forked:
    """One process; of `subprocess.Popen` it has what a `Child` needs."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery

    def poll(self) -> int | None:
        """Its exit status, a signal as a negative number; None while it runs."""
        return self._nursery.ended(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status at its end; subprocess.TimeoutExpired where that is not within so many seconds."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until_s is not None and time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_S)
        return status


class Nursery:
    """Where they come from. Use it as a context; every process dies with it.

    path: of modules, for all of them. imports: what is imported beforehand.
    """

    def __init__(self, path: str, imports: Sequence[str] = IMPORTS) -> None:
        self._starting = threading.Lock()
        self._started: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ends: dict[int, int] = {}
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
            return Forked(self, self._started.get(timeout=_START_S))

    def ended(self, pid: int) -> int | None:
        """The exit status of a process, None while it runs."""
        return self._ends.get(pid)

    def _listen(self) -> None:
        living: set[int] = set()
        while said := self._here.recv(_ROOM):
            told: dict[str, int] = json.loads(said)
            if "ended" in told:
                self._ends[told["ended"]] = told["status"]
                living.discard(told["ended"])
            else:
                self._ends.pop(told["pid"], None)  # of one that had the number before
                living.add(told["pid"])
                self._started.put(told["pid"])
        self._ends |= dict.fromkeys(living, -signal.SIGKILL)  # they died with it
