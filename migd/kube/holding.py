"""Holding a lease for as long as a program runs, and knowing at every moment whether it is still ours."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from migd.kube.errors import KubeError
from migd.kube.leases import Claim, Held
from migd.kube.ports import Leases

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """How often to renew what is ours, and to ask for what is not, in seconds; renew_s well below the duration.

    margin_s: it counts as lost so long before it expires, so that we have stopped before another one starts.
    """

    renew_s: float = 2.0
    margin_s: float = 5.0


class Holding:
    """One lease, taken, renewed and given up; time is the running loop's."""

    def __init__(
        self, leases: Leases, claim: Claim, pace: Pace, changed: Callable[[bool], None] = lambda _held: None
    ) -> None:
        assert pace.renew_s + pace.margin_s < claim.duration_s, "it would be lost between two renewals"
        self._leases = leases
        self._claim = claim
        self._pace = pace
        self._changed = changed
        self._until_s = float("-inf")
        self._told = False
        self.holder = ""  # who has it, as last seen, where it is not ours

    @property
    def held(self) -> bool:
        """Whether it is ours now; look before each act, since nobody tells when a sleep was too long."""
        return asyncio.get_running_loop().time() < self._until_s - self._pace.margin_s

    async def run(self) -> None:
        """Hold the lease until cancelled, then give it up. `changed` is told when it is gained and when it is lost."""
        try:
            while True:
                await self._turn()
                self._tell()
                await asyncio.sleep(self._pace.renew_s)
        finally:
            await self._give_up()

    async def _turn(self) -> None:
        left_s = self._until_s - self._pace.margin_s - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(left_s if left_s > 0 else None):  # a slow answer must not hide that it is lost
                answer = await self._leases.claim(self._claim)
        except TimeoutError:
            _log.warning("the lease %s was not renewed in time", self._claim.name)
        except KubeError as error:
            _log.warning("%s", error)
        else:
            self._until_s = answer.until_s if isinstance(answer, Held) else float("-inf")
            self.holder = self._claim.holder if isinstance(answer, Held) else answer.holder

    def _tell(self) -> None:
        if self.held != self._told:
            self._told = self.held
            self._changed(self._told)

    async def _give_up(self) -> None:
        was_held, self._until_s = self.held, float("-inf")
        self._tell()
        if not was_held:
            return
        try:
            async with asyncio.timeout(self._pace.margin_s):  # whoever ends us does not wait for an answer that hangs
                await self._leases.release(self._claim)
        except (KubeError, TimeoutError) as error:
            _log.warning("the lease was not given up, it expires by itself: %s", str(error) or "no answer")
