"""One moment of a node's transaction: what is seen, joined; what the turn would do now; and how stages follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from migd.agent.deciding import awaiting, opened
from migd.agent.driving import cause_of
from migd.agent.node.advertising import differing
from migd.agent.node.bounds import backoff_s
from migd.agent.node.clients import keeps_from_resets, to_stop
from migd.agent.node.effects import ChangeNode, Effect, StopPlugin
from migd.agent.node.holding import Held, held
from migd.agent.node.seeing import NodeSeen
from migd.agent.node.turning import Turn, turn_of
from migd.agent.node.victims import Going, who_goes
from migd.agent.records import Cause, NodeWork, Outcome, Record, Stage, StepTime
from migd.kube.owed import closing, owing, paid
from migd.mig.observed import SeenGpu
from migd.plans.conditions import time_text
from migd.plans.preview import GpuPreview

Decided = tuple[Record, Effect | None]
"""The next record, and the one effect to begin then."""

STEPS_MAX: Final = 40
_NAMES: Final[Mapping[Stage, str]] = {
    "Waiting": "Wait",
    "Closing": "Close",
    "Draining": "Drain",
    "Settling": "Settle",
    "Pausing": "Pause",
    "Applying": "Apply",
    "Refreshing": "Refresh",
    "Opening": "Open",
    "Verifying": "Verify",
    "Backing": "BackOut",
}


@dataclass(frozen=True, slots=True)
class View:
    """What is seen, with what follows from it: who holds what, and which turn the node has."""

    seen: NodeSeen
    held: Held
    turn: Turn | None

    @property
    def now_s(self) -> float:
        """On the clock of the boot."""
        return self.seen.now_s


@dataclass(frozen=True, slots=True)
class Judged:
    """What a turn would do now. plans: by GPU UUID, by index, of all GPUs that have an order.

    apart: those for which nothing can be begun, with what that makes of them; the others do not wait for them.
    changing: the others on which there is something to do. busy: of those, the ones that somebody uses.
    drifted: of those apart, the ones that were as wished until somebody else changed them, which is only told of.
    going: who is to be evicted for it; None where nobody is in the way, or no plan of these evicts.
    """

    plans: Mapping[str, GpuPreview]
    apart: Mapping[str, Outcome]
    changing: tuple[str, ...]
    busy: tuple[str, ...]
    drifted: frozenset[str] = frozenset()
    going: Going | None = None

    @property
    def begun(self) -> Mapping[str, GpuPreview]:
        """The plans of GPUs that are not set apart."""
        return {uuid: plan for uuid, plan in self.plans.items() if uuid not in self.apart}


def view_of(seen: NodeSeen, work: NodeWork) -> View:
    """The joined view of what is seen."""
    return View(seen, held(seen), turn_of(seen, work))


def shown_otherwise(view: View) -> str:
    """In a sentence, what the kubelet shows otherwise than it should; "" for nothing."""
    desired = view.turn.desired if view.turn is not None else {}
    sliced = frozenset(uuid for uuid, wish in desired.items() if wish.mig == "Enabled")
    return differing(view.seen.node.value, view.held.gpus, sliced)


def judge(record: Record, view: View) -> Judged:
    """Judge every GPU of the turn by itself."""
    plans: dict[str, GpuPreview] = {}
    apart: dict[str, Outcome] = {}
    drifted: set[str] = set()
    no_resets = keeps_from_resets(view.seen)
    for gpu in sorted(view.held.gpus, key=lambda gpu: gpu.index):
        order = view.turn.orders.get(gpu.uuid) if view.turn else None
        if order is None:
            continue
        ours = record.gpu(gpu.uuid)
        plan = plans[gpu.uuid] = order.plan(gpu, ours.owned)
        observes = view.turn is not None and view.turn.desired[gpu.uuid].drift == "Observe"
        stuck = awaiting(ours, gpu, view.seen.boot_id, order)
        if stuck is None and ours.outcome is not None and ours.outcome.phase == "Held":
            stuck = ours.outcome
        if stuck is not None:
            apart[gpu.uuid] = stuck
        elif plan.refused is not None:
            apart[gpu.uuid] = Outcome("Failed", cause_of(plan.refused))
        elif plan.changes and observes and ours.ready:
            drifted.add(gpu.uuid)
            apart[gpu.uuid] = Outcome("Blocked", Cause("ForeignInstances", _drift(gpu)))
        elif plan.blocked is not None and plan.blocked.reason != "InUse":
            apart[gpu.uuid] = Outcome("Blocked", cause_of(plan.blocked))
        elif plan.reset and no_resets:  # known before the node is closed, and lasting
            apart[gpu.uuid] = Outcome("Blocked", Cause("ResetRefused", no_resets))
    changing = tuple(uuid for uuid, plan in plans.items() if uuid not in apart and plan.changes)
    going = _going(record, view, plans, changing)
    busy = tuple(uuid for uuid in changing if plans[uuid].blocked is not None)
    return Judged(plans, apart, changing, busy, frozenset(drifted), going)


def _going(record: Record, view: View, plans: dict[str, GpuPreview], changing: tuple[str, ...]) -> Going | None:
    """Who is to be evicted, where a plan evicts; the layouts in plans are then those that take the fewest."""
    turn = view.turn
    evicts = [
        uuid
        for uuid in changing
        if plans[uuid].blocked is not None and turn is not None and turn.desired[uuid].disruption.policy == "Evict"
    ]
    if not evicts or turn is None:
        return None
    owned = {uuid: record.gpu(uuid).owned for uuid in changing}
    going = who_goes(work_of(record), view.seen, view.held, turn, plans, changing, owned)
    for uuid, freed in going.freed.items():
        plans[uuid] = turn.orders[uuid].plan(plans[uuid].seen, owned[uuid], freed)
    return going


def _drift(gpu: SeenGpu) -> str:
    return f"somebody else changed this GPU to {gpu.layout}; drift: Observe leaves it"


def begun(record: Record, view: View, judged: Judged) -> Record:
    """The record once the turn is begun on every GPU that is not set apart: with a transaction, or nothing to do.

    One that was left half done goes on from there, and would go back to where it came from first.
    """
    for uuid, plan in judged.begun.items():
        now, left = view.held.gpu(uuid), record.gpu(uuid).transaction
        assert now is not None, "a plan is made only for a GPU that is seen"
        assert view.turn is not None, "a plan is made only in a turn"
        ours = replace(record.gpu(uuid), transaction=None)
        if left is not None and not plan.changes:
            ours = ours.changed_from(left.before, now.layout)
        ours = opened(ours, now, plan, view.turn.orders[uuid], None, False)
        if left is not None and ours.transaction is not None:
            ours = replace(ours, transaction=replace(ours.transaction, before=left.before, touched=left.touched))
        record = record.with_gpu(uuid, ours)
    return record


# --- stages ----------------------------------------------------------------------------------------------------------


def working(record: Record, work: NodeWork) -> Record:
    """The record with its node's part replaced."""
    return replace(record, node=work)


