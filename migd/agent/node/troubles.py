"""What is told of GPUs that cannot be read at all: the last that was known of them, and why it is no longer known."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from migd.agent.node.telling import Told
from migd.kube.stored import Stored
from migd.plans.conditions import MESSAGE_MAX, Condition, Reason, Said, cut, following
from migd.plans.partitions import Partition, PartitionStatus

OURS: Final = frozenset({"Ready", "Drained", "Applied", "Advertised"})
"""The conditions that are the agent's; the others are the operator's."""


def unread(partitions: Iterable[Stored[Partition]], reason: Reason, message: str, now: datetime) -> Told:
    """What to tell of a node whose GPUs cannot be read, for this reason of the API's list."""
    ready = Said("Ready", "False", reason, message)
    return Told({p.name: _unread(p, ready, now) for p in partitions}, {"migd.dev/state": "failed"})


def _unread(partition: Stored[Partition], ready: Said, now: datetime) -> PartitionStatus:
    before = partition.value.status
    said = [ready, *(_again(c) for c in before.conditions if c.type in OURS - {"Ready"})]
    return before.model_copy(
        update={
            "observed_generation": partition.generation,
            "phase": "Failed",
            "reason": ready.reason,
            "message": cut(ready.message, MESSAGE_MAX),
            "conditions": following(before.conditions, said, partition.generation, now),
            "evictions": (),
        }
    )


def _again(condition: Condition) -> Said:
    return Said(condition.type, condition.status, condition.reason, condition.message)
