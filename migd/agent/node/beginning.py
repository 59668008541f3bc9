"""At rest and waiting: what there is to do, whether it may begin, and whether all that must go is idle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from migd.agent.deciding import under_way
from migd.agent.driving import backwards
from migd.agent.node.bounds import BACKOFF_FIRST_S, GUARD_LOOK_S, NUDGE_S, POLL_S, WEDGED_S
from migd.agent.node.draining import drains
from migd.agent.node.effects import ChangeNode, Effect, ForgetRetry, LookAgain, Wait
from migd.agent.node.guarding import guard, misfit, unwedging, wedged
from migd.agent.node.moments import (
    Decided,
    Judged,
    View,
    attempt,
    begun,
    enter,
    in_debt,
    judge,
    pay,
    shut,
    work_of,
    working,
)
from migd.agent.node.turning import HOLD, RETRY, Turn
from migd.agent.node.verifying import watch
from migd.agent.records import Cause, NodeWork, Outcome, Record
from migd.mig.geometry import counts_of
from migd.plans.plan import Rule
from migd.plans.wishes import Wish, resolve


def rest(record: Record, view: View) -> Decided:
    """At rest: pay what is owed, hear what is new, and look whether all is still as it was left."""
    if in_debt(view) and not (work_of(record).at_once and view.turn):
        return record, pay(view)
    record, asked = _asked(record, view)
    if asked is not None:
        return record, asked
    if under_way(record):  # left by a crash of a command of this machine, or gone on with
        return _closing(attempt(record, view, ""), view, _open(record))
    work, turn = work_of(record), view.turn
    loose = _loose(record, view)
    if loose and guard(view.seen) is None:
        if view.now_s < work.not_before_s:
            return record, Wait(work.not_before_s - view.now_s, "the next try")
        return _closing(attempt(_unparked(record, loose), view, ""), view, _open(record))
    if turn is None:
        kept = {uuid: layout for uuid, layout in work.accepted.items() if _wished(view, uuid)}
        idle = NodeWork(
            accepted=kept,
            wedged_s=work.wedged_s,
            tries=work.tries,
            not_before_s=work.not_before_s,
            spent=work.spent,
            spent_why=work.spent_why,
        )
        return (record if _same_rest(work, idle) else working(record, idle)), None
    if turn.id != work.turn:
        record = attempt(_anew(record, view, turn), view, turn.id, tries=0, refresh=None, at_once=work.at_once)
        return record, LookAgain()
    wait_s = _again_in_s(record, view)
    if wait_s is not None and wait_s <= 0:
        return attempt(_anew(record, view, turn, failed_only=True), view, turn.id), LookAgain()
    if HOLD in view.seen.node.annotations:
        return record, None
    record, effect = watch(record, view)
    if wait_s is None or not (effect is None or (isinstance(effect, Wait) and effect.seconds > wait_s)):
        return record, effect
    return record, Wait(wait_s, "the next try")


def waiting(record: Record, view: View) -> Decided:
    """A turn is given: wait until nothing stands in the way and all that must go is idle, without closing.

    Where the plan evicts, until all who hold what must go are pods that may be evicted, or on their way out.
    """
    record, asked = _asked(record, view)
    if asked is not None:
        return record, asked
    work, turn = work_of(record), view.turn
    if turn is None or turn.id != work.turn:
        return enter(record, "Rest", view, turn="", why=None, at_once=False), LookAgain()
    if in_debt(view) and not work.at_once:
        return record, pay(view)
    why = guard(view.seen)
    if why is not None:
        return _held_up(record, view, why, GUARD_LOOK_S)
    if view.now_s < work.not_before_s:
        return record, Wait(work.not_before_s - view.now_s, "the next try")
    judged = judge(record, view)
    for uuid, outcome in judged.apart.items():
        if uuid not in judged.drifted:  # that was as wished, and is again if it is undone
            record = record.with_gpu(uuid, replace(record.gpu(uuid), outcome=outcome))
    if not judged.changing:
        return _as_it_is(record, view, judged), LookAgain()
    why = misfit(view.seen.node, view.held, judged.begun, turn)
    if why is not None:
        return _held_up(record, view, why, GUARD_LOOK_S)
    if judged.busy and not drains(judged) and not work.at_once:
        return _held_up(record, view, _starving(work, view, judged, turn), POLL_S)
    before = {uuid: str(judged.plans[uuid].seen.layout) for uuid in judged.changing}
    return _closing(record, view, before)


def _closing(record: Record, view: View, before: Mapping[str, str]) -> Decided:
    """The journal first: it is on disk before the node changes."""
    record = enter(record, "Closing", view, why=None, closed_s=view.now_s, ended_at="", before=before)
    return record, shut(view, work_of(record).turn)


def _open(record: Record) -> dict[str, str]:
    """The GPUs that were left half done, with the layouts that they come from."""
    found = {uuid: record.gpu(uuid).transaction for uuid in record.open}
    return {uuid: str(transaction.before) for uuid, transaction in found.items() if transaction is not None}


def _held_up(record: Record, view: View, why: Cause, seconds: float) -> Decided:
    """Something is in the way. Nothing of ours stays on the node meanwhile."""
    work = work_of(record)
    record = record if work.why == why else working(record, replace(work, why=why))
    return record, pay(view) if in_debt(view) else Wait(seconds, why.message or why.reason)


def _starving(work: NodeWork, view: View, judged: Judged, turn: Turn) -> Cause:
    """Somebody uses what must go. Who it is changes all the time, so it is told from a look and not remembered.

    Where the plan evicts and somebody may not be evicted, that is the cause.
    """
    if judged.going is not None and judged.going.stuck is not None and judged.going.stuck.reason != "InUse":
        return judged.going.stuck
    timeout_s = min(turn.desired[uuid].disruption.timeout_s for uuid in judged.busy)
    return Cause("NeverIdle" if view.now_s - work.began_s >= timeout_s else "InUse", "")


def _as_it_is(record: Record, view: View, judged: Judged) -> Record:
    """Nothing to do on any GPU that can be worked on: no disruption; what is advertised is verified."""
    record = begun(record, view, judged)
    if work_of(record).refresh is not None:
        return enter(record, "Refreshing", view, why=None, at_once=False, refreshed=False, refresh_tries=0)
    return enter(record, "Verifying", view, why=None, at_once=False, nudges=0, nudged_s=view.now_s)


# --- what brings a node out of its rest ------------------------------------------------------------------------------


def _asked(record: Record, view: View) -> tuple[Record, Effect | None]:
    """What may be asked of a node that changes nothing now: to try again at once, or to come out of a wedge."""
    work = work_of(record)
    for partition in view.seen.partitions:
        if RETRY in partition.annotations:
            return _heard(record, view, partition.name), ForgetRetry(partition.name)
    stuck = () if view.turn is None or HOLD in view.seen.node.annotations else wedged(view.seen)
    if not stuck:
        return (record if work.wedged_s is None else working(record, replace(work, wedged_s=None))), None
    if work.wedged_s is None:
        return working(record, replace(work, wedged_s=view.now_s)), LookAgain()
    left_s = work.wedged_s + WEDGED_S - view.now_s
    if left_s > 0:
        return record, None
    why = f"{', '.join(stuck)} were left by a tool that is not here any more"
    return working(record, replace(work, wedged_s=view.now_s)), ChangeNode(unwedging(stuck), why)


def _heard(record: Record, view: View, name: str) -> Record:
    """The record once somebody says to try again now: also what was held for somebody to look at."""
    gpu = view.held.gpu(name)
    if gpu is not None:
        ours = record.gpu(gpu.uuid)
        record = record.with_gpu(gpu.uuid, replace(ours, outcome=None, awaiting=None))
    work = replace(work_of(record), tries=0, not_before_s=0.0, nudges=0, nudged_s=view.now_s - NUDGE_S)
    return working(record, replace(work, spent=(), spent_why=None))


def _loose(record: Record, view: View) -> tuple[str, ...]:
    """GPUs that are half done and nobody's wish any more: at least they go back, unless somebody says hands off."""
    wished = view.turn.orders if view.turn is not None else {}
    there = {gpu.uuid for gpu in view.held.gpus if not gpu.out_of_reach}
    hands_off = {p.name for p in view.seen.partitions if HOLD in p.annotations}
    return tuple(u for u in record.open if u in there and u not in wished and u.lower() not in hands_off)


