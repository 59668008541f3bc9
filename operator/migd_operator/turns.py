"""Whose turn it is: how far each node is, and which may start now within every plan's rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from migd.plans.conditions import COMMITTED, MOVING
from migd.plans.partitions import Partition
from migd_operator.claims import Claim, Left, NodeWish
from migd_operator.facts import PlanFacts

State = Literal["Ready", "Changing", "Waiting", "Blocked", "Failed", "Unknown"]
_BROKEN: Final = frozenset({"Failed", "Held"})
_BADLY: Final = frozenset({"Failed", "RolledBack", "Held"})
_STUCK: Final = frozenset({"Blocked", "RebootRequired"})
_MET: Final = "at its last turn this was in the way: "
_FORGOTTEN: Final = timedelta(minutes=30)
"""So long a node counts as in the way for what no look at its status shows; the agent's longest pause is no shorter."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one node is.

    given: all its wished GPUs carry exactly this wish and turn. used: the rollout has it closed, or it failed, or it
    may close at any time. counts: the plans, by name, in whose limits it does while it is used. committed: hardware is
    being changed, so nothing may be taken back. inside: it may be closed for a turn that is not, or not only, for this
    wish. failed: the plans, by name, at whose present wish it failed: also where its agent is silent since, or its turn
    gone. broke: it failed at a wish before this one; it has a place in the rollout already.
    """

    wish: NodeWish
    state: State
    given: bool
    used: bool
    counts: frozenset[str]
    committed: bool
    inside: bool
    failed: frozenset[str]
    broke: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What becomes of a node's turn: Keep it, Give it one, Take it back; or Leave all as it is, since it must finish.

    why: what keeps it from a turn. no_room: only the number of nodes does.
    """

    progress: Progress
    act: Literal["Keep", "Give", "Take", "Leave"]
    why: Left | None = None
    no_room: bool = False


@dataclass(slots=True)
class _Room:
    """What is left of each plan's limit while turns are given out, by plan; below 0 where too many are used.

    leaving: how many of the used nodes are on their way out, since their turn was taken back.
    blocked: nodes, by name, that have a turn which they cannot use now: they make room for one that could.
    """

    free: dict[str, int]
    leaving: Counter[str]
    blocked: dict[str, Progress]

    def fits(self, one: Progress) -> bool:
        """Whether a node may start now. One that is used already has its place."""
        least = 0 if one.used else 1
        return all(self.free[plan.name] >= least for plan in one.wish.plans)

    def give(self, one: Progress) -> None:
        """Count a node that starts."""
        for plan in one.wish.plans:
            self.free[plan.name] -= not one.used
        for name in one.counts:
            self.leaving[name] -= _leaving(one)

    def promise(self, one: Progress) -> tuple[Progress, ...]:
        """Keep the room for a node that could start as soon as others are out; the blocked nodes that must go for it.

        Nothing is kept, and nobody goes, where it still could not start then. What is kept goes to no other: a blocked
        node that got it back would have to make room again.
        """
        names = [plan.name for plan in one.wish.plans]
        coming = {name: self.free[name] + self.leaving[name] for name in names}
        going: list[Progress] = []
        for name in names:
            for other in self.blocked.values():
                if coming[name] < 1 and name in other.counts and other not in going:
                    going.append(other)
                    coming = {n: left + (n in other.counts) for n, left in coming.items()}
        if min(coming.values()) < 1:
            return ()
        for other in going:
            del self.blocked[other.wish.node.name]
            self.leaving.update(other.counts)
        for name in names:
            self.free[name] -= 1
        return tuple(going)


