"""Pods: what we read of them, whether one may be evicted, and what is asked for then."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from migd.kube.errors import Json
from migd.kube.nodes import TAINT
from migd.kube.stored import Interner, Kind, Stored, Where
from migd.plans.matching import matches
from migd.plans.plan import LabelSelector

_GPU: Final = "nvidia.com/"
_CLIENT: Final = "nvidia.com/gpu.deploy."
_MIRROR: Final = "kubernetes.io/config.mirror"
TERMINAL: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class Pod:
    """What we read of a pod.

    node_name: "" while not bound. phase: as the kubelet tells. gpus: what it asks for under nvidia.com/, over all its
    containers, as (resource, number) by name. claims: it asks for devices by resource claims.
    owner: kind of its controller, "" for a pod nobody would make again; owner_uid: which. mirror: a static pod's
    shadow. empty_dir: it has a volume that is lost with it. containers: their names, init containers left out.
    container_ids: of those that were started, without their runtime's name, init containers included.
    tolerates: our taint does not keep it away. clients: labels of the GPU Operator's by which it chooses its node.
    """

    node_name: str
    phase: str
    labels: Mapping[str, str]
    gpus: tuple[tuple[str, int], ...]
    claims: bool
    owner: str
    mirror: bool
    empty_dir: bool
    containers: tuple[str, ...]
    container_ids: tuple[str, ...] = ()
    tolerates: bool = False
    clients: tuple[str, ...] = ()
    owner_uid: str = ""

    @property
    def terminal(self) -> bool:
        """It has ended: the kubelet has its devices back."""
        return self.phase in TERMINAL


def on_node(name: str) -> Where:
    """The pods bound to a node."""
    return Where(fields=f"spec.nodeName={name}")


def may_not_go(pod: Pod, protect: LabelSelector | None, allow: Collection[str]) -> str:
    """Why a pod may not be evicted, for people; "" where it may.

    protect: pods never to be evicted; None for none, an empty selector for all. allow: what is done all the same, of
    "EmptyDir" and "Unmanaged". Source: kubectl's drain/filters.go; what has ended may go, but a static pod's shadow.
    """
    if pod.mirror:
        return "it is a static pod: only its file on the node can end it"
    if pod.terminal:
        return ""
    if pod.owner == "DaemonSet":
        return "a DaemonSet's pod comes straight back"
    if protect is not None and matches(protect, pod.labels):
        return "disruption.protect has it"
    if not pod.owner and "Unmanaged" not in allow:
        return "it has no controller, so nobody would make it again; disruption.allow: [Unmanaged] lets it go"
    if pod.empty_dir and "EmptyDir" not in allow:
        return "what is in its emptyDir would be lost; disruption.allow: [EmptyDir] lets it go"
    return ""


def eviction(pod: Stored[Pod], grace_s: int | None) -> Json:
    """What is posted to have this very pod evicted. grace_s: seconds to end in; None is the pod's own."""
    grace = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {"preconditions": {"uid": pod.uid}, **grace},
    }


def _pod(document: Json, same: Interner) -> Pod:
    metadata, spec = document["metadata"], document["spec"]
    running = spec.get("containers") or ()
    controller: Json = next((o for o in metadata.get("ownerReferences") or () if o.get("controller")), {})
    return Pod(
        node_name=same(spec.get("nodeName", "")),
        phase=same((document.get("status") or {}).get("phase", "")),
        labels=same.mapping(metadata.get("labels")),
        gpus=same(_gpus(running, spec.get("initContainers") or ())),
        claims=bool(spec.get("resourceClaims")),
        owner=same(controller.get("kind", "")),
        mirror=_MIRROR in (metadata.get("annotations") or {}),
        empty_dir=any("emptyDir" in volume for volume in spec.get("volumes") or ()),
        containers=same(tuple(c["name"] for c in running)),
        container_ids=_container_ids(document.get("status") or {}),
        tolerates=any(_tolerates(t) for t in spec.get("tolerations") or ()),
        clients=same(tuple(sorted(k for k in spec.get("nodeSelector") or {} if k.startswith(_CLIENT)))),
        owner_uid=same(controller.get("uid", "")),
    )


def _container_ids(status: Json) -> tuple[str, ...]:
    """As in containerd://0123abcd…, the part behind the slashes."""
    told = (*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ()))
    return tuple(c["containerID"].rpartition("//")[2] for c in told if c.get("containerID"))


def _tolerates(toleration: Json) -> bool:
    """Whether a toleration is for our taint, which has no value. Source: the API's definition of Toleration."""
    if toleration.get("effect") not in (None, "", "NoSchedule") or toleration.get("key") not in (None, "", TAINT):
        return False
    return toleration.get("operator") == "Exists" or (toleration.get("key") == TAINT and not toleration.get("value"))


def _gpus(running: object, initial: object) -> tuple[tuple[str, int], ...]:
    """GPU resources over all containers, init containers at least as many as the greediest: any at all matters most."""
    total: dict[str, int] = {}
    for resource, number in _limits(running):
        total[resource] = total.get(resource, 0) + number
    for resource, number in _limits(initial):
        total[resource] = max(total.get(resource, 0), number)
    return tuple(sorted(total.items()))


def _limits(containers: object) -> list[tuple[str, int]]:
    """Limits, since for extended resources the API server holds requests equal to them."""
    assert isinstance(containers, list | tuple)
    return [
        (resource, number)
        for container in containers
        for resource, quantity in ((container.get("resources") or {}).get("limits") or {}).items()
        if resource.startswith(_GPU) and (number := _number(str(quantity)))
    ]


def _number(quantity: str) -> int:
    """A quantity as a whole number, rounded up; 1 for one that cannot be read: it asks for something.

    Source: apimachinery, resource.Quantity; 3000 is stored as 3k.
    """
    found = _QUANTITY.fullmatch(quantity)
    if found is None:
        return 1
    digits, exponent, suffix = found.groups()
    return math.ceil(Decimal(digits).scaleb(int(exponent or 0)) * _FACTORS[suffix or ""])


_QUANTITY: Final = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)(?:[eE]([0-9]{1,2})|([kMGTPE]|[KMGTPE]i))?")
_FACTORS: Final[Mapping[str, int]] = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate(("K", "M", "G", "T", "P", "E"), 1)},
}


PODS: Final = Kind("v1", "Pod", "pods", _pod, namespaced=True)
