"""A node's transaction, story by story, in the small world: what is done, in which order, and what is left behind."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from toy_node import DEPLOY, Crash, ToyNode, made

from migd.agent.node.bounds import CLOSED_MAX_S, PAUSE_MAX_S
from migd.agent.node.effects import ChangeNode, HangUp, RefreshDevices, StopPlugin
from migd.agent.node.turning import HOLD
from migd.agent.records import Cause, Record
from migd.kube.owed import OWED
from migd.mig.geometry import EMPTY, Layout
from migd.mig.operations import CreateComputeInstance, CreateGpuInstance, DestroyComputeInstances

ONE_G = ["4x1g.6gb"]
TWO_G = ["2x2g.12gb"]
INSTALLS = ("Operator", "Helm", "Tolerant")


def ready(install: str = "Operator", gpus: int = 2) -> ToyNode:
    """A node whose GPUs are each cut into four, as wished."""
    node = ToyNode([None] * gpus, install)
    node.wish("aaaaaaaa", dict.fromkeys(range(gpus), ONE_G))
    assert node.run(600)
    assert node.phases() == ["Ready"] * gpus
    node.effects.clear()
    node.operations.clear()
    return node


def kinds(node: ToyNode) -> list[str]:
    """The kinds of effects, repetitions and waiting left out."""
    found: list[str] = []
    for effect in node.effects:
        name = type(effect).__name__
        if name not in ("LookAgain", "Wait") and found[-1:] != [name]:
            found.append(name)
    return found


# --- the way it goes ---


def test_with_the_gpu_operator_clients_are_paused_by_their_labels_and_run_again() -> None:
    node = ready("Operator")
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    assert node.run(600)
    closes, pauses, opens = [e.change for e in node.effects if isinstance(e, ChangeNode)]
    assert closes.closed is True
    assert not closes.labels
    three = ("device-plugin", "dcgm", "dcgm-exporter")
    assert dict(pauses.labels) == {f"{DEPLOY}{client}": "paused-for-mig-change" for client in three}
    assert dict(opens.labels) == {f"{DEPLOY}{client}": "true" for client in three}
    assert (opens.closed, opens.annotations) == (False, {OWED: None})
    assert node.phases() == ["Ready", "Ready"]
    assert node.layouts()[0] == Layout(True, made("2g@0 2g@2"))
    assert {operation.gpu_uuid for operation in node.operations} == {"GPU-0"}


def test_without_it_the_plugins_pod_is_deleted_and_our_taint_keeps_it_away() -> None:
    node = ready("Helm")
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    assert node.run(600)
    assert [type(e) for e in node.effects if isinstance(e, StopPlugin)] == [StopPlugin]
    assert not any(e.change.labels for e in node.effects if isinstance(e, ChangeNode))
    assert node.phases() == ["Ready", "Ready"]
    assert node.untouched()


def test_a_plugin_that_tolerates_our_taint_looks_again_before_the_node_is_opened() -> None:
    node = ready("Tolerant")
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    assert node.run(600)
    assert not any(isinstance(e, StopPlugin) for e in node.effects)
    hung_up = next(n for n, e in enumerate(node.effects) if isinstance(e, HangUp))
    opened = next(n for n, e in enumerate(node.effects) if isinstance(e, ChangeNode) and e.change.closed is False)
    assert hung_up < opened
    assert node.phases() == ["Ready", "Ready"]


@pytest.mark.parametrize("owner", ["DaemonSet", ""])
def test_a_reset_that_the_plugin_could_not_be_stopped_for_is_refused_before_the_node_is_closed(owner: str) -> None:
    """It would fail each time, with the node closed for as long as it is tried."""
    node = ready("Tolerant")
    node.daemons_owner = owner
    node.gpus[0].resets = True
    node.wish("bbbbbbbb", {0: None, 1: TWO_G})
    node.run(600)
    assert [str(layout) for layout in node.layouts()] == ["4×1g.6gb", "2×2g.12gb"]  # the other one does not wait for it
    assert node.phases() == ["Blocked", "Ready"]
    assert node.reasons()[0] == "ResetRefused"
    message = node.partitions["gpu-0"].value.status.message
    assert "gpu-operator/device-plugin" in message
    assert ("toleration" in message) == (owner == "DaemonSet")
    assert node.untouched()
    effects = len(node.effects)
    node.run(7200)
    assert len(node.effects) == effects
    node.install, node.daemons_owner = "Helm", "DaemonSet"  # somebody takes the toleration away
    node.run(7200)
    assert node.phases() == ["Ready", "Ready"]
    assert node.untouched()


def test_a_mode_change_pauses_every_client() -> None:
    node = ready("Operator", 1)
    node.wish("bbbbbbbb", {0: None})
    assert node.run(600)
    paused = next(e.change.labels for e in node.effects if isinstance(e, ChangeNode) and e.change.labels)
    assert f"{DEPLOY}gpu-feature-discovery" in paused
    assert node.allocatable["nvidia.com/gpu"] == 1


@pytest.mark.parametrize("install", INSTALLS)
def test_device_nodes_are_made_after_creation_and_before_the_plugin_looks(install: str) -> None:
    node = ready(install)
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    assert node.run(600)
    refreshed = next(n for n, e in enumerate(node.effects) if isinstance(e, RefreshDevices))
    last_made = max(n for n, e in enumerate(node.effects) if isinstance(e, CreateComputeInstance))
    looks = [
        n
        for n, e in enumerate(node.effects)
        if isinstance(e, HangUp) or (isinstance(e, ChangeNode) and e.change.closed is False)
    ]
    assert last_made < refreshed < min(looks)


def test_nothing_to_do_disturbs_nobody() -> None:
    node = ready()
    node.wish("bbbbbbbb", {0: ONE_G, 1: ONE_G})
    assert node.run(600)
    assert node.phases() == ["Ready", "Ready"]
    assert kinds(node) == []
    partition = node.partitions["gpu-0"]
    assert partition.value.status.observed_generation == partition.generation


def test_at_rest_and_after_fifty_restarts_nothing_is_written() -> None:
    node = ready()
    written, text = node.status_writes, node.text
    for _ in range(50):
        node.restart()
        assert node.run(60)
    assert (node.status_writes, node.text, node.effects) == (written, text, [])


def test_an_admins_cordon_neither_stops_a_turn_nor_changes() -> None:
    node = ready()
    node.cordoned = True
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    assert node.run(600)
    assert node.phases() == ["Ready", "Ready"]
    assert node.cordoned


def test_an_admins_false_stays_false_through_success_failure_and_crash() -> None:
    node = ToyNode([None], "Operator")
    node.labels[f"{DEPLOY}dcgm"] = "false"
    node.wish("aaaaaaaa", {0: ONE_G})
    assert node.run(600)
    node.gpus[0].refuses[CreateGpuInstance] = Cause("NVMLError", "no")
    node.wish("bbbbbbbb", {0: TWO_G})
    node.run(40)
    assert f"{DEPLOY}dcgm" not in node.annotations.get(OWED, "")
    assert node.labels[f"{DEPLOY}dcgm"] == "false"


# --- waiting ---


@pytest.mark.parametrize("works", [True, False])
def test_a_node_that_is_not_idle_is_never_closed(works: bool) -> None:
    node = ready()
    node.submit("job", "nvidia.com/mig-1g.6gb", 1000.0)
    node.pass_time(30.0)
    gpu, instance = node._where(node.pods["job"].device)
    assert gpu is not None
    assert instance is not None
    gpu.used = {instance} if works else set()  # a pod that does nothing holds its device all the same
    node.wish("bbbbbbbb", {gpu.index: TWO_G})
    node.run(500)
    assert node.phases()[gpu.index] == "WaitingForIdle"
    status = node.partitions[gpu.uuid.lower()].value.status
    assert [(b.reason, b.instance, b.pod.name if b.pod else "") for b in status.blockers] == [
        ("InUse", str(instance), "job")
    ]
    assert kinds(node) == []
    node.run(200)  # longer than disruption.timeout: reported, so that the operator can take the turn
    assert (node.phases()[gpu.index], node.reasons()[gpu.index]) == ("Blocked", "NeverIdle")
    assert kinds(node) == []
    node.run(800)
    assert node.phases()[gpu.index] == "Ready"


def test_nothing_is_closed_while_the_kubelet_cannot_be_asked() -> None:
    node = ready()
    node.kubelet_answers = False
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    node.run(300)
    assert node.phases() == ["WaitingForIdle", "WaitingForIdle"]
    assert "connection refused" in node.partitions["gpu-0"].value.status.message
    assert kinds(node) == []


def test_what_is_kept_may_be_in_use() -> None:
    node = ToyNode(["1g@3 1g@0"], "Operator")
    node.own_by_hand()
    serial = next(iter(s for i, s in node.gpus[0].made.items() if i in made("1g@3")))
    node.gpus[0].used = set(made("1g@3"))
    node.wish("aaaaaaaa", {0: ["1x2g.12gb", "1x1g.6gb"]})
    assert node.run(600)
    assert node.phases() == ["Ready"]
    assert serial in node.gpus[0].made.values()


@pytest.mark.parametrize("install", INSTALLS)
def test_no_pod_that_is_bound_around_the_closing_is_killed(install: str) -> None:
    for seed in range(25):
        random = Random(seed)
        node = ToyNode(["1g@0 1g@1 1g@2 1g@3", "2g@0 2g@2"], install, seed)
        node.own_by_hand()
        node.wish("aaaaaaaa", {0: ONE_G, 1: ["4x1g.6gb"]})
        node.after(random.uniform(0.0, 6.0), lambda node=node: node.submit("job", "nvidia.com/mig-1g.6gb", 900.0))  # type: ignore[misc]
        node.run(400)
        assert node.wrong == [], f"seed {seed}"
        assert node.pods["job"].phase == "Running", f"seed {seed}"


# --- backing out ---


def until_stage(node: ToyNode, stage: str) -> None:
    """Steps until the node's work is at this stage."""
    for _ in range(500):
        node.step()
        if node.record.node is not None and node.record.node.stage == stage:
            return
    raise AssertionError(f"never {stage}")


