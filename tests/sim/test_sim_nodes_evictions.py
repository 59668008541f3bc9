"""Pods of simulated nodes that are evicted: how they end, who comes after them, and what keeps them.

What the API server answers is in kube_contract/evicting, on both sides.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from migd.sim.cluster.virtual_time import run_virtually
from migd.sim.nodes.acting import JSON
from migd.sim.nodes.documents import node_of, pod_document, ready
from migd.sim.nodes.world import NodeSpec, SimulatedCluster, Workload

SMALL = "nvidia.com/mig-1g.10gb"
NODES = tuple(NodeSpec(name, "2xa100-80gb", layout={0: ["1g.10gb"] * 3}) for name in ("n1", "n2"))
ONE = NODES[:1]
TAINT = {"key": "migd.dev/changing", "effect": "NoSchedule"}
EVERYTHING = {"tolerations": [{"operator": "Exists"}]}
H13 = list(yaml.safe_load_all((Path(__file__).parents[1] / "data" / "h13-pdb-crashloop.yaml").read_text()))
Story = Callable[[SimulatedCluster], Awaitable[None]]


def play(story: Story, nodes: tuple[NodeSpec, ...] = ONE, seed: int = 0) -> SimulatedCluster:
    async def main() -> SimulatedCluster:
        world = SimulatedCluster(seed, nodes)
        world.start()
        await world.settled()
        await story(world)
        world.stage.check()
        world.stop()
        return world

    return run_virtually(main())


def evict(world: SimulatedCluster, pod: str, namespace: str = "default", **options: Any) -> int:
    """Ask for it; the status of the answer."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    return world.cluster.answer("admin", "POST", path, {}, {**body, "deleteOptions": options}, JSON)[0]


def pods(world: SimulatedCluster, app: str) -> list[str]:
    """Those that run and are well and not on their way out."""
    found = [p for p in world.pods(app=app) if ready(p) and "deletionTimestamp" not in p["metadata"]]
    return sorted(p["metadata"]["name"] for p in found)


def pod(world: SimulatedCluster, name: str, namespace: str = "default") -> Any:
    return world.get("pods", name, namespace)


def budget(world: SimulatedCluster, app: str, least: int) -> None:
    spec = {"selector": {"matchLabels": {"app": app}}, "minAvailable": least}
    head = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget"}
    world.apply({**head, "metadata": {"name": app, "namespace": "default"}, "spec": spec})


def counted(world: SimulatedCluster, name: str, namespace: str = "default") -> Any:
    return world.get("poddisruptionbudgets", name, namespace).get("status") or {}


def held(world: SimulatedCluster, node: str = "n1") -> list[str]:
    return sorted(one.pod for one in world.node(node).kubelet.pod_resources())


def computing(world: SimulatedCluster, node: str = "n1") -> int:
    return len(world.node(node).host.snapshot().processes)


@pytest.mark.parametrize("seed", range(5))
def test_a_budget_lets_the_next_one_go_once_another_pod_has_come_for_the_first(seed: int):
    async def story(world: SimulatedCluster) -> None:
        world.run(Workload("web", {SMALL: 1}, pods=2))
        budget(world, "web", 1)
        await world.until(lambda: counted(world, "web").get("disruptionsAllowed") == 1)
        first, second = pods(world, "web")
        uids = {pod(world, name)["metadata"]["uid"] for name in (first, second)}
        assert evict(world, first) == 201
        assert evict(world, first) == 201, "of a pod that is going"
        assert evict(world, second) == 429
        await world.until(lambda: len(pods(world, "web")) == 2)
        assert evict(world, second) == 429, "its controller counts a moment late"
        await world.until(lambda: counted(world, "web")["disruptionsAllowed"] == 1, 1)
        assert evict(world, second) == 201
        await world.until(lambda: len(pods(world, "web")) == 2 and second not in pods(world, "web"))
        assert not uids & {p["metadata"]["uid"] for p in world.pods(app="web")}

    play(story, seed=seed)


def test_who_comes_after_an_evicted_pod_goes_where_it_is_let_and_back_where_it_tolerates_everything():
    async def story(world: SimulatedCluster) -> None:
        world.run(Workload("meek", {SMALL: 1}))
        world.run(
            Workload("stubborn", {SMALL: 1}, spec={**EVERYTHING, "nodeSelector": {"kubernetes.io/hostname": "n1"}})
        )
        await world.until(lambda: pods(world, "meek") and pods(world, "stubborn"))
        (meek,), (stubborn,) = pods(world, "meek"), pods(world, "stubborn")
        where = node_of(pod(world, meek))
        for node in {"n1", where}:
            world.admin.merge("nodes", node, {"spec": {"taints": [TAINT]}})
        await world.quiet(3)
        assert (evict(world, meek), evict(world, stubborn)) == (201, 201)
        await world.until(lambda: pods(world, "stubborn") not in ([], [stubborn]))
        assert node_of(pod(world, pods(world, "stubborn")[0])) == "n1"
        if where == "n1":
            await world.until(lambda: pods(world, "meek") not in ([], [meek]))
            assert node_of(pod(world, pods(world, "meek")[0])) == "n2"
        else:
            await world.quiet(3)
            assert pods(world, "meek") == []

    for seed in range(4):
        play(story, NODES, seed)


