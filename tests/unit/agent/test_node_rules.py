"""The rules that a node's transaction is made of, each by itself: who holds what, whose turn, guards, what is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from toy_node import BOARD, DEPLOY, START, ToyNode, ToyPod, made

from migd.agent.node.advertising import differing, expected, resource_of
from migd.agent.node.bounds import CLIENTS_MAX_S, PAUSE_MAX_S, backoff_s
from migd.agent.node.clients import by_labels, is_plugin, to_pause
from migd.agent.node.deciding import answered, decide, needs_list
from migd.agent.node.effects import ChangeNode, HangUp, RefreshDevices, StopPlugin, Wait
from migd.agent.node.guarding import guard, misfit, wedged
from migd.agent.node.holding import held, unadmitted
from migd.agent.node.moments import judge, view_of, working
from migd.agent.node.relieving import relief
from migd.agent.node.seeing import NodeSeen
from migd.agent.node.telling import told
from migd.agent.node.turning import turn_of
from migd.agent.records import AwaitingReboot, Cause, GpuRecord, NodeWork, Record, Stage
from migd.kube.nodes import HAMI, SAFE_LOAD, TAINT, Node, Taint
from migd.kube.owed import OWED
from migd.kube.pods import Pod
from migd.kube.stored import Stored
from migd.kubelet.ports import PodDevices
from migd.mig.geometry import GpuInstance
from migd.mig.observed import MigMode, SeenComputeInstance, SeenGpu, SeenInstance
from migd.mig.profiles import Placement
from migd.plans.conditions import Said, following

MIG_ON = MigMode(True, True)


def seen_of(node: ToyNode, **changes: Any) -> NodeSeen:
    return replace(node.seen(Record(node.boot)), **changes)


def labelled(seen: NodeSeen, **labels: str) -> NodeSeen:
    more = {key.replace("__", "/").replace("_", "."): value for key, value in labels.items()}
    value = replace(seen.node.value, labels={**seen.node.value.labels, **more})
    return replace(seen, node=replace(seen.node, value=value))


def pod(name: str, labels: dict[str, str] | None = None, phase: str = "Running", **more: Any) -> Stored[Pod]:
    value = Pod("n1", phase, labels or {}, more.pop("gpus", ()), False, "Job", False, False, more.pop("containers", ()))
    return Stored(name, "ml", f"uid-{name}", "1", 0, False, {}, {}, replace(value, **more))


def holding(*ids: str, resource: str = "nvidia.com/mig-1g.6gb") -> tuple[PodDevices, ...]:
    return (PodDevices("ml", "job", resource, ids),)


# --- who holds what ---


def used(seen: NodeSeen) -> list[str]:
    """What is in use: instances as 0:1g.6gb@1, whole GPUs as 0."""
    found = held(seen).gpus
    whole = [str(gpu.index) for gpu in found if gpu.in_use]
    return whole + [f"{g.index}:{i.instance}" for g in found for i in g.instances if i.in_use]


def test_a_pod_holds_what_the_kubelet_says_though_no_process_is_there() -> None:
    node = ToyNode(["1g@0 1g@1", None])
    first = next(iter(node.gpus[0].ids()))
    assert used(seen_of(node, devices=holding(first))) == ["0:1g.6gb@0"]
    assert used(seen_of(node, devices=holding("GPU-1"))) == ["1"]
    assert used(seen_of(node, devices=holding("MIG-GPU-0/2/0"))) == ["0:1g.6gb@1"]  # as old drivers write it


def test_what_cannot_be_told_may_be_anything() -> None:
    node = ToyNode(["1g@0 1g@1", None])
    every = ["0", "1", "0:1g.6gb@0", "0:1g.6gb@1"]
    assert used(seen_of(node, devices=holding("MIG-unheard-of"))) == every
    assert used(seen_of(node, devices=holding(resource="gpu.nvidia.com"))) == every
    assert used(seen_of(node, devices=None, kubelet_trouble="no answer")) == every


def test_other_devices_ended_pods_and_gpus_that_are_gone_hold_nothing() -> None:
    node = ToyNode(["1g@0 1g@1", None])
    first = next(iter(node.gpus[0].ids()))
    assert used(seen_of(node, devices=holding("eth0", resource="example.com/nic"))) == []
    assert used(seen_of(node, devices=holding("0000:5e:00.2", resource="nvidia.com/hostdev"))) == []
    assert used(seen_of(node, devices=holding("GPU-gone"))) == []
    assert used(seen_of(node, devices=holding(first), pods=(pod("job", phase="Failed"),))) == []


def test_a_device_that_only_an_init_container_had_may_be_any_of_its_kind() -> None:
    node = ToyNode(["1g@0 1g@1 2g@2", None])
    asks = pod("job", gpus=(("nvidia.com/mig-1g.6gb", 1),))
    assert used(seen_of(node, pods=(asks,))) == ["0:1g.6gb@0", "0:1g.6gb@1"]
    assert used(seen_of(node, pods=(pod("job", gpus=(("nvidia.com/gpu", 1),)),))) == used(seen_of(node, devices=None))
    assert used(seen_of(node, pods=(pod("job", phase="Pending", gpus=asks.value.gpus),))) == []
    one = next(iter(node.gpus[0].ids()))
    assert len(used(seen_of(node, devices=holding(one), pods=(asks,)))) == 1, "what is listed is known"


def test_a_pod_that_asks_for_devices_and_has_none_yet_is_not_admitted() -> None:
    node = ToyNode(["1g@0 1g@1"])
    asks = pod("job", phase="Pending", gpus=(("nvidia.com/mig-1g.6gb", 1),))
    assert unadmitted(seen_of(node, pods=(asks, pod("web"))))[0].name == "job"
    assert unadmitted(seen_of(node, pods=(asks,), devices=holding("MIG-0-1"))) == ()
    for phase in ("Failed", "Running"):  # one that runs was admitted, if only its init container asked
        assert unadmitted(seen_of(node, pods=(replace(asks, value=replace(asks.value, phase=phase)),))) == ()


# --- where nothing can be decided ---


@pytest.mark.parametrize(
    ("boot", "stage", "paused_s", "closed_s", "after_s", "opens"),
    [
        ("boot-1", "Applying", 90.0, 80.0, PAUSE_MAX_S, False),
        ("boot-1", "Applying", 90.0, 80.0, PAUSE_MAX_S + 1, True),
        ("boot-1", "Settling", None, 80.0, PAUSE_MAX_S - 10, False),
        ("boot-1", "Settling", None, 80.0, PAUSE_MAX_S - 9, True),
        ("boot-1", "Applying", None, 80.0, PAUSE_MAX_S, False),  # nobody is paused: a change has its time
        ("boot-1", "Applying", None, 80.0, PAUSE_MAX_S + 1, True),
        ("boot-1", "Rest", None, None, PAUSE_MAX_S + 1, True),
        ("boot-2", "Applying", 90.0, 80.0, 1.0, True),  # clocks of two boots are not compared
    ],
)
def test_a_node_is_opened_in_time_though_nothing_can_be_decided(
    boot: str, stage: Stage, paused_s: float | None, closed_s: float | None, after_s: float, opens: bool
) -> None:
    node = ToyNode([None])
    stored = node.seen(node.record).node
    work = NodeWork(stage=stage, since_s=90.0, paused_s=paused_s, closed_s=closed_s)
    record = Record("boot-1", node=work)
    assert relief(record, stored, boot, 90.0 + after_s) is None, "nothing is owed"
    owed = replace(stored, annotations={OWED: '{"turn": "t", "labels": {}}'})
    due = relief(record, owed, boot, 90.0 + after_s)
    assert (due is not None) == opens
    assert due is None or (due.change.closed, due.change.annotations) == (False, {OWED: None})


# --- whose turn ---


def test_a_turn_is_what_as_many_partitions_carry_as_it_says() -> None:
    node = ToyNode([None, None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"], 1: None})
    turn = turn_of(seen_of(node), NodeWork())
    assert turn is not None
    assert (turn.id, sorted(turn.orders)) == ("aaaaaaaa", ["GPU-0", "GPU-1"])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]}, number=2)
    assert turn_of(seen_of(node), NodeWork()) is None


def test_a_wish_for_another_node_of_this_name_is_none() -> None:
    node = ToyNode([None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]})
    seen = seen_of(node)
    assert turn_of(replace(seen, node=replace(seen.node, uid="another")), NodeWork()) is None


def test_while_two_turns_are_complete_only_the_one_under_way_goes_on() -> None:
    node = ToyNode([None, None])
    node.wish("aaaaaaaa", {0: None, 1: None})
    one = node.partitions["gpu-0"]
    node.wish("bbbbbbbb", {1: None})
    other = node.partitions["gpu-1"]
    spec = one.value.spec.model_copy(update={"assignment": one.value.spec.assignment.model_copy(update={"gpus": 1})})  # type: ignore[union-attr]
    one = replace(one, value=one.value.model_copy(update={"spec": spec}))
    seen = seen_of(node, partitions=(one, other))
    assert turn_of(seen, NodeWork()) is None
    under_way = turn_of(seen, NodeWork(turn="bbbbbbbb"))
    assert under_way is not None
    assert under_way.id == "bbbbbbbb"


def test_plans_of_different_policies_meet_on_one_node() -> None:
    node = ToyNode(["1g@0", "1g@0"])
    node.wish("aaaaaaaa", {0: ["1x4g.24gb"], 1: ["1x4g.24gb"]}, foreignInstances="Adopt", onFailure="Hold")
    adopting = node.partitions["gpu-0"]
    node.wish("aaaaaaaa", {0: ["1x4g.24gb"], 1: ["1x4g.24gb"]})
    node.partitions["gpu-0"] = adopting
    seen = seen_of(node)
    judged = judge(Record(node.boot), view_of(seen, NodeWork()))
    assert judged.changing == ("GPU-0",)
    assert {uuid: (o.phase, o.cause.reason) for uuid, o in judged.apart.items()} == {
        "GPU-1": ("Blocked", "ForeignInstances")
    }


# --- guards ---


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("nvidia.com/gpu.deploy.mig-manager", "true", "ForeignOwner"),
        ("nvidia.com/gpu.deploy.mig-manager", "false", None),
        ("nvidia.com/mig.config.state", "pending", "ForeignOwner"),
        ("nvidia.com/mig.config.state", "rebooting", "ForeignOwner"),
        ("nvidia.com/mig.config.state", "success", None),
        ("nvidia.com/gpu.deploy.dcgm", "paused-for-mig-change", "ForeignOwner"),
        ("nos.nebuly.com/gpu-partitioning", "mig", "ForeignOwner"),
        ("nvidia.com/gpu.workload.config", "vm-passthrough", "ForeignOwner"),
        ("nvidia.com/gpu.workload.config", "container", None),
        ("nvidia.com/gpu-driver-upgrade-state", "drain-required", "DriverUpgrade"),
        ("nvidia.com/gpu-driver-upgrade-state", "upgrade-done", None),
        ("nvidia.com/gpu-driver-upgrade-state", "", None),
    ],
)
def test_a_label_says_who_else_is_at_work(key: str, value: str, reason: str | None) -> None:
    node = ToyNode([None])
    node.labels[key] = value
    found = guard(seen_of(node))
    assert (found.reason if found else None) == reason


@pytest.mark.parametrize(
    ("annotation", "value", "reason"),
    [
        (HAMI, '[{"id":"GPU-0","mode": "mig"}]', "ForeignOwner"),
        (HAMI, '[{"id":"GPU-0","mode": "hami-core"}]', None),
        (SAFE_LOAD, "true", "DriverUpgrade"),
    ],
)
def test_an_annotation_says_who_else_is_at_work(annotation: str, value: str, reason: str | None) -> None:
    seen = seen_of(ToyNode([None]))
    node = replace(seen.node, value=replace(seen.node.value, others={annotation: value}))
    found = guard(replace(seen, node=node))
    assert (found.reason if found else None) == reason


def test_mig_managers_pod_is_waited_for() -> None:
    seen = seen_of(ToyNode([None]))
    manager = pod("mm", {"app": "nvidia-mig-manager"})
    assert guard(replace(seen, pods=(manager,))) is not None
    assert guard(replace(seen, pods=(replace(manager, value=replace(manager.value, phase="Succeeded")),))) is None


@pytest.mark.parametrize(
    ("resource", "replicas", "refused"),
    [("nvidia.com/gpu.shared", "", True), ("nvidia.com/gpu", "4", True), ("nvidia.com/gpu", "", False)],
)
def test_mps_in_use_keeps_the_plugin_running(resource: str, replicas: str, refused: bool) -> None:
    node = ToyNode([None])
    node.labels |= {"nvidia.com/mps.capable": "true", "nvidia.com/gpu.replicas": replicas}
    found = guard(seen_of(node, pods=(pod("job", gpus=((resource, 1),)),)))
    assert (found is not None and found.reason == "MPSInUse") == refused
    node.labels["nvidia.com/mps.capable"] = "false"
    assert guard(seen_of(node, pods=(pod("job", gpus=((resource, 1),)),))) is None


def test_labels_that_are_owed_are_no_wedge() -> None:
    node = ToyNode([None])
    node.labels[f"{DEPLOY}dcgm"] = "paused-for-mig-change"
    assert wedged(seen_of(node)) == (f"{DEPLOY}dcgm",)
    node.annotations["migd.dev/owed"] = f'{{"turn": "a", "labels": {{"{DEPLOY}dcgm": "true"}}}}'
    assert wedged(seen_of(node)) == ()


@pytest.mark.parametrize(
    ("strategy", "wishes", "refused"),
    [
        ("none", {0: ["4x1g.6gb"], 1: ["4x1g.6gb"]}, True),
        ("none", {0: None, 1: None}, False),
        ("single", {0: ["4x1g.6gb"], 1: ["4x1g.6gb"]}, False),
        ("single", {0: ["4x1g.6gb"], 1: ["2x2g.12gb"]}, True),
        ("single", {0: ["4x1g.6gb"]}, True),
        ("single", {0: ["1x2g.12gb", "2x1g.6gb"], 1: ["4x1g.6gb"]}, True),
        ("mixed", {0: ["4x1g.6gb"], 1: ["2x2g.12gb"]}, False),
    ],
)
def test_the_plugins_strategy_must_take_what_is_wished(strategy: str, wishes: Any, refused: bool) -> None:
    node = ToyNode([None, None])
    node.labels["nvidia.com/mig.strategy"] = strategy
    node.wish("aaaaaaaa", wishes)
    seen = seen_of(node)
    view = view_of(seen, NodeWork())
    assert view.turn is not None
    judged = judge(Record(node.boot), view)
    assert (misfit(seen.node, view.held, judged.begun, view.turn) is not None) == refused


def test_an_unhealthy_gpu_is_set_apart() -> None:
    node = ToyNode([None, None])
    node.gpus[0].trouble = "row remapping failed"
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"], 1: ["4x1g.6gb"]})
    judged = judge(Record(node.boot), view_of(seen_of(node), NodeWork()))
    assert judged.changing == ("GPU-1",)
    assert judged.apart["GPU-0"].cause.reason == "GPUUnhealthy"


def test_a_mode_that_waits_for_a_reboot_is_not_asked_for_again_in_the_same_turn() -> None:
    node = ToyNode([None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]})
    view = view_of(seen_of(node), NodeWork())
    for boot, phase in ((node.boot, "RebootRequired"), ("earlier", "Failed")):
        waits = GpuRecord(awaiting=AwaitingReboot(boot, "aaaaaaaa", True))
        assert judge(Record(node.boot, gpus={"GPU-0": waits}), view).apart["GPU-0"].phase == phase
    other = GpuRecord(awaiting=AwaitingReboot("earlier", "bbbbbbbb", True))
    assert judge(Record(node.boot, gpus={"GPU-0": other}), view).changing == ("GPU-0",)


# --- what is advertised ---


def gpu(index: int, *profiles: str, mig: bool = True, whole: bool = True) -> SeenGpu:
    there = tuple(
        SeenInstance(
            GpuInstance(name, Placement(n, 1)), n, (SeenComputeInstance(0, True, f"MIG-{index}-{n}"),) if whole else ()
        )
        for n, name in enumerate(profiles)
    )
    return SeenGpu(f"GPU-{index}", index, "", "", 0, MIG_ON if mig else MigMode(False, False), instances=there)


def shown(allocatable: dict[str, str], **labels: str) -> Node:
    more = {key.replace("__", "."): value for key, value in labels.items()}
    return Node({f"nvidia.com/{k}": v for k, v in more.items()}, (), False, True, allocatable, False)


EIGHT = [gpu(n, *["1g.5gb"] * 7) for n in range(8)]


@pytest.mark.parametrize(
    ("gpus", "seven", "ok"),
    [("8", "8", False), ("8", "0", False), ("0", "0", True)],
)
def test_a_resource_that_lingers_is_named_and_at_zero_it_is_tolerated(gpus: str, seven: str, ok: bool) -> None:
    """Source: NVIDIA/k8s-device-plugin#240, kai-scheduler/KAI-Scheduler#1120."""
    node = shown({"nvidia.com/gpu": gpus, "nvidia.com/mig-1g.5gb": "56", "nvidia.com/mig-7g.40gb": seven})
    odd = differing(node, EIGHT)
    assert (odd == "") == ok
    assert ("nvidia.com/gpu is 8" in odd) == (not ok)
    assert ("nvidia.com/mig-7g.40gb is 8" in odd) == (seven == "8")


