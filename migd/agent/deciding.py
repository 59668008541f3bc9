"""The node transaction as one pure, total function: (record, what is seen) to (record, one effect).

Every turn looks again, so a restart is nothing special. The record is saved before the effect is begun. An effect's
error is put into the record by `failed`, and the next turn decides what to make of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from migd.agent.orders import Order
from migd.agent.patience import PAUSE_MAX_S, POLL_S, RESETS_MAX, TRY_AGAIN_S, TURNS_MAX, patience_with
from migd.agent.records import AS_WISHED, AwaitingReboot, Cause, GpuRecord, Outcome, Phase, Record, Transaction
from migd.agent.steps import InTheWay, next_operation
from migd.mig.geometry import EMPTY, Layout
from migd.mig.observed import SeenGpu
from migd.mig.operations import CreateGpuInstance, Operation, ResetGpu, SetMode
from migd.plans.preview import Blocked, GpuPreview
from migd.plans.wishes import Refused

PASSING: Final = frozenset({"InUse", "NeverIdle", "ForeignInstances", "ResetRefused", "GPUUnhealthy", "Waiting"})
"""Reasons that somebody else can take away, so that the same order may succeed later."""


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a decision looks at. now_s: any clock that only moves forward within one boot."""

    boot_id: str
    now_s: float
    gpus: tuple[SeenGpu, ...]
    order: Order | None = None

    def gpu(self, uuid: str) -> SeenGpu | None:
        """This GPU, or None where NVML does not show it."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for a while, then look again. why: for people; uuid: the GPU it is for."""

    seconds: float
    why: str
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Nothing to do but to save the record and look again."""


Effect = Operation | Pause | LookAgain


def decide(record: Record, seen: Seen) -> tuple[Record, Effect | None]:
    """The next record and the one effect to begin, or None at rest.

    At rest every GPU of the order has an outcome and no transaction is open that is not parked. Without an order only
    what a crash left is finished or undone.
    """
    record = _without_gone(_after_boot(record, seen), seen)
    for uuid in _by_index(under_way(record), seen):
        return _drive(record, uuid, seen)  # one GPU after the other, lowest index first
    if seen.order is None:
        return record, None
    if record.order_id == seen.order.id:
        return _carried_out(record, seen, seen.order)
    return _begin(record, seen, seen.order)


def under_way(record: Record) -> tuple[str, ...]:
    """UUIDs of GPUs whose transaction is to be driven now: open, and not parked."""
    return tuple(u for u in record.open if (found := record.gpu(u).transaction) is not None and not found.parked)


def accept(record: Record, order: Order | None) -> Record:
    """The record at the start of a command: the order is to be begun anew, and what was parked is tried again.

    On GPUs that an order does not name it stays parked: what hangs or fails there must not hold up the others.
    """
    if order is None:
        return replace(record, gpus={uuid: _resumed(gpu, ordered=False) for uuid, gpu in record.gpus.items()})
    gpus = {uuid: _resumed(gpu, ordered=True) if uuid in order.goals else gpu for uuid, gpu in record.gpus.items()}
    return Record(record.boot_id, "", gpus)


def _resumed(gpu: GpuRecord, ordered: bool) -> GpuRecord:
    waits = gpu.transaction
    if waits is not None and waits.parked:
        waits = replace(waits, parked=False, step="", tries=0, error=None, resets=0, turns=0, not_before_s=0.0)
    return replace(gpu, transaction=waits, outcome=None if ordered else gpu.outcome)


def failed(record: Record, operation: Operation, error: Cause, now_s: float) -> Record:
    """The record after an operation answered with an error; the next turn decides what follows."""
    gpu = record.gpu(operation.gpu_uuid)
    transaction = gpu.transaction
    assert transaction is not None, "operations are begun only within a transaction"
    pause = patience_with(error).pause_s(transaction.tries)
    changed = replace(transaction, error=error, not_before_s=now_s + pause)
    return record.with_gpu(operation.gpu_uuid, replace(gpu, transaction=changed))


def hung(record: Record, operation: Operation, error: Cause) -> Record:
    """The record after an operation did not return: nothing more can be tried in this process; the next goes back."""
    gpu = record.gpu(operation.gpu_uuid)
    transaction = gpu.transaction
    assert transaction is not None, "operations are begun only within a transaction"
    if not (transaction.back or transaction.hold):
        transaction = _backwards(transaction, error)
    outcome = Outcome("Failed", error, changed=True, touched=True)
    return record.with_gpu(operation.gpu_uuid, _parked(gpu, transaction, outcome))


# --- what a look voids -----------------------------------------------------------------------------------------------


def _after_boot(record: Record, seen: Seen) -> Record:
    """A changed boot id voids what is recorded of the GPUs: instances are gone, and on some GPUs the mode too.

    So no order counts as carried out any more.
    """
    if record.boot_id == seen.boot_id:
        return record
    return Record(seen.boot_id, "", {uuid: _rebooted(gpu) for uuid, gpu in record.gpus.items()})


def _rebooted(gpu: GpuRecord) -> GpuRecord:
    before = gpu.transaction.before if gpu.transaction else Layout(True, gpu.owned) if gpu.owned else None
    gpu = gpu if before is None else gpu.left_at(before)
    return replace(gpu, owned=EMPTY, transaction=None, outcome=None)


def _without_gone(record: Record, seen: Seen) -> Record:
    """Ours is only what has been there ever since: what is gone and comes back, somebody else has made."""
    for now in seen.gpus:
        gpu = record.gpu(now.uuid)
        if gpu.owned - now.geometry and now.mode is not None:
            record = record.with_gpu(now.uuid, replace(gpu, owned=gpu.owned & now.geometry))
    return record


# --- beginning an order ----------------------------------------------------------------------------------------------


def _begin(record: Record, seen: Seen, order: Order) -> tuple[Record, Effect | None]:
    """Judge every GPU first; open transactions only when not one is refused or blocked."""
    rests = {u: o for u in order.goals if (o := _rests(record.gpu(u), order)) is not None}
    record = _without_parked(record, seen, order)
    plans = order.plans(seen.gpus, record.owned)
    refused = {u: Outcome("Failed", _cause(p.refused)) for u, p in plans.items() if p.refused}
    stuck = rests or {u: o for u in plans if (o := _awaiting(record.gpu(u), seen, u, order)) is not None}
    blocked = {u: _blocked(p.blocked, order) for u, p in plans.items() if p.blocked is not None}
    gone = {u: _lost("the GPU is not there any more") for u in order.goals if u not in plans}
    if not refused and not stuck and not gone and blocked:
        waits = all(outcome.cause.reason == "InUse" for outcome in blocked.values())
        if waits and order.wait_until_s is not None:
            if seen.now_s < order.wait_until_s:
                uuid, outcome = min(blocked.items())
                return record, Pause(min(POLL_S, order.wait_until_s - seen.now_s), outcome.cause.message, uuid)
            blocked = {u: _never_idle(o) for u, o in blocked.items()}
    stop = refused or stuck or {**gone, **blocked}
    for uuid, outcome in gone.items():
        record = record.with_gpu(uuid, replace(record.gpu(uuid), outcome=outcome))
    for uuid, plan in plans.items():
        now = seen.gpu(uuid)
        assert now is not None, "a plan is made only for a GPU that is seen"
        record = record.with_gpu(uuid, _opened(record.gpu(uuid), now, plan, order, stop.get(uuid), bool(stop)))
    return Record(record.boot_id, order.id, record.gpus), None if stop else LookAgain()


def _rests(gpu: GpuRecord, order: Order) -> Outcome | None:
    """What became in this command of a change that an earlier one left open, where it is not to be begun again.

    Parked: planning on top of it would lose the layout before, as long as it is the same order. Held: somebody is to
    look at it first, and to say so with another command.
    """
    parked = gpu.transaction is not None and gpu.transaction.order_id == order.id
    held = gpu.outcome is not None and gpu.outcome.phase == "Held"
    return gpu.outcome if parked or held else None


def _carried_out(record: Record, seen: Seen, order: Order) -> tuple[Record, Effect | None]:
    """At rest, unless the order waits and somebody in use was found only while it was carried out: then once more.

    Such are processes that came in between, and monitors that NVML does not list.
    """
    failed = {u: o for u in sorted(order.goals) if (o := record.gpu(u).outcome) is not None and o.phase != "Ready"}
    in_use = all(o.cause.reason == "InUse" and record.gpu(u).transaction is None for u, o in failed.items())
    if order.wait_until_s is None or not failed or not in_use:
        return record, None
    if seen.now_s >= order.wait_until_s:
        for uuid, outcome in failed.items():
            record = record.with_gpu(uuid, replace(record.gpu(uuid), outcome=_never_idle(outcome)))
        return record, None
    uuid, outcome = next(iter(failed.items()))
    pause_s = min(TRY_AGAIN_S, order.wait_until_s - seen.now_s)
    return replace(record, order_id=""), Pause(pause_s, outcome.cause.message, uuid)


def _never_idle(outcome: Outcome) -> Outcome:
    return replace(outcome, cause=Cause("NeverIdle", f"the wait is over: {outcome.cause.message}"))


def _without_parked(record: Record, seen: Seen, order: Order) -> Record:
    """Another order takes over the GPUs that are parked, where they can be read: it plans from what is there."""
    for uuid in record.open:
        gpu, now = record.gpu(uuid), seen.gpu(uuid)
        takes_over = uuid in order.goals and _rests(gpu, order) is None
        if takes_over and now is not None and not now.lost and gpu.transaction is not None:
            record = record.with_gpu(uuid, _ended(gpu, gpu.transaction, gpu.outcome))
    return record


def _opened(
    gpu: GpuRecord, now: SeenGpu, plan: GpuPreview, order: Order, stopped: Outcome | None, waits: bool
) -> GpuRecord:
    """One GPU's record when its order begins: an open transaction, or the outcome that needs none."""
    if stopped is not None:
        return replace(gpu, outcome=stopped)
    owned = now.geometry if order.foreign == "Adopt" else gpu.owned
    if not plan.changes:
        gpu = gpu.changed_from(now.layout, now.layout)
        done = gpu.outcome if gpu.outcome is not None and gpu.outcome.phase == "Ready" else None  # before it waited
        return replace(gpu, owned=owned, awaiting=None, outcome=done or Outcome("Ready", AS_WISHED))
    if waits:
        return replace(
            gpu, outcome=Outcome("Blocked", Cause("Waiting", "not begun: another GPU of the plan is held up"))
        )
    return replace(
        gpu,
        owned=owned,
        outcome=None,
        awaiting=None,
        transaction=Transaction(order.id, now.layout, plan.target, order.on_failure == "Hold"),
    )


