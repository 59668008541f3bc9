"""What a kubelet says of a pod, as values: what it asks for, how it goes, and the status documents of each state."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from controlplane.api import Json
from migd.sim.nodes.devices import Wants

PROGRAM: Final = "sim.migd.dev/program"
"""Annotation: `idle` for a pod that holds its devices and runs nothing on them."""
LASTS_S: Final = "sim.migd.dev/lasts-s"
"""Annotation: a container that is only simulated ends by itself, and well, after so many seconds."""
CRASHES_AFTER_S: Final = "sim.migd.dev/crashes-after-s"
"""Annotation: a container that is only simulated ends badly so many seconds after each start, and is restarted."""
STOPS_IN_S: Final = "sim.migd.dev/stops-in-s"
"""Annotation: how long it takes to stop when it is asked to; at most its grace."""
HANGS: Final = "sim.migd.dev/hangs"
"""Annotation: it does not end, not even when it is killed, until this is taken off: a process in a call that hangs."""
GPU: Final = "nvidia.com/"
_OURS: Final = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")


@dataclass(frozen=True, slots=True)
class ContainerState:
    """How one container is. kind: waiting, running or terminated; reason, message: as kubectl shows them."""

    kind: str
    reason: str = ""
    message: str = ""
    ready: bool = False
    restarts: int = 0
    since: str = ""
    exit_status: int = 0
    container_id: str = ""


def uid_of(pod: Json) -> str:
    """The pod's uid."""
    return str(pod["metadata"]["uid"])


def wants_of(pod: Json) -> Wants:
    """What the pod asks of the device manager."""
    metadata = pod["metadata"]
    containers = {c["name"]: _limits(c) for c in pod["spec"]["containers"]}
    return Wants(metadata["uid"], metadata["namespace"], metadata["name"], containers)


def annotation(pod: Json, key: str) -> str:
    """An annotation, "" where there is none."""
    return str((pod["metadata"].get("annotations") or {}).get(key, ""))


def grace_s(pod: Json) -> float | None:
    """How long the pod may take to end, None where nobody wants it to."""
    metadata = pod["metadata"]
    return float(metadata.get("deletionGracePeriodSeconds") or 0) if metadata.get("deletionTimestamp") else None


def terminal(pod: Json) -> bool:
    """Whether the pod has ended, as the API server has it."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def container_id(uid: str, container: str, restarts: int) -> str:
    """A container's id, as long as containerd's."""
    return hashlib.sha256(f"{uid}/{container}/{restarts}".encode()).hexdigest()


def address_of(uid: str) -> str:
    """A loopback address of the pod's own: so that pods of one machine may all listen on one port."""
    a, b, c = hashlib.sha256(uid.encode()).digest()[:3]
    return f"127.{64 + a % 128}.{b}.{1 + c % 254}"


def now_text() -> str:
    """The time as the API has it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def refused(reason: str, message: str) -> Json:
    """The status of a pod that was not admitted."""
    return {"phase": "Failed", "reason": reason, "message": message, "startTime": now_text()}


def status_of(
    pod: Json, phase: str, containers: Mapping[str, ContainerState], address: str, started: str, sent: Json | None
) -> Json:
    """The status of an admitted pod; conditions that others wrote stay.

    sent: the status as it was sent last, which the pod may not show yet: it tells since when something holds.
    """
    ready = bool(containers) and all(one.ready for one in containers.values())
    before = (pod.get("status") or {}).get("conditions") or []
    truth = {"Ready": ready, "ContainersReady": ready, "PodReadyToStartContainers": phase == "Running"}
    told = {one["type"]: one for one in ((sent or {}).get("conditions") or before)}
    conditions = [one for one in before if one["type"] not in _OURS]
    for kind in _OURS:
        truly = "True" if truth.get(kind, True) else "False"
        old = told.get(kind)
        since = old["lastTransitionTime"] if old is not None and old["status"] == truly else now_text()
        conditions.append({"type": kind, "status": truly, "lastTransitionTime": since})
    status: Json = {
        "phase": phase,
        "conditions": conditions,
        "containerStatuses": [_container(c, containers[c["name"]]) for c in pod["spec"]["containers"]],
        "startTime": started,
        "hostIP": "127.0.0.1",
        "hostIPs": [{"ip": "127.0.0.1"}],
    }
    if address:
        status |= {"podIP": address, "podIPs": [{"ip": address}]}
    return status


def _container(spec: Json, state: ContainerState) -> Json:
    told: Json = {"waiting": {"reason": state.reason or "ContainerCreating"}}
    if state.kind == "waiting" and state.message:
        told["waiting"]["message"] = state.message
    if state.kind == "running":
        told = {"running": {"startedAt": state.since}}
    if state.kind == "terminated":
        reason = state.reason or ("Error" if state.exit_status else "Completed")
        told = {"terminated": {"exitCode": state.exit_status, "reason": reason, "finishedAt": state.since}}
        told["terminated"]["containerID"] = f"containerd://{state.container_id}"
    found: Json = {
        "name": spec["name"],
        "image": spec["image"],
        "imageID": "",
        "ready": state.ready,
        "started": state.kind == "running",
        "restartCount": state.restarts,
        "state": told,
    }
    if state.container_id:
        found["containerID"] = f"containerd://{state.container_id}"
    return found


def _limits(container: Json) -> dict[str, int]:
    limits = (container.get("resources") or {}).get("limits") or {}
    return {name: int(number) for name, number in limits.items() if name.startswith(GPU)}


def same_status(one: Json, other: Json) -> bool:
    """Whether two statuses say the same, whatever their order of conditions."""
    return _ordered(one) == _ordered(other)


def _ordered(status: Json) -> Json:
    conditions: Sequence[Json] = status.get("conditions") or []
    return {**status, "conditions": sorted(conditions, key=lambda c: str(c["type"]))}
