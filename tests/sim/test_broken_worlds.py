"""The world changes under a transaction: GPUs that fall off and come back, clocks that jump, boots, foreign records."""

from __future__ import annotations

from dataclasses import replace

import pytest
from boards import at
from others import after, before, shown
from worlds import World, orphans

from migd.agent.effects import Pause
from migd.agent.orders import Order
from migd.agent.patience import PAUSE_MAX_S
from migd.agent.records import GpuRecord, Record, Transaction
from migd.agent.running import Progress, run
from migd.mig.geometry import EMPTY, Layout
from migd.mig.observed import SeenGpu
from migd.plans.plan import GpuSelector, InstanceRule, Rule
from migd.sim.faults import Fault
from migd.sim.host import SimHost

MODE = "nvmlDeviceGetMigMode"
CREATE_GI = "nvmlDeviceCreateGpuInstanceWithPlacement"


def gpus_of(world: World) -> list[SeenGpu]:
    found = list(world.seen())
    world.end()
    return found


def layout(gpu: SeenGpu, text: str | None) -> Layout:
    assert gpu.board is not None
    return Layout(False) if text is None else Layout(True, at(gpu.board, text))


def order(world: World, *texts: str | None, name: str = "test", **options: str) -> Order:
    """An exact layout for each GPU by index; None for MIG off."""
    goals = {gpu.uuid: layout(gpu, text) for gpu, text in zip(gpus_of(world), texts, strict=True)}
    return Order(name, goals, **options)  # type: ignore[arg-type]


def cut(spec: str, *texts: str | None) -> World:
    world = World(SimHost.fresh(spec))
    assert world.attempt(order(world, *texts)) == "done"
    return world


def told(world: World, index: int = 0) -> tuple[str, str]:
    outcome = world.record().gpu(world.host.gpu_uuids()[index]).outcome
    assert outcome is not None
    return outcome.phase, outcome.cause.reason


# --- GPUs that go ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_step", ["destroy GPU instance 3g", "create GPU instance 1g.10gb@0"])
def test_a_gpu_that_comes_back_is_finished_by_the_next_command(at_step: str) -> None:
    world = cut("h100-sxm-80gb", "3g@0 3g@4")
    wish = order(world, "1g@0 1g@1")
    assert world.attempt(wish, after(at_step, lambda: world.host.lose_gpu(0))) == "done"
    assert told(world) == ("Lost", "GPUUnhealthy")
    world.host.find_gpu(0)
    assert world.attempt(None) == "done"
    (gpu,) = gpus_of(world)
    assert shown(gpu) == "1g.10gb@0 1g.10gb@1"
    assert orphans((gpu,)) == []
    record = world.record().gpu(gpu.uuid)
    assert record.owned == gpu.geometry
    assert record.previous == layout(gpu, "3g@0 3g@4")
    assert record.transaction is None


def test_while_a_gpu_is_lost_nothing_new_is_begun_on_it_and_nothing_is_forgotten() -> None:
    world = cut("2xh100-sxm-80gb", "3g@0 3g@4", "7g@0")
    wish, other = order(world, "1g@0 1g@1", "3g@0"), order(world, "2g@0", "3g@0", name="another")
    assert world.attempt(wish, after("destroy GPU instance 3g", lambda: world.host.lose_gpu(0))) == "done"
    assert told(world, 0) == ("Lost", "GPUUnhealthy")
    assert told(world, 1) == ("Ready", "AsWished")
    for _ in range(2):
        assert world.attempt(wish) == "done"
        assert told(world, 0) == ("Lost", "GPUUnhealthy")
    assert world.attempt(other) == "done"
    assert told(world, 0) == ("Lost", "GPUUnhealthy")
    lost = world.record().gpu(world.host.gpu_uuids()[0])
    assert lost.transaction is not None
    world.host.find_gpu(0)
    assert lost.transaction.before == layout(gpus_of(world)[0], "3g@0 3g@4")
    assert world.attempt(wish) == "done"
    assert shown(gpus_of(world)[0]) == "1g.10gb@0 1g.10gb@1"


def test_a_gpu_of_the_order_that_is_not_there_has_an_outcome_and_stops_the_others() -> None:
    world = cut("2xa100-40gb", "3g@0", "3g@4")
    wish = order(world, "1g@0", "1g@0")
    absent = replace(wish, goals={**wish.goals, "GPU-gone": Layout(False)})
    assert world.attempt(absent) == "done"
    gone = world.record().gpu("GPU-gone").outcome
    assert gone is not None
    assert (gone.phase, gone.cause.reason) == ("Lost", "GPUUnhealthy")
    assert told(world, 0) == told(world, 1) == ("Blocked", "Waiting")
    assert [shown(gpu) for gpu in gpus_of(world)] == ["3g.20gb@0", "3g.20gb@4"]


def test_one_wrong_answer_about_the_mode_proves_nothing_on_a_gpu_that_is_being_changed() -> None:
    world = cut("h100-sxm-80gb", "3g@0 3g@4")
    wish = order(world, None)

    def lie() -> None:
        world.host.inject(Fault(MODE, "error", 3, nth=1, times=4))  # NOT_SUPPORTED: "this GPU cannot do MIG"

    assert world.attempt(wish, after("destroy GPU instance 3g.40gb@4", lie)) == "done"
    assert told(world) == ("Lost", "GPUUnhealthy")
    world.host.clear_faults()
    assert world.attempt(wish) == "done"
    assert told(world) == ("Ready", "AsWished")
    (gpu,) = gpus_of(world)
    assert gpu.layout == Layout(False)


