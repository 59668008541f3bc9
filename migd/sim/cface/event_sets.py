"""Which programs listen to which events, in a file: a server that is restarted must not make listeners deaf."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from migd.sim.cface.sessions import Session
from migd.sim.machine import Machine

FILE: Final = "run/migd/event-sets.json"


class EventSets:
    """The file under a driver root. It is only a hint: one that cannot be read or written is as if there were none."""

    def __init__(self, root: Path) -> None:
        self._path = root / FILE
        self._lock = threading.Lock()
        self._kept: dict[str, Any] = {}

    def load(self, machine: Machine) -> None:
        """What the server before this one kept of clients that this machine still has."""
        self._kept = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._path.read_text("utf-8"))
            self._kept = {client: kept for client, kept in found.items() if client in machine.clients}

    def restore(self, session: Session) -> None:
        """Give a session that goes on the sets that it had."""
        found = self._kept.get(session.client)
        if found:
            session.listen_on(found)

    def save(self, listened: Callable[[], Mapping[str, Any]]) -> None:
        """Keep what sessions listen to (by client), instead of what was kept of them; those not seen again yet stay.

        It is asked for within our turn: what was asked before another save would undo that one.
        """
        with self._lock:
            fresh = {client: kept for client, kept in {**self._kept, **listened()}.items() if kept["sets"]}
            if fresh == self._kept:
                return
            self._kept = fresh
            part = self._path.with_name(f".{self._path.name}.new")
            with contextlib.suppress(OSError):
                part.write_text(json.dumps(fresh), "utf-8")
                part.replace(self._path)
