"""Work that blocks, off the event loop: in one thread of its own, so that two calls to the hardware never meet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class OffLoop(Protocol):
    """Runs a function that blocks, one at a time."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """What it returns or raises. Cancelled, it goes on, and its answer is thrown away."""
        ...


class OneThread:
    """The real side. The thread is a daemon: a process must be able to end although a disk or a GPU hangs."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def __call__(self, work: Callable[[], T]) -> T:
        """See `OffLoop`."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                result = work()
            except BaseException as error:  # whatever it is, it belongs to the one who asked
                found: Callable[[], Any] = _setting(answer, answer.set_exception, error)
            else:
                found = _setting(answer, answer.set_result, result)
            with suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(found)

        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hardware", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return await answer

    def _work(self) -> None:
        while True:
            self._jobs.get()()


def _setting(answer: asyncio.Future[T], setter: Callable[[Any], None], value: Any) -> Callable[[], None]:
    def settle() -> None:
        if not answer.done():
            setter(value)

    return settle


async def inline(work: Callable[[], T]) -> T:
    """The side for virtual time, where no other thread may be."""
    await asyncio.sleep(0)
    return work()
