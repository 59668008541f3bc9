"""Events for people: what a pass has changed that somebody may want to read of, as notes about the plan. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from migd.kube.events import Note, Regarding
from migd.plans.conditions import Condition, find
from migd.plans.plan import API_VERSION, KIND
from migd.plans.statuses import PlanStatus
from migd_operator.assembling import Look
from migd_operator.deciding import Decision
from migd_operator.paying import NodeWrite

_BY: Final = "Decide"


def notes_of(
    look: Look, decision: Decision, nodes: tuple[NodeWrite, ...], plans_told: Collection[str]
) -> tuple[Note, ...]:
    """What is new. plans_told: the plans whose status was written; of the others it is told with their next write."""
    found: list[Note] = []
    for name, status in decision.statuses:
        stored = look.plans[name]
        if name in plans_told:
            about = _about_plan(name, stored.uid)
            found += _of_plan(about, stored.value.status or PlanStatus(), status)
    found += _of_turns(look, decision)
    for write in nodes:
        if write.paid:
            text = "its agent has been silent for long: our taint and what it had paused were put back as they were"
            about = Regarding("v1", "Node", write.node.name, write.node.uid)
            found.append(Note(about, "Warning", "AgentSilent", "Pay", f"node {write.node.name}: {text}"))
    return tuple(found)


def _of_plan(about: Regarding, before: PlanStatus, after: PlanStatus) -> Iterable[Note]:
    for kind in ("Accepted", "Ready", "Stalled"):
        old, new = find(before.conditions, kind), find(after.conditions, kind)
        if new is None or (old is not None and (old.status, old.reason) == (new.status, new.reason)):
            continue
        if (kind, new.status) in (("Accepted", "False"), ("Stalled", "True")):
            if not (kind == "Stalled" and _same(find(after.conditions, "Accepted"), new)):  # once is enough
                yield Note(about, "Warning", new.reason, _BY, f"{_WORDS[kind]}: {new.message}")
        elif (kind, new.status) in (("Accepted", "True"), ("Ready", "True")):
            yield Note(about, "Normal", new.reason, _BY, f"{_WORDS[kind, new.status]}: {new.message}")


_WORDS: Final = {
    "Accepted": "refused, wholly or in part",
    "Stalled": "stalled",
    ("Accepted", "True"): "accepted",
    ("Ready", "True"): "finished",
}


def _same(one: Condition | None, other: Condition) -> bool:
    return one is not None and (one.status, one.reason) == ("False", other.reason)


def _of_turns(look: Look, decision: Decision) -> Iterable[Note]:
    """A node got its turn, or it was taken back: one note for each plan that it is about."""
    why = {w.partition: find(w.conditions, "Assigned") for w in decision.conditions}
    found: dict[tuple[str, str, str], Note] = {}
    for write in decision.specs:
        spec = look.partitions[write.partition].value.spec
        ref = (write.desired or spec.desired) if write.assignment is not None else spec.desired
        plan = look.plans.get(ref.plan.name) if ref is not None else None
        if plan is None or write.assignment == spec.assignment:
            continue
        about = _about_plan(plan.name, plan.uid)
        if write.assignment is not None:
            note = Note(about, "Normal", "Assigned", "GiveTurn", f"node {spec.node_name} has its turn")
        else:
            said = why.get(write.partition)
            reason, text = (said.reason, f": {said.message}") if said is not None else ("Waiting", "")
            note = Note(about, "Normal", reason, "TakeTurn", f"node {spec.node_name} has its turn no more{text}")
        found.setdefault((plan.name, spec.node_name, note.action), note)
    return found.values()


def _about_plan(name: str, uid: str) -> Regarding:
    return Regarding(API_VERSION, KIND, name, uid)
