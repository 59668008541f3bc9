"""What is said of each plan and GPU: conditions, counts and history, as the statuses of the API have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from migd.plans.conditions import MESSAGE_MAX, REASONS, Condition, Reason, Said, cut, find, following, whole_second
from migd.plans.partitions import Partition
from migd.plans.statuses import GpuCounts, HistoryEntry, NodeCounts, PlanPreview, PlanStatus
from migd_operator.claims import Claim, Left
from migd_operator.evicting import Evictions
from migd_operator.facts import APPROVED, InvalidPlan, NodeFacts, PlanFacts
from migd_operator.shares import Share, as_wished, fell_silent, held_up, idling, skipped
from migd_operator.turns import Turn

CONDITIONS: Final = ("Assigned", "AgentAlive")
"""The operator's of a GPU; the others are its agent's."""
HISTORY_MAX: Final = 10
_PASSING: Final[tuple[Reason, ...]] = ("Waiting", "DriverUpgrade", "AgentSilent")
_REFUSED: Final[tuple[Reason, ...]] = ("DuplicateGPU", "Conflict", "UnknownProfile", "Infeasible", "NotCapable")
_FIELD: Final = {
    "Idle": "idle",
    "Pending": "pending",
    "WaitingForIdle": "waiting_for_idle",
    "Draining": "draining",
    "Changing": "changing",
    "Verifying": "verifying",
    "RollingBack": "rolling_back",
    "Ready": "ready",
    "Blocked": "blocked",
    "RebootRequired": "reboot_required",
    "Failed": "failed",
    "Held": "held",
    "Lost": "lost",
}


def partition_conditions(claim: Claim, turn: Turn, now: datetime) -> tuple[Condition, ...]:
    """The operator's conditions of one GPU."""
    partition = claim.partition
    node = turn.progress.wish.node
    mine = {c.type: c for c in partition.status.conditions if c.type in CONDITIONS}
    assigned = _assigned(claim, turn)
    before = mine.get("Assigned")
    if node.agent == "unheard" and before is not None and (before.status, turn.act) == ("False", "Take"):
        assigned = _again(before)  # it waits as it did: a new start of the operator is no news
    return following(mine.values(), (assigned, *_alive(node, mine.get("AgentAlive"))), partition.generation, now)


def _alive(node: NodeFacts, before: Condition | None) -> tuple[Said, ...]:
    if node.agent == "unheard":
        return (_again(before),) if before is not None else ()
    if node.silent:
        message = f"the agent of node {node.name} is silent: its lease has expired, or there never was one"
        return (Said("AgentAlive", "False", "AgentSilent", message),)
    return (Said("AgentAlive", "True", "Valid", f"the agent of node {node.name} renews its lease"),)


def _again(before: Condition) -> Said:
    return Said(before.type, before.status, before.reason, before.message)


def _assigned(claim: Claim, turn: Turn) -> Said:
    if claim.partition.gpu is None:
        return Said("Assigned", "False", "Waiting", "the agent has not told of this GPU yet")
    if claim.left is not None:
        return Said("Assigned", "False", claim.left.reason, claim.left.message)
    if claim.desired is None:
        return Said("Assigned", "False", "NotNeeded", "no rule of a plan is for this GPU; it is left alone")
    if turn.act in ("Give", "Keep"):
        return Said(
            "Assigned", "True", "Assigned", f"plan {claim.desired.plan.name} decides, and it is this node's turn"
        )
    why = turn.why or Left("Waiting", "it is not this node's turn")
    return Said("Assigned", "False", why.reason, why.message)


def plan_status(
    plan: PlanFacts,
    shares: Sequence[Share],
    preview: PlanPreview,
    stop: Left | None,
    evictions: Evictions,
    now: datetime,
) -> PlanStatus:
    """The status of a plan. shares: nodes with a GPU that it decides on, by name."""
    states = [_state(share, plan.name) for share in shares]
    claims = [(share, claim) for share in shares for claim in share.claims]
    done = sum(as_wished(share.turn, claim) for share, claim in claims)
    said = _said(plan, shares, states, _with_command(plan, preview, stop), held_up(shares, evictions))
    ready = next(s for s in said if s.type == "Ready")
    well = ready.status == "True"
    conditions = following(plan.status.conditions, said, plan.generation, now)
    told = find(conditions, "Ready")
    assert told is not None
    return PlanStatus(
        observed_generation=plan.generation,
        reason="" if well else told.reason,
        message="" if well else told.message,
        conditions=conditions,
        nodes=_node_counts(states),
        gpus=_gpu_counts(claims, done),
        preview=preview,
        evictions=evictions.counts[plan.uid],
        history=_history(plan, shares, states, well, evictions, now),
    )