def _blocked(why: Blocked, order: Order) -> Outcome:
    """What blocks a GPU; for an order that waits it is named after what no waiting takes away, if there is any."""
    lasting = [by.reason for by in why.by if by.reason != "InUse"] if order.wait_until_s is not None else []
    return Outcome("Blocked", Cause(lasting[0] if lasting else why.reason, why.message))


def _cause(why: Refused | Blocked) -> Cause:
    return Cause(why.reason, why.message)


def _lost(message: str, touched: bool = False) -> Outcome:
    return Outcome("Lost", Cause("GPUUnhealthy", message), touched, touched)


def _awaiting(gpu: GpuRecord, seen: Seen, uuid: str, order: Order) -> Outcome | None:
    """What a mode change that waited for a reboot makes of the same order; another order is free to begin."""
    waits, now = gpu.awaiting, seen.gpu(uuid)
    if waits is None or waits.order_id != order.id or now is None or now.mode is None or now.mode.current == waits.mig:
        return None
    wish = "on" if waits.mig else "off"
    if waits.boot_id == seen.boot_id:
        return Outcome("RebootRequired", Cause("RebootRequired", f"MIG mode {wish} waits for a reboot of this machine"))
    return Outcome(
        "Failed",
        Cause(
            "ModeChangeFailed",
            f"MIG mode {wish} did not take effect, although the machine was rebooted. Nothing more is tried until the "
            "plan changes. In a virtual machine the hypervisor may not allow it",
        ),
    )


