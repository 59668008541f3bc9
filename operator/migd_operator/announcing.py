"""Events for people: what a pass has changed that somebody may want to read of, as notes about the plan. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from migd.kube.events import Note, Regarding
from migd.kube.stored import Stored
from migd.plans.conditions import Condition, find
from migd.plans.partitions import KIND as PARTITION
from migd.plans.partitions import EvictionDoc, Partition
from migd.plans.plan import API_VERSION, KIND
from migd.plans.statuses import PlanStatus
from migd_operator.assembling import Look
from migd_operator.deciding import Decision
from migd_operator.paying import NodeWrite
from migd_operator.writing import Done

_BY: Final = "Decide"


def notes_of(look: Look, decision: Decision, nodes: tuple[NodeWrite, ...], done: Done) -> tuple[Note, ...]:
    """What is new. Of plans and GPUs whose status was not written it is told with their next write."""
    found: list[Note] = []
    for write in decision.told:
        if write.partition in done.gpus:
            found += _of_refusals(look.partitions[write.partition], write.evictions)
    found += _of_evictions(look, done)
    for name, status in decision.statuses:
        stored = look.plans[name]
        if name in done.plans:
            about = _about_plan(name, stored.uid)
            found += _of_plan(about, stored.value.status or PlanStatus(), status)
    found += _of_turns(look, decision)
    for change in nodes:
        if change.paid:
            text = "its agent has been silent for long: our taint and what it had paused were put back as they were"
            about = Regarding("v1", "Node", change.node.name, change.node.uid)
            found.append(Note(about, "Warning", "AgentSilent", "Pay", f"node {change.node.name}: {text}"))
    return tuple(found)


def _of_evictions(look: Look, done: Done) -> Iterable[Note]:
    """A pod was evicted: told with the call, since a pod that has gone is no victim any more at the next look."""
    for ask in done.evicted:
        pod, by = f"{ask.pod.namespace}/{ask.pod.name}", " and ".join(ask.plans)
        text = f"pod {pod} holds what must go: it is evicted for plan {by}"
        for gpu in look.partitions.values():
            if ask.pod.uid in {victim.uid for victim in gpu.value.status.victims}:
                yield Note(Regarding(API_VERSION, PARTITION, gpu.name, gpu.uid), "Normal", "InUse", "Evict", text)


def _of_refusals(gpu: Stored[Partition], after: Iterable[EvictionDoc]) -> Iterable[Note]:
    """Somebody has to look why a pod that must go is not evicted. What is only tried again is no news."""
    about = Regarding(API_VERSION, PARTITION, gpu.name, gpu.uid)
    names = {pod.uid: f"{pod.namespace}/{pod.name}" for pod in gpu.value.status.victims}
    before = {one.pod_uid: _heard(one) for one in gpu.value.status.evictions}
    for one in after:
        if before.get(one.pod_uid) == _heard(one):
            continue
        pod, named = names.get(one.pod_uid, one.pod_uid), ", ".join(one.pod_disruption_budgets)
        if one.reason is not None and one.reason != "Waiting":
            by = f" by PodDisruptionBudget {named}" if named else ""
            yield Note(about, "Warning", one.reason, "Evict", f"pod {pod} is not evicted{by}: {one.message}")


def _heard(one: EvictionDoc) -> object:
    return one.code, one.reason, one.pod_disruption_budgets


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
    why = {w.partition: find(w.conditions, "Assigned") for w in decision.told}
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
