"""Plans on a real API server, with agents and operator as separate processes under their own accounts and policies.

What every preview said is held against what then happened. All stories run at the same time, each on its own nodes.
Left out: crashes, races and what is written, which the other e2e modules have; eviction, which there is none of yet.
"""

from __future__ import annotations

import json

from controlplane.clusters import Cluster
from controlplane.processes import until
from integration.acting import (
    HALF,
    OFF,
    PLANS,
    SMALL,
    WHOLE,
    annotate,
    apply,
    closed,
    condition,
    edit,
    end_pod,
    eventually,
    instances,
    labels,
    partitions,
    phases,
    plan,
    pod,
    quiet,
    ready,
    row,
    run_pod,
    runs,
    said_of,
    status,
    taints,
)
from integration.crowds import at_once
from integration.promises import Machines, Promise
from integration.witnesses import most_closed, switched

SMALL_ONE = "nvidia.com/mig-1g.10gb"


def carried_out(cluster: Cluster, promise: Promise, name: str, node: str, generation: int) -> None:
    """The plan gets ready, as its preview said, and nothing is left behind."""
    promise.said(generation)
    ready(cluster, name)
    promise.kept()
    quiet(cluster, node)


@at_once()
def test_a_plan_becomes_instances_labels_allocatable_and_a_running_pod(cluster: Cluster, node: str):
    promise = Promise(cluster, "first", [node])
    said = promise.said(apply(cluster, plan("first", [node], HALF)))
    assert said["totals"] == {
        **dict.fromkeys(("unchanged", "refused", "blocked", "keep", "destroy"), 0),
        "nodes": 1,
        "gpus": 1,
        "create": 4,
        "modeChanges": 1,
        "resets": 1,
    }
    assert said["groups"][0]["exampleNodes"] == [node]
    waited = cluster.kubectl("wait", "--for=condition=Ready", "gpp/first", "--timeout=90s")
    assert waited.returncode == 0, waited.stderr
    promise.kept()
    shown = row(cluster, node)
    assert shown.pop("NAME").startswith("gpu-")
    assert shown.pop("AGE")
    half = "3g.40gb 3×1g.10gb"
    cut = {"DESIRED": half, "OBSERVED": half, "PHASE": "Ready", "IN-USE": "0/4", "REASON": ""}
    assert shown == {"NODE": node, "GPU": "0", **cut}
    counts = {"migd.dev/mig-1g.10gb.count": "3", "migd.dev/mig-3g.40gb.count": "1"}
    eventually(lambda: labels(cluster, node), {"migd.dev/state": "ready", **counts})
    offered = {"nvidia.com/gpu": 0, SMALL_ONE: 3, "nvidia.com/mig-3g.40gb": 1}
    assert cluster.allocatable(node) == offered
    quiet(cluster, node)
    run_pod(cluster, "first-pod", node, mig_3g_40gb=1)
    assert runs(cluster, "first-pod")["spec"]["nodeName"] == node
    (held,) = cluster.nodes[node].kubelet.held()
    assert (held.pod, held.resource) == ("first-pod", "nvidia.com/mig-3g.40gb")
    assert {device.split("::")[0] for device in held.device_ids} < mig_uuids(cluster, node)
    eventually(lambda: row(cluster, node)["IN-USE"], "1/4")
    listed = cluster.kubectl("get", "gpp", "first").stdout.splitlines()[1].split()
    assert listed[:4] == ["first", "1/1", "1/1", "True"]


def mig_uuids(cluster: Cluster, node: str) -> set[str]:
    """The MIG UUIDs on a node."""
    gpus = cluster.nodes[node].machine().snapshot().gpus
    return {compute.uuid for gpu in gpus for one in gpu.instances for compute in one.compute}


