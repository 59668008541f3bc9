"""An agent whose clock runs four times as fast: `migd agent` unchanged, in an event loop of its own.

All that it waits for it measures by its loop's clock, so its three minutes for a device plugin are 45 seconds. It runs
on a real node, in place of the agent: see `RealCluster`.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any, Final

FASTER: Final = 4.0


class HurriedSelector(selectors.DefaultSelector):
    """Waits in real seconds for what a hurried loop says in its own."""

    def select(self, timeout: float | None = None) -> Any:
        """As its parent's. timeout: in the loop's seconds."""
        return super().select(timeout if timeout is None else timeout / FASTER)


class HurriedLoop(asyncio.SelectorEventLoop):
    """An event loop whose seconds are short."""

    def __init__(self) -> None:
        super().__init__(HurriedSelector())

    def time(self) -> float:
        """Of the boot, as the real one, and as long as the process before counted it."""
        return super().time() * FASTER


class Hurried(asyncio.DefaultEventLoopPolicy):
    """Every loop is a hurried one."""

    def new_event_loop(self) -> HurriedLoop:
        """One more."""
        return HurriedLoop()


if __name__ == "__main__":
    from migd.__main__ import main

    asyncio.set_event_loop_policy(Hurried())
    main()
