"""Which plan decides on which GPU of a node, and which GPUs are left out of the node's wish, and why."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from migd.plans.conditions import Reason
from migd.plans.matching import matches, selects
from migd.plans.partitions import Assignment, Desired, Partition
from migd_operator.facts import HOLD, InvalidPlan, NodeFacts, PlanFacts
from migd_operator.judging import Judge, Judged

NOTHING: Final[Mapping[str, InvalidPlan]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Left:
    """Why a GPU is left out of its node's wish."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Claim:
    """What the plans say of one GPU.

    plans: those that decide: none, one, or in a Conflict several. judged: what the one plan would do; None where
    there is not one, or the GPU cannot be judged. desired: the wish, None where left out or where no rule matches.
    """

    partition: Partition
    plans: tuple[PlanFacts, ...] = ()
    judged: Judged | None = None
    desired: Desired | None = None
    left: Left | None = None


@dataclass(frozen=True, slots=True)
class NodeWish:
    """The whole wish for one node. turn: the assignment that says so; None where there is nothing to wish.

    plans: those that have a GPU in the wish, by name. frozen: why nothing of this node's may be changed, since the
    whole wish cannot be known; turn is then the one that it carries.
    """

    node: NodeFacts
    claims: tuple[Claim, ...]
    turn: Assignment | None
    plans: tuple[PlanFacts, ...]
    frozen: Left | None = None

    @property
    def wished(self) -> tuple[Claim, ...]:
        """The claims that are part of the wish."""
        return tuple(c for c in self.claims if c.desired is not None)

    @property
    def changes(self) -> bool:
        """Whether there is anything to do on the hardware."""
        return any(c.judged is not None and c.judged.changes for c in self.wished)

    @property
    def evicts(self) -> bool:
        """Whether pods have to go there first."""
        return any(c.judged is not None and c.judged.evict for c in self.wished)

    @property
    def carried(self) -> frozenset[str]:
        """The names of the plans that its GPUs have a wish of: those that it had its last turn from."""
        return frozenset(d.plan.name for c in self.claims if (d := c.partition.spec.desired) is not None)

    @property
    def clear(self) -> bool:
        """Whether something could be begun there now, by what its agent tells of its GPUs.

        As the agent has it: a GPU in use keeps its whole node waiting; what else is in the way of one stops no other.
        """
        reasons = {c.judged.reason for c in self.wished if c.judged is not None and c.judged.changes}
        return "InUse" not in reasons and (None in reasons or not reasons)


def node_wish(
    node: NodeFacts,
    plans: Sequence[PlanFacts],
    partitions: Iterable[Partition],
    judge: Judge,
    duplicates: Mapping[str, str],
    invalid: Mapping[str, InvalidPlan] = NOTHING,
) -> NodeWish:
    """The wish for one node. plans: all, by name; partitions: this node's.

    duplicates: by partition, the other node that claims the same GPU. invalid: plans that cannot be read, by uid: the
    GPUs that carry the wish of one, and their node's turn with them, stay as they are.
    """
    here = [p for p in plans if matches(p.plan.spec.node_selector, node.labels)]
    ordered = sorted(partitions, key=lambda p: (p.gpu.index if p.gpu else -1, p.name))
    claims = [
        _unreadable(partition, invalid) or _claim(node, here, partition, judge, duplicates.get(partition.name))
        for partition in ordered
    ]
    frozen = next((c.left for c in claims if c.left is not None and c.left.reason == "Invalid"), None)
    if node.single_strategy and frozen is None:
        claims = _one_profile(claims)
    wished = [c for c in claims if c.desired is not None]
    deciding = {p.name: p for c in wished for p in c.plans}
    turn = Assignment(id=wish_id(wished, judge), gpus=len(wished)) if wished else None
    if frozen is not None and wished and len(carried := {c.partition.spec.assignment for c in wished}) == 1:
        turn = carried.pop() or turn
    return NodeWish(node, tuple(claims), turn, tuple(deciding[name] for name in sorted(deciding)), frozen)


def wish_id(wished: Iterable[Claim], judge: Judge) -> str:
    """The hash of a node's whole wish: which GPUs, and all that is desired of each."""
    parts = sorted((c.partition.name, judge.text(c.desired)) for c in wished if c.desired)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _unreadable(partition: Partition, invalid: Mapping[str, InvalidPlan]) -> Claim | None:
    """The claim of a GPU that carries the wish of a plan that cannot be read; None for any other."""
    carried = partition.spec.desired
    if carried is None or carried.plan.uid not in invalid:
        return None
    why = f"plan {carried.plan.name}, whose wish this GPU carries, is not valid any more: nothing of it is changed"
    return Claim(partition, left=Left("Invalid", why))


def _claim(
    node: NodeFacts, plans: Sequence[PlanFacts], partition: Partition, judge: Judge, duplicate: str | None
) -> Claim:
    gpu = partition.gpu
    if gpu is None:
        return Claim(partition)
    found: list[tuple[PlanFacts, int]] = []
    for plan in plans:
        rule = next((n for n, r in enumerate(plan.plan.spec.rules) if selects(r.gpus, gpu)), None)
        if rule is not None:
            found.append((plan, rule))
    if not found:
        return Claim(partition)
    if duplicate is not None:
        message = f"nodes {node.name} and {duplicate} both claim this GPU: one of them has a GPU that is not its own"
        return Claim(partition, tuple(p for p, _ in found), left=Left("DuplicateGPU", message))
    most = max(plan.plan.spec.priority for plan, _ in found)
    winners = [(plan, rule) for plan, rule in found if plan.plan.spec.priority == most]
    deciding = tuple(plan for plan, _ in winners)
    if len(winners) > 1:
        names = " and ".join(p.name for p in deciding)
        message = f"plans {names} both want this GPU at priority {most}: give one a higher priority"
        return Claim(partition, deciding, left=Left("Conflict", message))
    plan, rule = winners[0]
    if gpu.lost:
        return Claim(partition, deciding, left=Left("GPUUnhealthy", "the GPU fell off the bus"))
    judged = judge.judge(plan, rule, partition)
    if HOLD in partition.annotations or node.held:
        where = "the GPU's" if HOLD in partition.annotations else f"node {node.name}'s"
        return Claim(partition, deciding, judged, left=Left("Held", f"{where} annotation {HOLD} says hands off"))
    if judged.refused:
        assert judged.reason is not None
        return Claim(partition, deciding, judged, left=Left(judged.reason, judged.message))
    return Claim(partition, deciding, judged, judge.desired(plan, rule))


def _one_profile(claims: list[Claim]) -> list[Claim]:
    """MIG strategy single: accepted only where all GPUs of the node get one profile, or no MIG at all."""
    wished = [c for c in claims if c.desired is not None and c.judged is not None]
    on = [c for c in wished if c.desired is not None and c.desired.mig == "Enabled"]
    if not on:
        return claims
    profiles = {c.judged.profile for c in on if c.judged is not None}
    counting = [c for c in claims if c.partition.gpu is None or not c.partition.gpu.lost]
    if len(on) == len(counting) and len(profiles) == 1 and None not in profiles:
        return claims
    message = (
        "the node's MIG strategy is single: it takes one profile on all GPUs of the node; "
        "wish that, or set the strategy to mixed"
    )
    return [
        Claim(c.partition, c.plans, c.judged, left=Left("Infeasible", message)) if c.desired is not None else c
        for c in claims
    ]
