"""The operator over many nodes: never more at once than allowed, what comes and goes, and who is left out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fleet_worlds import API, World, played
from unit.migd_operator.fleets import answered, gpu_name

HALVES = {"profile": "3g.40gb", "count": 2}
NODES = [f"n{k}" for k in range(10)]
MANAGER = "nvidia.com/gpu.deploy.mig-manager"


def ready(world: World, name: str = "p") -> bool:
    return world.said(name, "Ready") == ("True", "AsWished")


def at_once(most: Any) -> int:
    """The most nodes that have a turn and are not done with it, over a whole rollout."""
    found = 0

    async def story(world: World) -> None:
        nonlocal found
        for name in NODES:
            world.add_node(name, "7g.80gb")
        world.plan("p", HALVES, rollout={"maxUnavailable": most})
        async with world.operator():
            while not ready(world):
                going = [p for p in world.partitions() if p.spec.assignment and p.status.phase != "Ready"]
                found = max(found, len({p.spec.node_name for p in going}))
                await asyncio.sleep(0.5)

    played(story)
    return found


@pytest.mark.parametrize(("most", "nodes"), [(1, 1), ("25%", 2), ("5%", 1)])
def test_a_rollout_never_has_more_nodes_at_once_than_allowed(most: Any, nodes: int):
    assert at_once(most) == nodes


def test_nothing_starts_where_none_may_be_unavailable():
    async def story(world: World) -> None:
        world.add_node("n1", "7g.80gb")
        world.plan("p", HALVES, rollout={"maxUnavailable": 0})
        async with world.operator():
            await asyncio.sleep(120)
            assert not world.started()
            assert world.said("p", "Ready") == ("False", "Waiting")

    played(story)


def test_a_node_that_fails_stops_the_rest_until_somebody_edits_the_plan():
    async def story(world: World) -> None:
        for name in NODES[:4]:
            world.add_node(name, "7g.80gb")
        world.phase = lambda node: "Failed" if node == "n1" else "Ready"
        world.plan("p", HALVES)
        async with world.operator():
            await world.until(lambda: world.said("p", "Stalled")[0] == "True")
            await asyncio.sleep(60)
            assert world.started() == {"n0", "n1"}
            world.phase = lambda _node: "Ready"
            world.plan("p", HALVES, priority=1)
            await world.until(lambda: ready(world))
            stalled = [note for kind, _, note in world.events() if kind == "Warning"]
            assert len(stalled) == 1
            assert "stalled" in stalled[0]

    played(story)


def test_a_node_that_joins_is_cut_too_and_one_that_goes_takes_its_objects_along():
    async def story(world: World) -> None:
        world.add_node("n0", "7g.80gb")
        world.plan("p", HALVES)
        async with world.operator():
            await world.until(lambda: ready(world))
            world.add_node("n1", "7g.80gb", None)
            await world.until(lambda: world.status("p")["gpus"]["summary"] == "3/3")
            world.kept.discard("n0")
            world.ask("DELETE", "/api/v1/nodes/n0", {})
            await world.until(lambda: {p.spec.node_name for p in world.partitions()} == {"n1"})
            await world.until(lambda: world.status("p")["gpus"]["summary"] == "2/2")

    played(story)


def test_a_gpu_that_appears_is_cut_and_one_that_falls_off_the_bus_is_left_out():
    async def story(world: World) -> None:
        world.add_node("n0", "7g.80gb", "7g.80gb")
        world.plan("p", HALVES)
        async with world.operator():
            await world.until(lambda: ready(world))
            world.add_gpu("n0", 2, "7g.80gb")
            await world.until(lambda: world.status("p")["gpus"]["summary"] == "3/3")
            lost = next(p for p in world.partitions() if p.name == gpu_name("n0", 1))
            world.tell(answered(lost, "Lost"))
            await world.until(lambda: world.assigned()[lost.name] == ("False", "GPUUnhealthy"))
            await world.until(lambda: world.status("p")["gpus"]["summary"] == "2/3")
            left = [p.spec.assignment.gpus for p in world.partitions() if p.name != lost.name and p.spec.assignment]
            assert left == [2, 2]

    played(story)


async def _cordon(world: World) -> None:
    world.merge("/api/v1/nodes/n0", {"spec": {"unschedulable": True}})


async def _hami(world: World) -> None:
    world.merge("/api/v1/nodes/n0", {"metadata": {"annotations": {"hami.io/node-nvidia-register": '[{"mode":"mig"}]'}}})


async def _upgrade(world: World) -> None:
    key = "nvidia.com/gpu-driver-upgrade.driver-wait-for-safe-load"
    world.merge("/api/v1/nodes/n0", {"metadata": {"annotations": {key: "true"}}})


async def _manager(world: World) -> None:
    world.merge("/api/v1/nodes/n0", {"metadata": {"labels": {MANAGER: "true"}}})


async def _slices(world: World) -> None:
    kind = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "n0-gpu.nvidia.com-x"}}
    body = {**kind, "spec": {"driver": "gpu.nvidia.com", "nodeName": "n0"}}
    world.ask("POST", "/apis/resource.k8s.io/v1/resourceslices", body)
    other = {**kind, "metadata": {"name": "n1-nic"}, "spec": {"driver": "nic.example.com", "nodeName": "n1"}}
    world.ask("POST", "/apis/resource.k8s.io/v1/resourceslices", other)


@pytest.mark.parametrize(
    ("away", "reason", "said"),
    [
        (_cordon, "Waiting", "cordoned"),
        (_upgrade, "DriverUpgrade", "safe load"),
        (_hami, "ForeignOwner", "HAMi in mig mode"),
        (_manager, "ForeignOwner", "mig-manager"),
        (_slices, "ForeignOwner", "NVIDIA's DRA driver"),
    ],
)
def test_a_node_that_others_have_is_left_out_and_said_and_stops_no_other(
    away: Callable[[World], Awaitable[None]], reason: str, said: str
):
    async def story(world: World) -> None:
        for name in ("n0", "n1"):
            world.add_node(name, "7g.80gb")
        await away(world)
        world.plan("p", HALVES)
        async with world.operator():
            await world.until(lambda: world.status("p").get("nodes", {}).get("ready") == 1)
            assert world.started() == {"n1"}
            (left,) = [p for p in world.partitions() if p.spec.node_name == "n0"]
            assert (left.says("Assigned").reason, said in left.says("Assigned").message) == (reason, True)

    played(story)


def test_a_node_is_taken_from_mig_manager_for_its_turn_and_given_back_when_the_plan_is_gone():
    async def story(world: World) -> None:
        world.add_node("n0", "7g.80gb", labels={MANAGER: "true"})
        world.plan("p", HALVES, owner="TakeOver", approval="Manual")
        async with world.operator():
            await world.until(lambda: world.said("p", "Progressing") == ("False", "AwaitingApproval"))
            await asyncio.sleep(90)
            assert world.node("n0")["metadata"]["labels"][MANAGER] == "true"
            digest = world.status("p")["preview"]["digest"]
            approval = {"metadata": {"annotations": {"migd.dev/approved": digest}}}
            world.merge(f"{API}/gpupartitionplans/p", approval)
            await world.until(lambda: ready(world))
            there = world.node("n0")["metadata"]
            assert (there["labels"][MANAGER], there["annotations"]["migd.dev/taken-over"]) == ("false", "true")
            world.delete_plan("p")
            await world.until(lambda: world.node("n0")["metadata"]["labels"][MANAGER] == "true")
            assert "migd.dev/taken-over" not in world.node("n0")["metadata"].get("annotations", {})
        order = [r.resource for r in world.requests() if r.resource in ("nodes", "gpupartitions")]
        assert order[0] == "nodes"

    played(story)


def test_two_claimants_of_one_gpu_move_nothing_until_the_first_has_lost_it():
    async def story(world: World) -> None:
        world.add_node("n0", "7g.80gb", "7g.80gb")
        world.add_node("n1", "7g.80gb")
        world.plan("p", HALVES)
        twice = gpu_name("n0", 1)
        world.kept.discard("n1")
        world.renew("n1", duplicates=twice)
        async with world.operator():
            await world.until(lambda: world.assigned().get(twice) == ("False", "DuplicateGPU"))
            await asyncio.sleep(90)
            (one,) = [p for p in world.partitions() if p.name == twice]
            assert one.spec.desired is None
            world.tell(answered(one, "Lost"))
            await world.until(lambda: twice not in {p.name for p in world.partitions()})

    played(story)