def test_whole_gpus_beside_leftovers_at_zero_are_as_expected() -> None:
    node = shown({"nvidia.com/gpu": "8", "nvidia.com/mig-1g.24gb": "0", "nvidia.com/mig-2g.48gb": "0"})
    assert differing(node, [gpu(n, mig=False) for n in range(8)]) == ""


def test_what_is_expected_depends_on_the_strategy() -> None:
    gpus = [gpu(0, "1g.10gb", "1g.10gb+me"), gpu(1, mig=False), gpu(2, "1g.10gb", whole=False)]
    mixed = {"nvidia.com/gpu": 1, "nvidia.com/mig-1g.10gb": 1, "nvidia.com/mig-1g.10gb.me": 1}
    assert expected(gpus, "mixed") == expected(gpus, None) == mixed
    assert expected(gpus, "none") == {"nvidia.com/gpu": 3}
    assert expected(gpus, "none", [gpus[0].uuid, gpus[1].uuid]) == mixed | {"nvidia.com/gpu": 2}, "wished, and not had"
    assert expected(gpus, "none", [gpu.uuid for gpu in gpus]) == expected(gpus, "mixed", [gpus[1].uuid]) == mixed
    assert expected(EIGHT, "single") == {"nvidia.com/gpu": 56}
    assert expected([gpu(0, mig=False)], "single") == {"nvidia.com/gpu": 1}
    assert resource_of("1g.10gb+me") == "nvidia.com/mig-1g.10gb.me"


