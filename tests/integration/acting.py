"""What an admin and the users of a cluster do in a story: plans, pods, and looking at what becomes of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from controlplane.api import Json
from controlplane.clusters import Cluster
from controlplane.processes import until

PLANS: Final = "/apis/migd.dev/v1alpha1/gpupartitionplans"
PARTITIONS: Final = "/apis/migd.dev/v1alpha1/gpupartitions"
PODS: Final = "/api/v1/namespaces/default/pods"
DEPLOYMENTS: Final = "/apis/apps/v1/namespaces/default/deployments"
BUDGETS: Final = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
TAINT: Final = "migd.dev/changing"
WITHIN_S: Final = 120.0
EVERY_S: Final = 0.5
"""Between two looks: many stories look at once, and each look takes the API server milliseconds."""


def instances(**counts: int) -> dict[str, Any]:
    """A rule for all GPUs: `_3g_40gb=1` is one 3g.40gb."""
    wanted = [{"profile": name.strip("_").replace("_", "."), "count": number} for name, number in counts.items()]
    return {"gpus": {"all": True}, "instances": wanted}


HALF: Final = instances(_3g_40gb=1, _1g_10gb=3)
SMALL: Final = instances(_1g_10gb=7)
WHOLE: Final = instances(_7g_80gb=1)
OFF: Final[dict[str, Any]] = {"gpus": {"all": True}, "mig": "Disabled"}


def plan(name: str, nodes: Sequence[str], *rules: dict[str, Any], **spec: Any) -> Json:
    """A plan for these nodes."""
    selector = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": sorted(nodes)}]}
    return {
        "apiVersion": "migd.dev/v1alpha1",
        "kind": "GPUPartitionPlan",
        "metadata": {"name": name},
        "spec": {"nodeSelector": selector, "rules": list(rules), **spec},
    }


def apply(cluster: Cluster, document: Json) -> int:
    """Apply it server-side, as an admin; the object's generation then."""
    path = f"{PLANS}/{document['metadata']['name']}"
    return int(cluster.plane.admin.apply(path, document, "admin", force=True).object()["metadata"]["generation"])


def edit(cluster: Cluster, name: str, **spec: Any) -> int:
    """Merge this into a plan's spec; its generation then."""
    return int(cluster.plane.admin.patch(f"{PLANS}/{name}", {"spec": spec}).object()["metadata"]["generation"])


def annotate(cluster: Cluster, path: str, **notes: str | None) -> None:
    """Set annotations `migd.dev/NAME` of an object; None takes one away."""
    body = {"metadata": {"annotations": {f"migd.dev/{name}": value for name, value in notes.items()}}}
    cluster.plane.admin.patch(path, body).object()


def status(cluster: Cluster, name: str) -> Json:
    """A plan's status."""
    return dict(cluster.plane.admin.get(f"{PLANS}/{name}").object().get("status") or {})


def condition(cluster: Cluster, name: str, kind: str) -> tuple[str, str]:
    """Status and reason of a plan's condition for its present generation; both "" before there is one."""
    return condition_of(cluster.plane.admin.get(f"{PLANS}/{name}").object(), kind)


def condition_of(found: Json, kind: str) -> tuple[str, str]:
    """The same of a plan that is at hand."""
    for one in (found.get("status") or {}).get("conditions") or ():
        if one["type"] == kind and one.get("observedGeneration") == found["metadata"]["generation"]:
            return one["status"], one["reason"]
    return "", ""


def said_of(cluster: Cluster, node: str, kind: str) -> tuple[str, str]:
    """Status and reason of a condition of a node's first GPU; both "" before there is one."""
    found = partitions(cluster, node)[0].get("status", {}).get("conditions") or ()
    return next(((one["status"], one["reason"]) for one in found if one["type"] == kind), ("", ""))


def partitions(cluster: Cluster, *nodes: str) -> list[Json]:
    """The GPUPartitions of these nodes, by node and index."""
    where = {"fieldSelector": f"spec.nodeName={nodes[0]}"} if len(nodes) == 1 else {}
    found = cluster.plane.admin.get(PARTITIONS, **where).object()["items"]
    mine = [one for one in found if one["spec"]["nodeName"] in nodes]
    return sorted(
        mine, key=lambda one: (one["spec"]["nodeName"], one.get("status", {}).get("board", {}).get("index", 0))
    )


def phases(cluster: Cluster, *nodes: str) -> list[str]:
    """Their phases."""
    return [one.get("status", {}).get("phase", "") for one in partitions(cluster, *nodes)]


def introduced(cluster: Cluster, *nodes: str) -> None:
    """Wait until the agents of these nodes have told of their GPUs: before, a plan can say nothing of them."""
    for name in nodes:
        gpus = len(cluster.nodes[name].machine().gpu_uuids())
        eventually(lambda name=name: phases(cluster, name), ["Idle"] * gpus)


def row(cluster: Cluster, node: str) -> dict[str, str]:
    """What `kubectl get gpupartitions` shows of a node with one GPU, by column; "" for an empty one."""
    done = cluster.kubectl("get", "gpupartitions", "--field-selector", f"spec.nodeName={node}")
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    starts = [at for at, letter in enumerate(head) if letter != " " and (at == 0 or head[at - 1] == " ")]
    ends = [*starts[1:], None]
    return {head[a:b].strip(): lines[0][a:b].strip() for a, b in zip(starts, ends, strict=True)}


