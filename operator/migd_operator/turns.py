"""Whose turn it is: how far each node is, and which may start now within every plan's rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from migd.plans.partitions import Partition
from migd_operator.claims import Left, NodeWish

State = Literal["Ready", "Changing", "Waiting", "Blocked", "Failed", "Unknown"]
MOVING: Final = frozenset({"Pending", "WaitingForIdle", "Draining", "Changing", "Verifying", "RollingBack"})
COMMITTED: Final = frozenset({"Changing", "Verifying", "RollingBack"})
"""After the first effect on hardware: such a node finishes, whatever is decided meanwhile."""
_BROKEN: Final = frozenset({"Failed", "Held"})
_STUCK: Final = frozenset({"Blocked", "RebootRequired"})


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one node is.

    given: all its wished GPUs carry exactly this wish and turn. used: the rollout has it closed, or it failed, or it
    may close at any time. committed: hardware is being changed, so nothing may be taken back.
    broke: it failed at a wish before this one; it has a place in the rollout already.
    """

    wish: NodeWish
    state: State
    given: bool
    used: bool
    committed: bool
    broke: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What becomes of a node's turn: Keep it, Give it one, Take it back; or Leave all as it is, since it must finish.

    why: what keeps it from a turn; no_room: only the number of nodes does.
    """

    progress: Progress
    act: Literal["Keep", "Give", "Take", "Leave"]
    why: Left | None = None
    no_room: bool = False


def progress_of(wish: NodeWish) -> Progress:
    """How far a node is, from what its partitions carry and its agent answered."""
    every = [c.partition for c in wish.claims]
    wished = [c.partition for c in wish.wished]
    committed = any(p.status.phase in COMMITTED for p in every)
    given = wish.turn is not None and all(
        c.partition.spec.desired == c.desired and c.partition.spec.assignment == wish.turn for c in wish.wished
    )
    if not given:
        broke = any(p.status.phase in _BROKEN for p in wished)
        used = broke or any(_under_way(p) for p in every)
        return Progress(wish, _or_unknown(wish, "Changing" if committed else "Waiting"), False, used, committed, broke)
    state = _answered(wished)
    # a silent node that was given a turn may be closed still, so it is used until it is known to be ready
    return Progress(wish, _or_unknown(wish, state), True, state != "Ready", committed)


def _under_way(partition: Partition) -> bool:
    """Whether a change that is not wanted so any more may still have the node closed."""
    phase = partition.status.phase
    unanswered = partition.status.observed_generation != partition.generation
    if phase == "Draining" or phase in COMMITTED:
        return True
    return phase in MOVING | _STUCK and (partition.spec.assignment is not None or unanswered)


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
    room = {
        name: limit_of(plans[name].plan.spec.rollout.max_unavailable, len(nodes)) - sum(n.used for n in nodes)
        for name, nodes in of_plan.items()
    }
    failed = {
        name: next((n.wish.node.name for n in nodes if n.given and n.state == "Failed"), None)
        for name, nodes in of_plan.items()
        if plans[name].plan.spec.rollout.pause_on_failure
    }
    turns: dict[str, Turn] = {}
    queue: list[Progress] = []
    for one in ordered:
        turn = _settled(one, stops)
        if turn is None:
            queue.append(one)
        else:
            turns[one.wish.node.name] = turn
    for one in sorted(queue, key=lambda p: (not p.broke, not p.used, _waits_since(p.wish, now), p.wish.node.name)):
        names = [plan.name for plan in one.wish.plans]
        stopped = _stopped(names, failed)
        why = stopped or _no_room(one, names, room)
        turns[one.wish.node.name] = Turn(one, "Give" if why is None else "Take", why, why is not None and not stopped)
        if why is None and not one.used:
            for name in names:
                room[name] -= 1
    _rotate(turns)
    return turns


def _settled(one: Progress, stops: Mapping[str, Left]) -> Turn | None:
    """The turn of a node that has one, needs none or cannot have one; None for one that queues."""
    stop = next((stops[p.name] for p in one.wish.plans if p.name in stops), None)
    if one.committed:
        return Turn(
            one, "Keep" if one.given else "Leave", None if one.given else Left("Waiting", "a change finishes first")
        )
    if one.wish.turn is None:
        return Turn(one, "Take")
    if one.given:
        back_out = stop is not None and one.state in ("Changing", "Blocked", "Unknown") and one.wish.changes
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
    if not one.wish.changes and not one.broke:
        return Turn(one, "Give")  # nothing is disturbed, so it needs no room
    return None


def _stopped(names: Sequence[str], failed: Mapping[str, str | None]) -> Left | None:
    for name in names:
        node = failed.get(name)
        if node is not None:
            return Left("Waiting", f"plan {name} stopped when node {node} failed (rollout.pauseOnFailure)")
    return None


def _no_room(one: Progress, names: Sequence[str], room: Mapping[str, int]) -> Left | None:
    if one.used and all(room[name] >= 0 for name in names):
        return None  # it has its place already
    for name in names:
        if room[name] <= 0:
            return Left("Waiting", f"it is not this node's turn in plan {name} (rollout.maxUnavailable)")
    return None


def _rotate(turns: dict[str, Turn]) -> None:
    """Take a blocked node's turn where another waits for room; that one starts once the node is known to be out.

    Without this a node that is never idle would stop a rollout; and without waiting it could close beside the other.
    """
    blocked = {
        name: turn.progress
        for name, turn in turns.items()
        if turn.act == "Keep" and turn.progress.state == "Blocked" and not _reboots(turn.progress.wish)
    }
    for waiting in [t for t in turns.values() if t.no_room]:
        names = {p.name for p in waiting.progress.wish.plans}
        name = next((n for n, one in blocked.items() if any(p.name in names for p in one.wish.plans)), None)
        if name is not None:
            why = Left("Waiting", "something was in the way; it waits for its next turn")
            turns[name] = Turn(blocked.pop(name), "Take", why)


def _reboots(wish: NodeWish) -> bool:
    """Whether hardware waits for a reboot: nothing to take back."""
    return any(c.partition.status.phase == "RebootRequired" for c in wish.wished)


def _waits_since(wish: NodeWish, now: datetime) -> datetime:
    """Since when the node has waited: those that waited longest come first, one that lost its turn comes last."""
    said = [c.partition.says("Assigned") for c in wish.wished]
    return max((s.last_transition_time for s in said if s is not None and s.status == "False"), default=now)