# --- driving one GPU -------------------------------------------------------------------------------------------------


def _drive(record: Record, uuid: str, seen: Seen) -> tuple[Record, Effect | None]:
    """One turn of one GPU's open transaction."""
    gpu, now = record.gpu(uuid), seen.gpu(uuid)
    transaction = gpu.transaction
    assert transaction is not None, "only open transactions are driven"
    if now is None or now.lost or now.mode is None:
        why = "the GPU fell off the bus while it was changed, or shows no MIG mode any more"
        outcome = _lost(f"{why}; once it is back, {_NEXT_COMMAND}", transaction.touched)
        return record.with_gpu(uuid, _parked(gpu, transaction, outcome)), LookAgain()
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
    step = next_operation(now, goal, gpu.owned, undoing=transaction.back)
    if step is None and aim is None:
        return _aim(gpu, transaction, now, seen)
    if step is None:
        return _verified(gpu, transaction), LookAgain()
    if isinstance(step, InTheWay):
        return _give_up(gpu, transaction, now, Cause("InUse", str(step)))
    if isinstance(step, SetMode):
        return _mode(gpu, transaction, now, step, seen)
    return _try(gpu, transaction, now, step)


def _aim(gpu: GpuRecord, transaction: Transaction, now: SeenGpu, seen: Seen) -> tuple[GpuRecord, Effect]:
    """MIG is on and the driver lists profiles at last: find the target that could not be known before."""
    if seen.order is None or now.uuid not in seen.order.goals:
        return _turn_back(gpu, transaction, now, Cause("Held", "interrupted before its target was known"))
    plan = seen.order.plan(now, gpu.owned)
    if plan.refused is not None:
        return _turn_back(gpu, transaction, now, _cause(plan.refused))
    if plan.blocked is not None:
        return _turn_back(gpu, transaction, now, _cause(plan.blocked))
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
        return _try(gpu, transaction, now, ResetGpu(now.uuid))
    wish = "on" if step.enable else "off"
    why = error.message if error else "neither the driver nor a GPU reset activates it"
    cause = Cause("RebootRequired", f"MIG mode {wish} is accepted and waits for a reboot of this machine: {why}")
    awaiting = None if transaction.back else AwaitingReboot(seen.boot_id, transaction.order_id, step.enable)
    outcome = Outcome("RebootRequired", cause, transaction.touched, transaction.touched)
    ended = _ended(gpu, transaction, outcome)
    return replace(ended, awaiting=awaiting), LookAgain()


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
    message = f"{first}; going back failed too: {cause.message}. The GPU is left with {now.layout}; {_NEXT_COMMAND}"
    return _parked(gpu, transaction, Outcome("Failed", Cause(cause.reason, message), True, True)), LookAgain()


