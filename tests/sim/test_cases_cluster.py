"""Situations of a whole cluster as others met them, end to end: operator, agent, kubelet, plugin, people.

Each names its case. What one node or the operator does alone is tested there. Left out: MPS, DRA, evictions.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fleet import Fleet, plan
from fleet_stories import DEPLOY, Scripted, clean, deployed, labels, layouts, node, play
from whole.truth import truth

from migd.sim.cluster.faults import Trouble, WatchTrouble
from migd.sim.faults import Fault

DATA = Path(__file__).parents[1] / "data"
SMALL = {"profile": "1g.6gb", "count": 4}
HALVES = {"profile": "2g.12gb", "count": 2}


def written(fleet: Fleet, since: int, *left_out: str) -> list[tuple[str, str, str]]:
    return [
        (r.user, r.resource, r.name)
        for r in fleet.cluster.cluster.requests[since:]
        if r.writes and r.user.startswith("migd-") and r.resource not in ("leases", *left_out)
    ]


def advertised(fleet: Fleet) -> tuple[str, str]:
    (said,) = {(c.status, c.message) for p in fleet.partitions() if (c := p.says("Advertised")) is not None}
    return said


# ---- device plugin, resources and labels


def test_b40_h10_a_node_that_still_shows_old_resources_is_not_ready_and_the_resource_is_named():
    pictures = json.loads((DATA / "h10-node-stale-resources.json").read_text())["pictures"]

    async def story(fleet: Fleet) -> None:
        fleet.apply(plan("p", {"profile": "1g.5gb", "count": 7}, foreignInstances="Adopt"))
        await fleet.ready("p")
        fleet.cluster.node("node-a").kubelet.end()  # what it tells is told by hand now
        for picture in pictures:
            told = picture["allocatable"]
            fleet.cluster.admin.merge("nodes", "node-a", {"status": {"allocatable": told}}, sub="status")
            await asyncio.sleep(400)
            status, message = advertised(fleet)
            assert (status == "True") == picture["ready"], picture["when"]
            assert (fleet.condition("p", "Ready")[0] == "True") == picture["ready"], picture["when"]
            stale = [r for r in ("nvidia.com/gpu", "nvidia.com/mig-7g.40gb") if told[r] != "0"]
            assert all(resource in message for resource in stale)

    whole = {index: ["1g.5gb"] * 7 for index in range(8)}
    play(story, node(gpus="8xa100-40gb", layout=whole))


def test_b42_mig_on_with_nothing_in_it_is_refused_unless_it_is_meant():
    async def story(fleet: Fleet) -> None:
        whole = fleet.cluster.get("nodes", "node-a")["status"]["allocatable"]
        rules = [{"gpus": {"indices": [0]}, "instances": [SMALL]}, {"gpus": {"indices": [1]}, "instances": []}]
        fleet.apply(plan("p", rules=rules))
        await fleet.until(lambda: fleet.condition("p", "Accepted")[0] == "False")
        await asyncio.sleep(300)
        assert "allowEmpty" in fleet.condition("p", "Accepted")[2]
        assert fleet.cluster.get("nodes", "node-a")["status"]["allocatable"] == whole
        assert layouts(fleet) == [{}, {}]
        assert not any(gpu.mig for gpu in truth(fleet.cluster.node("node-a")).values())
        fleet.edit("p", rules=[rules[0], {**rules[1], "allowEmpty": True}])
        await fleet.ready("p")
        assert layouts(fleet) == [{"1g.6gb": 4}, {}]
        assert all(gpu.mig for gpu in truth(fleet.cluster.node("node-a")).values())

    play(story, node(gpus="2xa30"))


def test_b44_labels_status_and_resources_have_one_name_for_a_profile():
    async def story(fleet: Fleet) -> None:
        fleet.apply(plan("p", {"profile": "3g.20gb", "count": 2}))
        await fleet.ready("p")
        offered = [r for r, number in fleet.cluster.allocatable("node-a").items() if number]
        assert offered == ["nvidia.com/mig-3g.20gb"]
        counted = {k: v for k, v in labels(fleet).items() if k.startswith("migd.dev/mig-")}
        assert counted == {"migd.dev/mig-3g.20gb.count": "4"}
        assert {i.profile for p in fleet.partitions() for i in p.status.observed.instances} == {"3g.20gb"}
        assert {p.status.observed.summary for p in fleet.partitions()} == {"2×3g.20gb"}

    play(story, node(gpus="2xa100-40gb"))


AS_SET = {DEPLOY + "gpu-feature-discovery": "false", DEPLOY + "dcgm": "false", "example.com/x": "1"}


@pytest.mark.parametrize("end", ["success", "failure", "crash"])
def test_b47_components_that_an_admin_turned_off_stay_off(end: str):
    async def story(fleet: Fleet) -> None:
        host = fleet.cluster.node("node-a").host
        await fleet.cluster.quiet(5)
        before = deployed(fleet)
        if end == "failure":
            host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", "error", 999, times=0))
        if end == "crash":
            for nth in (1, 3):
                host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", "crash", when="after", nth=nth))
        fleet.apply(plan("p", SMALL))
        if end == "failure":
            await fleet.until(lambda: fleet.condition("p", "Stalled")[0] == "True")
            await fleet.until(lambda: clean(fleet))
        else:
            await fleet.ready("p")
        await fleet.cluster.until(lambda: clean(fleet))
        assert deployed(fleet) == before
        assert before[DEPLOY + "dcgm"] == "false"
        if end == "crash":
            assert fleet.agent("node-a").lives >= 2

    play(story, node(style="operator", labels=AS_SET))


def test_b48_a_label_that_comes_later_starts_the_work_and_mig_that_is_on_already_is_seen():
    async def story(fleet: Fleet) -> None:
        fleet.apply(plan("p", SMALL, nodeSelector={"matchLabels": {"capable": "yes"}}, foreignInstances="Adopt"))
        await asyncio.sleep(60)
        assert fleet.condition("p", "Ready")[:2] == ("False", "Waiting")
        (one,) = fleet.partitions()
        assert (one.status.phase, one.status.observed.mig.current) == ("Idle", "Enabled")
        assert layouts(fleet) == [{"2g.12gb": 2}]
        fleet.cluster.admin.label("node-a", {"capable": "yes"})
        await fleet.ready("p", 300)
        assert layouts(fleet) == [{"1g.6gb": 4}]

    play(story, node(layout={0: ["2g.12gb", "2g.12gb"]}))


@pytest.mark.parametrize("fails", [0, 2, 60])
def test_b50_devices_are_made_before_the_plugin_is_back_and_what_cannot_be_made_is_not_ready(fails: int):
    async def story(fleet: Fleet) -> None:
        host = fleet.cluster.node("node-a").host
        if fails:
            host.inject(Fault("devices.refresh", "error", times=fails))
        fleet.apply(plan("p", SMALL))
        if fails < 10:
            await fleet.ready("p")
            return
        await fleet.until(lambda: fleet.condition("p", "Ready")[1] == "NVMLError")
        assert layouts(fleet) == [{"1g.6gb": 4}], "the GPU is right, and is not touched again"
        host.clear_faults()
        await fleet.ready("p", 3600)

    play(story)


# ---- the operator


def test_b91_an_edit_behind_watches_that_died_in_silence_is_carried_out_within_minutes():
    faults = Scripted()

    async def story(fleet: Fleet) -> None:
        fleet.apply(plan("p", SMALL))
        await fleet.ready("p")
        await asyncio.sleep(60)
        faults.watches = [WatchTrouble.SILENT] * 12
        fleet.edit("p", rules=[{"gpus": {"all": True}, "instances": [HALVES]}])
        await fleet.ready("p", 900)
        assert layouts(fleet) == [{"2g.12gb": 2}]

    play(story, faults=faults)


def test_b93_a_burst_of_429_and_5xx_loses_nothing_and_nothing_is_done_twice():
    faults = Scripted()

    async def story(fleet: Fleet) -> None:
        await fleet.cluster.quiet(5)
        faults.requests = [Trouble.UNWELL, *[Trouble.TOO_MANY] * 10]
        since = len(fleet.cluster.cluster.requests)
        fleet.apply(plan("p", SMALL))
        await fleet.ready("p")
        assert not faults.requests
        given = [w for w in written(fleet, since) if w[:2] == ("migd-operator-1", "gpupartitions")]
        assert len(given) == 1
        closings = [
            r for r in fleet.cluster.cluster.requests[since:] if r.resource == "nodes" and "taints" in str(r.body)
        ]
        assert len(closings) == 2, "closed once, and opened once"

    play(story, faults=faults)


def test_b95_plans_deleted_while_the_operator_is_away_are_gone_and_the_others_go_on_without_work():
    async def story(fleet: Fleet) -> None:
        for number in range(20):
            pool = {"matchLabels": {"pool": f"p{number}"}}
            fleet.apply(plan(f"p{number}", SMALL, nodeSelector=pool, foreignInstances="Adopt"))
        await fleet.ready("p0")
        await fleet.ready("p1")
        fleet.operator.kill(again=False)
        for number in range(1, 20, 2):
            fleet.cluster.delete("gpupartitionplans", f"p{number}")
        fleet.cluster.power_off("node-b")
        fleet.cluster.delete("nodes", "node-b")
        await asyncio.sleep(60)
        since = len(fleet.cluster.cluster.requests)
        fleet.operator.start()
        await asyncio.sleep(300)
        left = {one["metadata"]["name"] for one in fleet.cluster.all("gpupartitionplans")}
        assert left == {f"p{number}" for number in range(0, 20, 2)}
        assert {one.spec.node_name for one in fleet.partitions()} == {"node-a"}
        assert fleet.condition("p0", "Ready")[0] == "True"
        assert written(fleet, since) == [], "those that are left resume without work"

    play(story, node("node-a", labels={"pool": "p0"}), node("node-b", labels={"pool": "p1"}))


def test_b97_of_two_operators_one_acts_at_a_time_and_a_stray_peer_freezes_nobody():
    async def story(fleet: Fleet) -> None:
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        stray = {"metadata": {"name": "stray-peer", "namespace": "migd-system"}, "spec": {"holderIdentity": "x"}}
        fleet.cluster.admin.create("leases", {**lease, **stray})
        second = fleet.another_operator()
        second.start()
        fleet.apply(plan("p", SMALL))
        await asyncio.sleep(8)
        fleet.operator.kill(again=False)
        await fleet.ready("p")
        writers = {user for user, _resource, _name in written(fleet, 0) if user.startswith("migd-operator")}
        assert writers == {"migd-operator-1", "migd-operator-2"}

    play(story, node("node-a"), node("node-b"))


def test_b100_a_node_whose_driver_hangs_is_told_and_the_others_go_on():
    async def story(fleet: Fleet) -> None:
        fleet.cluster.node("node-a").host.inject(Fault("nvmlDeviceGetMigMode", "hang", times=0))
        fleet.apply(plan("p", SMALL, rollout={"maxUnavailable": 2, "pauseOnFailure": False}))
        await fleet.until(lambda: {p.status.phase for p in fleet.partitions("node-b")} == {"Ready"}, 600)
        assert layouts(fleet, "node-b") == [{"1g.6gb": 4}]
        await fleet.until(lambda: fleet.agent("node-a").lives > 3, 600)
        assert "nvmlDeviceGetMigMode" in "\n".join(
            line for line in fleet.cluster.log if "migd-agent node-a: ends" in line
        )
        fleet.cluster.node("node-a").host.clear_faults()
        await fleet.ready("p")

    play(story, node("node-a"), node("node-b"))


def test_b102_heartbeats_of_many_nodes_wake_nobody():
    async def story(fleet: Fleet) -> None:
        fleet.apply(plan("p", SMALL))
        await fleet.ready("p")
        names = [f"bare-{number}" for number in range(200)]
        for name in names:
            fleet.cluster.admin.create("nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        await fleet.cluster.quiet(60)
        since = len(fleet.cluster.cluster.requests)
        for second in range(0, 600, 10):
            beat = {"type": "Ready", "status": "True", "lastHeartbeatTime": f"{second}"}
            for name in names:
                fleet.cluster.admin.merge("nodes", name, {"status": {"conditions": [beat]}}, sub="status")
            await asyncio.sleep(10)
        assert written(fleet, since) == []
        asked = [r for r in fleet.cluster.cluster.requests[since:] if r.user.startswith("migd-operator")]
        assert {r.resource for r in asked} == {"leases"}

    play(story, leases=True)


# ---- crash and partial failure


def test_b53_h09_a_node_that_another_tool_left_half_way_is_taken_out_of_it():
    wedged = json.loads((DATA / "h09-node-wedged-labels.json").read_text())["metadata"]["labels"]

    async def story(fleet: Fleet) -> None:
        for kind in ("device-plugin", "gpu-feature-discovery", "dcgm", "dcgm-exporter"):
            assert deployed(fleet)[DEPLOY + kind] == "paused-for-mig-change"
        fleet.apply(plan("p", {"profile": "1g.5gb", "count": 7}))
        await asyncio.sleep(120)
        assert layouts(fleet) == [{}] * 2, "it may still be at work"
        await fleet.ready("p", 3600)
        assert layouts(fleet) == [{"1g.5gb": 7}] * 2
        assert "paused-for-mig-change" not in deployed(fleet).values()
        assert labels(fleet)["nvidia.com/mig.config"] == "all-1g.5gb", "theirs"

    play(story, node(gpus="2xa100-40gb", style="operator", labels=wedged))


def test_b53_a_monitor_that_does_not_go_leaves_nothing_paused_and_the_next_try_comes_by_itself():
    async def story(fleet: Fleet) -> None:
        kubelet = fleet.cluster.node("node-a").kubelet
        fleet.apply(plan("p", SMALL))
        await fleet.until(lambda: not clean(fleet), 60)
        kubelet.up = False  # it stops nothing and tells nothing for a while
        await asyncio.sleep(400)
        assert clean(fleet), "given back, though the other side does not answer"
        assert layouts(fleet) == [{}]
        kubelet.up = True
        kubelet.begin()
        await fleet.ready("p", 3600)

    play(story, node(style="operator"))