def taints(cluster: Cluster, node: str) -> list[str]:
    """The keys of a node's taints."""
    return [one["key"] for one in cluster.node(node)["spec"].get("taints") or ()]


def labels(cluster: Cluster, node: str) -> dict[str, str]:
    """The labels of ours on a node."""
    found = cluster.node(node)["metadata"]["labels"]
    return {key: value for key, value in found.items() if key.startswith("migd.dev/")}


def eventually(
    look: Callable[[], object], wanted: object, within_s: float = WITHIN_S, every_s: float = EVERY_S
) -> None:
    """Wait until a look gives exactly this; AssertionError with what it gives instead."""
    assert until(lambda: look() == wanted, within_s, every_s), f"{look()!r} and not {wanted!r} after {within_s:.0f} s"


def closed(cluster: Cluster, node: str) -> None:
    """Wait until a node is closed, and look often: what the test does next has to come before the agent goes on."""
    eventually(lambda: TAINT in taints(cluster, node), True, every_s=0.1)


def ready(cluster: Cluster, name: str) -> None:
    """Wait until a plan's present generation is carried out; told by a watch, since that takes long."""
    told, ends_s = ("", ""), time.monotonic() + WITHIN_S
    while (left_s := int(ends_s - time.monotonic())) > 0:
        events = cluster.plane.admin.watch(PLANS, left_s, fieldSelector=f"metadata.name={name}")
        with contextlib.closing(events):
            for event in events:
                if event["type"] == "ERROR":
                    break
                told = condition_of(event["object"], "Ready")
                if told == ("True", "AsWished"):
                    return
    raise AssertionError(f"plan {name}: Ready is {told} after {WITHIN_S:.0f} s")


def run_pod(cluster: Cluster, name: str, node: str, grace_s: int = 1, notes: Json | None = None, **limits: int) -> None:
    """A pod for this node that asks for `mig_1g_10gb=1`, which is nvidia.com/mig-1g.10gb."""
    spec = pod_spec(node, grace_s, limits)
    cluster.plane.admin.create(PODS, {"metadata": {"name": name, "annotations": notes or {}}, "spec": spec}).object()


def pod_spec(node: str, grace_s: int, limits: Mapping[str, int]) -> Json:
    """What a pod for this node is, that asks for these."""
    asked = {f"nvidia.com/{key.replace('_', '-', 1).replace('_', '.')}": str(n) for key, n in limits.items()}
    return {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": grace_s,
        "containers": [{"name": "main", "image": "train", "resources": {"limits": asked}}],
    }


def deploy(
    cluster: Cluster, name: str, node: str, replicas: int, grace_s: int = 1, notes: Json | None = None, **limits: int
) -> None:
    """A Deployment of such pods, which makes another one for each that goes. notes: annotations of its pods."""
    marks = {"app": name}
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": marks},
        "template": {
            "metadata": {"labels": marks, "annotations": notes or {}},
            "spec": pod_spec(node, grace_s, limits),
        },
    }
    cluster.plane.admin.create(DEPLOYMENTS, {"metadata": {"name": name}, "spec": spec}).object()


def pods_of(cluster: Cluster, app: str) -> list[Json]:
    """The pods of a Deployment, by name."""
    found = cluster.plane.admin.get(PODS, labelSelector=f"app={app}").object()["items"]
    return sorted(found, key=lambda one: str(one["metadata"]["name"]))


def running(cluster: Cluster, app: str) -> list[Json]:
    """Those of them that run and are not on their way out."""
    return [
        one
        for one in pods_of(cluster, app)
        if one.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in one["metadata"]
    ]


def budget(cluster: Cluster, name: str, app: str, least: int) -> None:
    """A PodDisruptionBudget of so many of a Deployment's pods, once its controller has counted them."""
    spec = {"minAvailable": least, "selector": {"matchLabels": {"app": app}}}
    cluster.plane.admin.apply(f"{BUDGETS}/{name}", {**_budget(name), "spec": spec}, "admin", force=True).object()

    def counted() -> bool:
        found = cluster.plane.admin.get(f"{BUDGETS}/{name}").object()
        said = found.get("status") or {}
        healthy = said.get("currentHealthy") == len(running(cluster, app))
        return healthy and said.get("observedGeneration") == found["metadata"]["generation"]

    eventually(counted, True)


def _budget(name: str) -> Json:
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name}}


def pod(cluster: Cluster, name: str) -> Json:
    """A pod of the namespace `default`."""
    return cluster.plane.admin.get(f"{PODS}/{name}").object()


def runs(cluster: Cluster, name: str, within_s: float = WITHIN_S) -> Json:
    """Wait until a pod runs."""
    eventually(lambda: pod(cluster, name).get("status", {}).get("phase"), "Running", within_s)
    return pod(cluster, name)


def end_pod(cluster: Cluster, name: str) -> None:
    """Delete a pod and see it gone."""
    cluster.plane.admin.delete(f"{PODS}/{name}", gracePeriodSeconds="1")
    eventually(lambda: cluster.plane.admin.get(f"{PODS}/{name}").code, 404, 60.0)


def quiet(cluster: Cluster, *nodes: str) -> None:
    """Nothing of ours is left on these nodes: no taint, no debt."""
    for name in nodes:
        found = cluster.node(name)
        assert TAINT not in taints(cluster, name), f"{name} is still closed"
        assert "migd.dev/owed" not in found["metadata"].get("annotations", {}), f"{name} is still owed"
