"""Pods, nodes and DaemonSets as documents: what the simulated controllers read of them. Pure.

How a simulated pod behaves is said by annotations under `sim.migd.dev/`, all of them optional.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from migd.sim.cluster.fields import Json
from migd.sim.nodes.devices import Wants

PROGRAM: Final = "sim.migd.dev/program"
"""What its containers do: compute (what who holds devices does by itself), idle, or one of `programs`."""
LASTS_S: Final = "sim.migd.dev/lasts-s"
"""It ends by itself, and well, so long after it began to run."""
CRASHES_AFTER_S: Final = "sim.migd.dev/crashes-after-s"
"""Its containers end badly so long after each start, and are started again."""
STOPS_IN_S: Final = "sim.migd.dev/stops-in-s"
"""How long it takes to stop when it is asked to; at most its grace. Without it, up to a second."""
HANGS: Final = "sim.migd.dev/hangs"
"""It does not end, not even when it is killed, until the annotation is taken off: a process in a call that hangs."""
BLOCKING: Final = ("NoSchedule", "NoExecute")
_TERMINAL: Final = ("Succeeded", "Failed")


def annotation(document: Json, name: str) -> str:
    """The value of an annotation; "" where there is none."""
    return str((document["metadata"].get("annotations") or {}).get(name, ""))


def labels_of(document: Json) -> Mapping[str, str]:
    """The labels of an object."""
    return document["metadata"].get("labels") or {}


def terminal(pod: Json) -> bool:
    """Whether a pod has ended."""
    return (pod.get("status") or {}).get("phase") in _TERMINAL


def running(pod: Json) -> bool:
    """Whether a pod runs and is not being deleted."""
    return (pod.get("status") or {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


def node_of(pod: Json) -> str:
    """The node that a pod is bound to; "" for none."""
    return str(pod["spec"].get("nodeName", ""))


def wants_of(pod: Json) -> Wants:
    """What a pod asks of its kubelet's device manager."""
    metadata = pod["metadata"]
    containers = {c["name"]: _limits(c) for c in pod["spec"]["containers"]}
    return Wants(metadata["uid"], metadata["namespace"], metadata["name"], containers)


def requested(pod: Json) -> dict[str, int]:
    """What a pod asks for under nvidia.com/, over all its containers."""
    total: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        for resource, number in _limits(container).items():
            total[resource] = total.get(resource, 0) + number
    return total


def _limits(container: Json) -> dict[str, int]:
    limits = (container.get("resources") or {}).get("limits") or {}
    return {resource: int(number) for resource, number in limits.items() if "/" in resource}


def resources_in(told: Mapping[str, str] | None) -> dict[str, int]:
    """The extended resources of a node's capacity or allocatable."""
    return {name: int(number) for name, number in (told or {}).items() if "/" in name}


def tolerated(taints: Iterable[Json], tolerations: Iterable[Json], effects: Iterable[str] = BLOCKING) -> bool:
    """Whether what keeps pods away, by these effects, does not keep these away."""
    held = list(tolerations)
    return all(any(_tolerates(t, taint) for t in held) for taint in taints if taint["effect"] in effects)


def _tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("effect", taint["effect"]) != taint["effect"]:
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return bool(toleration.get("key", taint["key"]) == taint["key"])
    return bool(toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""))


def selected(selector: Mapping[str, str] | None, labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one that a pod's nodeSelector takes."""
    return all(labels.get(name) == value for name, value in (selector or {}).items())


def ready(node: Json) -> bool:
    """Whether the node is told to be ready."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def pod_document(
    name: str,
    limits: Mapping[str, int] | None = None,
    *,
    namespace: str = "default",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, Any] | None = None,
    container: str = "main",
    **spec: Any,
) -> Json:
    """A pod of one container. limits: resource -> how many. spec: more of its spec."""
    one: Json = {"name": container, "image": "registry.example/image"}
    if limits:
        one["resources"] = {"limits": {name: str(number) for name, number in limits.items()}}
    metadata: Json = {"name": name, "namespace": namespace}
    if labels:
        metadata["labels"] = dict(labels)
    if annotations:
        metadata["annotations"] = {key: str(value) for key, value in annotations.items()}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [one], **spec}}


def pod_status(pod: Json | None, uid: str, phase: str, waiting: str, restarts: int, containers: Iterable[str]) -> Json:
    """What a kubelet tells of a pod whose containers are all alike; conditions that others wrote stay.

    pod: as it is, None where it is gone. waiting: the reason why they wait, "" where they do not.
    """
    container: Json = {"restartCount": restarts, "ready": phase == "Running" and not waiting}
    if waiting:
        container["state"] = {"waiting": {"reason": waiting}}
    elif phase == "Running":
        container["state"] = {"running": {}}
        container["containerID"] = f"containerd://{container_id(uid, restarts)}"
    else:
        container["state"] = {"terminated": {"exitCode": 0 if phase == "Succeeded" else 1}}
    told = ((pod or {}).get("status") or {}).get("conditions") or ()
    ready = {"type": "Ready", "status": str(container["ready"])}
    return {
        "phase": phase,
        "conditions": [*(c for c in told if c["type"] != "Ready"), ready],
        "containerStatuses": [{"name": name, **container} for name in containers],
    }


def owner_of(owner: Json) -> Json:
    """The reference by which a controller owns what it made."""
    metadata = owner["metadata"]
    named = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"]}
    return {**named, "uid": metadata["uid"], "controller": True, "blockOwnerDeletion": True}


def owner_uid(document: Json) -> str:
    """The uid of an object's controller; "" for none."""
    owners = document["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def container_id(uid: str, restarts: int) -> str:
    """The id of a pod's container, as its runtime would give it; another one after each restart."""
    return hashlib.sha256(f"{uid} {restarts}".encode()).hexdigest()
