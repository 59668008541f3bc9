"""What the actors of a simulated cluster share: time, dice, a log, and requests under a name of their own.

Nobody polls: actors hear of changes at once, within the write, and act a little later by a timer of the running loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

from migd.sim.cluster.entries import Entry, Happened
from migd.sim.cluster.fields import Json
from migd.sim.cluster.kinds import SimKind
from migd.sim.cluster.server import SimCluster
from migd.sim.cluster.store import BY_PLURAL

JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"
Heard = Callable[[Happened], None]


class Stage:
    """One simulated cluster as its actors see it. Make it inside the loop whose time it goes by.

    log: what happened, one line each, with the time in seconds; equal seeds have equal logs.
    """

    def __init__(self, cluster: SimCluster, seed: int) -> None:
        self.cluster = cluster
        self.seed = seed
        self.loop = asyncio.get_running_loop()
        self.log: list[str] = []
        self.stirred = asyncio.Event()
        self._heard: dict[str, list[Heard]] = {}
        self._failed: BaseException | None = None
        self._ended = False
        cluster.listen(self._tell)

    def _tell(self, kind: SimKind, happened: Happened) -> None:
        self.stirred.set()
        if not self._ended:
            for heard in self._heard.get(kind.plural, ()):
                heard(happened)

    def hear(self, plural: str, heard: Heard) -> None:
        """Tell of each change of a kind, at once: what hears must not write, only ask to be called later."""
        self._heard.setdefault(plural, []).append(heard)

    def now_s(self) -> float:
        """Seconds of the loop."""
        return self.loop.time()

    def later(self, seconds: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        """Do something after so long. What it raises ends the play: `check` raises it."""
        return self.loop.call_later(seconds, self._act, act)

    def _act(self, act: Callable[[], None]) -> None:
        if self._ended or self._failed is not None:
            return
        try:
            act()
        except BaseException as error:
            self._failed = error
            self.stirred.set()
            if not isinstance(error, Exception):
                raise

    def say(self, who: str, what: str) -> None:
        """Write a line of the log."""
        self.log.append(f"{self.loop.time():.3f} {who}: {what}")
        self.stirred.set()

    def check(self) -> None:
        """Raise what an actor failed on."""
        if self._failed is not None:
            raise self._failed

    def end(self) -> None:
        """Nobody acts any more."""
        self._ended = True


class Actor:
    """Somebody who reads and writes the API server directly, without the network's troubles, as user `user`."""

    def __init__(self, stage: Stage, name: str, user: str) -> None:
        self.stage = stage
        self.name = name
        self.user = user
        self.dice = random.Random(f"{stage.seed} {name}")  # noqa: S311

    def later(self, least_s: float, most_s: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        """Do something after a time in between, by the dice."""
        return self.stage.later(least_s + (most_s - least_s) * self.dice.random(), act)

    def say(self, what: str) -> None:
        """Write a line of the log."""
        self.stage.say(self.name, what)

    def read(self, plural: str, name: str, namespace: str = "") -> Json | None:
        """The object as it is now, not to be changed; None where there is none."""
        entry = self.stage.cluster.store.entries(BY_PLURAL[plural]).get((namespace, name))
        return None if entry is None else entry.document

    def all(self, plural: str) -> Iterator[Json]:
        """All objects of a kind as they are now, not to be changed, by namespace and name."""
        entries = self.stage.cluster.store.entries(BY_PLURAL[plural])
        return (entries[key].document for key in sorted(entries))

    def create(self, plural: str, document: Json) -> Json | None:
        """Make an object; None where there is one of the name already."""
        return self._ask("POST", self._path(plural, "", document["metadata"].get("namespace", "")), document, JSON)

    def merge(self, plural: str, name: str, body: Json, namespace: str = "", sub: str = "") -> Json | None:
        """A merge patch; None where the object is gone or refuses it."""
        return self._ask("PATCH", self._path(plural, name, namespace, sub), body, MERGE)

    def bind(self, pod: Json, node: str) -> Json | None:
        """Bind a pod to a node; None where it is gone or bound."""
        metadata = pod["metadata"]
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {}, "target": {"kind": "Node", "name": node}}
        path = self._path("pods", metadata["name"], metadata["namespace"], "binding")
        return self._ask("POST", path, body, JSON)

    def delete(self, plural: str, document: Json, grace_s: int | None = None) -> Json | None:
        """Delete this very object; None where it is gone. grace_s: 0 removes a pod at once, as its kubelet does."""
        metadata = document["metadata"]
        body: Json = {"preconditions": {"uid": metadata["uid"]}}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        return self._ask("DELETE", self._path(plural, metadata["name"], metadata.get("namespace", "")), body, JSON)

    def _ask(self, method: str, path: str, body: Any, content_type: str) -> Json | None:
        query = {"fieldManager": self.user}
        code, found, _kind = self.stage.cluster.act(self.user, method, path, query, body, content_type)
        if code >= 300:
            return None
        return found.document if isinstance(found, Entry) else found

    def _path(self, plural: str, name: str, namespace: str, sub: str = "") -> str:
        where = f"/namespaces/{namespace}" if namespace else ""
        return BY_PLURAL[plural].root + where + "".join(f"/{part}" for part in (plural, name, sub) if part)
