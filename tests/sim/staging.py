"""Short ways to stage a situation on a simulated machine: wishes, layouts, strangers, and what was called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from boards import at
from unit.plans.texts import plan
from worlds import World

from migd.agent.effects import Pause
from migd.agent.orders import Goal, Order
from migd.agent.records import Outcome
from migd.agent.running import Listener, Progress, look, run
from migd.cli.inputs import Given, ordered
from migd.mig.boards import Board
from migd.mig.geometry import Geometry, GpuInstance, Layout, by_start
from migd.mig.observed import SeenGpu
from migd.mig.operations import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstances,
    DestroyGpuInstance,
    Operation,
    ResetGpu,
    SetMode,
)
from migd.nvml.gpus import NvmlGpus
from migd.sim.host import SimHost

MUTATORS: Final = (
    "nvmlDeviceSetMigMode",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
)
"""Every NVML call with which migd changes a GPU."""

CHANGES: Final = (
    *MUTATORS,
    "nvmlDeviceCreateGpuInstance",
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
    "reset",
)
"""Every call that changes a GPU, whoever makes it."""

STRANGER: Final = 77_777
"""The pid of somebody else who uses NVML."""

OFF: Final[dict[str, Any]] = {"gpus": {"all": True}, "mig": "Disabled"}


def wish(counts: dict[str, int], *indices: int) -> dict[str, Any]:
    """A rule for these GPUs, or for all where none are named."""
    gpus: dict[str, Any] = {"indices": list(indices)} if indices else {"all": True}
    return {"gpus": gpus, "instances": [{"profile": name, "count": number} for name, number in counts.items()]}


def off(*indices: int) -> dict[str, Any]:
    """A rule that turns MIG off on these GPUs."""
    return {"gpus": {"indices": list(indices)}, "mig": "Disabled"}


def world_of(spec: str, **switches: Any) -> World:
    """A fresh machine with no agent on it yet."""
    return World(SimHost.fresh(spec, **switches))


def order_of(world: World, *rules: dict[str, Any], wait_s: float | None = None, **spec: Any) -> Order:
    """The order that a plan with these rules means on this machine now."""
    seen = look(world.machine())
    until = None if wait_s is None else seen.now_s + wait_s
    found, _ = ordered(Given(plan(*rules, **spec), "test", ()), seen.gpus, until)
    world.end()
    return found


def apply(
    world: World,
    *rules: dict[str, Any],
    wait_s: float | None = None,
    listen: Listener = lambda progress: None,
    **spec: Any,
) -> dict[int, Outcome]:
    """One `migd apply` by the whole agent in a process of its own; what became of each GPU of the plan, by index."""
    return carry_out(world, order_of(world, *rules, wait_s=wait_s, **spec), listen)


def carry_out(world: World, order: Order, listen: Listener = lambda progress: None) -> dict[int, Outcome]:
    """Carry out an order in a process of its own; what became of each of its GPUs, by the index it has then."""
    machine = world.machine()
    record = run(machine, order, listen)
    index = {gpu.uuid: gpu.index for gpu in look(machine).gpus}
    world.end()
    outcomes = {uuid: record.gpu(uuid).outcome for uuid in order.goals}
    assert all(outcomes.values()), "at rest every GPU of the order has an outcome"
    return {index.get(uuid, -1): outcome for uuid, outcome in outcomes.items() if outcome is not None}


def roll_back(world: World) -> dict[int, Outcome]:
    """What `migd rollback` does: finish what is under way, then return to the layouts before."""
    assert world.attempt(None) == "done"
    goals: dict[str, Goal] = {
        uuid: before
        for uuid, gpu in world.record().gpus.items()
        if (before := gpu.transaction.before if gpu.transaction else gpu.previous) is not None
    }
    return carry_out(world, Order("rollback " + repr(sorted((u, str(g)) for u, g in goals.items())), goals))


def cut(world: World, *texts: str) -> None:
    """Let migd cut the GPUs, in order of their indices: "3g@4 1g@2", "" for MIG on with nothing in it."""
    gpus = {gpu.index: gpu for gpu in world.seen()}
    goals: dict[str, Goal] = {gpus[i].uuid: layout(gpus[i], text) for i, text in enumerate(texts)}
    assert {o.phase for o in carry_out(world, Order("staged", goals)).values()} == {"Ready"}


def layout(gpu: SeenGpu, text: str) -> Layout:
    """A layout in short, by the GPU's own names."""
    return Layout(True, geometry(gpu, text))


