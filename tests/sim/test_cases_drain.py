"""Situations from the field in which pods hold GPUs: who is evicted, who is not, and what is given back.

Whole clusters: operator, agents, kubelets, budgets, in virtual time. Each names its case; every story is watched, so
that nobody ever loses an instance that is held. Those of the operator itself (§8) are in test_cases_operator_drain.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleet import Fleet
from fleet_stories import (
    at_rest,
    blockers,
    budget,
    calls,
    clean,
    deleted,
    deployed,
    drain,
    drained,
    events,
    evicted,
    held,
    labels,
    layouts,
    node,
    play,
    reason,
    run,
    running,
    serials,
    the_pod,
    uids,
)
from whole.truth import truth

from migd.sim.cluster.server import SimRequest
from migd.sim.faults import Fault
from migd.sim.nodes.world import Workload

DATA = Path(__file__).parents[1] / "data"
HALVES_CUT = {0: ["2g.12gb", "2g.12gb"]}
SMALL = {"profile": "1g.6gb", "count": 4}
HALF = {"nvidia.com/mig-2g.12gb": 1}
NEVER = (1e6, 1e6)
"""Nobody comes in the place of who went."""


# ---- whose instances may go


@pytest.mark.parametrize("policy", ["WaitForIdle", "Evict"])
def test_b25_clients_are_paused_by_label_for_a_mode_change_and_pods_elsewhere_are_not_touched(policy: str):
    paused = set()

    async def story(fleet: Fleet) -> None:
        on_a = {"nodeSelector": {"kubernetes.io/hostname": "node-a"}}
        await run(fleet, Workload("elsewhere", HALF), Workload("cpu", {}, pods=2, spec=on_a))
        before, users = deployed(fleet), fleet.cluster.pods(app="elsewhere") + fleet.cluster.pods(app="cpu")
        rules = [{"gpus": {"all": True}, "mig": "Disabled"}]
        a = {"matchLabels": {"kubernetes.io/hostname": "node-a"}}
        fleet.apply(drain("p", more={"rules": rules, "nodeSelector": a}, policy=policy))
        await fleet.until(lambda: paused.update(_paused(fleet)) or fleet.condition("p", "Ready")[0] == "True")
        assert paused >= {"nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.deploy.dcgm"}
        assert not any(gpu.mig for gpu in truth(fleet.cluster.node("node-a")).values())
        await fleet.until(lambda: clean(fleet))
        assert deployed(fleet) == before
        assert uids(users) == uids(running(fleet, "elsewhere") + running(fleet, "cpu"))
        assert calls(fleet) == []

    cut = {"style": "operator", "layout": HALVES_CUT}
    # MIG is on and empty on node-a, so that only the clients hold its GPU
    play(story, node("node-a", style="operator", layout={0: []}), node("node-b", **cut))


def _paused(fleet: Fleet) -> set[str]:
    return {key for key, value in labels(fleet).items() if value == "paused-for-mig-change"}


@pytest.mark.parametrize("policy", ["WaitForIdle", "Evict"])
def test_b27_the_instance_in_use_that_can_stay_stays_and_its_pod_is_not_evicted(policy: str):
    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("w", {"nvidia.com/mig-1g.5gb": 1}))
        before, pod = fleet.partitions()[0].status.observed, the_pod(fleet, "w")
        fleet.apply(drain("p", {"profile": "1g.5gb", "count": 7}, policy=policy))
        await fleet.ready("p")
        assert layouts(fleet) == [{"1g.5gb": 7}]
        assert uids(running(fleet, "w")) == uids([pod])
        (was,) = [i for i in before.instances if i.in_use]
        now = fleet.partitions()[0].status.observed.instances
        assert [(i.placement, i.gi, i.mig_uuid) for i in now if i.in_use] == [(was.placement, was.gi, was.mig_uuid)]
        assert len({i.mig_uuid for i in now} - {i.mig_uuid for i in before.instances}) >= 5, "made anew"
        assert calls(fleet) == []

    play(story, node(gpus="a100-40gb", layout={0: ["3g.20gb@4", "2g.10gb@0", "1g.5gb@2", "1g.5gb@3"]}))


@pytest.mark.parametrize("policy", ["WaitForIdle", "Evict"])
def test_b30_a_pod_that_owns_an_instance_and_computes_nothing_holds_it(policy: str):
    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("sleeper", {"nvidia.com/mig-3g.20gb": 1}, idle=True))
        pod, before = the_pod(fleet, "sleeper"), serials(fleet)
        assert not fleet.cluster.node("node-a").host.snapshot().processes, "NVML sees nobody"
        fleet.apply(drain("p", {"profile": "7g.40gb"}, policy=policy))
        if policy == "Evict":
            await fleet.ready("p")
            assert evicted(fleet) == [pod["metadata"]["name"]]
        else:
            await fleet.until(lambda: reason(fleet)[0] == "WaitingForIdle")
            await asyncio.sleep(600)
            assert (serials(fleet), calls(fleet)) == (before, [])
            assert {one.pod.name for one in blockers(fleet) if one.pod} == {pod["metadata"]["name"]}

    play(story, node(gpus="a100-40gb", layout={0: ["3g.20gb", "3g.20gb"]}))


@pytest.mark.parametrize("index", [0, 2, 7])
def test_b37_of_eighteen_pods_the_one_on_the_gpu_that_changes_is_evicted(index: int):
    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("whole", {"nvidia.com/mig-7g.80gb": 1}, pods=8), Workload("cpu", {}, pods=10))
        by_kubelet = held(fleet)
        (who,) = [pod.split("/")[1] for pod, there in by_kubelet.items() if {gpu for gpu, _ in there} == {index}]
        others = uids(p for p in fleet.cluster.pods() if p["metadata"]["name"] != who)
        rules = [{"gpus": {"indices": [index]}, "instances": [{"profile": "3g.40gb", "count": 2}]}]
        fleet.apply(drain("p", more={"rules": rules}))
        await fleet.ready("p")
        assert evicted(fleet) == [who]
        assert len(calls(fleet)) == 1
        stayed = uids(running(fleet, "whole") + running(fleet, "cpu"))
        assert len(stayed & others) == 17

    play(story, node(gpus="8xa100-80gb", layout={i: ["7g.80gb"] for i in range(8)}))


# ---- who does not go


@pytest.mark.parametrize("every_s", [15.0, 40.0])
def test_b31_h13_a_crash_looping_pod_under_a_budget_is_asked_for_a_bounded_time_and_never_deleted(every_s: float):
    """The budget of h13 as it is; it says nothing of unhealthy pods, so it holds those as well.

    Where it has not been counted yet that a pod is no longer ready, an API server lets that pod go: not told here.
    """
    pdb, as_seen = yaml.safe_load_all((DATA / "h13-pdb-crashloop.yaml").read_text())
    team = as_seen["metadata"]["namespace"]

    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("infer", {"nvidia.com/mig-3g.40gb": 1}, pods=2, namespace=team))
        fleet.cluster.apply(pdb)
        (here,) = fleet.cluster.pods("node-a", app="infer")
        fleet.cluster.crash_loop(here["metadata"]["uid"], "node-a", 100, every_s)
        await asyncio.sleep(60)
        before, cut = at_rest(fleet), serials(fleet)
        a = {"matchLabels": {"kubernetes.io/hostname": "node-a"}}
        began_s = fleet.cluster.stage.now_s()
        fleet.apply(drain("p", {"profile": "1g.10gb", "count": 7}, timeout="2m", more={"nodeSelector": a}))
        await fleet.until(lambda: drained(fleet)[1] == "DrainBlocked", 60)
        key = f"{team}/{here['metadata']['name']}"
        assert key in drained(fleet)[2]
        assert "PodDisruptionBudget infer" in drained(fleet)[2]
        await fleet.until(lambda: blockers(fleet) and blockers(fleet)[0].pod_disruption_budgets, 60)
        (one,) = blockers(fleet)
        assert (one.reason, f"{one.pod.namespace}/{one.pod.name}", one.pod_disruption_budgets) == (
            "DrainBlocked",
            key,
            ("infer",),
        )
        await fleet.until(lambda: reason(fleet) == ("Blocked", "DrainTimeout"), 300)
        took_s = fleet.cluster.stage.now_s() - began_s
        assert 120 <= took_s < 160
        await asyncio.sleep(3600)
        assert {r.code for r in calls(fleet)} == {429}
        assert 2 <= len(calls(fleet)) <= took_s / 5 + 2, "every 5 s, and no more once the time is over"
        assert deleted(fleet, "infer") == []
        assert (at_rest(fleet), serials(fleet), clean(fleet)) == (before, cut, True)
        assert uids(fleet.cluster.pods("node-a", app="infer")) == uids([here])

    halves = {0: ["3g.40gb"]}
    play(story, node("node-a", "a100-80gb", layout=halves), node("node-b", "a100-80gb", layout=halves))


def test_b33_a_refusal_by_a_budget_is_told_as_one():
    """(a): 429 with the cause, and no Retry-After."""

    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("w", HALF))
        fleet.cluster.apply(budget("keep-one", "w"))
        fleet.apply(drain("p", SMALL))
        await fleet.until(lambda: drained(fleet)[1] == "DrainBlocked", 60)
        await fleet.until(lambda: events(fleet, "DrainBlocked"), 60)
        assert any("keep-one" in note for note in events(fleet, "DrainBlocked"))
        assert any("keep-one" in one.pod_disruption_budgets for one in blockers(fleet))
        fleet.cluster.delete("poddisruptionbudgets", "keep-one", "default")
        await fleet.ready("p")
        assert len(evicted(fleet)) == 1

    play(story, node(layout=HALVES_CUT))


@pytest.mark.parametrize("retry_after_s", [7, 25])
def test_b33_an_api_server_that_is_busy_is_waited_for_as_long_as_it_says_and_blames_nobody(retry_after_s: int):
    """(b): 429 with Retry-After and without the cause, then 201."""
    asked_s, said = [], set()

    async def story(fleet: Fleet) -> None:
        def busy(request: SimRequest) -> int:
            if request.resource != "pods/eviction":
                return 0
            asked_s.append(fleet.cluster.stage.now_s())
            return retry_after_s if len(asked_s) == 1 else 0

        await run(fleet, Workload("w", HALF))
        fleet.cluster.cluster.busy = busy
        fleet.apply(drain("p", SMALL))
        await fleet.until(lambda: said.add(drained(fleet)[1]) or fleet.condition("p", "Ready")[0] == "True")
        first, second = asked_s
        assert retry_after_s <= second - first < retry_after_s + 3
        assert "DrainBlocked" not in said
        assert events(fleet, "DrainBlocked") == []
        assert fleet.plan("p")["status"]["evictions"] == {"generation": 1, "evicted": 1}

    play(story, node(layout=HALVES_CUT))


@pytest.mark.parametrize("grace_s", [600, 3600])
def test_b39_a_pod_that_does_not_end_is_named_when_the_time_is_over_and_all_is_given_back(grace_s: int):
    async def story(fleet: Fleet) -> None:
        spec = {"terminationGracePeriodSeconds": grace_s}
        await run(fleet, Workload("slow", HALF, stops_in_s=grace_s, spec=spec, pause_s=NEVER))
        pod, before, cut = the_pod(fleet, "slow"), at_rest(fleet), serials(fleet)
        name = pod["metadata"]["name"]
        began_s = fleet.cluster.stage.now_s()
        fleet.apply(drain("p", SMALL, timeout="2m"))
        await fleet.until(lambda: reason(fleet) == ("Blocked", "DrainTimeout"), 300)
        assert 120 <= fleet.cluster.stage.now_s() - began_s < 160
        assert f"default/{name}" in drained(fleet)[2]
        await fleet.until(lambda: at_rest(fleet) == before, 60)
        assert (serials(fleet), clean(fleet), evicted(fleet)) == (cut, True, [name])
        await fleet.ready("p", grace_s + 1800)  # nobody need be evicted again once it has ended
        assert len(calls(fleet)) == 1
        assert deleted(fleet, "slow") == []

    play(story, node(layout=HALVES_CUT))


def test_b39_a_pod_that_has_ended_is_not_waited_for_though_a_finalizer_keeps_its_object():
    """Its kubelet tells it so: Failed or Succeeded, while it is being deleted."""

    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("kept", HALF, pause_s=NEVER))
        name = the_pod(fleet, "kept")["metadata"]["name"]
        fleet.cluster.admin.merge("pods", name, {"metadata": {"finalizers": ["example.com/x"]}}, "default")
        fleet.apply(drain("p", SMALL, timeout="2m"))
        await fleet.ready("p", 100)
        assert evicted(fleet) == [name]
        still = fleet.cluster.get("pods", name, "default")
        assert still["metadata"]["finalizers"] == ["example.com/x"], "not ours to take away"

    play(story, node(layout=HALVES_CUT))


# ---- an admin's cordon


@pytest.mark.parametrize("cordoned", [True, False])
@pytest.mark.parametrize("end", ["success", "failure", "timeout", "crash"])
def test_b35_a_cordon_of_the_middle_of_a_drain_is_the_admins_on_every_path(end: str, cordoned: bool):
    seen = {"closed": False, "killed": False}
    said = []

    def strikes(who: str, where: str) -> bool:
        """Right after it has closed the node, once."""
        closing = who.startswith("migd-agent") and where == "after PATCH /api/v1/nodes/node-a"
        if end == "crash" and closing and seen["closed"] and not seen["killed"]:
            seen["killed"] = True
            return True
        return False

    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("w", HALF))
        fleet.cluster.cluster.listen(
            lambda kind, happened: kind.plural == "nodes" and _look(happened.after.document, said, seen)
        )
        fleet.cluster.apply(budget("keep-one", "w"))
        if end == "failure":
            host = fleet.cluster.node("node-a").host
            host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", "error", 999, times=0))
        fleet.apply(drain("p", SMALL, timeout="2m"))
        await fleet.until(lambda: drained(fleet)[1] == "DrainBlocked")
        fleet.cluster.admin.merge("nodes", "node-a", {"spec": {"unschedulable": cordoned or None}})
        said.clear()
        if end != "timeout":
            fleet.cluster.delete("poddisruptionbudgets", "keep-one", "default")
        if end in ("success", "crash"):
            await fleet.ready("p")
        else:
            await fleet.until(lambda: fleet.condition("p", "Stalled")[0] == "True")
        assert seen["killed"] == (end == "crash")
        await fleet.until(lambda: clean(fleet))
        assert set(said) == {cordoned}

    play(story, node(layout=HALVES_CUT), strikes=strikes)


def test_b35_a_node_that_was_cordoned_before_is_left_to_its_admin():
    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("w", HALF))
        fleet.cluster.admin.merge("nodes", "node-a", {"spec": {"unschedulable": True}})
        await asyncio.sleep(30)
        before, cut = at_rest(fleet), serials(fleet)
        fleet.apply(drain("p", SMALL, timeout="2m"))
        await asyncio.sleep(600)
        assert (at_rest(fleet), serials(fleet), calls(fleet)) == (before, cut, [])
        fleet.cluster.admin.merge("nodes", "node-a", {"spec": {"unschedulable": None}})
        await fleet.ready("p")
        assert "unschedulable" not in fleet.cluster.get("nodes", "node-a")["spec"]

    play(story, node(layout=HALVES_CUT))


def _look(node_now: dict[str, Any], said: list[bool], seen: dict[str, bool]) -> None:
    said.append(node_now["spec"].get("unschedulable", False))
    seen["closed"] |= any(t["key"] == "migd.dev/changing" for t in node_now["spec"].get("taints") or ())
