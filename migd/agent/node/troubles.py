"""What is told of GPUs that cannot be read at all: the last that was known of them, and why it is no longer known."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from migd.agent.node.telling import Told
from migd.agent.records import Cause
from migd.kube.stored import Stored
from migd.plans.conditions import MESSAGE_MAX, Condition, Said, cut, following
from migd.plans.partitions import Partition, PartitionStatus

OURS: Final = frozenset({"Ready", "Drained", "Applied", "Advertised"})
"""The conditions that are the agent's; the others are the operator's."""


def unread(partitions: Iterable[Stored[Partition]], reason: str, message: str, now: datetime) -> Told:
    """What to tell of a node whose GPUs cannot be read, for this reason of the API's list."""
    cause = Cause(reason, message)
    return Told({p.name: _unread(p, cause, now) for p in partitions}, {"migd.dev/state": "failed"})


def _unread(partition: Stored[Partition], cause: Cause, now: datetime) -> PartitionStatus:
    before = partition.value.status
    said = [_again(c) for c in before.conditions if c.type in OURS - {"Ready"}]
    said.append(Said("Ready", "False", cause.reason, cause.message))  # type: ignore[arg-type]  of the closed list
    return before.model_copy(
        update={
            "observed_generation": partition.generation,
            "phase": "Failed",
            "reason": cause.reason,
            "message": cut(cause.message, MESSAGE_MAX),
            "conditions": following(before.conditions, said, partition.generation, now),
            "evictions": (),
        }
    )


def _again(condition: Condition) -> Said:
    return Said(condition.type, condition.status, condition.reason, condition.message)