@at_once()
def test_waiting_for_ready_does_not_return_on_the_old_generation_right_after_an_edit(cluster: Cluster, node: str):
    first = Promise(cluster, "edited", [node])
    carried_out(cluster, first, "edited", node, apply(cluster, plan("edited", [node], SMALL)))
    second = Promise(cluster, "edited", [node])
    generation = edit(cluster, "edited", rules=[HALF])
    early = cluster.kubectl("wait", "--for=condition=Ready", "gpp/edited", "--timeout=1s")
    assert early.returncode == 1, "a node cannot be changed within a second, so this was the old generation's Ready"
    assert "timed out" in early.stderr
    waited = cluster.kubectl("wait", "--for=condition=Ready", "gpp/edited", "--timeout=90s")
    assert waited.returncode == 0, waited.stderr
    assert row(cluster, node)["OBSERVED"] == "3g.40gb 3×1g.10gb"
    said = second.said(generation)
    (group,) = said["groups"]
    assert (group["from"], group["to"]) == ("7×1g.10gb", "3g.40gb 3×1g.10gb")
    assert (group["keep"], group["destroy"]) == (
        [{"profile": "1g.10gb", "count": 3}],
        [{"profile": "1g.10gb", "count": 4}],
    )
    second.kept()
    history = status(cluster, "edited")["history"]
    assert [(one["generation"], one["result"]) for one in history] == [(2, "Succeeded"), (1, "Succeeded")]


@at_once(nodes=2, spec="h100-sxm-80gb")
def test_a_deleted_plan_leaves_the_layout_and_takes_labels_and_wish_away(cluster: Cluster, node: str, other: str):
    promise = Promise(cluster, "deleted", [node])
    generation = apply(cluster, plan("deleted", [node], HALF))
    assert not promise.said(generation)["totals"]["resets"], "from Hopper on no reset is needed"
    carried_out(cluster, promise, "deleted", node, generation)
    offered, before = cluster.allocatable(node), Machines.seen(cluster, [node])
    cluster.plane.admin.delete(f"{PLANS}/deleted").object()
    eventually(lambda: phases(cluster, node), ["Idle"])
    eventually(lambda: labels(cluster, node), {})
    (gpu,) = partitions(cluster, node)
    assert {"desired", "assignment"}.isdisjoint(gpu["spec"])
    assert "migd.dev/plan" not in gpu["metadata"]["labels"]
    assert (cluster.allocatable(node), Machines.seen(cluster, [node])) == (offered, before)

    backed_out = Promise(cluster, "too-late", [other])
    backed_out.said(apply(cluster, plan("too-late", [other], SMALL)))
    closed(cluster, other)
    cluster.plane.admin.delete(f"{PLANS}/too-late").object()
    eventually(lambda: (phases(cluster, other), taints(cluster, other)), (["Idle"], []))
    quiet(cluster, other)
    backed_out.nothing_happened()


@at_once(nodes=2)
def test_a_pause_backs_out_before_the_first_effect_and_lets_a_change_finish_after_it(
    cluster: Cluster, node: str, other: str
):
    promise = Promise(cluster, "paused", [node])
    promise.said(apply(cluster, plan("paused", [node], HALF)))
    closed(cluster, node)
    paused = edit(cluster, "paused", paused=True)
    eventually(lambda: taints(cluster, node), [])
    eventually(lambda: condition(cluster, "paused", "Ready"), ("False", "Paused"))
    assert promise.said(paused)["totals"]["create"] == 4, "a paused plan tells what it would do"
    promise.nothing_happened()
    quiet(cluster, node)
    carried_out(cluster, promise, "paused", node, edit(cluster, "paused", paused=False))

    late = Promise(cluster, "pausing", [other])
    generation = apply(cluster, plan("pausing", [other], HALF))
    late.said(generation)
    made = cluster.nodes[other].machine().snapshot().serial
    eventually(lambda: cluster.nodes[other].machine().snapshot().serial > made, True)
    paused = edit(cluster, "pausing", paused=True)  # what is previewed now is of the midst of a change
    eventually(lambda: partitions(cluster, other)[0]["status"]["observed"]["summary"], "3g.40gb 3×1g.10gb")
    eventually(lambda: taints(cluster, other), [])
    eventually(lambda: cluster.allocatable(other).get(SMALL_ONE), 3)
    late.kept(by_now=paused)
    quiet(cluster, other)
    eventually(lambda: labels(cluster, other).get("migd.dev/state"), "ready")