@pytest.mark.parametrize(
    ("allocatable", "replicas", "ok"),
    [
        ({"nvidia.com/gpu": "8"}, "4", True),
        ({"nvidia.com/gpu": "2"}, "4", True),
        ({"nvidia.com/gpu": "4"}, "4", False),
        ({"nvidia.com/gpu": "8"}, "", False),
        ({"nvidia.com/gpu.shared": "8"}, "4", True),
        ({"nvidia.com/gpu": "8", "nvidia.com/gpu.shared": "0"}, "4", True),
        ({"nvidia.com/gpu": "8", "nvidia.com/gpu.shared": "8"}, "4", False),
        ({"nvidia.com/gpu": "2", "nvidia.com/rdma": "63"}, "", True),
    ],
)
def test_shared_gpus_count_in_multiples(allocatable: dict[str, str], replicas: str, ok: bool) -> None:
    node = shown(allocatable, gpu__replicas=replicas)
    assert (differing(node, [gpu(0, mig=False), gpu(1, mig=False)]) == "") == ok


# --- clients ---


def test_the_plugin_is_told_from_others_of_its_chart_by_its_container() -> None:
    chart = {"app.kubernetes.io/name": "nvidia-device-plugin"}
    assert is_plugin(pod("a", chart, containers=("nvidia-device-plugin-ctr",)).value)
    assert not is_plugin(pod("b", chart, containers=("gpu-feature-discovery-ctr",)).value)
    assert is_plugin(pod("c", {"name": "nvidia-device-plugin-ds"}).value)
    assert is_plugin(pod("d", {"app": "nvidia-device-plugin-daemonset"}).value)


