"""The agent's loop: look, decide, remember, act. All decisions are `deciding`'s; all I/O goes through the ports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from migd.agent.deciding import accept, decide, failed, hung, under_way
from migd.agent.effects import Effect, LookAgain, Pause, Seen
from migd.agent.orders import Order
from migd.agent.ports import Boot, Clock, Gpus, Processes, Reset, ResetRefusedError, Store
from migd.agent.records import Cause, Record
from migd.mig.observed import Holder, SeenGpu
from migd.mig.operations import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstances,
    DestroyGpuInstance,
    Operation,
    ResetGpu,
    SetMode,
)
from migd.nvml.errors import (
    GpuError,
    HungError,
    InUseError,
    LostError,
    NoPermissionError,
    UnreadableError,
)

T = TypeVar("T")
ON_INSTANCE: Final = (DestroyComputeInstances, DestroyGpuInstance, CreateGpuInstance, CreateComputeInstance)
"""Operations after which only their own GPU is another."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine's ports, real or simulated."""

    gpus: Gpus
    reset: Reset
    processes: Processes
    clock: Clock
    boot: Boot
    store: Store


@dataclass(frozen=True, slots=True)
class Progress:
    """What the agent tells while it works. error: empty when the effect was begun or done."""

    effect: Operation | Pause
    done: bool
    seconds: float = 0.0
    error: str = ""


Listener = Callable[[Progress], None]
_FIRST_WAIT_S: Final = 0.5
_WHILE_RELOADED: Final = Retrying(
    retry=retry_if_exception(lambda error: isinstance(error, GpuError) and error.retry),
    stop=stop_after_attempt(5),
    wait=wait_exponential(multiplier=2 * _FIRST_WAIT_S, max=8),
    reraise=True,
)
"""After a first try, which is made without it: nearly every look is answered at once."""

LOOKS_MAX: Final = 8
"""Looks in a row without anything to do between them, for each GPU; opening, turning back and ending take one each."""


def look(
    machine: Machine,
    order: Order | None = None,
    needed: Collection[str] = (),
    waiting: Callable[[str], None] = lambda why: None,
) -> Seen:
    """Everything a decision looks at, read anew. A driver that is just being reloaded is waited for, briefly.

    needed: UUIDs of GPUs that must be readable, else GpuError; others may be `unreadable` in what is returned.
    waiting: told why when such a wait begins.
    """
    gpus = _patiently(machine, partial(_readable, machine, needed), waiting)
    return _seen(machine, order, (named(gpu, machine.processes) for gpu in gpus))


def _look_after(
    machine: Machine, order: Order | None, needed: Collection[str], last: Seen, effect: Effect, error: Cause | None
) -> Seen:
    """What the next decision looks at.

    After an operation on an instance that is its GPU: nothing is decided about another one before this one's
    transaction ends, and then all are looked at. So the time of a step does not grow with the number of GPUs.
    """
    if error is None and isinstance(effect, ON_INSTANCE):
        gpu = _patiently(machine, partial(machine.gpus.look_at, effect.gpu_uuid))
        if gpu is not None:
            now = named(gpu, machine.processes)
            return _seen(machine, order, (now if other.uuid == now.uuid else other for other in last.gpus))
    return look(machine, order, needed)


def _seen(machine: Machine, order: Order | None, gpus: Iterable[SeenGpu]) -> Seen:
    return Seen(machine.boot.boot_id(), machine.clock.now_s(), tuple(gpus), order)


def _patiently(machine: Machine, read: Callable[[], T], waiting: Callable[[str], None] = lambda why: None) -> T:
    try:
        return read()
    except GpuError as error:
        if not error.retry:
            raise
        waiting(f"waiting for the driver: {error}")
    machine.clock.sleep(_FIRST_WAIT_S)
    return _WHILE_RELOADED.copy(sleep=machine.clock.sleep)(read)


