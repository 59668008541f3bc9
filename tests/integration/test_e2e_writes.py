"""What operator and agents write on a real API server, as its audit log has it: nothing at rest, and no foreign key.

The cluster has the GPU Operator's labels, so that its GPU clients are paused by keys that are not ours. Left out:
what is refused, which test_deploy_policies has row by row.
"""

from __future__ import annotations

import signal

import pytest
from controlplane.audit import Request
from controlplane.clusters import Cluster, Process
from controlplane.processes import until
from integration.acting import (
    EVERY_S,
    HALF,
    OFF,
    PLANS,
    SMALL,
    apply,
    closed,
    condition,
    edit,
    eventually,
    introduced,
    labels,
    phases,
    plan,
    quiet,
    ready,
    taints,
)
from integration.deployed import AGENT, OPERATOR, rendered, rights_in
from integration.promises import Promise
from integration.witnesses import node_keys, ours, writes

from migd.kube.nodes import LABELS_OF_OTHERS
from migd.kube.nodes import TAINT as CHANGING

NODES = ("w0", "w1")
CLUSTER = {"nodes": NODES, "style": "operator", "spec": {"w0": "2xa100-80gb", "w1": "h100-sxm-80gb"}}
LOOK_S = 32
"""Longer than the agents rest between two looks."""


@pytest.fixture(scope="module")
def history(cluster: Cluster) -> None:
    """Plans come, change, stop and go; at the end one is carried out, and all is at rest."""
    introduced(cluster, *NODES)
    promise = Promise(cluster, "first", NODES)
    promise.said(apply(cluster, plan("first", NODES, HALF, rollout={"maxUnavailable": 2})))
    ready(cluster, "first")
    promise.kept()
    promise = Promise(cluster, "first", NODES)
    promise.said(edit(cluster, "first", rules=[SMALL]))
    closed(cluster, "w0")
    promise.said(edit(cluster, "first", paused=True))
    eventually(lambda: condition(cluster, "first", "Ready"), ("False", "Paused"))
    eventually(lambda: [taints(cluster, name) for name in NODES], [[], []])
    promise.nothing_happened()
    cluster.plane.admin.delete(f"{PLANS}/first").object()
    eventually(lambda: phases(cluster, *NODES), ["Idle"] * 3)
    promise = Promise(cluster, "second", NODES)
    rules = [{"gpus": {"indices": [1]}, "mig": OFF["mig"]}, SMALL]
    promise.said(apply(cluster, plan("second", NODES, *rules, rollout={"maxUnavailable": "50%"})))
    ready(cluster, "second")
    promise.kept()
    quiet(cluster, *NODES)
    for name in NODES:
        eventually(lambda name=name: labels(cluster, name)["migd.dev/state"], "ready")
    wait_looks(cluster, 3)


def wait_looks(cluster: Cluster, number: int) -> None:
    """Let the kubelets look at their nodes so often: once a second."""
    node = cluster.nodes["w0"].object
    begun = node.looks
    assert until(lambda: node.looks >= begun + number, 4 * number + 30, EVERY_S)


def shown(requests: list[Request]) -> list[str]:
    """What was asked, for a message."""
    return [f"{r.user.rpartition(':')[2]} {r.verb} {r.resource} {r.name} {r.code}: {r.body}"[:500] for r in requests]


def test_at_rest_nothing_is_written_but_leases(cluster: Cluster, history: None):
    before = cluster.plane.audit.requests()
    wait_looks(cluster, LOOK_S)
    asked = cluster.plane.audit.since(before)
    assert shown(writes(asked)) == []
    assert {r.resource for r in ours(asked) if r.writes} == {"leases"}, "they do live"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_operator_and_agents_that_start_again_write_nothing_but_leases(
    cluster: Cluster, history: None, number: signal.Signals
):
    before = cluster.plane.audit.requests()
    processes = [cluster.operator(), *(cluster.agent(name) for name in NODES)]
    pids = [process.pid for process in processes]
    for process in processes:
        process.send(number)
    for process, pid in zip(processes, pids, strict=True):
        assert until(lambda process=process, pid=pid: process.pid not in (None, pid), 60.0, EVERY_S)
    for process in processes:
        assert until(lambda process=process: is_ready(cluster, process), 60.0, EVERY_S), process.log
    wait_looks(cluster, 8)
    asked = cluster.plane.audit.since(before)
    assert shown(writes(asked)) == []
    assert {r.user for r in ours(asked) if r.writes and r.resource == "leases"} == {AGENT, OPERATOR}
    ready(cluster, "second")


def is_ready(cluster: Cluster, process: Process) -> bool:
    """Whether the pod of a process is ready."""
    found = cluster.plane.admin.get(f"/api/v1/namespaces/migd-system/pods/{process.pod}").object()
    return any((c["type"], c["status"]) == ("Ready", "True") for c in found["status"].get("conditions", ()))


def test_no_foreign_key_of_a_node_was_ever_written(cluster: Cluster, history: None):
    written: dict[str, set[str]] = {AGENT: set(), OPERATOR: set()}
    for request in writes(cluster.plane.audit.requests()):
        if request.resource.partition("/")[0] == "nodes":
            assert request.resource == "nodes"
            assert request.verb == "patch"
            written[request.user] |= node_keys(request)
    allowed = {f"labels {key}" for key in LABELS_OF_OTHERS} | {f"taint {CHANGING}"}
    foreign = {key for key in written[AGENT] if not key.startswith(("labels migd.dev/", "annotations migd.dev/"))}
    assert foreign <= allowed
    assert {f"taint {CHANGING}", "labels nvidia.com/gpu.deploy.device-plugin"} <= foreign, "it was closed, and paused"
    assert {"annotations migd.dev/owed", "labels migd.dev/state", "labels migd.dev/mig-1g.10gb.count"} <= written[AGENT]
    assert written[OPERATOR] <= {"labels migd.dev/state"}, "no agent was silent, so nothing was paid for it"


def test_every_request_is_covered_by_a_right_and_none_was_refused(cluster: Cluster, history: None):
    rights = rights_in(rendered(cluster.plane, "overlays/gpu-operator"))
    asked = ours(cluster.plane.audit.requests())
    refused = [r for r in asked if r.code in (401, 403, 422)]
    assert shown(refused) == []
    uncovered = [r for r in asked if r.resource and not any(right.covers(r) for right in rights)]
    assert shown(uncovered) == []
    assert {r.resource for r in asked if r.writes} == {
        "nodes",
        "gpupartitions",
        "gpupartitions/status",
        "gpupartitionplans/status",
        "leases",
        "events",
    }
    others = {
        (r.user, r.resource) for r in asked if r.resource in ("pods/eviction", "secrets", "pods/exec", "configmaps")
    }
    assert others == set()
