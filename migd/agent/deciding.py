"""The node transaction as one pure, total function: (record, what is seen) to (record, one effect).

Every turn looks again, so a restart is nothing special. The record is saved before the effect is begun. An effect's
error is put into the record by `failed`, and the next turn decides what to make of it. Here orders are judged and
transactions opened; `driving` takes one GPU's transaction to its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from migd.agent.driving import backwards, cause_of, drive, ended, lost, parked
from migd.agent.effects import Effect, LookAgain, Pause, Seen
from migd.agent.orders import Order
from migd.agent.patience import POLL_S, TRY_AGAIN_S, patience_with
from migd.agent.records import READY, Cause, GpuRecord, Outcome, Record, Transaction
from migd.mig.geometry import EMPTY, Layout
from migd.mig.observed import SeenGpu
from migd.mig.operations import Operation
from migd.plans.preview import Blocked, GpuPreview


def decide(record: Record, seen: Seen) -> tuple[Record, Effect | None]:
    """The next record and the one effect to begin, or None at rest.

    At rest every GPU of the order has an outcome and no transaction is open that is not parked. Without an order only
    what a crash left is finished or undone.
    """
    record = without_gone(after_boot(record, seen.boot_id), seen.gpus)
    for uuid in _by_index(under_way(record), seen):
        return drive(record, uuid, seen)  # one GPU after the other, lowest index first
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
    return replace(record, order_id="", gpus=gpus)


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
        transaction = backwards(transaction, error)
    outcome = Outcome("Failed", error, changed=True, touched=True)
    return record.with_gpu(operation.gpu_uuid, parked(gpu, transaction, outcome))


# --- what a look voids -----------------------------------------------------------------------------------------------


def after_boot(record: Record, boot_id: str) -> Record:
    """A changed boot id voids what is recorded of the GPUs: instances are gone, and on some GPUs the mode too.

    So no order counts as carried out any more.
    """
    if record.boot_id == boot_id:
        return record
    gpus = {uuid: _rebooted(gpu) for uuid, gpu in record.gpus.items()}
    return replace(record, boot_id=boot_id, order_id="", gpus=gpus)


def _rebooted(gpu: GpuRecord) -> GpuRecord:
    before = gpu.transaction.before if gpu.transaction else Layout(True, gpu.owned) if gpu.owned else None
    gpu = gpu if before is None else gpu.left_at(before)
    return replace(gpu, owned=EMPTY, transaction=None, outcome=None)


def without_gone(record: Record, gpus: Iterable[SeenGpu]) -> Record:
    """Ours is only what has been there ever since: what is gone and comes back, somebody else has made."""
    for now in gpus:
        gpu, there = record.gpu(now.uuid), now.geometry
        if not gpu.owned <= there and now.mode is not None:
            record = record.with_gpu(now.uuid, replace(gpu, owned=gpu.owned & there))
    return record


# --- beginning an order ----------------------------------------------------------------------------------------------


def _begin(record: Record, seen: Seen, order: Order) -> tuple[Record, Effect | None]:
    """Judge every GPU first; open transactions only when not one is refused or blocked."""
    rests = {u: o for u in order.goals if (o := _rests(record.gpu(u), order)) is not None}
    record = _without_parked(record, seen, order)
    plans = order.plans(seen.gpus, record.owned)
    refused = {u: Outcome("Failed", cause_of(p.refused)) for u, p in plans.items() if p.refused}
    stuck = {
        u: o for u in plans if (o := awaiting(record.gpu(u), seen.gpu(u), seen.boot_id, order)) is not None
    } | rests
    blocked = {u: _blocked(p.blocked, order) for u, p in plans.items() if p.blocked is not None}
    gone = {u: lost("the GPU is not there any more") for u in order.goals if u not in plans}
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
        record = record.with_gpu(uuid, opened(record.gpu(uuid), now, plan, order, stop.get(uuid), bool(stop)))
    return replace(record, order_id=order.id), None if stop else LookAgain()


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
            record = record.with_gpu(uuid, ended(gpu, gpu.transaction, gpu.outcome))
    return record


def opened(
    gpu: GpuRecord, now: SeenGpu, plan: GpuPreview, order: Order, stopped: Outcome | None, waits: bool
) -> GpuRecord:
    """One GPU's record when its order begins: an open transaction, or the outcome that needs none."""
    if stopped is not None:
        return replace(gpu, outcome=stopped)
    owned = now.geometry if order.foreign == "Adopt" else gpu.owned
    if not plan.changes:
        gpu = gpu.changed_from(now.layout, now.layout)
        done = gpu.outcome if gpu.ready else READY  # before it waited
        return replace(gpu, owned=owned, awaiting=None, outcome=done)
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


def awaiting(gpu: GpuRecord, now: SeenGpu | None, boot_id: str, order: Order) -> Outcome | None:
    """What a mode change that waited for a reboot makes of the same order; another order is free to begin."""
    waits = gpu.awaiting
    if waits is None or waits.order_id != order.id or now is None or now.mode is None or now.mode.current == waits.mig:
        return None
    wish = "on" if waits.mig else "off"
    if waits.boot_id == boot_id:
        return Outcome("RebootRequired", Cause("RebootRequired", f"MIG mode {wish} waits for a reboot of this machine"))
    return Outcome(
        "Failed",
        Cause(
            "ModeChangeFailed",
            f"MIG mode {wish} did not take effect, although the machine was rebooted. Nothing more is tried until the "
            "plan changes. In a virtual machine the hypervisor may not allow it",
        ),
    )


def _by_index(uuids: tuple[str, ...], seen: Seen) -> list[str]:
    index = {gpu.uuid: gpu.index for gpu in seen.gpus}
    return sorted(uuids, key=lambda uuid: (index.get(uuid, len(index)), uuid))