@pytest.mark.parametrize("stage", ["Waiting", "Closing", "Settling", "Pausing"])
@pytest.mark.parametrize("how", ["withdrawn", "deleted", "edited", "held"])
def test_before_the_first_effect_a_turn_is_given_back_and_the_node_opened(stage: str, how: str) -> None:
    node = ready()
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    until_stage(node, stage)
    match how:
        case "withdrawn":
            node.withdraw()
        case "deleted":
            node.withdraw(keep_wish=False)
        case "edited":
            node.wish("cccccccc", {0: ONE_G, 1: ONE_G})
        case "held":
            node.annotations["migd.dev/hold"] = "me"
    node.run(100)
    assert node.operations == []
    assert node.untouched()
    phase = {"withdrawn": "Pending", "deleted": "Idle", "edited": "Ready", "held": "Blocked"}[how]
    assert node.phases() == [phase, phase]
    partition = node.partitions["gpu-0"]
    assert partition.value.status.observed_generation == partition.generation


def test_after_the_first_effect_it_finishes_and_then_obeys() -> None:
    node = ready()
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    until_stage(node, "Applying")
    while not node.operations:
        node.step()
    node.withdraw(keep_wish=False)
    assert node.run(600)
    assert node.layouts()[0] == Layout(True, made("2g@0 2g@2"))
    assert node.phases() == ["Idle", "Idle"]
    assert node.untouched()