@at_once()
def test_what_cannot_be_is_refused_with_the_nearest_that_fits(cluster: Cluster, node: str):
    promise = Promise(cluster, "greedy", [node])
    rule = instances(_3g_40gb=2, _1g_10gb=1)
    said = promise.said(apply(cluster, plan("greedy", [node], rule)))
    assert (said["totals"]["refused"], said["totals"]["gpus"]) == (1, 0)
    eventually(lambda: condition(cluster, "greedy", "Ready"), ("False", "Infeasible"))
    told = status(cluster, "greedy")
    assert "Nearest that fits: 2×3g.40gb or 3g.40gb + 1g.10gb" in told["message"]
    eventually(lambda: said_of(cluster, node, "Assigned"), ("False", "Infeasible"))
    promise.said(edit(cluster, "greedy", rules=[instances(_5g_50gb=1)]))
    eventually(lambda: condition(cluster, "greedy", "Ready"), ("False", "UnknownProfile"))
    assert "7g.80gb" in status(cluster, "greedy")["message"], "what the board does offer"
    promise.nothing_happened()
    assert switched(cluster.plane.audit.requests(), node) == []


@at_once()
def test_of_two_plans_for_one_gpu_neither_moves_it_until_one_is_more_important(cluster: Cluster, node: str):
    promise = Promise(cluster, "left", [node])
    apply(cluster, plan("left", [node], HALF, paused=True))
    generation = apply(cluster, plan("right", [node], SMALL))
    eventually(lambda: condition(cluster, "right", "Ready"), ("False", "Conflict"))
    edit(cluster, "left", paused=False)
    eventually(lambda: condition(cluster, "left", "Ready"), ("False", "Conflict"))
    assert "right" in status(cluster, "left")["message"]
    promise.nothing_happened()
    assert switched(cluster.plane.audit.requests(), node) == []
    carried_out(cluster, promise, "left", node, edit(cluster, "left", priority=1))
    assert partitions(cluster, node)[0]["spec"]["desired"]["plan"]["name"] == "left"
    succession = Promise(cluster, "right", [node])
    cluster.plane.admin.delete(f"{PLANS}/left").object()
    succession.said(generation, lambda totals: totals["gpus"] == 1)  # it was edited by nobody: it won
    eventually(lambda: condition(cluster, "right", "Ready"), ("True", "AsWished"))
    assert row(cluster, node)["OBSERVED"] == "7×1g.10gb"
    succession.kept()


@at_once()
def test_a_plan_with_manual_approval_waits_for_the_digest_of_its_preview(cluster: Cluster, node: str):
    promise = Promise(cluster, "asked", [node])
    generation = apply(cluster, plan("asked", [node], SMALL, approval="Manual"))
    digest = promise.said(generation)["digest"]
    eventually(lambda: condition(cluster, "asked", "Ready"), ("False", "AwaitingApproval"))
    annotate(cluster, f"{PLANS}/asked", approved="0" * len(digest))
    annotate(cluster, f"{PLANS}/asked", other="x")
    looks = cluster.nodes[node].object.looks
    assert until(lambda: cluster.nodes[node].object.looks > looks + 3, 30)
    assert condition(cluster, "asked", "Ready") == ("False", "AwaitingApproval")
    promise.nothing_happened()
    annotate(cluster, f"{PLANS}/asked", approved=digest)
    carried_out(cluster, promise, "asked", node, generation)


@at_once(nodes=3)
def test_with_one_node_unavailable_at_most_never_two_are_closed_at_once(cluster: Cluster, *nodes: str):
    promise = Promise(cluster, "rollout", nodes)
    generation = apply(cluster, plan("rollout", nodes, HALF, rollout={"maxUnavailable": 1}))
    assert promise.said(generation)["totals"]["nodes"] == 3
    ready(cluster, "rollout")
    promise.kept()
    requests = cluster.plane.audit.requests()
    assert most_closed(requests, *nodes) == 1
    turns = switched(requests, *nodes)
    assert [one.closed for one in turns] == [True, False] * 3
    assert {one.node for one in turns} == set(nodes)
    quiet(cluster, *nodes)
    assert status(cluster, "rollout")["nodes"]["summary"] == "3/3"


