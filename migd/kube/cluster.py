"""The cluster through a transport: one client for the real API server and for the simulated one."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from migd.kube.caches import NOT_OF_ITS_KIND, Cache, Change, Reader
from migd.kube.errors import ConflictError, Json, KubeError, MissingError, StaleError, UnreadableError
from migd.kube.events import Count, Note, Recorder
from migd.kube.events import path as events_path
from migd.kube.following import TIMING, Follower, Timing
from migd.kube.leases import LEASES, Claim, Expiry, Held, HeldBy, Lease, claimed, released
from migd.kube.nodes import NODES, Node, NodeChange, operations, without_annotation
from migd.kube.ownership import NOTHING_APPLIED, Digest, wanted
from migd.kube.pods import PODS, Pod, eviction
from migd.kube.ports import Cluster
from migd.kube.stored import EVERYWHERE, OURS, Interner, Kind, Stored, Where
from migd.kube.transport import Throttle, Transport, Verbs

T = TypeVar("T")
_log = logging.getLogger(__name__)
_LISTS_MAX: Final = 3
_SAID_MAX: Final = 64
"""So many bodies of applies are remembered: all of a node's GPUs. Of a fleet's it would be too much."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who writes.

    manager: the field manager, as migd-agent. controller, instance: who reports events; see `Recorder`.
    """

    manager: str
    controller: str
    instance: str


class ApiCluster(Cluster):
    """A Cluster port; use it as a context, which ends what follows.

    A bug in what follows ends the context with that error: the next start recovers. wall_clock: UTC, only ever shown
    to others; what we wait for is measured by the running loop's clock.
    """

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        wall_clock: Callable[[], datetime],
        timing: Timing = TIMING,
        dice: random.Random | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        self._verbs = Verbs(transport, timing.answer_s, throttle)
        self._manager = identity.manager
        self._recorder = Recorder(identity.controller, identity.instance)
        self._wall_clock = wall_clock
        self._timing = timing
        self._dice = dice or random.Random()  # noqa: S311  jitter only
        self._same = Interner()
        self._expiry = Expiry()
        self._held: dict[str, Stored[Lease]] = {}  # as they were when last claimed: a renewal needs no look before it
        self._said: dict[tuple[str, str, str], tuple[Json, Digest]] = {}
        self._followers: list[Follower[Any]] = []
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if group.exceptions == (error,):
                return  # what was raised inside goes on as it is
            raise

    def follow(
        self,
        kind: Kind[T],
        changed: Callable[[Change[T]], None],
        listed: Callable[[], None] = lambda: None,
        where: Where = EVERYWHERE,
    ) -> Follower[T]:
        """See `Reads`."""
        cache = Cache(self._reader(kind))
        follower = Follower(self._verbs, cache, changed, listed, where, self._timing, self._dice)
        self._followers.append(follower)
        self._tasks.append(self._group.create_task(follower.run()))
        return follower

    async def get(self, kind: Kind[T], name: str, namespace: str = "") -> Stored[T] | None:
        """See `Reads`."""
        try:
            return self._read(kind, await self._verbs.get(kind.path(name, namespace)))
        except MissingError:
            return None

    async def list(self, kind: Kind[T], where: Where = EVERYWHERE) -> tuple[Stored[T], ...]:
        """See `Reads`."""
        path = kind.path(namespace=where.namespace)
        for left in reversed(range(_LISTS_MAX)):
            found: list[Stored[T]] = []
            try:
                async for page, _ in self._verbs.pages(path, where.query, self._timing.page):
                    found += [self._read(kind, document) for document in page]
            except StaleError:  # it took so long that its own beginning was forgotten
                if not left:
                    raise
                continue
            break
        return tuple(sorted(found, key=lambda stored: stored.key))

    async def apply(
        self,
        kind: Kind[T],
        name: str,
        body: Json,
        seen: Stored[T] | None,
        subresource: str = "",
        force: bool = True,
    ) -> Stored[T]:
        """See `Writes`."""
        assert not kind.namespaced, "our objects have no namespace"
        metadata: Json = {**body.get("metadata", {}), "name": name}
        document = {**body, "apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
        due = self._wanted(kind, document, subresource)
        if seen is not None:
            if seen.applied.get(subresource, NOTHING_APPLIED) == due:
                return seen
            metadata["uid"] = seen.uid
        path = kind.path(name, subresource=subresource)
        answer = await self._verbs.apply(path, document, self._manager, force)
        stored = self._noted(kind, answer)
        if seen is not None and stored.uid != seen.uid:  # a status's uid is not looked at by the API server
            raise ConflictError(
                f"PATCH {kind.path(name, subresource=subresource)}", 409, "it is another of that name now"
            )
        if stored.applied.get(subresource, NOTHING_APPLIED) != due:
            _log.warning("%s %s is not as applied: are defaults left out inside a list?", kind.kind, name)
        return stored

    async def delete(self, kind: Kind[Any], seen: Stored[Any], dry_run: bool = False) -> None:
        """See `Writes`."""
        try:
            await self._verbs.delete(kind.path(seen.name, seen.namespace), seen.uid, dry_run)
        except (MissingError, ConflictError):
            return  # this one is gone; another of its name is none of our business

    async def without_annotation(self, kind: Kind[T], seen: Stored[T], key: str) -> Stored[T]:
        """See `Writes`."""
        assert key.startswith(OURS), f"not ours to take off: {key}"
        if key not in seen.annotations:
            return seen
        patch = without_annotation(seen, key)
        return self._noted(kind, await self._verbs.patch(kind.path(seen.name, seen.namespace), patch))

    async def evict(self, pod: Stored[Pod], grace_s: int | None) -> None:
        """See `Writes`."""
        await self._verbs.create(PODS.path(pod.name, pod.namespace, "eviction"), eviction(pod, grace_s))

    async def change_node(self, seen: Stored[Node], change: NodeChange) -> Stored[Node]:
        """See `NodeWrites`."""
        patch = operations(seen, change)
        if not patch:
            return seen
        return self._noted(NODES, await self._verbs.patch(NODES.path(seen.name), patch))

    async def claim(self, claim: Claim) -> Held | HeldBy:
        """See `Leases`."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()  # what we hold is counted from before the request: the safe side
        path = LEASES.path(claim.name, claim.namespace)
        renewed = self._held.pop(path, None)
        seen = renewed or await self.get(LEASES, claim.name, claim.namespace)
        free = seen is None or self._expiry.expired(path, seen.value, loop.time())
        document = claimed(claim, seen, free, self._wall_clock())
        if document is None:
            assert seen is not None
            return HeldBy(seen.value.holder, self._expiry.until_s(path, seen.value, loop.time()))
        try:
            if seen is None:
                answer = await self._verbs.create(LEASES.path(namespace=claim.namespace), document)
            else:
                answer = await self._verbs.replace(path, document)
        except (ConflictError, MissingError):  # somebody was faster; who, the next claim tells
            if renewed is not None:
                return await self.claim(claim)
            return HeldBy("", loop.time())
        self._held[path] = self._noted(LEASES, answer)
        return Held(asked_s + claim.duration_s)

    async def release(self, claim: Claim) -> None:
        """See `Leases`."""
        seen = await self.get(LEASES, claim.name, claim.namespace)
        if seen is None or seen.value.holder != claim.holder:
            return
        try:
            document = released(claim, seen, self._wall_clock())
            self._noted(LEASES, await self._verbs.replace(LEASES.path(claim.name, claim.namespace), document))
        except (ConflictError, MissingError):
            return  # somebody has it already

    async def tell(self, note: Note) -> bool:
        """See `Telling`."""
        due = self._recorder.record(note, asyncio.get_running_loop().time(), self._wall_clock())
        if due is None:
            return False
        try:
            if isinstance(due, Count):
                await self._verbs.merge(events_path(due.namespace, due.name), due.patch)
            else:
                await self._verbs.create(events_path(due.namespace), due.document)
        except KubeError as error:
            self._recorder.failed(note)
            _log.warning("an event was not written: %s", error)
            return False
        return True

    def _wanted(self, kind: Kind[Any], document: Json, subresource: str) -> Digest:
        """As `wanted`; what is said of the same object again and again is not digested each time."""
        key = (kind.plural, document["metadata"]["name"], subresource)
        known = self._said.get(key)
        if known is not None and known[0] == document:
            return known[1]
        if len(self._said) >= _SAID_MAX:
            self._said.clear()
        due = wanted(document, kind.list_maps)
        kept = {**document, "metadata": {**document["metadata"]}}
        self._said[key] = (kept, due)
        return due

    def _reader(self, kind: Kind[T]) -> Reader[T]:
        return Reader(kind, self._manager, self._same)

    def _noted(self, kind: Kind[T], answer: Json) -> Stored[T]:
        """The answer to a write of ours, told to the caches of that kind before their watch tells them."""
        stored = self._read(kind, answer)
        for follower in self._followers:
            if follower.cache.kind is kind:
                follower.noted(stored)
        return stored

    def _read(self, kind: Kind[T], document: Json) -> Stored[T]:
        try:
            return self._reader(kind).read(document)
        except NOT_OF_ITS_KIND as error:
            metadata = document["metadata"]
            path = kind.path(metadata["name"], metadata.get("namespace", ""))
            raise UnreadableError(f"READ {path}", 0, f"{type(error).__name__}: {error}") from error
