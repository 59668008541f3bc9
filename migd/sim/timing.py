"""Time on a simulated machine, for who holds it: a clock to wait by, and deadlines for what calls its NVML."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from migd.sim.core import Core

T = TypeVar("T")


class Clock:
    """The machine's time, in seconds. Virtual: sleeping moves it at once. Real: it is the host's own."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        return self._core.read(lambda _machine: self._core.now_s())

    def sleep(self, seconds: float) -> None:
        """Let time pass; a deadline of Caller.run holds here too."""
        self._core.pass_time(seconds, "sleep")


class Caller:
    """Runs something that calls the simulated NVML, under a deadline."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def run(self, fn: Callable[[], T], deadline_s: float) -> T:
        """What fn answers; TimeoutError when it takes longer than deadline_s, though its effect may have happened."""
        core = self._core
        outer = core.deadline_at_s
        mine = core.now_s() + deadline_s
        core.deadline_at_s = mine if outer is None else min(mine, outer)
        try:
            return fn()
        finally:
            core.deadline_at_s = outer