@at_once()
def test_an_instance_in_use_is_waited_for_and_goes_when_its_pod_ends(cluster: Cluster, node: str):
    promise = Promise(cluster, "patient", [node])
    carried_out(cluster, promise, "patient", node, apply(cluster, plan("patient", [node], SMALL)))
    run_pod(cluster, "user", node, mig_1g_10gb=1)
    runs(cluster, "user")
    eventually(lambda: row(cluster, node)["IN-USE"], "1/7")
    promise = Promise(cluster, "patient", [node])
    before = len(cluster.plane.audit.requests())
    generation = edit(cluster, "patient", rules=[WHOLE])
    said = promise.said(generation)
    assert (said["totals"]["blocked"], said["groups"][0]["reason"]) == (1, "InUse")
    eventually(lambda: (row(cluster, node)["PHASE"], row(cluster, node)["REASON"]), ("WaitingForIdle", "InUse"))
    (gpu,) = partitions(cluster, node)
    assert [one["pod"]["name"] for one in gpu["status"]["blockers"] if "pod" in one] == ["user"], gpu["status"][
        "blockers"
    ]
    assert condition(cluster, "patient", "Ready")[0] == "False"
    assert switched(cluster.plane.audit.requests()[before:], node) == [], "nothing is closed while somebody works"
    promise.nothing_happened()
    end_pod(cluster, "user")
    carried_out(cluster, promise, "patient", node, generation)


@at_once()
def test_a_pod_whose_instance_fits_the_new_layout_keeps_its_uid_and_its_mig_device(cluster: Cluster, node: str):
    promise = Promise(cluster, "gentle", [node])
    carried_out(cluster, promise, "gentle", node, apply(cluster, plan("gentle", [node], SMALL)))
    run_pod(cluster, "kept", node, mig_1g_10gb=1)
    before = runs(cluster, "kept")
    held = cluster.nodes[node].kubelet.held()
    eventually(lambda: row(cluster, node)["IN-USE"], "1/7")
    promise = Promise(cluster, "gentle", [node])
    carried_out(cluster, promise, "gentle", node, edit(cluster, "gentle", rules=[HALF]))
    after = pod(cluster, "kept")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"], "it did not even restart"
    assert cluster.nodes[node].kubelet.held() == held
    assert {device.split("::")[0] for one in held for device in one.device_ids} <= mig_uuids(cluster, node)
    machine = cluster.nodes[node].machine().snapshot()
    assert [process.gpu_uuid for process in machine.processes.values()] == [machine.gpus[0].uuid]


@at_once()
def test_mig_can_be_turned_off_again(cluster: Cluster, node: str):
    promise = Promise(cluster, "there-and-back", [node])
    carried_out(cluster, promise, "there-and-back", node, apply(cluster, plan("there-and-back", [node], HALF)))
    promise = Promise(cluster, "there-and-back", [node])
    generation = edit(cluster, "there-and-back", rules=[OFF])
    assert promise.said(generation)["totals"]["destroy"] == 4
    carried_out(cluster, promise, "there-and-back", node, generation)
    assert cluster.allocatable(node)["nvidia.com/gpu"] == 1
    run_pod(cluster, "whole", node, gpu=1)
    runs(cluster, "whole")


@at_once(nodes=0)
def test_kubectl_explains_the_kinds_and_lists_them_as_one_category(cluster: Cluster):
    known = cluster.kubectl("api-resources", "--api-group=migd.dev", "-o", "name")  # not from kubectl's cache
    assert known.stdout.split() == ["gpupartitionplans.migd.dev", "gpupartitions.migd.dev"], known.stderr
    explained = cluster.kubectl("explain", "gpp.spec.rollout")
    assert explained.returncode == 0, explained.stderr
    assert "maxUnavailable" in explained.stdout
    assert "pauseOnFailure" in explained.stdout
    assert "FIELD: rollout" in explained.stdout
    for word in ("gpupartitionplans", "gpupartitions", "gpp", "gpart"):
        assert cluster.kubectl("explain", word).returncode == 0
    eventually(lambda: {"gpupartitionplan", "gpupartition"} <= kinds(cluster), True)


def kinds(cluster: Cluster) -> set[str]:
    """What `kubectl get migd` lists."""
    listed = cluster.kubectl("get", "migd", "-o", "json")
    return {one["kind"].lower() for one in json.loads(listed.stdout)["items"]}