def test_what_becomes_busy_while_the_node_closes_is_waited_for_open() -> None:
    node = ready()
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    until_stage(node, "Settling")
    node.gpus[0].used = set(made("1g@2"))
    node.run(400)
    assert node.operations == []
    assert node.untouched()
    assert node.longest_closed <= CLOSED_MAX_S + 10
    node.gpus[0].used.clear()
    node.run(600)
    assert node.phases() == ["Ready", "Ready"]


@pytest.mark.parametrize("install", INSTALLS)
def test_what_becomes_busy_while_clients_pause_is_not_touched(install: str) -> None:
    node = ready(install)
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    until_stage(node, "Pausing")
    node.gpus[0].used = set(made("1g@2"))
    node.run(55)
    assert node.operations == []
    assert node.untouched()
    assert node.phases() == ["WaitingForIdle", "WaitingForIdle"]


def test_a_plugin_that_ran_on_looks_again_also_where_the_numbers_are_right_already() -> None:
    node = ready("Tolerant", 1)
    node.gpus[0].bare.add(max(node.gpus[0].made))  # somebody destroyed its compute instance; the plugin does not see it
    node.run(200)
    assert node.phases() == ["Ready"]
    assert kinds(node) == ["ChangeNode", "CreateComputeInstance", "RefreshDevices", "HangUp", "ChangeNode"]