def test_only_clients_that_run_are_paused() -> None:
    node = shown({}, **{"gpu__deploy__dcgm": "false", "gpu__deploy__device-plugin": "true"})
    keys = (f"{DEPLOY}device-plugin", f"{DEPLOY}dcgm", f"{DEPLOY}dcgm-exporter")
    assert to_pause(node, keys) == (f"{DEPLOY}device-plugin",)


def test_where_the_operator_runs_nothing_nothing_is_paused_by_label() -> None:
    node = ToyNode([None], "Operator")
    node.labels[f"{DEPLOY}operands"] = "false"
    seen = seen_of(node)
    assert to_pause(seen.node.value, (f"{DEPLOY}device-plugin",)) == ()
    assert not by_labels(seen.node)


# --- answers ---


def test_a_denied_change_before_anything_was_changed_backs_out_with_its_reason() -> None:
    node = ToyNode([None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]})
    record, effect = Record(node.boot), None
    while not isinstance(effect, ChangeNode):
        record, effect = decide(record, node.seen(record))
    record = answered(record, effect, Cause("NoPermission", "the policy says no"), node.now_s)
    while not isinstance(effect, Wait):
        record, effect = decide(record, node.seen(record))
    node.now_s += effect.seconds
    for _ in range(4):
        record, effect = decide(record, node.seen(record))
    said = told(record, node.seen(record), {}).statuses["gpu-0"]
    assert (said.phase, said.reason, said.message) == ("Blocked", "NoPermission", "the policy says no")