def geometry(gpu: SeenGpu, text: str) -> Geometry:
    """A geometry in short, by the GPU's own names."""
    assert isinstance(gpu.board, Board)
    return at(gpu.board, text)


def gpu(world: World, index: int = 0) -> SeenGpu:
    """One GPU as an agent sees it now."""
    found = next(gpu for gpu in world.seen() if gpu.index == index)
    world.end()
    return found


def places(seen: SeenGpu) -> str:
    """What is on a GPU in short: "3g.20gb@0 1g.5gb@4"."""
    return " ".join(map(str, by_start(seen.geometry)))


# --- somebody else -------------------------------------------------------------------------------------------------


@contextmanager
def stranger(host: SimHost) -> Iterator[NvmlGpus]:
    """Another program that changes GPUs; its session ends with it."""
    gpus = NvmlGpus(host.nvml(pid=STRANGER), host.caller)
    try:
        yield gpus
    finally:
        host.close_sessions(STRANGER)


def make(gpus: NvmlGpus, seen: SeenGpu, text: str) -> None:
    """Create instances by hand, each with its compute instance, MIG being on."""
    for instance in by_start(geometry(seen, text)):
        gpus.perform(CreateGpuInstance(seen.uuid, instance))
        gpus.perform(CreateComputeInstance(seen.uuid, instance))


def remove(gpus: NvmlGpus, seen: SeenGpu, instances: Iterable[GpuInstance]) -> None:
    """Destroy instances by hand."""
    for instance in by_start(instances):
        gpus.perform(DestroyComputeInstances(seen.uuid, instance))
        gpus.perform(DestroyGpuInstance(seen.uuid, instance))


def made_by_hand(world: World, *texts: str) -> None:
    """Cut the GPUs without migd, in order of their indices."""
    with stranger(world.host) as gpus:
        for seen, text in zip(gpus.look(), texts, strict=True):
            gpus.perform(SetMode(seen.uuid, True))
            make(gpus, seen, text)


def once_before(text: str, deed: Callable[[], object]) -> Listener:
    """A listener that does something when the agent is about to begin the first operation whose text begins so.

    That is the moment between the look that decided it and the call: what hardware may do to us at any time.
    """
    return _once(lambda progress: not progress.done and str(progress.effect).startswith(text), deed)


def once_after(text: str, deed: Callable[[], object]) -> Listener:
    """A listener that does something when the first operation whose text begins so has ended, before the next look."""
    return _once(lambda progress: progress.done and str(progress.effect).startswith(text), deed)


def _once(when: Callable[[Progress], bool], deed: Callable[[], object]) -> Listener:
    left = [deed]

    def listen(progress: Progress) -> None:
        if left and not isinstance(progress.effect, Pause) and when(progress):
            left.pop()()

    return listen


# --- what was done -------------------------------------------------------------------------------------------------


def changes(host: SimHost, since: int = 0) -> list[tuple[int | None, str]]:
    """(GPU index, call) of every call that may change a GPU, whoever made it, from the call number `since` on."""
    return [(call.gpu, call.name) for call in list(host.calls)[since:] if call.name in CHANGES]


def operations(done: list[Operation]) -> Listener:
    """A listener that notes every operation begun."""

    def listen(progress: Progress) -> None:
        if not progress.done and not isinstance(progress.effect, Pause):
            done.append(progress.effect)

    return listen


def compute_counts(world: World, index: int = 0) -> tuple[int, int]:
    """How many GPU instances and how many compute instances are on a GPU, behind NVML's back."""
    found = next(g for g in world.host.snapshot().gpus if g.index == index)
    return len(found.instances), sum(len(i.compute) for i in found.instances)


def is_reset(operation: Operation) -> bool:
    """Whether an operation is a GPU reset."""
    return isinstance(operation, ResetGpu)