def test_a_client_that_does_not_stop_is_named_and_the_node_is_opened_and_tried_again() -> None:
    node = ready()
    node.clients_stay = True
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    node.run(135)
    assert node.untouched()
    assert node.phases() == ["Blocked", "Blocked"]
    assert node.reasons() == ["DrainTimeout", "DrainTimeout"]
    assert "gpu-operator/device-plugin" in node.partitions["gpu-0"].value.status.message
    node.clients_stay = False
    for pod in [p for p in node.pods.values() if p.deleting]:
        node._gone(pod)
    node.run(300)
    assert node.phases() == ["Ready", "Ready"]


# --- failing ---


def test_one_gpu_that_fails_goes_back_alone_and_is_tried_again_by_itself() -> None:
    node = ready()
    node.gpus[1].refuses[CreateComputeInstance] = Cause("NVMLError", "it refuses")
    before = node.layouts()[1]
    node.wish("bbbbbbbb", {0: TWO_G, 1: ["1x4g.24gb"]})
    node.gpus[1].refuses[CreateGpuInstance] = Cause("NVMLError", "it refuses")
    del node.gpus[1].refuses[CreateComputeInstance]

    def heal() -> None:
        node.gpus[1].refuses.clear()

    node.run(15)
    node.after(18.0, heal)
    node.run(45)
    assert node.phases() == ["Ready", "Failed"]
    assert node.layouts()[1] == before
    status = node.partitions["gpu-1"].value.status
    assert status.reason == "NVMLError"
    assert status.last_transition is not None
    assert status.last_transition.result == "RolledBack"
    assert node.untouched()
    node.run(200)
    assert node.phases() == ["Ready", "Ready"]


def test_a_gpu_that_cannot_even_go_back_is_told_so_and_is_made_whole_later() -> None:
    node = ready()
    node.gpus[0].refuses = {kind: Cause("NVMLError", "no") for kind in (CreateGpuInstance, CreateComputeInstance)}
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    node.run(100)
    assert node.phases() == ["Failed", "Ready"]
    message = node.partitions["gpu-0"].value.status.message
    assert "going back failed too" in message
    assert "migd apply" not in message
    assert node.untouched()
    node.withdraw(keep_wish=False)  # nobody wishes anything of it any more: at least it goes back
    node.gpus[0].refuses.clear()
    node.run(2000)
    assert [layout.instances for layout in node.layouts()] == [made("1g@0 1g@1 1g@2 1g@3")] * 2
    assert node.untouched()


def half_done() -> ToyNode:
    """A node whose GPU 0 could neither be changed nor put back, and could be now."""
    node = ready()
    node.gpus[0].refuses = {kind: Cause("NVMLError", "no") for kind in (CreateGpuInstance, CreateComputeInstance)}
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    while node.phases() != ["Failed", "Ready"]:
        node.step()
    node.gpus[0].refuses.clear()
    node.operations.clear()
    return node


@pytest.mark.parametrize(("where", "withdrawn"), [("gpu", False), ("gpu", True), ("node", True)])
def test_a_gpu_that_is_half_done_is_left_alone_while_somebody_holds_it(where: str, withdrawn: bool) -> None:
    node = half_done()
    if where == "gpu":
        node.annotate(0, HOLD)
    else:
        node.annotations[HOLD] = "ann looks at it"
    if withdrawn:
        node.withdraw()
    node.run(4000)
    assert node.operations == []
    assert node.untouched()
    node.annotations.clear()
    node.partitions["gpu-0"] = replace(node.partitions["gpu-0"], annotations={})
    node.run(4000)
    assert node.record.open == ()