def test_a_node_that_is_closed_already_is_opened_at_once_where_a_change_is_denied() -> None:
    node, record = closed_and("Pausing", 110.0, 110.0)
    seen = replace(seen_of(node), now_s=120.0)
    denied = StopPlugin("kube-system", "plugin", "uid")
    record = answered(record, denied, Cause("NoPermission", "an agent does not stop pods"), 120.0)
    record, effect = decide(record, seen)
    assert isinstance(effect, ChangeNode)
    assert effect.change.closed is False
    again = answered(record, effect, Cause("NoPermission", "nor does it open nodes"), 120.0)
    assert isinstance(decide(again, seen)[1], Wait), "it is not asked again and again"


def test_what_an_effect_answered_is_remembered_where_no_look_shows_it() -> None:
    record = Record("b", node=NodeWork(stage="Refreshing"))
    cause = Cause("NVMLError", "no nvidia-modprobe")
    after = answered(record, RefreshDevices(()), cause, 1.0).node
    assert after is not None
    assert (after.refreshed, after.refresh, after.refresh_tries) == (False, cause, 1)
    assert answered(record, StopPlugin("n", "p", "u"), None, 1.0) == record


@pytest.mark.parametrize("error", [None, Cause("NoDevicePlugin", "none runs")])
def test_a_plugin_is_told_to_look_again_until_that_is_answered_and_then_left_alone_for_a_while(
    error: Cause | None,
) -> None:
    node = ToyNode([None], "Tolerant")
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]})
    record, effect = Record(node.boot), None
    record = working(record, NodeWork(turn="aaaaaaaa", stage="Verifying", refreshed=True, nudged_s=node.now_s - 60))
    for _ in range(2):  # the first one is swallowed by a crash
        record, effect = decide(record, node.seen(record))
        assert isinstance(effect, HangUp)
    record = answered(record, effect, error, node.now_s)
    record, effect = decide(record, node.seen(record))
    assert isinstance(effect, Wait)