def _turn_back(gpu: GpuRecord, transaction: Transaction, now: SeenGpu, cause: Cause) -> tuple[GpuRecord, Effect]:
    if transaction.hold and transaction.touched:
        message = f"{cause.message}; held as the plan's onFailure says, with {now.layout}"
        return _ended(gpu, transaction, Outcome("Held", Cause("Held", message), True, True)), LookAgain()
    return replace(gpu, transaction=_backwards(transaction, cause)), LookAgain()


def _backwards(transaction: Transaction, cause: Cause) -> Transaction:
    return replace(
        transaction, back=True, cause=cause, step="", tries=0, error=None, resets=0, turns=0, not_before_s=0.0
    )


_NEXT_COMMAND: Final = "the next `migd apply` that names this GPU, or `migd rollback`, goes on from there"


# --- ending one GPU's transaction ------------------------------------------------------------------------------------


def _parked(gpu: GpuRecord, transaction: Transaction, outcome: Outcome) -> GpuRecord:
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


def _ended(gpu: GpuRecord, transaction: Transaction, outcome: Outcome | None) -> GpuRecord:
    """Given up half way: what is there of ours stays ours, and `migd rollback` can still go to the layout before."""
    return replace(gpu.left_at(transaction.before), transaction=None, outcome=outcome)


def _by_index(uuids: tuple[str, ...], seen: Seen) -> list[str]:
    index = {gpu.uuid: gpu.index for gpu in seen.gpus}
    return sorted(uuids, key=lambda uuid: (index.get(uuid, len(index)), uuid))
