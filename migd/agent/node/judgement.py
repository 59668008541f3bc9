"""How one GPU stands: its phase, the cause, its conditions, and who is in the way. Nothing is steered by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, cast

from migd.agent.driving import NEXT_COMMAND
from migd.agent.node.draining import answers, waiting_for
from migd.agent.node.guarding import guard
from migd.agent.node.holding import owner_of
from migd.agent.node.moments import Judged, View, in_debt, shown_otherwise, work_of
from migd.agent.node.seeing import NodeSeen
from migd.agent.node.turning import RETRY, held_of
from migd.agent.records import AS_WISHED, Cause, NodeWork, Record, Stage
from migd.kube.stored import Stored
from migd.plans.conditions import MOVING, WELL, Phase, Reason, Said, Status, cut
from migd.plans.partitions import BlockerDoc, EvictionDoc, Partition, Pod
from migd.plans.preview import Blocker

BLOCKERS_MAX: Final = 64
_COMMAND_MAX: Final = 256
_DAEMONS: Final[Mapping[str, str]] = {
    "nv-hostengine": "dcgm",
    "dcgm-exporter": "dcgm-exporter",
    "nvidia-persistenced": "nvidia-persistenced",
    "nvsm_core": "nvsm",
    "nvidia-cuda-mps-server": "mps",
    "nvidia-cuda-mps-control": "mps",
}
_DRAINING: Final[frozenset[Stage]] = frozenset({"Closing", "Draining", "Settling", "Pausing", "Backing"})
_CHANGING: Final[frozenset[Stage]] = frozenset({"Applying", "Refreshing"})
_SHOWING: Final[frozenset[Stage]] = frozenset({"Opening", "Verifying"})
_UNDRAINED: Final = frozenset({"InUse", "NeverIdle", "DrainBlocked", "DrainTimeout", "EvictionBudget"})
_NEXT_TRY: Final = f"it is tried again by itself, or at once with the annotation {RETRY}"
_TAKES_A_PERSON: Final = frozenset(
    {"Conflict", "DuplicateGPU", "ForeignOwner", "Infeasible", "Invalid", "NotCapable", "UnknownProfile"}
)
"""Of the reasons why a GPU is given no turn, those that do not pass by waiting."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """How one GPU stands. conditions: none where nothing is wished of it. blockers: at most 64, and how many more."""

    phase: Phase
    cause: Cause
    conditions: tuple[Said, ...]
    blockers: tuple[BlockerDoc, ...]
    blockers_left_out: int


def judgement_of(record: Record, view: View, judged: Judged, partition: Stored[Partition]) -> Judgement:
    """How the GPU of a partition stands, after `decide` gave this record."""
    phase, cause = _phase(record, view, judged, partition)
    if phase == "Idle":
        return Judgement(phase, cause, (), (), 0)
    if phase == "Lost":
        return Judgement(phase, cause, (_said("Ready", "False", cause),), (), 0)
    blockers = _blockers(view, judged, partition) if phase in ("WaitingForIdle", "Draining", "Blocked") else ()
    shown, left_out = blockers[:BLOCKERS_MAX], max(0, len(blockers) - BLOCKERS_MAX)
    return Judgement(phase, cause, _conditions(record, view, judged, partition, phase, cause), shown, left_out)


def _phase(record: Record, view: View, judged: Judged, partition: Stored[Partition]) -> tuple[Phase, Cause]:
    now, work, desired = view.held.gpu(partition.name), work_of(record), partition.value.spec.desired
    if now is None or now.lost:
        why = "it fell off the bus" if now is not None else "NVML does not show this GPU any more"
        return "Lost", Cause("GPUUnhealthy", why)
    given = view.turn is not None and view.turn.id == work.turn and now.uuid in view.turn.orders
    if given or now.uuid in work.before:
        moving = _moving(record, view, judged, now.uuid)
        if moving is not None:
            return moving
    left = _left_out(partition, view.seen)
    if desired is None:
        return "Idle", left or Cause("NotNeeded", "")
    outcome = record.gpu(now.uuid).outcome
    hold = held_of(partition, view.seen)
    if hold and not (given and work.stage == "Rest" and outcome is not None and outcome.phase == "Ready"):
        return "Blocked", Cause("Held", hold)
    if not given and left is not None:
        return "Blocked" if left.reason in _TAKES_A_PERSON else "Pending", left
    if not given:
        return "Pending", Cause("Waiting", "it waits for its node's turn")
    if outcome is not None and outcome.phase != "Ready":
        message = outcome.cause.message.replace(NEXT_COMMAND, _NEXT_TRY)
        return outcome.phase, Cause(outcome.cause.reason, message)
    if now.uuid in judged.drifted:
        return "Blocked", judged.apart[now.uuid].cause
    if work.stage == "Waiting":
        return _waiting(work, judged, now.uuid)
    if outcome is None:
        return "Pending", Cause("Waiting", "the next attempt begins")
    if work.denied is not None and in_debt(view):
        return "Blocked", work.denied
    return _at_rest(work, view, judged, now.uuid, desired.drift)


def _left_out(partition: Stored[Partition], seen: NodeSeen) -> Cause | None:
    """What keeps this GPU from a turn, as the operator says of this very wish; None where it only has to wait.

    While it waits, what would be in the way of its turn is told before that comes.
    """
    said = partition.value.says("Assigned")
    if said is None or said.status != "False" or said.observed_generation != partition.generation:
        return None
    if said.reason == "Waiting":
        return guard(seen)
    return None if said.reason in WELL else Cause(said.reason, said.message)


def _moving(record: Record, view: View, judged: Judged, uuid: str) -> tuple[Phase, Cause] | None:
    """The phase while its node's transaction is under way; None at rest and while it waits."""
    work = work_of(record)
    if work.stage == "Draining":
        return "Draining", work.denied or waiting_for(work, view, judged)
    if work.stage in _DRAINING:
        message = (
            work.why.message if work.stage == "Backing" and work.why else "the node is closed and its GPU clients pause"
        )
        return "Draining", work.denied or Cause("Waiting", message)
    if work.stage in _CHANGING:
        transaction = record.gpu(uuid).transaction
        if transaction is not None and transaction.back:
            cause = transaction.cause or Cause("Held", "interrupted")
            return "RollingBack", cause
        return "Changing", Cause("Waiting", "the GPUs of this node are being changed")
    if work.stage in _SHOWING:
        return "Verifying", work.denied or Cause("Waiting", "the kubelet is to show what is there now")
    return None