# --- clocks ----------------------------------------------------------------------------------------------------------


def test_a_moment_that_another_clock_wrote_is_not_waited_for() -> None:
    world = cut("a100-40gb", "3g@0")
    (gpu,) = gpus_of(world)
    open_one = Transaction("test", gpu.layout, layout(gpu, "1g@0"), step="x", tries=1, not_before_s=1.8e9)
    world.store.save(Record(world.host.boot_id(), "test", {gpu.uuid: GpuRecord(gpu.geometry, None, open_one)}))
    waits: list[float] = []

    def listen(step: Progress) -> None:
        if isinstance(step.effect, Pause):
            waits.append(step.effect.seconds)

    assert world.attempt(None, listen) == "done"
    assert shown(gpus_of(world)[0]) == "1g.5gb@0"
    assert sum(waits) <= PAUSE_MAX_S


# --- orders ----------------------------------------------------------------------------------------------------------


def test_a_plan_that_no_longer_means_a_gpu_turns_what_it_began_there_back() -> None:
    world = World(SimHost.fresh("a100-40gb", profiles_while_off=False))
    (gpu,) = gpus_of(world)
    rule = Rule(gpus=GpuSelector(every=True), instances=(InstanceRule(profile="3g.20gb", count=1),))
    wish = Order("indices", {gpu.uuid: rule})
    world.host.inject(Fault("nvmlDeviceGetCount", "crash", nth=3))
    assert world.attempt(wish) == "crashed"
    assert world.record().open == (gpu.uuid,)
    assert world.attempt(Order("indices", {})) == "done"  # the indices were swapped: now another GPU is meant
    assert gpus_of(world)[0].layout == Layout(False)
    assert world.record().open == ()


def test_a_second_plan_begins_only_when_the_first_is_finished_or_undone() -> None:
    world = cut("2xa30", "2g@0 2g@2", "4g@0")
    first, second = order(world, "1g@0", None, name="first"), order(world, "2g@0", "2g@0", name="second")
    world.host.inject(Fault("record.save", "crash", nth=4))
    assert world.attempt(first) == "crashed"
    done: list[str] = []

    def listen(step: Progress) -> None:
        if step.done and not isinstance(step.effect, Pause):
            done.append(str(step.effect))

    assert world.attempt(second, listen) == "done"
    assert [shown(gpu) for gpu in gpus_of(world)] == ["2g.12gb@0", "2g.12gb@0"]
    assert done.index("MIG mode off") < done.index("MIG mode on")
    previous = [world.record().gpu(gpu.uuid).previous for gpu in gpus_of(world)]
    assert list(map(str, previous)) == ["1g.6gb", "MIG off"]


def test_a_parked_gpu_does_not_hold_up_the_other() -> None:
    world = cut("2xa100-40gb", "3g@0", "3g@0")
    wish = order(world, "1g@0", "1g@0")
    world.host.inject(Fault(CREATE_GI, "error", 999, gpu=0, times=0))
    assert world.attempt(wish) == "done"
    assert told(world, 0)[0] == "Failed"
    assert told(world, 1) == ("Ready", "AsWished")
    parked = world.record().gpu(world.host.gpu_uuids()[0]).transaction
    assert parked is not None
    assert parked.parked
    assert str(parked.before) == "3g.20gb"
    world.host.clear_faults()
    assert world.attempt(None) == "done"
    assert shown(gpus_of(world)[0]) == "3g.20gb@0"


# --- records ---------------------------------------------------------------------------------------------------------


def test_a_record_of_another_machine_moves_nothing_here() -> None:
    world = cut("a100-40gb", "3g@0")
    (gpu,) = gpus_of(world)
    elsewhere = Transaction("test", Layout(False), layout(gpu, "7g@0"), touched=True)
    world.store.save(
        Record("another boot", "x", {"GPU-elsewhere": GpuRecord(EMPTY, Layout(False), elsewhere, None, None)})
    )
    since = len(world.host.calls)
    assert world.attempt(None) == "done"
    assert world.record().open == ()
    assert shown(gpus_of(world)[0]) == "3g.20gb@0"
    assert not any("Create" in call.name or "Destroy" in call.name for call in list(world.host.calls)[since:])
    assert world.attempt(order(world, "1g@4")) == "done"
    assert told(world) == ("Blocked", "ForeignInstances")


def test_a_process_that_starts_between_look_and_destruction_loses_nothing() -> None:
    world = cut("a100-40gb", "3g@0 3g@4")
    start = before("destroy compute instance of 3g.20gb@4", lambda: world.host.start_process(0, 4))
    assert world.attempt(order(world, "7g@0"), start) == "done"
    assert told(world) == ("Blocked", "InUse")
    (gpu,) = gpus_of(world)
    assert shown(gpu) == "3g.20gb@0 3g.20gb@4"
    assert orphans((gpu,)) == []
    assert len(world.host.snapshot().processes) == 1


def test_the_loop_ends_when_somebody_undoes_every_step() -> None:
    world = cut("a100-40gb", "3g@0")
    (gpu,) = gpus_of(world)
    machine = world.machine()

    def listen(step: Progress) -> None:
        if step.done and str(step.effect).startswith("create GPU instance"):
            world.host.snapshot().gpus[0].instances.clear()

    record = run(machine, order(world, "1g@0 1g@1"), listen)
    found = record.gpu(gpu.uuid)
    assert found.outcome is not None
    assert found.outcome.phase == "Failed"
    assert found.owned == EMPTY
