"""The simulated side: an API server of its own for each test, with the controllers it needs, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime

from kube_contract.worlds import World, Wrote
from migd.kube.transport import Transport
from migd.sim.cluster.server import SimCluster, SimRequest
from migd.sim.cluster.virtual_time import run_virtually
from migd.sim.nodes.acting import Stage
from migd.sim.nodes.disruptions import Disruptions, Namespaces


class Simulated:
    """A simulated API server of its own for each test."""

    def __init__(self) -> None:
        self.server = SimCluster(policy=_nobody_may_do_anything)

    def run(self, test: Callable[[World], Awaitable[None]]) -> None:
        async def main() -> None:
            stage = Stage(self.server, 0)
            Disruptions(stage)
            Namespaces(stage)
            await test(World(self, self.server.transport("admin")))

        run_virtually(asyncio.wait_for(main(), 3600))

    async def transport(self, user: str) -> Transport:
        return self.server.transport(user)

    async def powerless(self) -> Transport:
        return self.server.transport("nobody")

    def writes(self) -> tuple[Wrote, ...]:
        return tuple(
            Wrote(r.user, r.verb, r.resource, r.name, r.code, r.body) for r in self.server.requests if r.writes
        )

    def now(self) -> datetime:
        return self.server.now()


def _nobody_may_do_anything(request: SimRequest) -> str:
    return f"nobody may not {request.verb} {request.resource}" if request.user == "nobody" else ""
