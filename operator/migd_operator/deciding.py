"""The fleet's decision: from plans, partitions and nodes to what is to be written, and nothing else. Pure and total."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from migd.plans.conditions import Condition
from migd.plans.partitions import Assignment, Desired, EvictionDoc, Partition
from migd.plans.statuses import PlanStatus
from migd_operator.claims import Claim, Left, node_wish
from migd_operator.evicting import Ask, Drain, Evictions, evictions_of
from migd_operator.facts import APPROVED, TAKEN_OVER, Fleet, PlanFacts
from migd_operator.judging import Judge
from migd_operator.previewing import approved, preview_of
from migd_operator.shares import Share
from migd_operator.telling import invalid_status, partition_conditions, plan_status
from migd_operator.turns import Turn, give_turns, progress_of

PLAN_LABEL: Final = "migd.dev/plan"
_LABEL_MAX: Final = 63


@dataclass(frozen=True, slots=True)
class SpecWrite:
    """The operator's part of a partition's spec as it shall be; None where the field shall not be there."""

    partition: str
    desired: Desired | None
    assignment: Assignment | None

    @property
    def label(self) -> str | None:
        """The value of the label migd.dev/plan; None where there is no plan, or its name is too long for a label."""
        name = self.desired.plan.name if self.desired is not None else ""
        return name if 0 < len(name) <= _LABEL_MAX else None


@dataclass(frozen=True, slots=True)
class StatusWrite:
    """The operator's part of a partition's status as it shall be: its two conditions, and what came of evictions."""

    partition: str
    conditions: tuple[Condition, ...]
    evictions: tuple[EvictionDoc, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What differs from how it should be, in order of name; empty at rest.

    told: the operator's part of partitions' statuses. statuses: by plan, whole.
    deletions: partitions whose node is gone, or that moved to another node.
    asks: pods to look at and to evict, in this order.
    taken_over: nodes to take from mig-manager before they get their turn. released: nodes to give back to it.
    silent: nodes with partitions whose agent's lease has expired.
    """

    specs: tuple[SpecWrite, ...] = ()
    told: tuple[StatusWrite, ...] = ()
    statuses: tuple[tuple[str, PlanStatus], ...] = ()
    deletions: tuple[str, ...] = ()
    taken_over: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    asks: tuple[Ask, ...] = ()

    @property
    def at_rest(self) -> bool:
        """Whether there is nothing to write or to ask for."""
        writes = (self.specs, self.told, self.statuses, self.deletions, self.taken_over, self.released)
        return not any(writes) and not self.asks


def decide(fleet: Fleet) -> Decision:
    """What to write. Equal fleets give equal decisions, in whatever order their parts come."""
    now = fleet.now
    plans = sorted(fleet.plans, key=lambda p: (p.name, p.uid))
    nodes = sorted(fleet.nodes, key=lambda n: (n.name, n.uid))
    of_node: dict[str, list[Partition]] = {node.uid: [] for node in nodes}
    deletions = []
    duplicates = {name: node.name for node in nodes for name in sorted(node.duplicates)}
    for partition in sorted(fleet.partitions, key=lambda p: p.name):
        moved = partition.name in duplicates and partition.status.phase == "Lost"
        if moved or partition.spec.node_uid not in of_node:
            deletions.append(partition.name)
        else:
            of_node[partition.spec.node_uid].append(partition)
    judge = Judge()
    invalid = {plan.uid: plan for plan in fleet.invalid}
    wishes = [node_wish(n, plans, of_node[n.uid], judge, duplicates, invalid) for n in nodes if of_node[n.uid]]
    decided: dict[str, list[tuple[str, Claim]]] = {plan.uid: [] for plan in plans}
    for wish in wishes:
        for claim in wish.claims:
            for plan in claim.plans:
                decided[plan.uid].append((wish.node.name, claim))
    previews = {plan.uid: preview_of(plan, decided[plan.uid]) for plan in plans}
    stops = {p.name: stop for p in plans if (stop := _stop(p, approved(p, previews[p.uid])))}
    turns = give_turns([progress_of(wish) for wish in wishes], stops, now)
    evictions = evictions_of([drain for turn in turns.values() if (drain := _drain(turn)) is not None], fleet)
    uids = frozenset(plan.uid for plan in plans) | frozenset(invalid)
    specs: list[SpecWrite] = []
    said: list[StatusWrite] = []
    shares: dict[str, list[Share]] = {plan.uid: [] for plan in plans}
    for wish in wishes:
        turn = turns[wish.node.name]
        for claim in wish.claims:
            specs += _spec(claim, turn, uids)
            said += _told(claim, turn, evictions, now)
        by_plan: dict[str, list[Claim]] = {}
        for claim in wish.claims:
            for plan in claim.plans:
                by_plan.setdefault(plan.uid, []).append(claim)
        for uid, claims in by_plan.items():
            shares[uid].append(Share(turn, tuple(claims)))
    told = [
        (p.name, plan_status(p, shares[p.uid], previews[p.uid], stops.get(p.name), evictions, now), p.status)
        for p in plans
    ]
    told += [(p.name, invalid_status(p, p.status, now), p.status) for p in fleet.invalid if p.status is not None]
    return Decision(
        specs=tuple(sorted(specs, key=lambda s: s.partition)),
        told=tuple(sorted(said, key=lambda write: write.partition)),
        statuses=tuple((name, status) for name, status, before in sorted(told, key=_name) if status != before),
        deletions=tuple(deletions),
        taken_over=tuple(turn.progress.wish.node.name for _, turn in sorted(turns.items()) if _takes_over(turn)),
        released=tuple(n.name for n in nodes if TAKEN_OVER in n.annotations and _releases(turns.get(n.name))),
        silent=tuple(wish.node.name for wish in wishes if wish.node.silent),
        asks=evictions.asks,
    )