def test_what_is_asked_to_end_holds_its_device_until_it_has_and_is_killed_when_its_grace_is_over():
    async def story(world: SimulatedCluster) -> None:
        slow = {"sim.migd.dev/stops-in-s": 1000}
        world.admin.create("pods", pod_document("p", {SMALL: 1}, annotations=slow, terminationGracePeriodSeconds=40))
        await world.until(lambda: ready(pod(world, "p")))
        began_s, told = world.stage.now_s(), []
        world.stage.hear("pods", lambda happened: told.append(happened.after.document["status"]))
        assert evict(world, "p") == 201
        await world.quiet(5)
        assert (held(world), computing(world)) == (["p"], 1)
        assert ready(pod(world, "p")), "it answers until it ends"
        assert evict(world, "p", gracePeriodSeconds=20) == 201, "and may be given less"
        await world.until(lambda: pod(world, "p") is None)
        assert 24 <= world.stage.now_s() - began_s < 27
        assert (told[-1]["phase"], ready({"status": told[-1]})) == ("Failed", False)
        assert {c["type"] for c in told[-1]["conditions"]} >= {"DisruptionTarget"}
        assert (held(world), computing(world)) == ([], 0)

    play(story)


def test_a_kubelet_that_restarts_meanwhile_ends_what_was_to_end():
    async def story(world: SimulatedCluster) -> None:
        world.run(Workload("web", {SMALL: 1}, stops_in_s=10.0))
        await world.until(lambda: pods(world, "web"))
        (first,) = pods(world, "web")
        assert evict(world, first) == 201
        await world.quiet(1)
        world.restart_kubelet("n1", away_s=20.0)
        await world.until(lambda: pod(world, first) is None and pods(world, "web"))

    play(story)


def test_h13_a_pod_that_crashes_over_and_over_keeps_its_device_and_cannot_be_evicted():
    document, there = H13

    async def story(world: SimulatedCluster) -> None:
        world.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-a"}})
        world.apply(document)
        world.run(Workload("infer", {SMALL: 1}, namespace="team-a"))
        world.run(
            Workload(
                "crashing", {SMALL: 1}, namespace="team-a", labels=there["metadata"]["labels"], crashes_after_s=0.5
            )
        )

        def restarts() -> int:
            found = pod(world, "crashing-2", "team-a") or pod(world, "crashing-1", "team-a")
            told = (found or {}).get("status", {}).get("containerStatuses") or ()
            return max((one["restartCount"] for one in told), default=0)

        await world.until(lambda: restarts() >= 4, 300)
        (name,) = (p["metadata"]["name"] for p in world.pods() if p["metadata"]["name"].startswith("crashing-"))
        await world.until(lambda: not ready(pod(world, name, "team-a")))
        await world.quiet(1)
        told = pod(world, name, "team-a")["status"]
        assert told["phase"] == there["status"]["phase"] == "Running"
        assert told["containerStatuses"][0]["state"] == there["status"]["containerStatuses"][0]["state"]
        assert (name in held(world), computing(world)) == (True, 1)
        assert counted(world, "infer", "team-a")["currentHealthy"] == 1
        assert evict(world, name, "team-a") == 429
        world.apply({**document, "spec": {**document["spec"], "unhealthyPodEvictionPolicy": "AlwaysAllow"}})
        assert evict(world, name, "team-a") == 201
        await world.until(lambda: pod(world, name, "team-a") is None, 2)

    play(story)


def test_a_container_that_crashes_while_it_is_to_end_has_ended():
    async def story(world: SimulatedCluster) -> None:
        notes = {"sim.migd.dev/stops-in-s": 100, "sim.migd.dev/crashes-after-s": 20}
        world.admin.create("pods", pod_document("p", {SMALL: 1}, annotations=notes, terminationGracePeriodSeconds=60))
        await world.until(lambda: ready(pod(world, "p")))
        assert evict(world, "p") == 201
        await world.until(lambda: pod(world, "p") is None, 21)

    play(story)


def test_a_pod_that_hangs_stays_terminating_with_its_device_until_it_is_let_go():
    async def story(world: SimulatedCluster) -> None:
        world.run(Workload("web", {SMALL: 1}, hangs=True))
        await world.until(lambda: pods(world, "web"))
        (first,) = pods(world, "web")
        assert evict(world, first, gracePeriodSeconds=5) == 201
        await world.until(lambda: pods(world, "web"), 20)
        await world.quiet(600, 1000)
        assert (pod(world, first)["status"]["phase"], len(held(world)), computing(world)) == ("Running", 2, 2)
        assert evict(world, first) == 201
        world.let_go(first)
        await world.until(lambda: pod(world, first) is None, 2)
        assert (held(world), computing(world)) == (pods(world, "web"), 1)

    play(story)


def test_a_pod_removed_by_force_gives_its_device_back_while_its_process_hangs():
    async def story(world: SimulatedCluster) -> None:
        world.run(Workload("web", {SMALL: 1}, hangs=True))
        await world.until(lambda: pods(world, "web"))
        (first,) = pods(world, "web")
        world.admin.delete("pods", pod(world, first), 0)
        assert pod(world, first) is None
        await world.until(lambda: held(world) == pods(world, "web") != [])
        world.restart_kubelet("n1")
        await world.until(lambda: world.node("n1").kubelet.up)
        await world.quiet(60)
        assert computing(world) == 2, "NVML still shows who computes there"
        world.workloads.stop("web")
        world.reboot("n1")
        await world.until(lambda: world.node("n1").kubelet.up)
        assert computing(world) == 0

    play(story)


def test_a_finalizer_keeps_a_pod_that_has_ended_and_gave_its_device_back():
    async def story(world: SimulatedCluster) -> None:
        world.run(Workload("web", {SMALL: 1}, finalizers=("example.com/hold",)))
        await world.until(lambda: pods(world, "web"))
        (first,) = pods(world, "web")
        assert evict(world, first) == 201
        await world.until(lambda: pods(world, "web"))
        await world.quiet(600, 1000)
        assert pod(world, first)["status"]["phase"] == "Succeeded"
        assert held(world) == pods(world, "web")
        world.let_go(first)
        assert pod(world, first) is None

    play(story)