def test_a_half_done_gpu_that_nobody_wishes_waits_for_an_owner_that_works_here() -> None:
    node = half_done()
    node.withdraw(keep_wish=False)
    node.labels[f"{DEPLOY}mig-manager"] = "true"
    node.run(4000)
    assert node.operations == []
    assert node.untouched()
    del node.labels[f"{DEPLOY}mig-manager"]
    node.run(4000)
    assert node.record.open == ()


def test_beside_a_plugin_that_runs_on_nothing_is_changed_while_the_kubelet_does_not_answer() -> None:
    """A pod that tolerates every taint may be given an instance at any time."""
    node = ready("Tolerant", 1)
    node.wish("bbbbbbbb", {0: TWO_G})
    while not node.operations:
        node.step()
    node.kubelet_answers = False
    done = len(node.operations)
    node.run(100)
    assert len(node.operations) == done
    node.kubelet_answers = True
    node.run(600)
    assert node.phases() == ["Ready"]
    assert node.layouts()[0] == Layout(True, made("2g@0 2g@2"))


def test_what_is_half_done_goes_back_also_while_others_of_the_node_have_a_turn() -> None:
    node = ready()
    node.gpus[0].refuses = {kind: Cause("NVMLError", "no") for kind in (CreateGpuInstance, CreateComputeInstance)}
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    node.run(100)
    node.wish("cccccccc", {1: ONE_G})
    node.gpus[0].refuses.clear()
    node.run(2000)
    assert [layout.instances for layout in node.layouts()] == [made("1g@0 1g@1 1g@2 1g@3")] * 2
    assert node.phases() == ["Idle", "Ready"]


def test_a_pause_never_lasts_longer_than_its_bound() -> None:
    node = ready()
    node.wish("bbbbbbbb", {0: TWO_G, 1: TWO_G})
    until_stage(node, "Applying")
    node.gpus[0].refuses[DestroyComputeInstances] = Cause("InUse", "held")
    slow = node._operate

    def slowly(effect: object) -> Cause | None:
        node.now_s += 20.0
        return slow(effect)  # type: ignore[arg-type]

    node._operate = slowly  # type: ignore[method-assign, assignment]
    node.run(400)
    assert node.longest_pause <= PAUSE_MAX_S + 25


@pytest.mark.parametrize("install", INSTALLS)
def test_device_nodes_that_cannot_be_made_are_a_failure_with_that_reason_until_they_can(install: str) -> None:
    node = ready(install)
    node.refresh_fails = True
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    node.run(60)
    assert node.phases() == ["Failed", "Failed"]
    assert "nvidia-modprobe failed" in node.partitions["gpu-0"].value.status.message
    assert node.untouched()
    node.operations.clear()
    node.refresh_fails = False
    node.run(400)
    assert node.phases() == ["Ready", "Ready"]
    assert node.operations == []


def unadvertised(node: ToyNode) -> str:
    """What is said of a node of two GPUs that are not advertised."""
    assert node.phases() == ["Failed", "Failed"]
    condition = node.partitions["gpu-0"].value.says("Advertised")
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "NotAdvertised")
    return condition.message


def test_slices_that_a_plugin_without_mig_offers_as_whole_gpus_are_told_of_and_come_back_with_the_strategy() -> None:
    node = ready()
    well = node.allocatable
    node.labels["nvidia.com/mig.strategy"] = "none"
    node.enumerate = lambda: None  # type: ignore[method-assign]
    node.allocatable = {"nvidia.com/gpu": 2, "nvidia.com/mig-1g.6gb": 0}
    node.run(300)
    assert "nvidia.com/mig-1g.6gb is 0, not 8; nvidia.com/gpu is 2, but there is none" in unadvertised(node)
    node.labels["nvidia.com/mig.strategy"], node.allocatable = "mixed", well
    node.run(100)
    assert node.phases() == ["Ready", "Ready"]
    assert node.operations == []