def _unparked(record: Record, uuids: Iterable[str]) -> Record:
    """What rests half done goes on, backwards."""
    for uuid in uuids:
        gpu = record.gpu(uuid)
        if gpu.transaction is not None:
            why = gpu.transaction.cause or Cause("Held", "the wish was withdrawn")
            record = record.with_gpu(
                uuid, replace(gpu, transaction=replace(backwards(gpu.transaction, why), parked=False))
            )
    return record


def _anew(record: Record, view: View, turn: Turn, failed_only: bool = False) -> Record:
    """The GPUs of a turn that begins: earlier outcomes are over."""
    for uuid in turn.orders:
        gpu = record.gpu(uuid)
        over = gpu.outcome is not None and not (failed_only and gpu.outcome.phase in ("Ready", "Held"))
        if over and not _observed(record, view, turn, uuid):
            record = record.with_gpu(uuid, replace(gpu, outcome=None))
    return record


def _observed(record: Record, view: View, turn: Turn, uuid: str) -> bool:
    """Whether a GPU under drift: Observe was made as it is wished now, at an earlier turn: what differs is drift."""
    now, goal = view.held.gpu(uuid), turn.orders[uuid].goals[uuid]
    made = work_of(record).accepted.get(uuid)
    if turn.desired[uuid].drift != "Observe" or not record.gpu(uuid).ready or now is None or made is None:
        return False
    wish = resolve(goal, now) if isinstance(goal, Rule) else None
    return isinstance(wish, Wish) and (wish.mig, wish.counts) == (made.mig, counts_of(made.instances))


def _again_in_s(record: Record, view: View) -> float | None:
    """In how many seconds a turn that ended is to be begun again; None for not as things are."""
    work, turn = work_of(record), view.turn
    assert turn is not None, "asked only with a turn"
    judged = judge(record, view)
    left_s = [work.not_before_s - view.now_s] if work.refresh is not None else []
    for uuid in judged.plans:
        outcome = record.gpu(uuid).outcome
        if _lasting(outcome, judged.apart.get(uuid)):
            continue
        if outcome is None or outcome.phase != "Ready":
            left_s.append(work.not_before_s - view.now_s)
        elif uuid in judged.changing + tuple(judged.apart) and turn.desired[uuid].drift == "Correct":
            left_s.append(work.since_s + BACKOFF_FIRST_S - view.now_s)  # a fight with somebody has its pauses
    return min(left_s, default=None)


def _lasting(outcome: Outcome | None, apart: Outcome | None) -> bool:
    """Whether trying again would come to the same: what sets the GPU apart is still so."""
    if outcome is None:
        return False
    return outcome.phase in ("Held", "RebootRequired") or (
        apart is not None and apart.cause.reason == outcome.cause.reason
    )


def _wished(view: View, uuid: str) -> bool:
    return any(p.name == uuid.lower() and p.value.spec.desired is not None for p in view.seen.partitions)


def _same_rest(work: NodeWork, idle: NodeWork) -> bool:
    return not work.turn and work.accepted == idle.accepted and not work.at_once