def _with_command(plan: PlanFacts, preview: PlanPreview, stop: Left | None) -> Left | None:
    """What stops a plan, with the command that lets it go. GPUs do not tell it: a digest changes with the fleet."""
    if stop is None or stop.reason != "AwaitingApproval":
        return stop
    command = f"kubectl annotate gpp {plan.name} {APPROVED}={preview.digest} --overwrite"
    return Left(stop.reason, f"{stop.message}: look at status.preview, then {command}")


def invalid_status(plan: InvalidPlan, status: PlanStatus, now: datetime) -> PlanStatus:
    """The status of a plan that cannot be read: what was counted and previewed before stays, and is of then."""
    why = f"this is no plan that this version of migd can carry out, so nothing of it is changed: {plan.why}"
    said = [
        Said("Accepted", "False", "Invalid", why),
        Said("Progressing", "False", "Invalid", why),
        Said("Ready", "False", "Invalid", why),
        Said("Stalled", "True", "Invalid", why),
    ]
    return status.model_copy(
        update={
            "observed_generation": plan.generation,
            "reason": "Invalid",
            "message": cut(why, MESSAGE_MAX),
            "conditions": following(status.conditions, said, plan.generation, now),
        }
    )


def _state(share: Share, plan: str) -> str:
    state = share.turn.progress.state
    if state == "Waiting" and plan in share.turn.progress.failed:
        return "failed"
    if state in ("Ready", "Waiting") and any(c.left is not None for c in share.claims):
        return "blocked"
    return state.lower()


def _node_counts(states: Sequence[str]) -> NodeCounts:
    counted = {name: states.count(name) for name in ("ready", "changing", "waiting", "blocked", "failed", "unknown")}
    return NodeCounts(summary=f"{counted['ready']}/{len(states)}", matched=len(states), **counted)


def _gpu_counts(claims: Sequence[tuple[Share, Claim]], done: int) -> GpuCounts:
    counted = dict.fromkeys(_FIELD.values(), 0)
    for share, claim in claims:
        phase = claim.partition.status.phase or "Pending"
        stale = phase == "Ready" and not as_wished(share.turn, claim)
        counted["pending" if stale else _FIELD[phase]] += 1
    return GpuCounts(summary=f"{done}/{len(claims)}", matched=len(claims), **counted)


def _said(
    plan: PlanFacts, shares: Sequence[Share], states: Sequence[str], stop: Left | None, waiting: str
) -> tuple[Said, ...]:
    refused = _refusals(shares)
    accepted = (
        Said("Accepted", "False", *refused) if refused else Said("Accepted", "True", "Valid", "the plan is valid")
    )
    if not shares:
        none = "no GPU is decided by this plan yet: no node matches, no rule matches, or other plans have them"
        return (
            accepted,
            Said("Progressing", "False", "NotNeeded", none),
            Said("Ready", "False", "Waiting", none),
            Said("Stalled", "False", "NotNeeded", none),
        )
    number = f"{states.count('ready')} of {len(states)} nodes are ready"
    if all(as_wished(s.turn, c) for s in shares for c in s.claims):
        every = "every GPU is as wished"
        return (
            accepted,
            Said("Progressing", "False", "AsWished", every),
            Said("Ready", "True", "AsWished", every),
            Said("Stalled", "False", "AsWished", every),
        )
    trouble = refused or _trouble(shares)
    waits = [s for s in shares if s.turn.why is not None and s.turn.why.reason in _PASSING]
    if fell_silent(shares):  # it keeps its place, so who only waits for room waits for its agent
        waits = [s for s in waits if not s.turn.no_room]
    failed = "failed" in states and plan.plan.spec.rollout.pause_on_failure
    moving = "changing" in states or any(s.turn.act == "Give" for s in shares)
    going = moving or (not stop and not failed and bool(waits))
    message = "; ".join(part for part in (number, idling(shares), waiting, skipped(shares)) if part)
    stopped = (stop.reason, stop.message) if stop else trouble or ("Waiting", message)
    why = trouble or stopped
    return (
        accepted,
        Said("Progressing", "True", "Waiting", message) if going else Said("Progressing", "False", *stopped),
        Said("Ready", "False", why[0], f"{number}; {why[1]}" if why[1] != message else message),
        Said("Stalled", "True", *trouble)
        if trouble and not going
        else Said("Stalled", "False", "Waiting" if going or stop else "NotNeeded", message),
    )


