"""A simulated API server: the transport face on the store, with watches, faults by seed, and time by the running loop.

It takes and gives what HTTP would: plain requests and documents. So `migd.kube` runs on it unchanged, and it imports
nothing of ours but its own parts. Not simulated: rights and policies but by `policy`, most validation, quota.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from migd.sim.cluster.answers import Refusal, Target, matcher, status
from migd.sim.cluster.entries import Entry, Happened, Listener, Outcome
from migd.sim.cluster.faults import Faults, Trouble, WatchTrouble
from migd.sim.cluster.fields import Json, copied
from migd.sim.cluster.kinds import KINDS, SimKind
from migd.sim.cluster.store import Answer, Store

BOOKMARK_S: Final = 60.0
_START: Final = datetime(2026, 1, 1, tzinfo=UTC)
_LATE_MAX_S: Final = 5.0
_SLOW_MAX_S: Final = 10.0
_TOO_MANY: Final = "too many requests, please try again later"


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request that was carried out or refused, as an audit log has it. verb: get, list, create, update, patch, …"""

    user: str
    verb: str
    resource: str
    name: str
    code: int
    body: Any

    @property
    def writes(self) -> bool:
        """Whether it asked for a change."""
        return self.verb in {"create", "update", "patch", "delete"}


Policy = Callable[[SimRequest], str]
"""Why a request is denied; "" where it is not."""
Busy = Callable[[SimRequest], int]
"""After how many seconds a request may be made again, where too many ask; 0 where they do not."""


