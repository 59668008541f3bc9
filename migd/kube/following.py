"""Following one kind of object: list, then watch, and never give up; every wait has an end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from migd.kube.caches import Cache, Change, Unreadable
from migd.kube.errors import Json, KubeError, StaleError, UnavailableError
from migd.kube.queueing import Backoff
from migd.kube.stored import EVERYWHERE, Stored, Where
from migd.kube.transport import Verbs, error_in

T = TypeVar("T")
_log = logging.getLogger(__name__)
_FAILED_WATCHES_MAX: Final = 3


BACKOFF: Final = Backoff(first_s=0.5, most_s=30.0, jitter=0.5)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long we wait for an API server, in seconds.

    answer_s: for one request. silence_s: for the next event of a watch; bookmarks come every 60 s. watch_s: the server
    ends a watch after that, somewhere up to twice of it. resync_s: then a full list again, whatever the watch said.
    page: objects a list request asks for. backoff: between tries that fail.
    """

    answer_s: float = 30.0
    silence_s: float = 75.0
    watch_s: float = 240.0
    resync_s: float = 1800.0
    page: int = 500
    backoff: Backoff = BACKOFF


TIMING: Final = Timing()


class Follower(Generic[T]):
    """Keeps one cache up to date, and tells of every change after it is in the cache.

    changed: called for each change, in order. listed: called after each complete list, changed or not, so that a
    listener can have everything looked at again. Both only note; they do not wait.
    """

    def __init__(
        self,
        verbs: Verbs,
        cache: Cache[T],
        changed: Callable[[Change[T]], None],
        listed: Callable[[], None] = lambda: None,
        where: Where = EVERYWHERE,
        timing: Timing = TIMING,
        dice: random.Random | None = None,
    ) -> None:
        self.cache = cache
        self._synced = asyncio.Event()
        self.trouble = ""  # what the last try failed on; "" when well
        self.heard_s = float("-inf")
        self._verbs = verbs
        self._path = cache.kind.path(namespace=where.namespace)
        self._where = where
        self._changed = changed
        self._listed = listed
        self._timing = timing
        self._dice = dice or random.Random()  # noqa: S311  jitter only

    async def wait_synced(self) -> None:
        """Returns once the first list is complete."""
        await self._synced.wait()

    def noted(self, found: Stored[T]) -> None:
        """Take the answer to a write of ours, before the watch tells of it, where it is one of ours to follow."""
        if self._where.namespace not in ("", found.namespace):
            return
        if self._where.query and self.cache.get(found.name, found.namespace) is None:
            return  # only the API server can tell whether a selector takes it
        self._tell(self.cache.noted(found))

    async def run(self) -> None:
        """Follow until cancelled. What fails is logged and tried again, with waits that grow to a bound."""
        failures = 0
        while True:
            try:
                at = await self._list()
                failures = 0
                self.trouble = ""
                await self._watch_from(at)
            except StaleError as error:
                _log.info("listing %s again: %s", self.cache.kind.plural, error)
            except KubeError as error:
                failures += 1
                await self._wait(error, failures)

    async def _list(self) -> str:
        """One complete list into the cache; the resource version that it was taken at."""
        found: list[Stored[T] | Unreadable] = []
        at = ""
        async for page, version in self._verbs.pages(self._path, self._where.query, self._timing.page):
            found += [self.cache.read(document) for document in page]
            at = version
            self.heard_s = asyncio.get_running_loop().time()
        self._tell(self.cache.listed(found, at))
        self._warn_of_unreadable()
        self._synced.set()
        self._listed()
        return at

    async def _watch_from(self, at: str) -> None:
        """Watch until it is time for another list; KubeError where a list is the better next step."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._timing.resync_s * (1 + 0.2 * self._dice.random())
        failures = 0
        while loop.time() < until:
            started, before = loop.time(), at
            try:
                async with aclosing(self._events(at, until)) as events:
                    async for event in events:
                        at = str(event["object"]["metadata"]["resourceVersion"])
                        self.heard_s = loop.time()
                        self._tell(self.cache.event(event["type"], event["object"]))
                        failures = 0
                self.trouble = ""
                if loop.time() < until and at == before and loop.time() - started < self._timing.backoff.first_s:
                    raise UnavailableError(f"WATCH {self._path}", 0, "ended at once")
            except UnavailableError as error:
                failures += 1
                if failures > _FAILED_WATCHES_MAX:
                    raise
                await self._wait(error, failures)

    async def _events(self, at: str, until: float) -> AsyncGenerator[Json, None]:
        """The events of one watch; it ends when the server ends it, is silent for too long, or it is time to list."""
        loop = asyncio.get_running_loop()
        query = {
            **self._where.query,
            "watch": "true",
            "resourceVersion": at,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(self._timing.watch_s * (1 + self._dice.random())) + 1),
        }
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._timing.answer_s):
                    events = await stack.enter_async_context(self._verbs.transport.watch(self._path, query))
                while True:
                    async with asyncio.timeout(min(self._timing.silence_s, max(0.0, until - loop.time()))):
                        event = await anext(events, None)
                    if event is None:
                        return
                    if event["type"] == "ERROR":
                        raise error_in(event, self._path)
                    yield event
        except TimeoutError:
            _log.info("watching %s anew: nothing was heard", self.cache.kind.plural)
        except OSError as error:
            raise UnavailableError(f"WATCH {self._path}", 0, str(error) or type(error).__name__) from error

    def _tell(self, changes: tuple[Change[T], ...]) -> None:
        for change in changes:
            self._changed(change)

    async def _wait(self, error: KubeError, failures: int) -> None:
        wait_s = self._timing.backoff.wait_s(failures, self._dice)
        if isinstance(error, UnavailableError):
            wait_s = max(wait_s, min(error.retry_after_s, self._timing.backoff.most_s))
        self.trouble = str(error)
        _log.warning("%s; again in %.1f s", error, wait_s)
        await asyncio.sleep(wait_s)

    def _warn_of_unreadable(self) -> None:
        for key, why in sorted(self.cache.unreadable.items()):
            _log.warning("%s %s cannot be read, and is left alone: %s", self.cache.kind.kind, key, why)
