"""The real side: the control plane of a test run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime

from controlplane.running import ControlPlane

from kube_contract.worlds import World, Wrote
from migd.kube.connecting import HttpTransport
from migd.kube.transport import Transport


class Real:
    """The control plane of the test run; each user has a client certificate."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._before = plane.audit.requests()
        self._stack = AsyncExitStack()

    def run(self, test: Callable[[World], Awaitable[None]]) -> None:
        async def main() -> None:
            async with self._stack:
                await test(World(self, await self.transport("migd-tests-admin")))

        asyncio.run(asyncio.wait_for(main(), 90))

    async def transport(self, user: str) -> Transport:
        return await self._connected(user, "system:masters")

    async def powerless(self) -> Transport:
        return await self._connected("nobody", "nobodies")

    async def _connected(self, user: str, group: str) -> Transport:
        pair = self._plane.authority.client(f"kube-{user}", user, [group])
        kubeconfig = self._plane.kubeconfig_of(f"kube-{user}.kubeconfig", pair)
        return await self._stack.enter_async_context(await HttpTransport.connect("migd-tests", kubeconfig))

    def writes(self) -> tuple[Wrote, ...]:
        found = self._plane.audit.since(self._before)
        return tuple(Wrote(r.user, r.verb, r.resource, r.name, r.code, r.body) for r in found if r.writes)

    def now(self) -> datetime:
        return datetime.now(UTC)