def work_of(record: Record) -> NodeWork:
    """The node's part of a record; a new one where there is none."""
    return record.node or NodeWork()


def enter(record: Record, stage: Stage, view: View, **changes: Any) -> Record:
    """The record once a stage is entered, with other parts of the node's work changed; for people, steps are timed."""
    work = work_of(record)
    steps = changes.pop("steps", work.steps)
    if steps and steps[-1].milliseconds is None:
        took_s = max(0.0, view.now_s - steps[-1].began_s)
        steps = (*steps[:-1], replace(steps[-1], milliseconds=round(took_s * 1000)))
    if stage in _NAMES:
        steps = (*steps, StepTime(_NAMES[stage], time_text(view.seen.wall), view.now_s))[-STEPS_MAX:]
    return working(record, replace(work, stage=stage, since_s=view.now_s, steps=steps, **changes))


def attempt(record: Record, view: View, turn: str, **changes: Any) -> Record:
    """The record at the beginning of an attempt: it waits until it may begin. What went before is over."""
    work = work_of(record)
    fresh = NodeWork(
        turn=turn,
        began_s=view.now_s,
        began_at=time_text(view.seen.wall),
        tries=work.tries,
        refresh=work.refresh,
        unadvertised=work.unadvertised,
        wedged_s=work.wedged_s,
        accepted=work.accepted,
        spent=work.spent,
        spent_why=work.spent_why,
    )
    return enter(working(record, replace(fresh, **changes)), "Waiting", view)


def back_out(record: Record, view: View, why: Cause | None) -> Record:
    """The record once it is decided to open the node again before anything was changed."""
    return enter(record, "Backing", view, why=why, at_once=False)


def not_before(work: NodeWork, view: View) -> dict[str, Any]:
    """One more attempt that did not end well, and how long to leave it alone now."""
    return {"tries": work.tries + 1, "not_before_s": view.now_s + backoff_s(work.tries + 1)}


# --- debts -----------------------------------------------------------------------------------------------------------


def in_debt(view: View) -> bool:
    """Whether something of ours is still on the node: our taint, or old values that we owe."""
    return owing(view.seen.node)


def shut(view: View, turn: str) -> ChangeNode:
    """Close the node to new pods, if then the pods of its device plugin may be deleted: else nothing is begun."""
    then = tuple(StopPlugin(pod.namespace, pod.name, pod.uid) for pod in to_stop(view.seen))
    return ChangeNode(closing(view.seen.node, turn), "close the node to new pods", then)


def pay(view: View) -> ChangeNode:
    """Take all of ours off the node, and give back what is owed."""
    return ChangeNode(paid(view.seen.node), "open the node, and let its GPU clients run again")