def closed_and(stage: Stage, since_s: float, paused_s: float | None) -> tuple[ToyNode, Record]:
    """A node that was closed for a turn, at some stage of it."""
    node = ToyNode(["1g@0"])
    node.wish("bbbbbbbb", {0: ["2x2g.12gb"]}, foreignInstances="Adopt")
    node.taints = (Taint(TAINT, "", "NoSchedule"),)
    node.annotations[OWED] = '{"turn": "bbbbbbbb", "labels": {}}'
    work = NodeWork(turn="bbbbbbbb", stage=stage, since_s=since_s, pause="Labels", paused_s=paused_s, closed_s=since_s)
    return node, Record(node.boot, node=work)


def test_an_agent_that_comes_back_too_late_pauses_nobody_any_more() -> None:
    node, record = closed_and("Pausing", 0.0, 0.0)
    assert node.now_s > CLIENTS_MAX_S
    record, effect = decide(record, seen_of(node))
    assert not isinstance(effect, ChangeNode)
    assert record.node is not None
    assert (record.node.stage, record.node.why and record.node.why.reason) == ("Backing", "DrainTimeout")


@pytest.mark.parametrize(("over_s", "tries", "tried"), [(0.0, 2, True), (1.0, 0, True), (1.0, 1, False)])
def test_device_nodes_are_tried_for_again_only_within_the_bound_of_a_pause(
    over_s: float, tries: int, tried: bool
) -> None:
    node, record = closed_and("Refreshing", 0.0, node_time := 500.0 - PAUSE_MAX_S)
    assert record.node is not None
    failed = Cause("NVMLError", "nvidia-smi hangs")
    record = working(record, replace(record.node, refresh=failed if tries else None, refresh_tries=tries))
    record, effect = decide(record, replace(seen_of(node), now_s=node_time + PAUSE_MAX_S + over_s))
    assert isinstance(effect, RefreshDevices) == tried
    assert record.node is not None
    assert record.node.stage == ("Refreshing" if tried else "Opening")


def test_pods_are_listed_anew_only_while_it_matters() -> None:
    stages = ("Rest", "Waiting", "Closing", "Settling", "Pausing", "Applying", "Verifying")
    listed = [stage for stage in stages if needs_list(Record("b", node=NodeWork(stage=stage)))]  # type: ignore[arg-type]
    assert listed == ["Settling", "Pausing"]


def test_tries_are_a_minute_apart_and_then_half_an_hour() -> None:
    assert [backoff_s(n) for n in (0, 1, 2, 3, 6, 50)] == [0, 60, 120, 240, 1800, 1800]


# --- telling ---


def test_the_status_says_what_the_gpu_is_and_who_holds_it() -> None:
    node = ToyNode(["1g@0 1g@1"])
    node.own_by_hand()
    first = next(iter(node.gpus[0].ids()))
    node.wish("aaaaaaaa", {0: ["2x2g.12gb"]})
    container = "0123abcd"
    job = pod("job", gpus=(("nvidia.com/mig-1g.6gb", 1),), container_ids=(container,))
    seen = seen_of(node, devices=holding(first), pods=(job,))
    record = node.record
    for _ in range(3):
        record, _ = decide(record, seen)
    status = told(record, seen, {}).statuses["gpu-0"]
    assert (status.phase, status.reason) == ("WaitingForIdle", "InUse")
    assert "1g.6gb@0 by pod ml/job" in status.message
    assert [(b.instance, b.pod.uid if b.pod else "") for b in status.blockers] == [("1g.6gb@0", "uid-job")]
    assert status.board is not None
    assert (status.board.uuid, len(status.board.profiles)) == ("GPU-0", len(BOARD.profiles))
    assert status.observed is not None
    assert (status.observed.summary, status.observed.in_use) == ("2×1g.6gb", "1/2")
    assert {c.type: (c.status, c.reason) for c in status.conditions} == {
        "Ready": ("False", "InUse"),
        "Drained": ("False", "InUse"),
        "Applied": ("False", "InUse"),
        "Advertised": ("Unknown", "Waiting"),
    }
    assert {c.observed_generation for c in status.conditions} == {node.partitions["gpu-0"].generation}


