"""Simulated nodes under everything that may happen to them: nothing is held twice, and nothing leaks."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pynvml

from migd.sim.cluster.virtual_time import run_virtually
from migd.sim.errors import SimulationError
from migd.sim.nodes.carving import carve, clear
from migd.sim.nodes.documents import node_of, running
from migd.sim.nodes.world import NodeSpec, SimulatedCluster, Workload

CUT = {0: ["3g.40gb", "1g.10gb", "1g.10gb"]}
NODES = (
    NodeSpec("n1", "2xa100-80gb", layout=CUT),
    NodeSpec("n2", "2xh100-sxm-80gb", style="operator", layout={**CUT, 1: ["1g.10gb"] * 7}),
    NodeSpec("n3", "2xa100-80gb", style="helm-tolerant", layout=CUT, switches={"release_lag_s": 2.0}),
)
TAINT = {"key": "migd.dev/changing", "effect": "NoSchedule"}


def check(world: SimulatedCluster) -> None:
    """What holds at every moment."""
    for node in world.nodes:
        manager = node.kubelet.manager
        held = [(h.resource, one) for h in manager.held() for one in h.device_ids]
        assert len(held) == len(set(held)), f"a device of {node.name} is held twice"
        for told in world.allocatable(node.name).values():
            assert told >= 0


def happens(world: SimulatedCluster, dice: random.Random) -> None:
    """One thing, by the dice, that may happen to a node."""
    name = dice.choice([node.name for node in world.nodes])
    node = world.node(name)
    pods = world.pods(name)
    match dice.randrange(10):
        case 0 if node.kubelet.up:
            world.reboot(name, dice.uniform(5, 90))
        case 1 if node.kubelet.up:
            world.restart_kubelet(name, dice.uniform(1, 60))
        case 2 if pods:
            node.kubelet.crash(dice.choice(pods)["metadata"]["uid"])
        case 3 if pods:
            world.admin.delete("pods", dice.choice(pods), dice.choice([None, 0, 5]))
        case 4:
            world.admin.merge("nodes", name, {"spec": {"taints": dice.choice([[TAINT], None])}})
        case 5:
            world.raise_xid(name, dice.randrange(2), dice.choice([31, 48]))
        case 6 if pods:
            node.kubelet.hang_up(dice.choice(pods)["metadata"]["uid"])
        case 7:
            world.admin.cordon(name, dice.random() < 0.5)
        case 8:
            node.kubelet.lost_statuses += 1
        case _:
            with suppress(pynvml.NVMLError, SimulationError):  # in use, or no room, as an admin would be told
                dice.choice([clear, lambda host, gpu: carve(host, gpu, ["1g.10gb"])])(node.host, dice.randrange(2))


async def play(seed: int) -> SimulatedCluster:
    dice = random.Random(seed)
    world = SimulatedCluster(seed, NODES, leases=False)
    world.start()
    world.run(Workload("train", {"nvidia.com/mig-1g.10gb": 1}, pods=5, lasts_s=(5, 90)))
    world.run(Workload("serve", {"nvidia.com/mig-3g.40gb": 1}, pods=2))
    world.run(Workload("whole", {"nvidia.com/gpu": 1}, pods=1, stops_in_s=20))
    world.run(Workload("web", {}, pods=3))
    for _ in range(25):
        await asyncio.sleep(dice.expovariate(1 / 20))
        happens(world, dice)
        world.stage.check()
        check(world)
    for node in world.nodes:
        world.admin.merge("nodes", node.name, {"spec": {"taints": None, "unschedulable": None}})
    await world.until(lambda: all(node.kubelet.up for node in world.nodes), 120)
    for name in ("train", "serve", "whole", "web"):
        world.workloads.stop(name)
    await world.until(lambda: not [p for p in world.pods() if p["metadata"]["namespace"] == "default"], 600)
    await asyncio.sleep(60)
    return world


def test_whatever_happens_nothing_is_held_twice_and_nothing_leaks(soak: int, first_seed: int):
    for seed in range(first_seed, first_seed + 60 * soak):
        try:
            world = run_virtually(play(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        for node in world.nodes:
            assert node.kubelet.manager.held() == (), f"seed {seed}"
            assert {w.uid for w in node.kubelet.manager.active()} == {
                p["metadata"]["uid"] for p in world.pods(node.name) if running(p)
            }, f"seed {seed}"
            ours = {node.kubelet.pod_of(process.container) for process in node.host.snapshot().processes.values()}
            assert ours <= {p["metadata"]["uid"] for p in world.pods(node.name)}, f"seed {seed}: a process leaked"
            sessions = {node.kubelet.pod_of(client.container) for client in node.host.snapshot().clients.values()}
            assert "" not in sessions, f"seed {seed}: a session leaked"
            assert all(node_of(p) == node.name for p in world.pods(node.name))
