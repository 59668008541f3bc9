"""One GPU's open transaction, driven one turn at a time: forward, back when that fails, and to a verified end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from migd.agent.effects import Effect, LookAgain, Pause, Seen
from migd.agent.patience import PAUSE_MAX_S, RESETS_MAX, TURNS_MAX, patience_with
from migd.agent.records import AS_WISHED, AwaitingReboot, Cause, GpuRecord, Outcome, Phase, Record, Transaction
from migd.agent.steps import InTheWay, next_operation
from migd.mig.geometry import EMPTY, Geometry, Layout, by_start
from migd.mig.observed import SeenGpu, SeenInstance
from migd.mig.operations import CreateGpuInstance, Operation, ResetGpu, SetMode
from migd.plans.preview import Blocked
from migd.plans.wishes import Refused

PASSING: Final = frozenset({"InUse", "NeverIdle", "ForeignInstances", "ResetRefused", "GPUUnhealthy", "Waiting"})
"""Reasons that somebody else can take away, so that the same order may succeed later."""


def drive(record: Record, uuid: str, seen: Seen) -> tuple[Record, Effect | None]:
    """One turn of one GPU's open transaction."""
    gpu, now = record.gpu(uuid), seen.gpu(uuid)
    transaction = gpu.transaction
    assert transaction is not None, "only open transactions are driven"
    if now is None or now.lost or now.mode is None:
        why = "the GPU fell off the bus while it was changed, or shows no MIG mode any more"
        outcome = lost(f"{why}; once it is back, {NEXT_COMMAND}", transaction.touched)
        return record.with_gpu(uuid, parked(gpu, transaction, outcome)), LookAgain()
    left_s = transaction.not_before_s - seen.now_s
    if 0 < left_s <= PAUSE_MAX_S:
        return record, Pause(left_s, transaction.error.message if transaction.error else "trying again", uuid)
    gpu, effect = _turn(gpu, transaction, now, seen)
    return record.with_gpu(uuid, gpu), effect


def _turn(gpu: GpuRecord, transaction: Transaction, now: SeenGpu, seen: Seen) -> tuple[GpuRecord, Effect]:
    aim = transaction.before if transaction.back else transaction.target
    goal = aim or Layout(True)
    foreign = [there for there in now.instances if there.instance not in gpu.owned]
    strange = [s for s in foreign if s.instance not in goal.instances or (s.compute_instances and not s.whole)]
    if strange and not transaction.back:
        names = ", ".join(str(there.instance) for there in strange)
        return _turn_back(gpu, transaction, now, Cause("ForeignInstances", f"somebody else made or changed {names}"))
    taken = _taken(goal, strange) if transaction.back else EMPTY
    reachable = replace(goal, instances=goal.instances - taken) if taken else goal
    step = next_operation(now, reachable, gpu.owned, undoing=transaction.back)
    if step is None and taken:  # all else is back, and trying would not move them
        theirs, was = (", ".join(map(str, by_start(those))) for those in ({s.instance for s in strange}, taken))
        return _give_up(
            gpu,
            transaction,
            now,
            Cause("ForeignInstances", f"{was} cannot be put back beside somebody else's {theirs}"),
        )
    if step is None and aim is None:
        return _aim(gpu, transaction, now, seen)
    if step is None:
        return _verified(gpu, transaction), LookAgain()
    if isinstance(step, InTheWay):
        return _give_up(gpu, transaction, now, Cause("InUse", str(step)))
    if isinstance(step, SetMode):
        return _mode(gpu, transaction, now, step, seen)
    return _try(gpu, transaction, now, step)


def _taken(goal: Layout, strange: Iterable[SeenInstance]) -> Geometry:
    """What of a layout cannot be put back, as somebody else's instances are there now."""
    theirs = [there.instance for there in strange if there.instance not in goal.instances]
    return frozenset(
        ours for ours in goal.instances if any(ours.placement.mask & other.placement.mask for other in theirs)
    )


def _aim(gpu: GpuRecord, transaction: Transaction, now: SeenGpu, seen: Seen) -> tuple[GpuRecord, Effect]:
    """MIG is on and the driver lists profiles at last: find the target that could not be known before."""
    if seen.order is None or now.uuid not in seen.order.goals:
        return _turn_back(gpu, transaction, now, Cause("Held", "interrupted before its target was known"))
    plan = seen.order.plan(now, gpu.owned)
    if plan.refused is not None:
        return _turn_back(gpu, transaction, now, cause_of(plan.refused))
    if plan.blocked is not None:
        return _turn_back(gpu, transaction, now, cause_of(plan.blocked))
    if plan.target is None:
        cause = Cause("NVMLError", "the driver lists no profiles although MIG is on")
        return _turn_back(gpu, transaction, now, cause)
    return replace(gpu, transaction=replace(transaction, target=plan.target)), LookAgain()