def test_what_is_not_advertised_is_told_and_hardware_is_left_alone() -> None:
    node = ready()
    node.enumerate = lambda: None  # type: ignore[method-assign]
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    node.run(300)
    assert "nvidia.com/mig-2g.12gb is 0, not 2" in unadvertised(node)
    nudges = sum(isinstance(e, HangUp) for e in node.effects)
    assert nudges >= 1
    done = len(node.operations)
    node.run(4000)
    assert len(node.operations) == done
    assert sum(isinstance(e, HangUp) for e in node.effects) < nudges + 9  # with longer and longer pauses
    del node.enumerate  # type: ignore[method-assign]
    node.enumerate()
    assert node.run(100)
    assert node.phases() == ["Ready", "Ready"]
    assert len(node.operations) == done


def test_a_retry_that_is_asked_for_comes_at_once_and_the_annotation_goes() -> None:
    node = ready()
    node.gpus[0].refuses[DestroyComputeInstances] = Cause("NVMLError", "it refuses")
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G}, onFailure="Hold")
    node.run(3000)
    assert node.phases() == ["Held", "Ready"]  # for somebody to look at: not tried again by itself
    node.gpus[0].refuses.clear()
    done = len(node.operations)
    node.run(3000)
    assert len(node.operations) == done
    node.annotate(0, "migd.dev/retry")
    node.run(100)
    assert node.phases() == ["Ready", "Ready"]
    assert node.partitions["gpu-0"].annotations == {}


# --- crashes, reboots, others ---


@pytest.mark.parametrize("install", INSTALLS)
def test_killed_at_any_point_the_next_process_goes_on(install: str) -> None:
    begun = ready(install)
    begun.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    for at in count(step=1 if install == "Operator" else 4):
        node, left = deepcopy(begun), [at]

        def crash(where: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise Crash(where)

        try:
            node.run(600, crash)
        except Crash:
            node.restart()
            node.run(600)
        assert node.phases() == ["Ready", "Ready"]
        assert node.untouched()
        assert node.wrong == []
        if left[0] >= 0:
            break
    assert at > 80


@pytest.mark.parametrize("install", INSTALLS)
@pytest.mark.parametrize("stage", ["Settling", "Pausing", "Applying", "Verifying"])
def test_a_lost_record_does_not_leave_the_node_closed(install: str, stage: str) -> None:
    node = ready(install)
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G}, foreignInstances="Adopt")
    until_stage(node, stage)
    node.text = None
    node.restart()
    assert node.run(900)
    assert node.untouched()
    assert node.phases() == ["Ready", "Ready"]


def reboot(node: ToyNode) -> None:
    node.boot += "+"
    for gpu in node.gpus:
        gpu.made, gpu.bare, gpu.used = {}, set(), set()
    node.pods, node.offers, node.timers = {}, {}, []
    node.restart()
    node._daemons()
    node.pass_time(5.0)
    node.effects.clear()


@pytest.mark.parametrize("withdrawn", [False, True])
def test_after_a_reboot_the_node_is_closed_first_and_made_again(withdrawn: bool) -> None:
    node = ready()
    if withdrawn:
        node.withdraw()
        assert node.run(60)
    reboot(node)
    assert node.run(900)
    assert kinds(node)[:2] == ["ChangeNode", "CreateGpuInstance"]
    assert [layout.instances for layout in node.layouts()] == [made("1g@0 1g@1 1g@2 1g@3")] * 2
    assert node.phases() == (["Pending", "Pending"] if withdrawn else ["Ready", "Ready"])
    assert node.untouched()


def test_after_a_reboot_nothing_of_a_deleted_plan_comes_back() -> None:
    node = ready()
    node.withdraw(keep_wish=False)
    assert node.run(60)
    reboot(node)
    assert node.run(900)
    assert node.effects == []
    assert [layout.instances for layout in node.layouts()] == [EMPTY, EMPTY]


def test_a_reboot_in_the_middle_of_it_is_made_good() -> None:
    for stage in ("Closing", "Settling", "Pausing", "Applying", "Refreshing", "Opening", "Verifying"):
        node = ready()
        node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
        until_stage(node, stage)
        reboot(node)
        assert node.run(900)
        assert node.phases() == ["Ready", "Ready"]
        assert node.untouched()