def _waiting(work: NodeWork, judged: Judged, uuid: str) -> tuple[Phase, Cause]:
    why = work.why
    if why is None:
        return "Pending", Cause("Waiting", "its node begins")
    if why.reason not in ("InUse", "NeverIdle"):
        return "Blocked", why
    blocked = judged.plans[uuid].blocked if uuid in judged.plans else None
    message = blocked.message if blocked is not None else why.message or _in_use_elsewhere(judged)
    return "WaitingForIdle" if why.reason == "InUse" else "Blocked", Cause(why.reason, message)


def _in_use_elsewhere(judged: Judged) -> str:
    """Which GPU of the node this one waits for: they change together, so all that must go has to be idle at once."""
    plan = next((judged.plans[uuid] for uuid in judged.busy), None)
    if plan is None or plan.blocked is None:
        return "another GPU of this node is in use"
    return f"it waits for GPU {plan.index} of this node: {plan.blocked.message}"


def _at_rest(work: NodeWork, view: View, judged: Judged, uuid: str, drift: str) -> tuple[Phase, Cause]:
    if drift == "Observe" and uuid in judged.apart:
        return "Blocked", judged.apart[uuid].cause
    if work.refresh is not None:
        return "Failed", work.refresh
    if work.unadvertised is not None:
        return "Failed", _live(work.unadvertised, view)
    return "Ready", AS_WISHED


def _live(cause: Cause, view: View) -> Cause:
    """What is not advertised changes while it is waited for: the sentence is of now."""
    odd = shown_otherwise(view)
    start = cause.message.partition(": ")[0]
    return Cause(cause.reason, f"{start}: {odd}") if odd else cause


# --- conditions ------------------------------------------------------------------------------------------------------


