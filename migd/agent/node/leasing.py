"""The lease of a node's agent: by it the operator sees that the agent lives. That two never act is the lock's work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from migd.agent.node.logs import logger
from migd.kube.errors import UnavailableError
from migd.kube.holding import Pace
from migd.kube.leases import Claim, Held, HeldBy
from migd.kube.ports import Leases

LEASE_S: Final = 180
PACE: Final = Pace(renew_s=60.0, margin_s=5.0)
DUPLICATES: Final = "migd.dev/duplicates"
RETRIES_S: Final = (1.0, 2.0, 4.0, 8.0)
"""Waits between tries of one claim: the next renewal is a minute away."""
_log = logger(__name__)


class NodeLease(Leases):
    """Leases as the agent of a node takes its own.

    Whoever held it before on this machine is dead, since we have the machine's lock: it is not waited out. duplicates:
    names of partitions that are another node's although the GPU is here; they stand in the lease, so that the operator
    sees them. owner: name and uid of the node that the lease goes with, None where it is not there: while we run it may
    be made anew, and what is owned by one that is gone is collected. gives_up: whether the lease may be given up at the
    end; one that dies in a transaction keeps it, so that nobody takes the node for abandoned before its time.
    """

    def __init__(
        self,
        leases: Leases,
        duplicates: Callable[[], tuple[str, ...]],
        owner: Callable[[], tuple[str, str] | None],
        gives_up: Callable[[], bool],
    ) -> None:
        self._leases = leases
        self._duplicates = duplicates
        self._owner = owner
        self._gives_up = gives_up

    async def claim(self, claim: Claim) -> Held | HeldBy:
        """See `Leases`."""
        for wait_s in RETRIES_S:
            try:
                answer = await self._claim(claim)
            except UnavailableError as error:
                _log.warning("the lease was not renewed", error=str(error))
            else:
                if isinstance(answer, Held):
                    return answer
            await asyncio.sleep(wait_s)
        return await self._claim(claim)

    async def _claim(self, claim: Claim) -> Held | HeldBy:
        names = self._duplicates()
        full = replace(claim, owner=self._owner() or claim.owner)
        if names:
            full = replace(full, annotations={**claim.annotations, DUPLICATES: ",".join(names)})
        answer = await self._leases.claim(full)
        if isinstance(answer, HeldBy) and answer.holder:
            _log.info("the lease was another's, who is gone", holder=answer.holder)
            await self._leases.release(replace(claim, holder=answer.holder))
            answer = await self._leases.claim(full)
        return answer

    async def release(self, claim: Claim) -> None:
        """See `Leases`."""
        if self._gives_up():
            await self._leases.release(claim)
