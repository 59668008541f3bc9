"""Which turn a node has: the partitions that carry the same assignment, once all of them do, as orders per GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from migd.agent.node.seeing import NodeSeen
from migd.agent.orders import Goal, Order
from migd.agent.records import NodeWork
from migd.kube.stored import Stored
from migd.plans.partitions import Desired, Partition, Switch
from migd.plans.plan import GpuSelector, InstanceRule, Rule

HOLD: Final = "migd.dev/hold"
RETRY: Final = "migd.dev/retry"
RESTORE: Final = "restore"
"""The turn that nobody gave: a reboot took what the node had from a wish that is still there."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A node's turn. orders: by GPU UUID, one of one goal each; GPUs that are gone or held are not among them.

    desired: by GPU UUID, the wish of each GPU that has an order.
    """

    id: str
    orders: Mapping[str, Order]
    desired: Mapping[str, Desired]


def turn_of(seen: NodeSeen, work: NodeWork) -> Turn | None:
    """The node's turn, or None: only what as many partitions carry as it says, and of no other node of this name.

    Where two are complete the operator is at writing: the one under way goes on, and no other begins.
    """
    ours = [p for p in seen.partitions if p.value.spec.node_uid == seen.node.uid and not p.deleting]
    groups: dict[tuple[str, int], list[Stored[Partition]]] = {}
    for partition in ours:
        assignment = partition.value.spec.assignment
        if assignment is not None:
            groups.setdefault((assignment.id, assignment.gpus), []).append(partition)
    complete = {turn: group for (turn, gpus), group in groups.items() if len(group) == gpus}
    if len(complete) == 1 or work.turn in complete:
        turn = work.turn if work.turn in complete else next(iter(complete))
        return _turn(turn, complete[turn], seen)
    if complete or not (work.at_once or work.turn == RESTORE):
        return None
    return _restoring(ours, seen, work)


def held_of(partition: Stored[Partition], seen: NodeSeen) -> str:
    """Who says hands off of this GPU: "" for nobody."""
    if HOLD in seen.node.annotations:
        return f"node {seen.node.name}'s annotation {HOLD} says hands off"
    return f"the annotation {HOLD} says hands off" if HOLD in partition.annotations else ""


def _turn(turn: str, group: Iterable[Stored[Partition]], seen: NodeSeen) -> Turn:
    return _of_goals(
        turn, group, seen, lambda _uuid, desired: _rule(desired.mig, desired.instances, desired.allow_empty)
    )


def _restoring(ours: Iterable[Stored[Partition]], seen: NodeSeen, work: NodeWork) -> Turn | None:
    """What a reboot took away, where the wish that it came from was withdrawn but not deleted."""
    turn = _of_goals(RESTORE, ours, seen, lambda uuid, _desired: work.accepted.get(uuid))
    return turn if turn.orders else None


def _of_goals(
    turn: str, group: Iterable[Stored[Partition]], seen: NodeSeen, goal_of: Callable[[str, Desired], Goal | None]
) -> Turn:
    """The orders of those that are there, wished for and not held. goal_of: by UUID and wish, None for no order."""
    orders: dict[str, Order] = {}
    wishes: dict[str, Desired] = {}
    for partition in group:
        gpu, desired = seen.gpu(partition.name), partition.value.spec.desired
        if gpu is None or gpu.lost or desired is None or HOLD in partition.annotations:
            continue
        goal = goal_of(gpu.uuid, desired)
        if goal is not None:
            orders[gpu.uuid] = Order(turn, {gpu.uuid: goal}, desired.foreign_instances, desired.on_failure)
            wishes[gpu.uuid] = desired
    return Turn(turn, orders, wishes)


@lru_cache(maxsize=256)
def _rule(mig: Switch, instances: tuple[InstanceRule, ...], allow_empty: bool) -> Rule:
    every = GpuSelector(every=True)
    if mig == "Disabled":
        return Rule(gpus=every, mig="Disabled")
    return Rule(gpus=every, instances=instances, allow_empty=allow_empty)
