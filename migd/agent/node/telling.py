"""What the agent tells of its node: the status of each GPUPartition, and the node's labels. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final

from migd.agent.node.judgement import judgement_of
from migd.agent.node.moments import Judged, View, judge, view_of, work_of
from migd.agent.node.seeing import NodeSeen
from migd.agent.node.showing import board_doc, observed_doc, previous_doc, same_but_use, transition_doc
from migd.agent.records import Record
from migd.kube.stored import OURS, Stored
from migd.plans.conditions import HALF_WAY, MESSAGE_MAX, MOVING, WELL, Phase, cut, following
from migd.plans.partitions import PODS_MAX, Partition, PartitionStatus, Pod

COALESCE_S: Final = 30.0
"""A change of use alone is told no more often: a job that starts is not a write."""

_WORST: Final[tuple[tuple[str, frozenset[Phase]], ...]] = (
    ("failed", frozenset({"Failed", "Lost"})),
    ("blocked", frozenset({"Blocked", "Held", "RebootRequired"})),
    ("changing", MOVING),
    ("ready", frozenset({"Ready"})),
)
STATE: Final = f"{OURS}state"
_COUNT: Final = (f"{OURS}mig-", ".count")


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
    view = view_of(seen, work_of(record))
    judged = judge(record, view)
    statuses = {}
    for partition in seen.partitions:
        if partition.value.spec.node_uid == seen.node.uid:
            status = _status(record, view, judged, partition)
            last_s = before.get(partition.name)
            recent = last_s is not None and seen.now_s - last_s < COALESCE_S
            was = _ours(partition.value.status)
            held_back = recent and was != status and same_but_use(was, status)
            statuses[partition.name] = was if held_back else status
    return Told(statuses, _labels(seen, statuses))


def _status(record: Record, view: View, judged: Judged, partition: Stored[Partition]) -> PartitionStatus:
    was, now = partition.value.status, view.held.gpu(partition.name)
    said = judgement_of(record, view, judged, partition)
    readable = now is not None and not now.out_of_reach
    ours = record.gpu(now.uuid if now is not None else partition.name)
    half_way = said.phase == was.phase  # each step and each operation is not worth a write
    well = said.phase == "Ready" or (said.phase == "Idle" and said.cause.reason in WELL)
    steady = half_way and said.phase in HALF_WAY
    transition = transition_doc(record, partition, now, was.last_transition)
    if half_way and transition is not None and was.last_transition is not None and transition.finished_at is None:
        transition = was.last_transition if was.last_transition.finished_at is None else transition
    return PartitionStatus(
        observed_generation=partition.generation,
        phase=said.phase,
        reason="" if well else said.cause.reason,
        message="" if well else cut(said.cause.message, MESSAGE_MAX),
        conditions=following(was.conditions, said.conditions, partition.generation, view.seen.wall),
        board=board_doc(now, view.seen.driver) if now is not None and readable else was.board,
        observed=observed_doc(now, ours.owned) if now is not None and readable and not steady else was.observed,
        blockers=said.blockers,
        blockers_left_out=said.blockers_left_out,
        victims=_victims(record, partition),
        last_transition=transition,
        previous=previous_doc(ours.before) or was.previous,
    )


def _victims(record: Record, partition: Stored[Partition]) -> tuple[Pod, ...]:
    """The pods on this GPU that the operator is to evict, so many at a time; the rest when these have gone."""
    work = work_of(record)
    mine = next((pods for uuid, pods in work.victims.items() if uuid.lower() == partition.name), ())
    if work.stage != "Draining":
        return ()
    return tuple(Pod(namespace=p.namespace, name=p.name, uid=p.uid) for p in sorted(mine)[:PODS_MAX])


def _ours(status: PartitionStatus) -> PartitionStatus:
    """The agent's part of a status as it was read."""
    kept = tuple(c for c in status.conditions if c.type in ("Ready", "Drained", "Applied", "Advertised"))
    return status.model_copy(update={"evictions": (), "conditions": tuple(sorted(kept, key=lambda c: c.type))})


def _labels(seen: NodeSeen, statuses: Mapping[str, PartitionStatus]) -> dict[str, str | None]:
    """The node's labels of ours; none where no GPU has a wish. Instances are counted when a change is over."""
    wished = {p.name for p in seen.partitions if p.value.spec.desired is not None}
    phases = {status.phase for name, status in statuses.items() if name in wished}
    start, end = _COUNT
    there = [k for k in seen.node.value.labels if k == STATE or (k.startswith(start) and k.endswith(end))]
    labels: dict[str, str | None] = dict.fromkeys(there)
    if not phases:
        return labels
    labels[STATE] = worst_of(phases)
    if phases & HALF_WAY:  # kubelet, scheduler and many others follow nodes: an operation is not worth a write
        return labels | {key: seen.node.value.labels[key] for key in there if key != STATE}
    counts: dict[str, int] = {}
    for gpu in seen.gpus:
        for instance in gpu.instances:
            if instance.whole:
                key = f"{start}{instance.instance.profile.replace('+', '.')}{end}"
                counts[key] = counts.get(key, 0) + 1
    return labels | {key: str(number) for key, number in counts.items()}


def worst_of(phases: Set[Phase | None]) -> str:
    """The node's state by the phases of its GPUs that have a wish."""
    return next((word for word, those in _WORST if phases & those), "changing")
