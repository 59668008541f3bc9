"""An API server that is away for a while, and one that comes back: nobody ends, and nothing is missed."""

from __future__ import annotations

import asyncio

from controlplane.running import ControlPlane
from integration.texts import PARTITIONS as AT
from integration.texts import gpu_name, partition
from kube_contract.real import Real
from kube_contract.worlds import World

from migd.kube.partitions import PARTITIONS


def test_caches_go_on_over_a_restart_of_the_api_server_and_find_what_was_deleted(plane: ControlPlane):
    async def test(world: World) -> None:
        stays, goes = gpu_name(), gpu_name()
        for name in (stays, goes):
            plane.admin.create(AT, partition(name)).object()
        async with world.cluster() as cluster:
            following = cluster.follow(PARTITIONS, lambda _change: None)
            await following.wait_synced()
            await asyncio.to_thread(plane.api_server.kill)
            await world.until(lambda: following.trouble, 30)
            assert following.cache.get(goes), "what was known stays known"
            plane.api_server.start()  # not in a thread that ends: it is leashed to the one that starts it
            await asyncio.to_thread(plane.wait_ready)
            plane.admin.delete(f"{AT}/{goes}").object()
            comes = gpu_name()
            plane.admin.create(AT, partition(comes)).object()
            await world.until(lambda: following.cache.get(comes) and not following.cache.get(goes), 30)
            assert following.cache.get(stays)
            await world.until(lambda: following.trouble == "", 30)

    Real(plane).run(test)
