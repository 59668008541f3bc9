"""What is told where nothing can be decided: the last that was known of the GPUs, and why it goes no further."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from migd.agent.node.telling import STATE, Told, worst_of
from migd.kube.stored import Stored
from migd.plans.conditions import COMMITTED, MESSAGE_MAX, Condition, Phase, Reason, Said, cut, following
from migd.plans.partitions import Partition, PartitionStatus

OURS: Final = frozenset({"Ready", "Drained", "Applied", "Advertised"})
"""The conditions that are the agent's; the others are the operator's."""
_STAYS: Final[frozenset[Phase]] = COMMITTED | {"Draining", "RebootRequired", "Failed", "Held", "Lost"}
"""Phases that say of a GPU what a record that cannot be saved changes nothing of."""


def unread(partitions: Iterable[Stored[Partition]], reason: Reason, message: str, now: datetime) -> Told:
    """What to tell of a node whose GPUs cannot be read, for this reason of the API's list."""
    return _told(partitions, {p.name: _with(p, "Failed", reason, message, now) for p in partitions})


def unsaved(partitions: Iterable[Stored[Partition]], message: str, now: datetime) -> Told:
    """What to tell of a node whose record cannot be saved: whatever is wished there, nothing is begun."""
    statuses = {}
    for one in partitions:
        if one.value.spec.desired is not None:
            phase = one.value.status.phase
            phase = phase if phase in _STAYS else "Blocked"
            statuses[one.name] = _with(one, phase, "NoPermission", message, now)
    return _told(partitions, statuses)


def _told(partitions: Iterable[Stored[Partition]], statuses: dict[str, PartitionStatus]) -> Told:
    """With the node's state, which is of the GPUs that have a wish; a node without any has none."""
    phases = {s.phase for p in partitions if p.value.spec.desired is not None and (s := statuses.get(p.name))}
    return Told(statuses, {STATE: worst_of(phases)} if phases else {})


def _with(partition: Stored[Partition], phase: Phase, reason: Reason, message: str, now: datetime) -> PartitionStatus:
    before = partition.value.status
    ready = Said("Ready", "False", reason, message)
    said = [ready, *(_again(c) for c in before.conditions if c.type in OURS - {"Ready"})]
    return before.model_copy(
        update={
            "observed_generation": partition.generation,
            "phase": phase,
            "reason": reason,
            "message": cut(message, MESSAGE_MAX),
            "conditions": following(before.conditions, said, partition.generation, now),
            "victims": (),  # who cannot remember whom it asked must ask nobody
            "evictions": (),
        }
    )


def _again(condition: Condition) -> Said:
    return Said(condition.type, condition.status, condition.reason, condition.message)