def run(machine: Machine, order: Order | None, listen: Listener = lambda progress: None) -> Record:
    """Carry out an order, after finishing or undoing what a crash left; without an order only the latter.

    Returns the record at rest: each GPU of the order has an outcome. GpuError where the GPUs can no longer be read or
    a call hangs: the record then stays open, and the next run goes on from there, after a hang by going back. The
    caller holds the lock.
    """
    kept = machine.store.load() or Record(machine.boot.boot_id())  # that nothing is recorded yet is not worth a write
    record = accept(kept, order)
    needed = {*(order.goals if order else ()), *under_way(record)}
    seen = look(machine, order, needed)
    while True:
        record, effect = decide(record, seen)
        lasting = record.lasting
        if lasting != kept:
            kept = lasting
            machine.store.save(kept)
        if effect is None:
            return record
        try:
            error = _carry_out(machine, effect, listen)
        except HungError as problem:
            assert not isinstance(effect, Pause | LookAgain), "only operations hang"
            machine.store.save(hung(record, effect, Cause("NVMLError", str(problem))))
            raise
        if error is not None:
            assert not isinstance(effect, Pause | LookAgain), "only operations fail"
            record = failed(record, effect, error, machine.clock.now_s())
        seen = _look_after(machine, order, needed, seen, effect, error)


def _readable(machine: Machine, needed: Collection[str]) -> tuple[SeenGpu, ...]:
    gpus = machine.gpus.look()
    for gpu in gpus:
        if gpu.unreadable and gpu.uuid in needed:
            raise UnreadableError("read", gpu.uuid, None, gpu.unreadable)
    return gpus


def _carry_out(machine: Machine, effect: Effect, listen: Listener) -> Cause | None:
    """Do one effect; what it answered, where it failed."""
    if isinstance(effect, LookAgain):
        return None
    _tell(listen, Progress(effect, done=False))
    began = machine.clock.now_s()
    error: Cause | None = None
    if isinstance(effect, Pause):
        machine.clock.sleep(effect.seconds)
    else:
        error = perform(machine, effect)
    _tell(listen, Progress(effect, True, machine.clock.now_s() - began, error.message if error else ""))
    return error


def _tell(listen: Listener, progress: Progress) -> None:
    """Say how it goes; that nobody reads it any more (a closed pipe) is no reason to stop half way."""
    with suppress(OSError):
        listen(progress)


def perform(machine: Machine, operation: Operation) -> Cause | None:
    """Do one operation; what it answered, where it failed. HungError where it does not return."""
    try:
        if isinstance(operation, ResetGpu):
            machine.gpus.close()  # our own session would refuse the reset
            machine.reset.reset(operation.gpu_uuid)
        else:
            machine.gpus.perform(operation)
    except HungError:
        raise  # NVML answers this process no more
    except ResetRefusedError as error:
        users = _users(machine, operation)
        # Without anybody whose end would allow it, only a reboot can do what the reset was for.
        return Cause("ResetRefused" if users else "RebootRequired", f"the GPU reset was refused: {error}{users}")
    except GpuError as error:
        return Cause(reason_of(error), _told(machine, operation, error))
    return None


def reason_of(error: GpuError) -> str:
    """The API's reason for an error of the hardware's."""
    match error:
        case InUseError():
            return "InUse"
        case NoPermissionError():
            return "NoPermission"
        case LostError():
            return "GPUUnhealthy"
    return "NVMLError"


def _told(machine: Machine, operation: Operation, error: GpuError) -> str:
    """The error for people; where a holder is not listed by NVML, with who has the device file open."""
    if not isinstance(error, InUseError) or not isinstance(
        operation, SetMode | DestroyComputeInstances | DestroyGpuInstance
    ):
        return str(error)
    users = _users(machine, operation)
    if users:
        return f"{error}{users}"
    alone = ", or the GPU cannot be reset alone: NVLink peers, Fabric Manager" * isinstance(operation, SetMode)
    return f"{error}. NVML lists no process; a monitor such as the DCGM host engine may hold it{alone}"


def _users(machine: Machine, operation: Operation) -> str:
    """Who has the GPU's device file open, to be added to a sentence; "" for nobody."""
    users = [_holder(Holder(pid), machine.processes) for pid in machine.processes.device_users(operation.gpu_uuid)]
    return f". The device file is open in {', '.join(map(str, users))}" if users else ""


def named(gpu: SeenGpu, processes: Processes) -> SeenGpu:
    """The GPU with its holders' commands and containers."""
    if not gpu.holders and not any(instance.holders for instance in gpu.instances):
        return gpu
    instances = tuple(
        replace(i, holders=tuple(_holder(h, processes) for h in i.holders)) if i.holders else i for i in gpu.instances
    )
    return replace(gpu, holders=tuple(_holder(h, processes) for h in gpu.holders), instances=instances)


def _holder(holder: Holder, processes: Processes) -> Holder:
    found = processes.describe(holder.pid) if holder.pid is not None else None
    return Holder(holder.pid, *found) if found else holder
