"""The kinds that the simulated API server serves, with what it fills in and refuses in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from migd.sim.cluster.fields import ListMaps

Json = dict[str, Any]
Check = Callable[[Json, Json | None], tuple[str, ...]]
"""What is wrong with a document, given the one before it (None when it is made); empty when nothing is."""


def _fine(_new: Json, _old: Json | None) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class SimKind:
    """One kind. status: it has a status subresource. generation: its spec's generations are counted. owned: who owns
    which field is kept; not for kinds that nobody applies.

    defaults: path, with "[]" for each item of a list -> what is filled in there where it is missing.
    """

    api_version: str
    kind: str
    plural: str
    namespaced: bool = False
    status: bool = False
    generation: bool = False
    owned: bool = True
    list_maps: ListMaps = field(default_factory=dict)
    defaults: Mapping[tuple[str, ...], Json] = field(default_factory=dict)
    check: Check = _fine

    @property
    def root(self) -> str:
        """The URL path of its group and version."""
        return f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"


def _partition(new: Json, old: Json | None) -> tuple[str, ...]:
    spec, before = new.get("spec") or {}, (old or {}).get("spec") or {}
    wrong = [f"spec.{name}: Required value" for name in ("nodeName", "nodeUID") if name not in spec]
    wrong += [
        f"spec.{n}: {n} cannot change" for n in ("nodeName", "nodeUID") if n in before and before[n] != spec.get(n)
    ]
    if "desired" in spec:
        needed = ("mig", "plan", "disruption", "summary")
        wrong += [f"spec.desired.{name}: Required value" for name in needed if name not in spec["desired"]]
    if "assignment" in spec and "desired" not in spec:
        wrong.append("spec: assignment goes with desired only")
    return tuple(wrong)


def _plan(new: Json, _old: Json | None) -> tuple[str, ...]:
    spec = new.get("spec") or {}
    return tuple(f"spec.{name}: Required value" for name in ("nodeSelector", "rules") if name not in spec)


def _event(new: Json, _old: Json | None) -> tuple[str, ...]:
    needed = ("eventTime", "reportingController", "reportingInstance", "action", "reason", "type")
    wrong = [f"{name}: Required value" for name in needed if not new.get(name)]
    if len(new.get("note", "").encode()) > 1024:
        wrong.append("note: can have at most 1024 bytes")
    return tuple(wrong)


def _budget(new: Json, _old: Json | None) -> tuple[str, ...]:
    given = [name for name in ("minAvailable", "maxUnavailable") if name in (new.get("spec") or {})]
    return () if len(given) == 1 else (f"spec: {' and '.join(given) or 'neither'}: exactly one is needed",)


KINDS: Final = (
    SimKind(
        "migd.dev/v1alpha1",
        "GPUPartition",
        "gpupartitions",
        status=True,
        generation=True,
        list_maps={
            ("status", "conditions"): ("type",),
            ("status", "victims"): ("uid",),
            ("status", "evictions"): ("podUID",),
        },
        defaults={
            ("spec", "desired"): {
                "allowEmpty": False,
                "onFailure": "Rollback",
                "drift": "Correct",
                "foreignInstances": "Refuse",
            },
            ("spec", "desired", "instances", "[]"): {"count": 1},
        },
        check=_partition,
    ),
    SimKind(
        "migd.dev/v1alpha1",
        "GPUPartitionPlan",
        "gpupartitionplans",
        status=True,
        generation=True,
        list_maps={("status", "conditions"): ("type",)},
        check=_plan,
    ),
    SimKind("v1", "Node", "nodes", status=True, owned=False, list_maps={("status", "conditions"): ("type",)}),
    SimKind("v1", "Pod", "pods", namespaced=True, status=True, owned=False),
    SimKind("apps/v1", "DaemonSet", "daemonsets", namespaced=True, status=True, generation=True, owned=False),
    SimKind("apps/v1", "ReplicaSet", "replicasets", namespaced=True, status=True, generation=True, owned=False),
    SimKind("batch/v1", "Job", "jobs", namespaced=True, status=True, generation=True, owned=False),
    SimKind(
        "policy/v1",
        "PodDisruptionBudget",
        "poddisruptionbudgets",
        namespaced=True,
        status=True,
        generation=True,
        check=_budget,
    ),
    SimKind("coordination.k8s.io/v1", "Lease", "leases", namespaced=True, owned=False),
    SimKind("resource.k8s.io/v1", "ResourceSlice", "resourceslices"),
    SimKind("events.k8s.io/v1", "Event", "events", namespaced=True, owned=False, check=_event),
    # last, since what is in a namespace has paths that begin as its own
    SimKind("v1", "Namespace", "namespaces", status=True, owned=False),
)


def filled_in(kind: SimKind, document: Json) -> Json:
    """A document with what is missing filled in."""
    for path, values in kind.defaults.items():
        _fill(document, path, values)
    return document


def _fill(inside: Any, path: tuple[str, ...], values: Json) -> None:
    if not path:
        if isinstance(inside, dict):
            for name, value in values.items():
                inside.setdefault(name, value)
    elif path[0] == "[]":
        for item in inside if isinstance(inside, list) else ():
            _fill(item, path[1:], values)
    elif isinstance(inside, dict) and path[0] in inside:
        _fill(inside[path[0]], path[1:], values)