def progress_of(wish: NodeWish) -> Progress:
    """How far a node is, from what its partitions carry and its agent answered."""
    every = [c.partition for c in wish.claims]
    wished = [c.partition for c in wish.wished]
    committed = any(p.status.phase in COMMITTED for p in every)
    given = wish.turn is not None and all(
        c.partition.spec.desired == c.desired and c.partition.spec.assignment == wish.turn for c in wish.wished
    )
    names = frozenset(plan.name for plan in wish.plans)
    silent = wish.node.silent
    loose = [c.partition for c in wish.claims if not given or c.desired is None]
    inside = (wish.node.closed and not given) or any(_under_way(p, silent) for p in loose)
    every_plan = names | wish.carried | {plan.name for c in wish.claims for plan in c.plans}
    counts = every_plan if inside else names
    failed = frozenset(plan.name for c in wish.claims for plan in c.plans if _ended_badly(c.partition, plan))
    if not given:
        broke = any(p.status.phase in _BROKEN for p in wished)
        state = _or_unknown(wish, "Changing" if committed else "Waiting")
        return Progress(wish, state, False, broke or inside, counts, committed, inside, failed, broke)
    state = _answered(wished)
    failed |= names if state == "Failed" else frozenset()
    # a silent node that was given a turn may be closed still, so it is used until it is known to be ready
    used = state != "Ready" or inside or wish.node.closed
    return Progress(wish, _or_unknown(wish, state), True, used, counts, committed, inside, failed)


def _under_way(partition: Partition, silent: bool) -> bool:
    """Whether a turn that is not wanted so any more may still have the node closed.

    An agent that has not answered may have begun what it was told before. One that is silent begins nothing.
    """
    phase = partition.status.phase
    if phase == "Draining" or phase in COMMITTED:
        return True
    unanswered = partition.status.observed_generation != partition.generation
    if phase in MOVING | _STUCK:
        return partition.spec.assignment is not None or unanswered
    return unanswered and phase is not None and not silent


def _or_unknown(wish: NodeWish, state: State) -> State:
    return "Unknown" if wish.node.silent else state


def is_ready(partition: Partition) -> bool:
    """Whether the agent says Ready of exactly this generation of the object."""
    ready = partition.says("Ready")
    return (
        partition.status.phase == "Ready"
        and partition.status.observed_generation == partition.generation
        and ready is not None
        and ready.status == "True"
        and ready.observed_generation == partition.generation
    )


def _answered(wished: Sequence[Partition]) -> State:
    current = [p for p in wished if p.status.observed_generation == p.generation]
    phases = {p.status.phase for p in current}
    if phases & _BROKEN:
        return "Failed"
    if len(current) < len(wished) or phases & MOVING:
        return "Changing"
    if phases & _STUCK:
        return "Blocked"
    return "Ready" if all(is_ready(p) for p in wished) else "Changing"


def _ended_badly(partition: Partition, plan: PlanFacts) -> bool:
    """Whether a GPU's last change was for this very generation of a plan, failed, and still counts.

    Its turn may be gone since: a hold, or an approval that lapsed, makes no failure undone. Success does, or an edit.
    """
    last, desired = partition.status.last_transition, partition.spec.desired
    if last is None or last.result not in _BADLY or partition.status.phase == "Ready" or desired is None:
        return False
    return (desired.plan.uid, last.generation) == (plan.uid, plan.generation)


def away(wish: NodeWish) -> Left | None:
    """Why a node cannot start for reasons that are not ours; None where it can."""
    node = wish.node
    if node.silent:
        return Left("AgentSilent", f"the agent of node {node.name} is silent; it starts when the agent is back")
    if not node.ready:
        return Left("Waiting", f"node {node.name} is not ready; it starts when it is")
    if node.unschedulable:
        return Left("Waiting", f"node {node.name} is cordoned; it starts when it is uncordoned")
    if node.upgrade_state:
        return Left("DriverUpgrade", f"node {node.name} is in a driver upgrade: {node.upgrade_state}")
    if node.other_owners:
        return Left("ForeignOwner", f"on node {node.name} MIG is owned by {', '.join(node.other_owners)}")
    if node.mig_manager and any(p.plan.spec.owner != "TakeOver" for p in wish.plans):
        message = f"on node {node.name} NVIDIA's mig-manager runs; owner: TakeOver takes the node from it"
        return Left("ForeignOwner", message)
    return None


