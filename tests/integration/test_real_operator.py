"""The GPU Operator's label protocol on a real node: its DaemonSets go and come by labels that migd's agent changes.

Plugin and feature discovery are NVIDIA's own; what stands for the DCGM exporter holds NVML open. They are stopped and
started by the real DaemonSet controller.
"""

from __future__ import annotations

from controlplane.api import Json
from controlplane.real_clusters import NODE, RealCluster
from controlplane.real_overlays import deployment
from integration.acting import apply, edit, eventually, instances, introduced, plan, quiet, ready
from integration.deployed import AGENT
from integration.driver_calls import logged
from integration.promises import Promise
from integration.real_pods import counts, identity, running

REAL_CLUSTER = {"spec": "2xa100-80gb", "base": "gpu-operator"}
DEPLOY = "nvidia.com/gpu.deploy."
LARGE, SMALL = "nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb"
DISCOVERY = "gpu-feature-discovery"
APPS = {
    "device-plugin": "nvidia-device-plugin-daemonset",
    DISCOVERY: "gpu-feature-discovery",
    "dcgm-exporter": "nvidia-dcgm-exporter",
}


def clients(real_cluster: RealCluster) -> dict[str, tuple[str, int]]:
    """Of each client of the GPUs that runs, its pod's uid, and how often that was restarted."""
    found: dict[str, tuple[str, int]] = {}
    for client, app in APPS.items():
        for pod in real_cluster.pods(f"app={app}", "gpu-operator"):
            (container,) = pod["status"].get("containerStatuses") or [{}]
            if "deletionTimestamp" not in pod["metadata"] and container.get("ready"):
                found[client] = pod["metadata"]["uid"], container["restartCount"]
    return found


def deploys(node: Json) -> dict[str, str]:
    """What the node's labels say of each client."""
    labels = node["metadata"]["labels"]
    return {key.removeprefix(DEPLOY): value for key, value in labels.items() if key.startswith(DEPLOY)}


def settled(real_cluster: RealCluster) -> dict[str, str]:
    """Wait until every client runs again; the uids of their pods. None has ever failed, but who looks meanwhile may."""
    eventually(lambda: set(clients(real_cluster)), set(APPS))
    now = clients(real_cluster)
    assert {restarts for client, (_, restarts) in now.items() if client != DISCOVERY} == {0}
    return {client: uid for client, (uid, _) in now.items()}


def test_clients_go_and_come_by_their_labels_and_pods_keep_what_stays(real_cluster: RealCluster):
    introduced(real_cluster, NODE)
    labels, first = deploys(real_cluster.node()), settled(real_cluster)
    begun = real_cluster.audit.requests()
    promise = Promise(real_cluster, "real", [NODE])
    promise.said(apply(real_cluster, plan("real", [NODE], instances(_3g_40gb=1, _1g_10gb=3))))
    ready(real_cluster, "real")
    promise.kept()
    quiet(real_cluster, NODE)
    assert real_cluster.allocatable() == {"nvidia.com/gpu": 0, LARGE: 2, SMALL: 6}
    eventually(lambda: counts(real_cluster), {"3g.40gb": 2, "1g.10gb": 6})
    assert deploys(real_cluster.node()) == labels
    second = settled(real_cluster)
    assert all(second[client] != first[client] for client in APPS), "a change of mode takes every client away"

    real_cluster.apply(deployment("train", 2, {SMALL: 1}))
    before = [identity(real_cluster, pod) for pod in running(real_cluster, "train", 2)]
    with logged(real_cluster, APPS[DISCOVERY]) as log:
        edit(real_cluster, "real", rules=[instances(_1g_10gb=7)])
        ready(real_cluster, "real")
    assert log.half_seen() == []
    quiet(real_cluster, NODE)
    assert real_cluster.allocatable() == {"nvidia.com/gpu": 0, LARGE: 0, SMALL: 14}
    eventually(lambda: counts(real_cluster), {"1g.10gb": 14})
    assert [identity(real_cluster, pod) for pod in running(real_cluster, "train", 2)] == before
    assert deploys(real_cluster.node()) == labels
    third = settled(real_cluster)
    changed = {client for client in APPS if third[client] != second[client]}
    assert changed == {"device-plugin", "dcgm-exporter"}, "who holds no MIG device stays"

    ours = [one for one in real_cluster.audit.since(begun) if one.user == AGENT]
    assert [one.uri for one in ours if one.verb == "delete"] == [], "nothing is deleted: labels do it"
    assert [(one.verb, one.uri, one.code) for one in ours if one.code in (401, 403, 422)] == []