def test_a_node_that_another_tool_left_wedged_comes_back_without_an_edit() -> None:
    node = ToyNode([None, None], "Operator")
    for client in ("device-plugin", "dcgm", "dcgm-exporter", "gpu-feature-discovery"):
        node.labels[f"{DEPLOY}{client}"] = "paused-for-mig-change"
    node.labels["nvidia.com/mig.config.state"] = "pending"
    node._daemons()
    node.wish("aaaaaaaa", {0: ONE_G, 1: ONE_G})
    node.run(500)
    assert node.phases() == ["Blocked", "Blocked"]
    assert node.reasons() == ["ForeignOwner", "ForeignOwner"]
    assert kinds(node) == []
    node.run(1200)
    assert node.phases() == ["Ready", "Ready"]
    assert node.labels["nvidia.com/mig.config.state"] == "failed"
    assert node.labels[f"{DEPLOY}device-plugin"] == "true"


def test_while_mig_manager_is_there_its_labels_are_its_own() -> None:
    node = ToyNode([None], "Operator")
    node.labels |= {f"{DEPLOY}device-plugin": "paused-for-mig-change", "nvidia.com/mig.config.state": "pending"}
    node.labels[f"{DEPLOY}mig-manager"] = "true"
    node.wish("aaaaaaaa", {0: ONE_G})
    node.run(5000)
    assert (node.phases(), node.reasons()) == (["Blocked"], ["ForeignOwner"])
    assert kinds(node) == []


@pytest.mark.parametrize("drift", ["Correct", "Observe"])
def test_what_others_change_is_corrected_or_only_told(drift: str) -> None:
    node = ready()
    node.wish("bbbbbbbb", {0: ONE_G, 1: ONE_G}, drift=drift)
    assert node.run(100)
    gone = max(node.gpus[0].made)
    del node.gpus[0].made[gone]
    node.run(300)
    assert node.phases() == (["Ready", "Ready"] if drift == "Correct" else ["Blocked", "Ready"])
    assert (gone in node.gpus[0].made) == (drift == "Correct")
    assert node.untouched()


def test_what_is_only_observed_stays_so_when_the_node_loses_its_turn_and_gets_it_again() -> None:
    """Seen: a node that made room for another, and one with a second GPU whose wish was edited, were corrected."""
    node = ready()
    node.wish("bbbbbbbb", {0: ONE_G, 1: ONE_G}, drift="Observe")
    assert node.run(100)
    gone = max(node.gpus[0].made)
    del node.gpus[0].made[gone]
    node.run(300)
    node.withdraw()
    node.run(300)
    node.wish("bbbbbbbb", {0: ONE_G, 1: ONE_G}, drift="Observe")
    node.run(3600)
    assert (node.phases(), gone in node.gpus[0].made) == (["Blocked", "Ready"], False)
    node.wish("cccccccc", {0: ONE_G, 1: TWO_G}, drift="Observe")
    node.run(3600)
    assert (node.phases(), gone in node.gpus[0].made) == (["Blocked", "Ready"], False)
    assert node.reasons() == ["ForeignInstances", ""]
    node.annotate(0, "migd.dev/retry")
    node.run(3600)
    assert (node.phases(), gone in node.gpus[0].made) == (["Ready", "Ready"], True), "somebody asked for it"


def test_what_was_only_observed_is_made_as_an_edit_wishes_and_after_a_reboot() -> None:
    node = ready()
    node.wish("bbbbbbbb", {0: ONE_G, 1: ONE_G}, drift="Observe")
    assert node.run(100)
    del node.gpus[0].made[max(node.gpus[0].made)]
    node.run(300)
    node.wish("cccccccc", {0: TWO_G, 1: ONE_G}, drift="Observe")
    assert node.run(3600)
    assert node.phases() == ["Ready", "Ready"]
    reboot(node)
    assert node.run(3600)
    assert node.phases() == ["Ready", "Ready"], "what a reboot took is nobody's hand"


