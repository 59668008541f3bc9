"""What the agent tells of its node: the status of each GPUPartition, and the node's labels. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from migd.agent.node.seeing import NodeSeen
from migd.agent.records import Record
from migd.plans.partitions import PartitionStatus


@dataclass(frozen=True, slots=True)
class Told:
    """What is to be written, as it shall be.

    statuses: by name of partition, all of the agent's part of the status (its four conditions, no evictions); to be
    applied with `written(status)` where that differs. labels: ours on the node, None for one that must go.
    """

    statuses: Mapping[str, PartitionStatus]
    labels: Mapping[str, str | None]


def told(record: Record, seen: NodeSeen, before: Mapping[str, float]) -> Told:
    """What to tell after `decide` gave this record for this sight.

    before: by name of partition, on the clock, when this process last wrote its status; a change of use alone is held
    back until that is 30 s ago.
    """
    raise NotImplementedError
