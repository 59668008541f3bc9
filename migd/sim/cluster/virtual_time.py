"""Virtual time for asyncio: a loop whose clock jumps to the next thing that is due, so that nobody waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(Exception):
    """Everything waits for something that nothing will bring about."""


class _Jumping(selectors.BaseSelector):
    """A selector that does not wait: where it would, it moves the clock."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.now_s = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready:
            return ready
        if timeout is None:
            raise DeadlockError("all tasks wait, and no time is due")
        self.now_s += max(0.0, timeout)
        return []

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, from 0 s on; equal programs run equally. No other thread may call into it."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._jumping.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass within a call that takes long: what is due meanwhile comes after it."""
        self._jumping.now_s += max(0.0, seconds)


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time; hours take as long as what happens in them."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