def _mode(
    gpu: GpuRecord, transaction: Transaction, now: SeenGpu, step: SetMode, seen: Seen
) -> tuple[GpuRecord, Effect]:
    """Ask for the mode; where it was accepted and only a reset can activate it, reset; where that fails, a reboot."""
    assert now.mode is not None, "a mode step is made only where there is a mode"
    asked = transaction.step in (str(step), str(ResetGpu(now.uuid)))
    error = transaction.error
    pending = now.mode.pending == step.enable != now.mode.current
    if not (asked and pending and not now.resetless) or (error is not None and transaction.resets == 0):
        return _try(gpu, transaction, now, step)
    if transaction.resets < RESETS_MAX or (error is not None and error.reason != "RebootRequired"):
        if now.in_use:  # whoever it is, a reset would end it; asking for the mode did not
            return _give_up(gpu, transaction, now, Cause("InUse", str(InTheWay(now))))
        return _try(gpu, transaction, now, ResetGpu(now.uuid))
    wish = "on" if step.enable else "off"
    why = error.message if error else "neither the driver nor a GPU reset activates it"
    cause = Cause("RebootRequired", f"MIG mode {wish} is accepted and waits for a reboot of this machine: {why}")
    awaiting = None if transaction.back else AwaitingReboot(seen.boot_id, transaction.order_id, step.enable)
    outcome = Outcome("RebootRequired", cause, transaction.touched, transaction.touched)
    return replace(ended(gpu, transaction, outcome), awaiting=awaiting), LookAgain()


def _try(gpu: GpuRecord, transaction: Transaction, now: SeenGpu, step: Operation) -> tuple[GpuRecord, Effect]:
    """Begin an operation, unless it was tried often enough."""
    again = transaction.step == str(step)
    patience = patience_with(transaction.error if again else None)
    tries = transaction.tries if again else 0
    if tries >= (patience.tries_back if transaction.back else patience.tries) or transaction.turns >= TURNS_MAX:
        return _give_up(
            gpu, transaction, now, transaction.error if again and transaction.error else _no_effect(step, tries)
        )
    begun = replace(
        transaction,
        step=str(step),
        tries=tries + 1,
        error=None,
        resets=transaction.resets + isinstance(step, ResetGpu),
        touched=True,
        turns=transaction.turns + 1,
        not_before_s=0.0,
    )
    made = frozenset({step.instance}) if isinstance(step, CreateGpuInstance) else EMPTY
    return replace(gpu, owned=gpu.owned | made, transaction=begun), step


def _no_effect(step: Operation, tries: int) -> Cause:
    reason = "ModeChangeFailed" if isinstance(step, SetMode) else "NVMLError"
    return Cause(reason, f"{step} was accepted {tries} times, but NVML does not show it")


def _give_up(gpu: GpuRecord, transaction: Transaction, now: SeenGpu, cause: Cause) -> tuple[GpuRecord, Effect]:
    """Forward: go back. On the way back already: rest as it is, and say so; the next command tries again."""
    if not transaction.back:
        return _turn_back(gpu, transaction, now, cause)
    first = transaction.cause.message if transaction.cause else "interrupted"
    message = f"{first}; going back failed too: {cause.message}. The GPU is left with {now.layout}; {NEXT_COMMAND}"
    return parked(gpu, transaction, Outcome("Failed", Cause(cause.reason, message), True, True)), LookAgain()


def _turn_back(gpu: GpuRecord, transaction: Transaction, now: SeenGpu, cause: Cause) -> tuple[GpuRecord, Effect]:
    if transaction.hold and transaction.touched:
        message = f"{cause.message}; held as the plan's onFailure says, with {now.layout}"
        return ended(gpu, transaction, Outcome("Held", Cause("Held", message), True, True)), LookAgain()
    return replace(gpu, transaction=backwards(transaction, cause)), LookAgain()


def backwards(transaction: Transaction, cause: Cause) -> Transaction:
    """The transaction turned round, towards the layout before it."""
    return replace(
        transaction, back=True, cause=cause, step="", tries=0, error=None, resets=0, turns=0, not_before_s=0.0
    )


NEXT_COMMAND: Final = "the next `migd apply` that names this GPU, or `migd rollback`, goes on from there"
"""What goes on from where a GPU was left, on a machine of its own; a cluster's agent tells it otherwise."""


# --- ending one GPU's transaction ------------------------------------------------------------------------------------


def parked(gpu: GpuRecord, transaction: Transaction, outcome: Outcome) -> GpuRecord:
    """At rest with the transaction open: the next command goes on with it."""
    return replace(gpu, transaction=replace(transaction, parked=True), outcome=outcome)


def _verified(gpu: GpuRecord, transaction: Transaction) -> GpuRecord:
    """The GPU is, as read back, what it should be: the target, or again what it was."""
    if transaction.back:
        cause = transaction.cause or Cause("Held", "interrupted")
        phase: Phase = "Blocked" if cause.reason in PASSING else "Failed"
        put_back = "; put back as it was" if transaction.touched else ""
        return replace(
            gpu,
            transaction=None,
            outcome=Outcome(phase, Cause(cause.reason, cause.message + put_back), touched=transaction.touched),
        )
    target, before = transaction.target, transaction.before
    assert target is not None, "nothing is verified against an unknown target"
    outcome = Outcome("Ready", AS_WISHED, target != before, transaction.touched)
    return replace(gpu.changed_from(before, target), transaction=None, outcome=outcome)


def ended(gpu: GpuRecord, transaction: Transaction, outcome: Outcome | None) -> GpuRecord:
    """Given up half way: what is there of ours stays ours, and `migd rollback` can still go to the layout before."""
    return replace(gpu.left_at(transaction.before), transaction=None, outcome=outcome)


def cause_of(why: Refused | Blocked) -> Cause:
    """A preview's refusal or blocker as the cause of an outcome."""
    return Cause(why.reason, why.message)


def lost(message: str, touched: bool = False) -> Outcome:
    """The outcome of a GPU that is not there any more. touched: while it was being changed."""
    return Outcome("Lost", Cause("GPUUnhealthy", message), touched, touched)