def _conditions(
    record: Record, view: View, judged: Judged, partition: Stored[Partition], phase: Phase, cause: Cause
) -> tuple[Said, ...]:
    now, work = view.held.gpu(partition.name), work_of(record)
    plan = judged.plans.get(now.uuid) if now is not None else None
    mine = plan is not None and view.turn is not None and view.turn.id == work.turn
    done = mine and plan is not None and not plan.changes and plan.refused is None and plan.blocked is None
    waiting = Cause("Waiting", "it is not so yet")
    ready: Status = "True" if phase == "Ready" else "False"
    lasting = cause if phase not in MOVING or phase in ("RollingBack", "WaitingForIdle") else waiting
    applied = _said("Applied", "True", AS_WISHED) if done else _said("Applied", "False", lasting)
    return (
        _said("Ready", ready, cause),
        _drained(work, cause, done),
        applied,
        _shown(work, view),
    )


def _drained(work: NodeWork, cause: Cause, done: bool) -> Said:
    if work.stage == "Draining" or (work.stage in ("Waiting", "Backing") and cause.reason in _UNDRAINED):
        return _said("Drained", "False", cause)
    if done or work.stage in ("Rest", "Waiting"):
        return _said("Drained", "True", Cause("NotNeeded", "nothing has to go"))
    return _said("Drained", "True", Cause("AsWished", "all that has to go is idle"))


def _shown(work: NodeWork, view: View) -> Said:
    if work.unadvertised is not None and work.stage in ("Rest", "Waiting"):
        return _said("Advertised", "False", _live(work.unadvertised, view))
    if work.stage == "Rest":
        return _said("Advertised", "True", AS_WISHED)
    return _said("Advertised", "Unknown", Cause("Waiting", "it is verified at the end"))


def _said(kind: str, status: Status, cause: Cause) -> Said:
    return Said(kind, status, cast("Reason", cause.reason), cause.message)  # type: ignore[arg-type]


# --- who is in the way -----------------------------------------------------------------------------------------------


def _blockers(view: View, judged: Judged, partition: Stored[Partition]) -> tuple[BlockerDoc, ...]:
    """Who is in the way on this GPU, in order of place; a process or a pod is named once for each place."""
    now = view.held.gpu(partition.name)
    plan = judged.plans.get(now.uuid) if now is not None else None
    found = [doc for by in (plan.blocked_by if plan else ()) for doc in _docs(view, now.uuid if now else "", by)]
    said = answers(view)
    return tuple(dict.fromkeys(_answered(doc, said) for doc in found))


def _answered(doc: BlockerDoc, said: Mapping[str, EvictionDoc]) -> BlockerDoc:
    """A blocker with what keeps it from being evicted, as the operator says."""
    one = said.get(doc.pod.uid) if doc.pod is not None else None
    if one is None or one.reason not in ("DrainBlocked", "EvictionBudget"):
        return doc
    return doc.model_copy(update={"reason": one.reason, "pod_disruption_budgets": one.pod_disruption_budgets})


def _docs(view: View, uuid: str, by: Blocker) -> Iterable[BlockerDoc]:
    instance = None if by.instance is None else str(by.instance)
    pods = [p for name in view.held.pods.get((uuid, by.instance), ()) if (p := _named(view, name)) is not None]
    holder = by.holder
    if holder.pid is None:
        command = cut(holder.command, _COMMAND_MAX) or None
        if not pods:
            yield BlockerDoc(reason=by.reason, instance=instance, command=command)
        for pod in pods:
            yield BlockerDoc(reason=by.reason, instance=instance, pod=pod)
        return
    found = owner_of(view.seen, holder, view.held.pods.get((uuid, by.instance), ()))
    owner = None if found is None else Pod(namespace=found.namespace, name=found.name, uid=found.uid)
    program = holder.command.split(" ", 1)[0].rpartition("/")[2]
    yield BlockerDoc(
        reason=by.reason,
        instance=instance,
        pod=owner,
        pid=holder.pid,
        command=cut(holder.command, _COMMAND_MAX) or None,
        daemon=_DAEMONS.get(program),
    )


def _named(view: View, name: tuple[str, str]) -> Pod | None:
    return next(
        (Pod(namespace=p.namespace, name=p.name, uid=p.uid) for p in view.seen.pods if (p.namespace, p.name) == name),
        None,
    )