def limit_of(most: int | str, nodes: int) -> int:
    """How many of so many nodes may be unavailable: a percentage is rounded down, but is 1 at least unless it is 0."""
    if isinstance(most, int):
        return most
    percent = int(most[:-1])
    return max(1, nodes * percent // 100) if percent else 0


def give_turns(found: Sequence[Progress], stops: Mapping[str, Left], now: datetime) -> dict[str, Turn]:
    """For each node by name, what becomes of its turn.

    stops: by plan, why it starts nothing that disturbs: paused, or not approved. A node under several plans needs
    the consent of each: no plan may stop it, and it must fit within every plan's limit, so the smallest rules.
    """
    ordered = sorted(found, key=lambda p: p.wish.node.name)
    of_plan: dict[str, list[Progress]] = {}
    for one in ordered:
        for plan in one.wish.plans:
            of_plan.setdefault(plan.name, []).append(one)
    plans = {plan.name: plan for one in ordered for plan in one.wish.plans}
    failed: dict[str, str] = {}
    for one in ordered:
        for name in one.failed & plans.keys():
            if plans[name].plan.spec.rollout.pause_on_failure:
                failed.setdefault(name, one.wish.node.name)
    turns: dict[str, Turn] = {}
    queue: list[Progress] = []
    for one in ordered:
        turn = _settled(one, stops, of_plan.keys())
        if turn is None:
            queue.append(one)
        else:
            turns[one.wish.node.name] = turn
    taken = Counter(name for one in ordered if one.used for name in one.counts)
    room = _Room(
        free={
            name: limit_of(plans[name].plan.spec.rollout.max_unavailable, len(nodes)) - taken[name]
            for name, nodes in of_plan.items()
        },
        leaving=Counter(name for one in ordered if _leaving(one) for name in one.counts),
        blocked={name: turn.progress for name, turn in turns.items() if _in_the_way(turn)},
    )
    for one in sorted(queue, key=lambda p: _order(p, now)):
        name = one.wish.node.name
        # one that failed itself stopped the others: once it may have a turn again, it is the one to try
        why = _stopped([plan.name for plan in one.wish.plans if plan.name not in one.failed], failed)
        if why is not None:
            turns[name] = Turn(one, "Take", why)
        elif room.fits(one):
            room.give(one)
            turns[name] = Turn(one, "Give")
        else:
            turns[name] = Turn(one, "Take", _met(one.wish, now) or _no_room(one, room.free), no_room=True)
            if _able(one.wish, now) and not one.used:
                for other in room.promise(one):
                    turns[other.wish.node.name] = Turn(other, "Take", _meets(other.wish))
    return turns


def _order(one: Progress, now: datetime) -> tuple[bool, bool, bool, bool, bool, datetime, str]:
    """Who comes first: nodes that failed or are under way, then those that could go, then those that waited longest.

    Of those that could go, those come first on which nobody is evicted for it: meanwhile pods may end by themselves.
    """
    fresh, there = not (one.broke or one.failed), one.used and _carries(one.wish)
    wish = one.wish
    return (fresh, not there, not _able(wish, now), wish.evicts, not one.used, *_since(wish, now))


def _settled(one: Progress, stops: Mapping[str, Left], at_it: Set[str]) -> Turn | None:
    """The turn of a node that has one, needs none or cannot have one; None for one that queues.

    at_it: the plans, by name, that have nodes. A turn from other plans than before comes once the agent is out of the
    one before: until then the node counts in those plans by the wish that it carries.
    """
    stop = next((stops[p.name] for p in one.wish.plans if p.name in stops), None)
    if one.committed:
        return Turn(
            one, "Keep" if one.given else "Leave", None if one.given else Left("Waiting", "a change finishes first")
        )
    if one.wish.turn is None:
        return Turn(one, "Take")
    if one.given:
        back_out = stop is not None and one.wish.changes and _begins(one)
        return Turn(one, "Take", stop) if back_out else Turn(one, "Keep")
    if one.wish.frozen is not None:
        return Turn(one, "Leave", one.wish.frozen)
    gone = away(one.wish)
    if gone is not None:
        return Turn(one, "Take", gone)
    if stop is not None and (one.wish.changes or stop.reason == "Paused"):
        return Turn(one, "Take", stop)
    if one.wish.node.agent == "unheard":
        name = one.wish.node.name
        why = f"the agent of node {name} has not been heard since the operator started; it renews once a minute"
        return Turn(one, "Take", Left("Waiting", why))
    before = sorted((one.wish.carried & at_it) - {plan.name for plan in one.wish.plans}) if one.inside else []
    if before:
        return Turn(one, "Take", Left("Waiting", f"it comes out of its turn in plan {before[0]} first"))
    if not one.wish.changes and not one.broke:
        return Turn(one, "Give")  # nothing is disturbed, so it needs no room
    return None


def _begins(one: Progress) -> bool:
    """Whether the agent of a node with a turn may begin something yet: what failed it tries again, what is held not."""
    failed = any(c.partition.status.phase == "Failed" for c in one.wish.wished)
    return failed or one.state in ("Changing", "Blocked", "Unknown")


def _stopped(names: Sequence[str], failed: Mapping[str, str]) -> Left | None:
    for name in names:
        node = failed.get(name)
        if node is not None:
            return Left("Waiting", f"plan {name} stopped when node {node} failed (rollout.pauseOnFailure)")
    return None


def _no_room(one: Progress, free: Mapping[str, int]) -> Left:
    name = min(one.wish.plans, key=lambda plan: (free[plan.name], plan.name)).name
    return Left("Waiting", f"it is not this node's turn in plan {name} (rollout.maxUnavailable)")


def _in_the_way(turn: Turn) -> bool:
    """Whether a node has a turn that it cannot use now, so that it must not stop a rollout."""
    one = turn.progress
    return turn.act == "Keep" and one.state == "Blocked" and not _reboots(one.wish)


def _leaving(one: Progress) -> bool:
    """Whether a node's turn was taken back, and its agent will soon have answered."""
    out = one.given or one.committed or one.broke or one.wish.node.silent
    return one.used and not out and not _carries(one.wish)


def _carries(wish: NodeWish) -> bool:
    """Whether a turn is there, be it of this wish or of another."""
    return any(c.partition.spec.assignment is not None for c in wish.claims)


def _able(wish: NodeWish, now: datetime) -> bool:
    """Whether a node could start, as far as is known before it has its turn."""
    return wish.clear and _met(wish, now) is None


def _meets(wish: NodeWish) -> Left:
    """Why a blocked node's turn is taken back. What its status shows at all times need not be remembered."""
    shown = not wish.clear or any(_in_use(c) for c in wish.wished)
    said = next((c.partition.status for c in wish.wished if c.partition.status.phase == "Blocked"), None)
    if shown or said is None:
        return Left("Waiting", "something was in the way; it waits for its next turn")
    return Left("Waiting", f"{_MET}{said.message or said.reason}")


def _in_use(claim: Claim) -> bool:
    """Whether a GPU waits until it is idle. Where its pods may be evicted, use says nothing: somebody may not go."""
    waits = claim.desired is not None and claim.desired.disruption.policy == "WaitForIdle"
    return waits and claim.partition.status.reason in ("InUse", "NeverIdle")


def _met(wish: NodeWish, now: datetime) -> Left | None:
    """What was in a node's way at its last turn for this very wish, where nothing but a turn would show it again."""
    for claim in wish.wished:
        said = claim.partition.says("Assigned")
        if said is None or said.status != "False" or not said.message.startswith(_MET):
            continue
        if claim.partition.spec.desired == claim.desired and now - said.last_transition_time < _FORGOTTEN:
            return Left("Waiting", said.message)
    return None


def _reboots(wish: NodeWish) -> bool:
    """Whether hardware waits for a reboot: nothing to take back."""
    return any(c.partition.status.phase == "RebootRequired" for c in wish.wished)


def _since(wish: NodeWish, now: datetime) -> tuple[datetime, str]:
    """Since when the node has waited: those that waited longest come first, one that lost its turn comes last."""
    said = [c.partition.says("Assigned") for c in wish.wished]
    since = max((s.last_transition_time for s in said if s is not None and s.status == "False"), default=now)
    return since, wish.node.name