def test_a_gpu_that_is_lost_or_held_is_left_out_and_the_others_go_on() -> None:
    node = ready(gpus=3)
    node.gpus[0].lost = True
    node.annotate(1, "migd.dev/hold")
    node.wish("bbbbbbbb", dict.fromkeys(range(3), TWO_G))
    node.run(600)
    assert node.phases() == ["Lost", "Blocked", "Ready"]
    assert node.reasons() == ["GPUUnhealthy", "Held", ""]
    assert {operation.gpu_uuid for operation in node.operations} == {"GPU-2"}


def test_an_incomplete_turn_is_none() -> None:
    node = ready()
    node.wish("bbbbbbbb", {0: TWO_G}, number=2)
    node.run(600)
    assert node.phases() == ["Pending", "Idle"]
    assert kinds(node) == []


def test_a_gpu_in_mig_mode_with_nothing_in_it_keeps_the_plugin_from_being_restarted() -> None:
    node = ToyNode([None, ""], "Operator")
    node.wish("aaaaaaaa", {0: ONE_G})
    node.run(300)
    assert (node.phases(), kinds(node)) == (["Blocked", "Idle"], [])
    assert "GPU 1" in node.partitions["gpu-0"].value.status.message
    node.wish("bbbbbbbb", {0: ONE_G, 1: []}, allowEmpty=True)
    node.run(300)
    assert node.phases() == ["Ready", "Ready"]


def test_a_job_that_starts_is_told_within_half_a_minute_and_not_each_time() -> None:
    node = ready()
    node.run(60)
    node.writes = dict.fromkeys(node.partitions, node.now_s)
    written = node.status_writes
    for _ in range(100):
        node.gpus[0].used = set() if node.gpus[0].used else set(made("1g@0"))
        node.step()
        node.pass_time(1.0)
    assert 2 <= node.status_writes - written <= 4


def test_a_record_without_a_nodes_part_is_taken_up() -> None:
    node = ToyNode([None], "Operator")
    node.record = Record(node.boot)
    node.wish("aaaaaaaa", {0: ONE_G})
    assert node.run(600)
    assert node.phases() == ["Ready"]


# --- an API server that denies ---


def test_a_node_whose_plugin_may_not_be_stopped_is_not_even_closed_and_goes_on_once_it_may() -> None:
    """Seen: it was closed for seconds at each try, again and again, and pods that could have run there waited."""
    node = ready("Helm")
    node.keeps_plugin = Cause("NoPermission", "the API server does not let the agent stop pod kube-system/plugin: 403")
    node.longest_closed = 0.0
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    node.run(3600)
    assert (node.phases(), node.reasons()[0]) == (["Blocked", "Blocked"], "NoPermission")
    assert node.partitions["gpu-0"].value.status.message == node.keeps_plugin.message
    assert node.longest_closed == 0.0
    node.keeps_plugin = None
    assert node.run(3600)
    assert node.phases() == ["Ready", "Ready"]


def test_a_node_that_may_not_be_opened_again_says_why_it_stays_closed() -> None:
    """It said that the kubelet was waited for, and at rest that all was ready, while no pod could land there."""
    node = ready("Helm")
    node.wish("bbbbbbbb", {0: TWO_G, 1: ONE_G})
    until_stage(node, "Opening")
    denial = Cause("NoPermission", "the API server does not let the agent open the node: 403")
    node.denies = denial
    node.run(60)
    assert node.closed
    assert node.phases() == ["Verifying", "Verifying"]
    assert node.reasons() == ["NoPermission", "NoPermission"]
    assert node.partitions["gpu-0"].value.status.message == denial.message
    node.denies = None
    node.run(600)
    assert node.phases() == ["Ready", "Ready"]
    assert node.untouched()
    node.annotations[OWED] = "{}"  # somebody's
    node.denies = denial
    node.run(60)
    assert (node.phases(), node.reasons()[0]) == (["Blocked", "Blocked"], "NoPermission")
    node.denies = None
    node.run(600)
    assert node.phases() == ["Ready", "Ready"]
    assert node.record.node is not None
    assert node.record.node.denied is None
