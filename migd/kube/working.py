"""Working through a queue of keys: level-triggered, several at a time, never one key twice at once."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Generic, TypeVar

from migd.kube.errors import DeniedError, KubeError, RefusedError, UnavailableError
from migd.kube.queueing import DEFAULT, Backoff, KeyQueue

K = TypeVar("K", bound=Hashable)
Reconcile = Callable[[K], Awaitable[float | None]]
"""Makes one key as it should be; returns after how many seconds to look again, None for when something changes."""

_log = logging.getLogger(__name__)
_SLOWLY_S: Final = 30.0
"""At least so long before what a person has to cure is tried again."""


class Worker(Generic[K]):
    """A queue with those who work on it; time is the running loop's.

    at_once: keys worked on at the same time. failed: told of each failure, as for a metric; it has been logged.
    """

    def __init__(
        self,
        reconcile: Reconcile[K],
        at_once: int = 4,
        backoff: Backoff = DEFAULT,
        dice: random.Random | None = None,
        failed: Callable[[K, KubeError], None] = lambda _key, _error: None,
    ) -> None:
        self._reconcile = reconcile
        self._at_once = at_once
        self._failed = failed
        self._queue: KeyQueue[K] = KeyQueue(backoff, dice)
        self._added = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    def add(self, key: K, after_s: float = 0.0) -> None:
        """Have a key worked on, not before so long; cheap, and callable from whatever tells of changes."""
        self._queue.add(key, self._now_s(), after_s)
        self._added.set()

    def forget(self, key: K) -> None:
        """A key is not to be worked on any more."""
        self._queue.forget(key)

    @property
    def idle(self) -> bool:
        """Nothing is worked on, and nothing is due."""
        due = self._queue.next_at_s()
        return not self._running and (due is None or due > self._now_s())

    async def run(self) -> None:
        """Work until cancelled. A KubeError is tried again, with waits that grow; any other error ends it: a bug."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._added.clear()
                while len(self._running) < self._at_once and (key := self._queue.take(self._now_s())) is not None:
                    task = group.create_task(self._work(key))
                    self._running.add(task)
                    task.add_done_callback(self._finished)
                await self._sleep()

    async def _work(self, key: K) -> None:
        try:
            again_s = await self._reconcile(key)
        except KubeError as error:
            wait_s = self._queue.failed(key, self._now_s(), _at_least_s(error))
            _log.warning("%s: %s; again in %.1f s", key, error, wait_s)
            self._failed(key, error)
        else:
            self._queue.done(key, self._now_s(), again_s)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._added.set()

    async def _sleep(self) -> None:
        """Until a key is added, work is done, or a key is due that there is room for."""
        due = self._queue.next_at_s() if len(self._running) < self._at_once else None
        wait_s = None if due is None else max(0.0, due - self._now_s())
        try:
            async with asyncio.timeout(wait_s):
                await self._added.wait()
        except TimeoutError:
            return

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _at_least_s(error: KubeError) -> float:
    match error:
        case UnavailableError():
            return error.retry_after_s
        case DeniedError() | RefusedError():
            return _SLOWLY_S
        case _:
            return 0.0