def _where(share: Share, claim: Claim) -> str:
    gpu = claim.partition.gpu
    return f"node {share.node.name}, GPU {gpu.index}" if gpu is not None else f"node {share.node.name}"


def _refusals(shares: Sequence[Share]) -> tuple[Reason, str] | None:
    """The worst reason why GPUs can never be as this plan wishes, as things are; None where there is none."""
    for reason in _REFUSED:
        found = [(s, c) for s in shares for c in s.claims if c.left is not None and c.left.reason == reason]
        if found:
            share, claim = found[0]
            assert claim.left is not None
            number = "1 GPU is" if len(found) == 1 else f"{len(found)} GPUs are"
            return reason, f"{number} not moved, such as {_where(share, claim)}: {claim.left.message}"
    return None


def _trouble(shares: Sequence[Share]) -> tuple[Reason, str] | None:
    """What else is wrong, the worst first: a change that failed, then what is in the way."""
    for bad in (("Failed", "Held"), ("RebootRequired", "Blocked")):
        for share in shares:
            for claim in share.claims:
                if share.turn.progress.given and claim.desired is not None and claim.partition.status.phase in bad:
                    reason = _reason_of(claim.partition)
                    return reason, f"{_where(share, claim)}: {claim.partition.status.message or reason}"
    silent = fell_silent(shares)
    if silent:
        return "AgentSilent", f"the agent of node {silent} fell silent in the node's turn: look at its pod and the node"
    for share in shares:
        for claim in share.claims:
            if claim.left is not None:
                return claim.left.reason, f"{_where(share, claim)}: {claim.left.message}"
        why = share.turn.why
        if why is not None and why.reason in ("ForeignOwner", "Invalid"):
            return why.reason, why.message
    return None


def _reason_of(partition: Partition) -> Reason:
    fallback: Mapping[str, Reason] = {"Held": "Held", "RebootRequired": "RebootRequired", "Blocked": "InUse"}
    told = partition.status.reason
    known = next((r for r in REASONS if r == told), None)
    return known or fallback.get(partition.status.phase or "", "NVMLError")


def _history(
    plan: PlanFacts, shares: Sequence[Share], states: Sequence[str], well: bool, evictions: Evictions, now: datetime
) -> tuple[HistoryEntry, ...]:
    """The last changes, the newest first: one for each generation that started a node that had something to do."""
    at = whole_second(now)
    counts = (evictions.counts[plan.uid], evictions.closed.get(plan.uid))
    counted = {one.generation: one.evicted for one in counts if one is not None}
    entries = [
        e.model_copy(update={"evicted": max(e.evicted, counted.get(e.generation, 0))}) for e in plan.status.history
    ]
    entries = [
        e.model_copy(update={"result": "Superseded", "finished_at": at})
        if e.generation != plan.generation and e.result == "Running"
        else e
        for e in entries
    ]
    here = next((i for i, e in enumerate(entries) if e.generation == plan.generation), None)
    if here is None:
        if not any(s.turn.act == "Give" and s.turn.progress.wish.changes for s in shares):
            return tuple(entries[:HISTORY_MAX])
        entries.insert(0, HistoryEntry(generation=plan.generation, started_at=at, result="Running"))
        here = 0
    entry = entries[here]
    moving = "changing" in states or any(s.turn.act == "Give" for s in shares)
    failed = "failed" in states and not moving
    result = "Succeeded" if well or (entry.result == "Succeeded" and not moving) else "Failed" if failed else "Running"
    changed = [
        share.node.name
        for share in shares
        for claim in share.claims
        if (last := claim.partition.status.last_transition) is not None
        and last.generation == plan.generation
        and last.result == "Succeeded"
    ]
    ended = None if result == "Running" else entry.finished_at if result == entry.result else at
    message = "" if result != "Failed" else f"node {shares[states.index('failed')].node.name} failed"
    entries[here] = entry.model_copy(
        update={
            "result": result,
            "finished_at": ended,
            "nodes": max(entry.nodes, len(set(changed))),
            "gpus": max(entry.gpus, len(changed)),
            "message": cut(message, 1024),
        }
    )
    return tuple(entries[:HISTORY_MAX])