class SimCluster:
    """The simulated API server. `transport(user)` is somebody's connection to it.

    requests: all that were carried out or refused by it, in order; watches are not among them. busy: which are refused
    by priority and fairness, with 429 and Retry-After and before anything is looked at; nobody's until a test sets it.
    """

    def __init__(self, seed: int = 0, faults: Faults | None = None, policy: Policy = lambda _request: "") -> None:
        self.faults = faults or Faults()
        self.policy = policy
        self.busy: Busy = lambda _request: 0
        self.requests: list[SimRequest] = []
        self.store = Store(seed, self.now, self._wake)
        self._waiting: set[asyncio.Event] = set()
        self._watches: dict[str, list[_Watch]] = {}
        self._listeners: list[Listener] = []

    def now(self) -> datetime:
        """The wall clock; it starts on 2026-01-01 and goes as the running loop's does."""
        return _START + timedelta(seconds=asyncio.get_running_loop().time())

    def transport(self, user: str) -> SimTransport:
        """A connection for a user."""
        return SimTransport(self, user)

    def answer(
        self, user: str, method: str, path: str, query: Mapping[str, str], body: Any, content_type: str
    ) -> Answer:
        """Carry out one request at once, with no trouble."""
        code, found, kind = self.act(user, method, path, query, body, content_type)
        if isinstance(found, Entry):
            return code, {}, found.shown(kind)
        again_s = (found.get("details") or {}).get("retryAfterSeconds")
        return code, {"Retry-After": str(again_s)} if again_s else {}, found

    def act(
        self, user: str, method: str, path: str, query: Mapping[str, str], body: Any, content_type: str
    ) -> tuple[int, Outcome, SimKind]:
        """As `answer`, for who does not want the object copied: it must not be changed."""
        kind = KINDS[0]
        try:
            target = self.store.target(path)
            kind = target.kind
            verb = _VERBS[method] if target.name or method != "GET" else "list"
            resource = "/".join(part for part in (target.kind.plural, target.subresource) if part)
            asked = SimRequest(user, verb, resource, target.name, 0, body)
            busy_s, why = self.busy(asked), self.policy(asked)
            found: Outcome
            if busy_s:
                code, found = 429, status(429, _TOO_MANY, retryAfterSeconds=busy_s)
            elif why:
                code, found = 403, status(403, why)
            else:
                code, found = self._done(target, verb, query, body, content_type)
        except Refusal as refusal:
            code, found = refusal.code, refusal.body
            if refusal.code == 404 and "resource" in str(refusal):
                return code, found, kind
        name = target.name or str(((body or {}) if isinstance(body, dict) else {}).get("metadata", {}).get("name", ""))
        self.requests.append(SimRequest(user, verb, resource, name, code, copied(body)))
        return code, found, kind

    def _done(
        self, target: Target, verb: str, query: Mapping[str, str], body: Any, content_type: str
    ) -> tuple[int, Outcome]:
        manager = query.get("fieldManager", "unknown")
        match verb:
            case "get":
                return 200, self.store.get(target)
            case "list":
                return 200, self.store.page(target, query)
            case "create":
                return 201, self.store.create(target, body, manager)
            case "update":
                return 200, self.store.replace(target, body, manager)
            case "patch":
                return 200, self.store.patch(target, body, content_type, query)
            case _:
                return 200, self.store.delete(target, body)

    @asynccontextmanager
    async def news(self) -> AsyncIterator[asyncio.Event]:
        """An event that is set at every change."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            yield event
        finally:
            self._waiting.discard(event)

    @contextmanager
    def watching(self, watch: _Watch) -> Iterator[None]:
        """Tell a watch of what it is to see, as long as this lasts."""
        watches = self._watches.setdefault(watch.target.kind.plural, [])
        watches.append(watch)
        try:
            yield
        finally:
            watches.remove(watch)

    def listen(self, listener: Listener) -> None:
        """Tell of every change from now on, at once."""
        self._listeners.append(listener)

    def _wake(self, kind: SimKind, happened: Happened) -> None:
        for event in self._waiting:
            event.set()
        for watch in self._watches.get(kind.plural, ()):
            watch.tell(happened)
        for listener in self._listeners:
            listener(kind, happened)


class _Watch:
    """Where one watch is. at: it has seen all up to this version. news: there is something for it to see."""

    def __init__(self, target: Target, query: Mapping[str, str]) -> None:
        self.target = target
        self.matches = matcher(target, query)
        self.at = int(query["resourceVersion"])
        self.news = asyncio.Event()

    def tell(self, happened: Happened) -> None:
        """Something happened; what the selectors leave out wakes nobody."""
        if self.cares(happened):
            self.news.set()
        elif not self.news.is_set():
            self.at = happened.version

    def cares(self, happened: Happened) -> bool:
        """Whether a change is one of its selection."""
        if not happened.deleted and self.matches(happened.after.document):
            return True
        return happened.before is not None and self.matches(happened.before.document)

    def seen(self, happened: Happened) -> Json | None:
        """What it sees of a change; an object that leaves the selection is deleted for it. None for nothing."""
        was = happened.before is not None and self.matches(happened.before.document)
        now = not happened.deleted and self.matches(happened.after.document)
        if not was and not now:
            return None
        kind = "DELETED" if not now else ("MODIFIED" if was else "ADDED")
        shown = happened.after
        if kind == "DELETED" and not happened.deleted:
            assert happened.before is not None
            shown = _at(happened.before, happened.after.document["metadata"]["resourceVersion"])
        return {"type": kind, "object": shown.sent(self.target.kind)}


_VERBS: Final = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class SimTransport:
    """One user's connection to the simulated API server, with its faults."""

    def __init__(self, cluster: SimCluster, user: str) -> None:
        self._cluster = cluster
        self._user = user

    async def request(self, method: str, path: str, query: Mapping[str, str], body: Any, content_type: str) -> Answer:
        """One request; ConnectionError where the trouble is that nobody answers."""
        await asyncio.sleep(0)
        trouble = self._cluster.faults.of_request()
        if trouble is Trouble.TOO_MANY:
            return 429, {"Retry-After": "1"}, status(429, _TOO_MANY)
        if trouble is Trouble.UNWELL:
            return 500, {}, status(500, "etcdserver: leader changed")
        if trouble is Trouble.REFUSED:
            raise ConnectionRefusedError("connection refused")
        if trouble is Trouble.HANGS:
            await asyncio.Event().wait()
        if trouble is Trouble.SLOW:
            await asyncio.sleep(self._cluster.faults.delay_s(_SLOW_MAX_S))
        found = self._cluster.answer(self._user, method, path, query, body, content_type)
        if trouble is Trouble.LOST_ANSWER:
            raise ConnectionResetError("connection reset by peer")
        return found

    @asynccontextmanager
    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[AsyncIterator[Json]]:
        """A watch, from the resource version in the query."""
        await asyncio.sleep(0)
        if self._cluster.faults.of_request() is Trouble.REFUSED:
            raise ConnectionRefusedError("connection refused")
        yield self._events(path, query)

    async def _events(self, path: str, query: Mapping[str, str]) -> AsyncIterator[Json]:
        loop = asyncio.get_running_loop()
        store, faults = self._cluster.store, self._cluster.faults
        ends_s = loop.time() + float(query.get("timeoutSeconds", "1800"))
        bookmark_s = loop.time() + BOOKMARK_S
        try:
            watch = _Watch(store.target(path), query)
        except Refusal as refusal:
            yield {"type": "ERROR", "object": refusal.body}
            return
        begun = False
        with self._cluster.watching(watch):
            while True:
                watch.news.clear()
                try:
                    due = list(store.history(watch.target.kind, watch.at, begun))
                except Refusal as refusal:
                    yield {"type": "ERROR", "object": refusal.body}
                    return
                begun = True
                for happened in due:
                    match faults.of_watch():
                        case WatchTrouble.GONE:
                            yield {"type": "ERROR", "object": status(410, f"too old resource version: {watch.at}")}
                            return
                        case WatchTrouble.CUT:
                            raise ConnectionResetError("connection reset by peer")
                        case WatchTrouble.SILENT:
                            await asyncio.Event().wait()
                        case WatchTrouble.LATE:
                            await asyncio.sleep(faults.delay_s(_LATE_MAX_S))
                    watch.at = happened.version
                    event = watch.seen(happened)
                    if event is not None:
                        yield event
                if due:
                    continue  # what came meanwhile
                watch.at = max(watch.at, store.version)
                try:
                    async with asyncio.timeout_at(min(ends_s, bookmark_s)):
                        await watch.news.wait()
                except TimeoutError:
                    if loop.time() >= ends_s:
                        return
                    bookmark_s = loop.time() + BOOKMARK_S
                    if query.get("allowWatchBookmarks") == "true":
                        yield _bookmark(watch.target, watch.at)


def _at(entry: Entry, version: str) -> Entry:
    document = copied(entry.document)
    document["metadata"]["resourceVersion"] = version
    return Entry(document, entry.owners)


def _bookmark(target: Target, version: int) -> Json:
    kind = target.kind
    metadata: Json = {"resourceVersion": str(version), "creationTimestamp": None}
    return {"type": "BOOKMARK", "object": {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}}
