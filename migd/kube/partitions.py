"""GPUPartitions and their plans as caches keep them: the values of `migd.plans`, shared where they are equal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final, get_args

from migd.kube.errors import Json
from migd.kube.stored import Interner, Kind
from migd.plans.conditions import Condition
from migd.plans.fields import Value
from migd.plans.partitions import Partition, partition_of
from migd.plans.plan import API_VERSION, Plan, plan_of
from migd.plans.problems import BadInput
from migd.plans.statuses import PlanStatus, plan_status_of

_SHARED: Final = frozenset(
    {
        *("node_name", "node_uid", "desired", "assignment"),
        *("model", "architecture", "pci_device_id", "driver", "trouble", "profiles"),
        *("summary", "reason", "in_use", "mig", "profile", "placement"),
        *("from_layout", "to"),
    }
)
"""The fields of which a fleet has few different values; what is of one GPU only would crowd the interner."""


@dataclass(frozen=True, slots=True)
class PlanObject:
    """A GPUPartitionPlan, and what its status says; its uid, generation and annotations are in `Stored`.

    plan: None where it is stored but no plan of this version, such as one of a newer migd; invalid says why.
    status: None where nobody can read it, so that it must not be written over either.
    """

    plan: Plan | None
    status: PlanStatus | None
    invalid: str = ""


def _plan(document: Json, _: Interner) -> PlanObject:
    """A plan; one that is not valid stays in sight, since GPUs may carry its wish and somebody must be told."""
    name = document["metadata"]["name"]
    try:
        status = plan_status_of(document.get("status"), name)
    except BadInput as bad:
        return PlanObject(None, None, _sentence(bad))
    try:
        return PlanObject(plan_of(document, name), status)
    except BadInput as bad:
        return PlanObject(None, status, _sentence(bad))


def _sentence(bad: BadInput) -> str:
    """What is wrong, in one line; the source is the object that it is written into."""
    return "; ".join(str(problem) for problem in bad.problems)


def _partition(document: Json, same: Interner) -> Partition:
    try:
        found = partition_of(document, document["metadata"]["name"])
    except BadInput as bad:
        raise ValueError(str(bad)) from bad
    _share(found, same)
    return found


def _share(value: Value, same: Interner) -> None:
    """Let a value that was just read, and that nobody else has yet, share what others have too.

    Which fields a document gave and which are defaults is forgotten: nobody asks, and it takes a set for each value.
    """
    shared, deep = _parts(type(value))
    fields = value.__dict__
    for name in shared:
        fields[name] = same(fields[name])
    for name in deep:
        part = fields[name]
        if isinstance(part, Value):
            _share(part, same)
        elif part and isinstance(part[0], Condition):
            fields[name] = same(part)
        else:
            for item in part or ():
                _share(item, same)
    object.__setattr__(value, "__pydantic_fields_set__", _names(type(value)))


@cache
def _parts(model: type[Value]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which fields of a model are shared, and which of the others have values of ours in them, or tuples of such."""
    others = {name: field.annotation for name, field in model.model_fields.items() if name not in _SHARED}
    deep = tuple(name for name, annotation in others.items() if _holds_values(annotation))
    return tuple(name for name in model.model_fields if name in _SHARED), deep


def _holds_values(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, Value):
        return True
    return any(_holds_values(inner) for inner in get_args(annotation))


@cache
def _names(model: type[Value]) -> set[str]:
    """The names of a model's fields, one set for all its values."""
    return set(model.model_fields)


PLANS: Final = Kind(
    API_VERSION,
    "GPUPartitionPlan",
    "gpupartitionplans",
    _plan,
    list_maps={("status", "conditions"): ("type",)},
)
PARTITIONS: Final = Kind(
    API_VERSION,
    "GPUPartition",
    "gpupartitions",
    _partition,
    list_maps={
        ("status", "conditions"): ("type",),
        ("status", "victims"): ("uid",),
        ("status", "evictions"): ("podUID",),
    },
)