def test_a_gpu_that_waits_for_another_one_says_for_which() -> None:
    node = ToyNode(["1g@0 1g@1", "1g@0 1g@1"])
    node.own_by_hand()
    node.gpus[1].used = set(made("1g@1"))
    node.wish("aaaaaaaa", {0: ["1x4g.24gb"], 1: ["1x4g.24gb"]})
    node.run(60)
    message = node.partitions["gpu-0"].value.status.message
    assert message.startswith("it waits for GPU 1 of this node: in use: 1g.6gb@1 by pid 4242")


def test_a_ready_node_is_told_with_its_steps_its_counts_and_what_to_go_back_to() -> None:
    node = ToyNode([None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]})
    assert node.run(600)
    status = node.partitions["gpu-0"].value.status
    assert {c.type: c.status for c in status.conditions} == dict.fromkeys(
        ("Ready", "Drained", "Applied", "Advertised"), "True"
    )
    assert (status.reason, status.message, status.blockers) == ("", "", ())
    assert status.previous is not None
    assert (status.previous.mig, status.previous.summary) == ("Disabled", "MIG off")
    transition = status.last_transition
    assert transition is not None
    assert (transition.id, transition.from_layout, transition.to) == ("aaaaaaaa", "MIG off", "4×1g.6gb")
    assert transition.result == "Succeeded"
    names = [step.name for step in transition.steps]
    assert names == ["Wait", "Close", "Settle", "Pause", "Apply", "Refresh", "Open", "Verify"]
    took = {step.name: step.milliseconds for step in transition.steps}
    assert (took["Settle"] or 0) >= 5000
    assert None not in took.values()
    assert node.labels["migd.dev/state"] == "ready"
    assert node.labels["migd.dev/mig-1g.6gb.count"] == "4"


def test_a_change_writes_the_counts_of_a_node_once_and_not_at_each_step() -> None:
    node = ToyNode([None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]})
    assert node.run(600)
    node.wish("bbbbbbbb", {0: ["2x2g.12gb"]})
    shown = []
    while not shown or shown[-1][0] != "ready" or len(shown) < 2:
        node.step()
        labels = {key: value for key, value in node.labels.items() if key.startswith("migd.dev/")}
        told_now = (labels.pop("migd.dev/state"), labels)
        shown += [told_now] if not shown or shown[-1] != told_now else []
    before, after = {"migd.dev/mig-1g.6gb.count": "4"}, {"migd.dev/mig-2g.12gb.count": "2"}
    assert [labels for state, labels in shown if state == "changing"] in ([before], [before, after])
    assert shown[-1] == ("ready", after)


def test_labels_of_what_is_no_more_are_taken_off_and_without_a_wish_all_of_them() -> None:
    node = ToyNode([None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]})
    assert node.run(600)
    node.wish("bbbbbbbb", {0: ["2x2g.12gb"]})
    assert node.run(600)
    ours = {key for key in node.labels if key.startswith("migd.dev/")}
    assert ours == {"migd.dev/state", "migd.dev/mig-2g.12gb.count"}
    node.withdraw(keep_wish=False)
    assert node.run(60)
    assert not [key for key in node.labels if key.startswith("migd.dev/")]


def test_a_node_without_a_plan_is_told_and_nothing_else() -> None:
    node = ToyNode(["1g@0 1g@1"])
    assert node.run(600)
    status = node.partitions["gpu-0"].value.status
    assert status.observed is not None
    assert [i.foreign for i in status.observed.instances] == [True, True]
    assert (status.phase, status.conditions, node.effects) == ("Idle", (), [])


def test_who_is_ready_stays_so_under_a_hold() -> None:
    node = ToyNode([None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]})
    assert node.run(600)
    node.annotations["migd.dev/hold"] = "me"
    assert node.run(600)
    assert node.phases() == ["Ready"]


def test_a_transition_costs_few_writes() -> None:
    node = ToyNode([None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]})
    assert node.run(600)
    assert node.status_writes <= 7


