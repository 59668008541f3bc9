"""A world to test in: an API server, whoever acts on it, its audit log, and trouble on the way to it."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from migd.kube.cluster import ApiCluster, Identity
from migd.kube.following import Timing
from migd.kube.queueing import Backoff
from migd.kube.transport import Transport, Verbs

Json = dict[str, Any]
QUICK = Timing(
    answer_s=5.0, silence_s=3.0, watch_s=20.0, resync_s=60.0, page=500, backoff=Backoff(first_s=0.05, most_s=2.0)
)


@dataclass(frozen=True)
class Wrote:
    """One write as the audit log has it."""

    user: str
    verb: str
    resource: str
    name: str
    code: int
    body: Any


class Side(Protocol):
    """One of the two API servers."""

    def run(self, test: Callable[[World], Awaitable[None]]) -> None: ...

    async def transport(self, user: str) -> Transport: ...

    async def powerless(self) -> Transport:
        """Somebody who may do nothing."""
        ...

    def writes(self) -> tuple[Wrote, ...]: ...

    def now(self) -> datetime: ...


@dataclass
class Meddling:
    """A transport with trouble that the test orders; each piece of trouble happens once."""

    inner: Transport
    lists: int = 0
    watches: int = 0
    versions: list[str] = field(default_factory=list)
    answers: list[tuple[int, Mapping[str, str], Json] | OSError | float] = field(default_factory=list)  # a float waits
    watch_from: list[str] = field(default_factory=list)
    silent: int = 0
    stuck: int = 0
    lost: int = 0  # so many answers do not arrive, to requests that were carried out
    refused: list[Json] = field(default_factory=list)
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def request(self, method: str, path: str, query: Mapping[str, str], body: Any, content_type: str) -> Any:
        if "limit" in query and "continue" not in query:
            self.lists += 1
        if self.answers:
            ordered = self.answers.pop(0)
            if isinstance(ordered, OSError):
                raise ordered
            if not isinstance(ordered, float):
                return ordered
            await asyncio.sleep(ordered)
        answer = await self.inner.request(method, path, query, body, content_type)
        if self.lost:
            self.lost -= 1
            raise ConnectionResetError("connection reset by peer")
        return answer

    @asynccontextmanager
    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[AsyncIterator[Json]]:
        await self.gate.wait()
        self.watches += 1
        self.versions.append(query["resourceVersion"])
        if self.watch_from:
            query = {**query, "resourceVersion": self.watch_from.pop(0)}
        if self.stuck:
            self.stuck -= 1
            await asyncio.Event().wait()
        if self.silent:
            self.silent -= 1
            yield _silence()
            return
        if self.refused:
            yield _once({"type": "ERROR", "object": self.refused.pop(0)})
            return
        self.cut.clear()
        async with self.inner.watch(path, query) as events:
            yield self._until_cut(events)

    async def _until_cut(self, events: AsyncIterator[Json]) -> AsyncIterator[Json]:
        cut = asyncio.ensure_future(self.cut.wait())
        try:
            while True:
                one = asyncio.ensure_future(anext(events, None))
                done, _ = await asyncio.wait({one, cut}, return_when=asyncio.FIRST_COMPLETED)
                if one not in done:
                    one.cancel()
                    await asyncio.wait({one})
                    raise ConnectionResetError("connection reset by peer")
                if (event := one.result()) is None:
                    return
                yield event
        finally:
            cut.cancel()


async def _silence() -> AsyncIterator[Json]:
    await asyncio.Event().wait()
    yield {}


async def _once(event: Json) -> AsyncIterator[Json]:
    yield event


class World:
    """One test's view of an API server that other tests use too."""

    def __init__(self, side: Side, admin: Transport) -> None:
        self.side = side
        self.admin = Verbs(admin, 10.0)
        self.mark = uuid.uuid4().hex[:10]

    def name(self, what: str = "t") -> str:
        """A name that no other test uses."""
        return f"{what}-{self.mark}-{uuid.uuid4().hex[:6]}"

    def gpu(self) -> str:
        return f"gpu-{uuid.uuid4()}"

    async def meddling(self, user: str = "migd-test") -> Meddling:
        return Meddling(await self.side.transport(user))

    @asynccontextmanager
    async def cluster(
        self, user: str = "migd-test", timing: Timing = QUICK, transport: Transport | None = None
    ) -> AsyncIterator[ApiCluster]:
        """Somebody's port; user is the field manager too."""
        identity = Identity(user, f"migd.dev/{user}", "test")
        through = transport or await self.side.transport(user)
        async with ApiCluster(through, identity, self.side.now, timing, random.Random(1)) as cluster:
            yield cluster

    def writes(self, user: str, name: str = "") -> list[Wrote]:
        """What a user asked to be changed, as the audit log has it."""
        return [w for w in self.side.writes() if w.user == user and (not name or w.name == name)]

    async def until(self, holds: Callable[[], object], within_s: float = 15.0) -> None:
        """Wait until something holds; AssertionError where it does not in time."""
        async with asyncio.timeout(within_s):
            while not holds():
                await asyncio.sleep(0.02)