def _stop(plan: PlanFacts, is_approved: bool) -> Left | None:
    """Why a plan starts nothing that disturbs; None where it may."""
    if plan.plan.spec.paused:
        return Left("Paused", f"plan {plan.name} is paused")
    if not is_approved:
        message = f"plan {plan.name} waits for the annotation {APPROVED} with the digest of its preview"
        return Left("AwaitingApproval", message)
    return None


def _name(told: tuple[str, PlanStatus, PlanStatus]) -> str:
    return told[0]


def _takes_over(turn: Turn) -> bool:
    """Whether mig-manager must be off for what this node has its turn for. `away` saw that all its plans say so."""
    wish = turn.progress.wish
    wanted = bool(wish.plans) and all(p.plan.spec.owner == "TakeOver" for p in wish.plans)
    return wanted and wish.node.mig_manager and turn.act in ("Give", "Keep")


def _releases(turn: Turn | None) -> bool:
    """Whether no plan keeps a node from mig-manager any more, and nothing is under way there."""
    if turn is None:
        return True
    one, wish = turn.progress, turn.progress.wish
    kept = any(p.plan.spec.owner == "TakeOver" for c in wish.claims for p in c.plans)
    withdrawn_now = wish.turn is None and any(c.partition.spec.assignment is not None for c in wish.claims)
    going = withdrawn_now or (one.used and not one.given)  # its agent has not answered yet that it is out
    return not (kept or one.committed or wish.frozen is not None or (going and not wish.node.silent))


def _spec(claim: Claim, turn: Turn, uids: frozenset[str]) -> tuple[SpecWrite, ...]:
    partition = claim.partition
    before = SpecWrite(partition.name, partition.spec.desired, partition.spec.assignment)
    after = _wanted(claim, turn, before, uids)
    return () if after == before and after.label == partition.labels.get(PLAN_LABEL) else (after,)


def _wanted(claim: Claim, turn: Turn, before: SpecWrite, uids: frozenset[str]) -> SpecWrite:
    """What a partition's spec shall be: a wish comes with its turn, and stays until the next one's."""
    wish = turn.progress.wish
    unreadable = claim.left is not None and claim.left.reason == "Invalid"
    if turn.act == "Leave" or claim.partition.gpu is None or unreadable:
        return before
    if turn.act in ("Give", "Keep") and claim.desired is not None:
        return SpecWrite(before.partition, claim.desired, wish.turn)
    gone = before.desired is not None and before.desired.plan.uid not in uids
    if not claim.plans and turn.progress.inside and not gone:
        return SpecWrite(
            before.partition, before.desired, None
        )  # it says in whose limit the node counts until it is out
    if not claim.plans or gone:
        return SpecWrite(before.partition, None, None)
    if turn.act == "Take" and wish.turn is not None and not turn.progress.given and _settled(turn):
        return before  # what it carries is done; it stays in force until the node's next turn
    return SpecWrite(before.partition, before.desired, None)


def _settled(turn: Turn) -> bool:
    """Whether every GPU of the node that has a turn is done with it."""
    carrying = [c.partition for c in turn.progress.wish.claims if c.partition.spec.assignment is not None]
    return all(p.status.phase == "Ready" and p.status.observed_generation == p.generation for p in carrying)


def _told(claim: Claim, turn: Turn, evictions: Evictions, now: datetime) -> tuple[StatusWrite, ...]:
    partition = claim.partition
    said = partition_conditions(claim, turn, now)
    answers = evictions.told.get(partition.name, ())
    there = {c.type: c for c in partition.status.conditions}
    before = sorted(partition.status.evictions, key=lambda one: one.pod_uid)
    if all(there.get(c.type) == c for c in said) and list(answers) == before:
        return ()
    return (StatusWrite(partition.name, said, answers),)


def _drain(turn: Turn) -> Drain | None:
    """The GPUs of a node of which pods may be evicted now; None where nobody may be.

    The node has its turn for exactly this wish and keeps it, so that no plan is paused and nobody holds it; its agent
    is alive and has closed it; and what the agent wants to go is for what the GPU carries now.
    """
    one, node = turn.progress, turn.progress.wish.node
    if turn.act != "Keep" or not one.given or not (node.closed and node.tainted) or node.agent != "alive" or node.held:
        return None
    gpus = []
    for claim in one.wish.wished:
        partition, desired = claim.partition, claim.desired
        answered = partition.status.observed_generation == partition.generation
        draining = answered and partition.status.phase == "Draining" and partition.status.victims
        if draining and desired is not None and desired.disruption.policy == "Evict":
            gpus.append((partition, claim.plans[0]))
    return Drain(node.name, tuple(gpus)) if gpus else None