def test_instances_are_counted_in_labels_when_a_change_is_over_and_not_at_each_operation() -> None:
    node = ToyNode([None, None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"], 1: ["4x1g.6gb"]})
    counts: list[str] = []
    for _ in range(500):
        node.step()
        count = node.labels.get("migd.dev/mig-1g.6gb.count", "")
        counts += [count] if counts[-1:] != [count] else []
    assert node.phases() == ["Ready", "Ready"]
    assert counts == ["", "8"]


@pytest.mark.parametrize(
    ("reason", "phase"),
    [("Conflict", "Blocked"), ("UnknownProfile", "Blocked"), ("Paused", "Pending"), ("AgentSilent", "Pending")],
)
def test_what_keeps_a_gpu_from_a_turn_is_told_with_the_gpu(reason: str, phase: str) -> None:
    """`kubectl get gpart` shows it, and not that it waits for a turn which it will not get."""
    node = ToyNode([None, None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]})
    assert node.run(600)
    node.withdraw()
    for index in (0, 1):
        assigned(node, index, "False", reason, "give one a higher priority")
    node.run(60)
    assert (node.phases(), node.reasons()) == ([phase, "Idle"], [reason, reason])
    assert node.partitions["gpu-1"].value.status.message == "give one a higher priority"
    assert node.labels["migd.dev/state"] == ("blocked" if phase == "Blocked" else "changing")
    for index in (0, 1):
        assigned(node, index, "False", "Waiting", "it is not this node's turn")
    node.run(60)
    assert (node.phases(), node.reasons()) == (["Pending", "Idle"], ["Waiting", ""])


def test_what_would_be_in_the_way_of_a_turn_is_told_while_it_is_waited_for() -> None:
    """Seen: a node had to be given its turn first, while another waited, for anybody to hear of it."""
    node = ToyNode([None, None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]})
    assert node.run(600)
    node.withdraw()
    for index in (0, 1):  # the second was never wished for
        assigned(node, index, "False", "Waiting", "it is not this node's turn")
    node.run(60)
    node.labels |= {"nvidia.com/mps.capable": "true", "nvidia.com/mig-1g.6gb.replicas": "4"}
    node.pods["job"] = ToyPod("job", "job", "", "nvidia.com/mig-1g.6gb", phase="Running")
    node.pass_time(30.0)  # a pod that comes is not told of at once
    node.run(60)
    assert (node.phases(), node.reasons()) == (["Pending", "Idle"], ["MPSInUse", "MPSInUse"])
    assert "ml/job shares a GPU by MPS" in (node.partitions["gpu-1"].value.status.message or "")
    node.labels["nvidia.com/gpu.workload.config"] = "vm-passthrough"
    node.run(60)
    assert (node.phases(), node.reasons()) == (["Blocked", "Idle"], ["ForeignOwner", "ForeignOwner"])
    assigned(node, 1, "False", "NotNeeded", "no rule is for it")
    node.run(60)
    assert (node.phases()[1], node.reasons()[1]) == ("Idle", "")


def test_pods_that_share_a_gpu_come_and_go_and_are_told_of_now_and_then() -> None:
    node = ToyNode([None])
    node.labels |= {"nvidia.com/mps.capable": "true", "nvidia.com/gpu.replicas": "4"}
    assigned(node, 0, "False", "Waiting", "it is not this node's turn")
    node.run(60)
    node.writes = dict.fromkeys(node.partitions, node.now_s)
    written = node.status_writes
    for number in range(100):
        node.pods = {f"job-{number}": ToyPod(f"job-{number}", "x", "", "nvidia.com/gpu")} if number % 3 else {}
        node.step()
        node.pass_time(1.0)
    assert 2 <= node.status_writes - written <= 4


def test_what_was_said_of_an_earlier_wish_is_not_told() -> None:
    node = ToyNode([None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]}, number=2)
    assigned(node, 0, "False", "Conflict", "plans a and b", generation=1)
    node.run(60)
    assert (node.phases(), node.reasons()) == (["Pending"], ["Waiting"])


def assigned(node: ToyNode, index: int, status: str, reason: str, message: str, generation: int | None = None) -> None:
    """What the operator says of a GPU's turn."""
    name = node.gpus[index].uuid.lower()
    old = node.partitions[name]
    said = Said("Assigned", status, reason, message)  # type: ignore[arg-type]
    kept = [Said(c.type, c.status, c.reason, c.message) for c in old.value.status.conditions if c.type != "Assigned"]
    conditions = following((), (*kept, said), old.generation if generation is None else generation, START)
    status_now = old.value.status.model_copy(update={"conditions": conditions})
    node.partitions[name] = replace(old, value=old.value.model_copy(update={"status": status_now}))
    node.changes += 1


def test_times_of_conditions_stay_while_they_say_the_same() -> None:
    node = ToyNode([None])
    node.wish("aaaaaaaa", {0: ["4x1g.6gb"]})
    assert node.run(600)
    before = node.partitions["gpu-0"].value.says("Ready")
    node.run(6000)
    node.gpus[0].used = set(made("1g@0"))
    node.run(6000)
    assert node.partitions["gpu-0"].value.says("Ready") == before
