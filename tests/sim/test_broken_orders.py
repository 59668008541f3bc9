"""How orders begin, wait, stop and follow one another: all or none begin, every step is judged anew."""

from __future__ import annotations

from dataclasses import replace

import others
import pytest
from boards import at
from others import after, shown, somebody
from worlds import MemoryStore, World

from migd.agent.deciding import decide
from migd.agent.effects import LookAgain, Pause, Seen
from migd.agent.orders import Goal, Order
from migd.agent.patience import TURNS_MAX
from migd.agent.records import Cause, GpuRecord, Outcome, Record, Transaction
from migd.agent.running import Listener, Progress
from migd.mig.geometry import Layout
from migd.mig.observed import SeenGpu
from migd.mig.operations import SetMode
from migd.plans.plan import GpuSelector, InstanceRule, Rule
from migd.sim.faults import Fault
from migd.sim.host import SimHost

CREATE_GI = "nvmlDeviceCreateGpuInstanceWithPlacement"
EVERY = GpuSelector(every=True)


def gpus_of(world: World) -> list[SeenGpu]:
    found = list(world.seen())
    world.end()
    return found


def layout(gpu: SeenGpu, text: str | None) -> Layout:
    assert gpu.board is not None
    return Layout(False) if text is None else Layout(True, at(gpu.board, text))


def order(world: World, *texts: str | None, name: str = "test", **options: object) -> Order:
    goals = {gpu.uuid: layout(gpu, text) for gpu, text in zip(gpus_of(world), texts, strict=True)}
    return Order(name, goals, **options)  # type: ignore[arg-type]


def counted(world: World, profile: str, count: int = 1, name: str = "counted", **options: object) -> Order:
    rule = Rule(gpus=EVERY, instances=(InstanceRule(profile=profile, count=count),))
    goals: dict[str, Goal] = {gpu.uuid: rule for gpu in gpus_of(world)}
    return Order(name, goals, **options)  # type: ignore[arg-type]


def cut(spec: str, *texts: str | None, **switches: object) -> World:
    world = World(SimHost.fresh(spec, **switches))
    assert world.attempt(order(world, *texts)) == "done"
    return world


def told(world: World, index: int = 0) -> tuple[str, str]:
    outcome = world.record().gpu(world.host.gpu_uuids()[index]).outcome
    assert outcome is not None
    return outcome.phase, outcome.cause.reason


def steps(done: list[str]) -> Listener:
    def listen(step: Progress) -> None:
        if not step.done and not isinstance(step.effect, Pause):
            done.append(f"{step.effect.gpu_uuid} {step.effect}")

    return listen


# --- one for all -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["in use", "foreign", "refused"])
def test_one_gpu_that_cannot_be_begun_keeps_all_of_them_untouched(why: str) -> None:
    world = cut("2xa100-40gb", "3g@0", "3g@0")
    first, second = gpus_of(world)
    wish = order(world, "1g@0", "1g@0")
    if why == "in use":
        world.host.start_process(1, 0)
    elif why == "foreign":
        others.create(world.host, second.uuid, others.place(second, "3g@4"))
    else:
        wish = replace(wish, goals={**wish.goals, second.uuid: counted(world, "3g.40gb").goals[second.uuid]})
    done: list[str] = []
    assert world.attempt(wish, steps(done)) == "done"
    assert done == []
    assert told(world, 0) == ("Blocked", "Waiting")
    assert told(world, 1)[0] == ("Failed" if why == "refused" else "Blocked")
    assert world.record().gpu(first.uuid).transaction is None


def test_gpus_are_changed_in_the_order_of_their_indices() -> None:
    for swapped in (False, True):
        world = cut("2xa100-40gb", "3g@0", "3g@0")
        if swapped:
            world.host.swap_indices(0, 1)
        wish, done = order(world, "1g@0", "1g@0"), list[str]()
        assert world.attempt(wish, steps(done)) == "done"
        assert list(dict.fromkeys(line.split()[0] for line in done)) == list(world.host.gpu_uuids())


def test_what_is_foreign_is_not_waited_for() -> None:
    world = cut("a100-40gb", "")
    (gpu,) = gpus_of(world)
    others.create(world.host, gpu.uuid, others.place(gpu, "3g@4"))
    began = world.host.clock.now_s()
    assert world.attempt(order(world, "7g@0", wait_until_s=began + 600)) == "done"
    assert told(world) == ("Blocked", "ForeignInstances")
    assert world.host.clock.now_s() < began + 60


def test_what_is_in_use_is_waited_for_and_no_longer_than_said() -> None:
    world = cut("a100-40gb", "3g@4")
    world.host.start_process(0, 4, ends_after_s=100)
    began = world.host.clock.now_s()
    assert world.attempt(order(world, "7g@0", wait_until_s=began + 30)) == "done"
    assert told(world) == ("Blocked", "NeverIdle")
    assert began + 30 <= world.host.clock.now_s() < began + 40
    assert world.attempt(order(world, "7g@0", wait_until_s=began + 300)) == "done"
    assert told(world) == ("Ready", "AsWished")


def test_what_an_ended_process_still_holds_for_a_moment_is_waited_for_without_being_asked() -> None:
    world = cut("a100-40gb", "3g@4", release_lag_s=2.0)
    world.host.end_process(world.host.start_process(0, 4))
    assert world.attempt(order(world, "7g@0")) == "done"
    assert told(world) == ("Ready", "AsWished")


# --- wishes that are known only once MIG is on -----------------------------------------------------------------------


def test_a_profile_that_turns_out_not_to_be_offered_puts_mig_off_again() -> None:
    world = World(SimHost.fresh("a100-40gb", profiles_while_off=False))
    assert world.attempt(counted(world, "3g.40gb")) == "done"
    assert told(world) == ("Failed", "UnknownProfile")
    assert gpus_of(world)[0].layout == Layout(False)
    assert world.record().open == ()


def test_a_gpu_that_needs_a_reset_after_its_mode_change_is_worked_on_no_further() -> None:
    world = World(SimHost.fresh("a100-40gb", profiles_while_off=False))
    ill = after("MIG mode on", lambda: world.host.switch("recovery_action", 1, gpu=0))
    done: list[str] = []

    def listen(step: Progress) -> None:
        ill(step)
        steps(done)(step)

    assert world.attempt(counted(world, "3g.20gb"), listen) == "done"
    assert told(world) == ("Blocked", "GPUUnhealthy")
    assert not any("create" in line for line in done)


def test_another_plan_goes_on_from_where_a_crash_left_one_whose_target_was_not_known() -> None:
    world = World(SimHost.fresh("a100-40gb", profiles_while_off=False))
    world.host.inject(Fault("nvmlDeviceGetCount", "crash", nth=3))
    assert world.attempt(counted(world, "3g.20gb", name="first")) == "crashed"
    done: list[str] = []
    assert world.attempt(counted(world, "2g.10gb", name="second"), steps(done)) == "done"
    assert [gpu.layout.mig for gpu in gpus_of(world)] == [True]
    assert shown(gpus_of(world)[0]).startswith("2g.10gb")
    assert not any("MIG mode off" in line for line in done)
    assert str(world.record().gpu(world.host.gpu_uuids()[0]).before) == "MIG off"


# --- modes -----------------------------------------------------------------------------------------------------------


def test_a_gpu_that_needs_no_reset_for_its_mode_is_never_reset() -> None:
    world = World(SimHost.fresh("h100-sxm-80gb", mode_change_never_takes=True))
    done: list[str] = []
    assert world.attempt(order(world, "3g@0"), steps(done)) == "done"
    assert told(world) == ("Failed", "ModeChangeFailed")
    assert not any("reset" in line for line in done)


def test_a_reset_that_had_no_effect_is_tried_once_more() -> None:
    world = World(SimHost.fresh("a100-40gb", vm=True))
    works = after("GPU reset", lambda: world.host.switch("vm", False))
    assert world.attempt(order(world, "3g@0"), works) == "done"
    assert told(world) == ("Ready", "AsWished")


def test_a_way_back_that_waits_for_a_reboot_does_not_hold_up_the_next_try() -> None:
    world = World(SimHost.fresh("a100-40gb"))
    wish = order(world, "3g@0")
    world.host.inject(Fault(CREATE_GI, "error", 999, times=3))
    assert world.attempt(wish, after("MIG mode on", lambda: world.host.switch("vm", True))) == "done"
    assert told(world) == ("RebootRequired", "RebootRequired")
    assert world.attempt(wish) == "done"
    assert told(world) == ("Ready", "AsWished")


@pytest.mark.parametrize("already", [False, True])
def test_a_plan_that_waited_for_a_reboot_and_was_replaced_begins_anew_when_it_comes_back(already: bool) -> None:
    world = World(SimHost.fresh("a100-40gb", vm=True))
    wish = order(world, "3g@0")
    assert world.attempt(wish) == "done"
    assert told(world) == ("RebootRequired", "RebootRequired")
    if already:
        with somebody(world.host) as gpus:
            gpus.perform(SetMode(world.host.gpu_uuids()[0], False))
    assert world.attempt(order(world, None, name="off")) == "done"
    assert told(world) == ("Ready", "AsWished")
    world.host.switch("vm", False)
    assert world.attempt(wish) == "done"
    assert told(world) == ("Ready", "AsWished")


# --- holds, repairs, endings -----------------------------------------------------------------------------------------


class Watched(MemoryStore):
    """A store that does something once, when it has saved so often."""

    def __init__(self, nth: int, deed: object) -> None:
        super().__init__()
        self._nth, self._deed = nth, deed

    def save(self, record: Record) -> None:
        super().save(record)
        if self.saves == self._nth:
            self._deed()  # type: ignore[operator]


def test_a_hold_before_anything_was_touched_is_no_hold() -> None:
    world = cut("a100-40gb", "3g@4")
    store = Watched(1, lambda: world.host.start_process(0, 4))
    store.text, world.store = world.store.text, store
    assert world.attempt(order(world, "7g@0", on_failure="Hold")) == "done"
    assert told(world) == ("Blocked", "InUse")


def test_two_holds_in_a_row_still_roll_back_to_the_layout_before_the_first() -> None:
    world = cut("a30", "2g@2")
    for wish, fails in (("1g@0 1g@1", 2), ("4g@0", 1)):
        world.host.inject(Fault(CREATE_GI, "error", 999, nth=fails, times=3))
        assert world.attempt(order(world, wish, name=wish, on_failure="Hold")) == "done"
        assert told(world)[0] == "Held"
        world.host.clear_faults()
    assert world.roll_back() == "done"
    assert shown(gpus_of(world)[0]) == "2g.12gb@2"


def test_a_way_back_that_fails_after_a_hold_still_rolls_back_to_the_layout_before_the_hold() -> None:
    world = cut("a30", "2g@2")
    world.host.inject(Fault(CREATE_GI, "error", 999, nth=2, times=3))
    assert world.attempt(order(world, "1g@0 1g@1", name="held", on_failure="Hold")) == "done"
    assert told(world)[0] == "Held"
    world.host.clear_faults()
    world.host.inject(Fault(CREATE_GI, "error", 999, times=0))
    assert world.attempt(order(world, "4g@0", name="parked")) == "done"
    assert told(world)[0] == "Failed"
    found = world.record().gpu(world.host.gpu_uuids()[0])
    assert found.transaction is not None
    assert (str(found.transaction.before), str(found.before)) == ("1g.6gb", "2g.12gb")


def test_a_repair_is_no_change_of_layout_and_leaves_the_rollback_as_it_was() -> None:
    world = cut("a30", "1g@0")
    assert world.attempt(order(world, "2g@2", name="second")) == "done"
    world.host.snapshot().gpus[0].instances[0].compute.clear()
    assert world.attempt(order(world, "2g@2", name="second")) == "done"
    assert [there.whole for there in gpus_of(world)[0].instances] == [True]
    assert str(world.record().gpu(world.host.gpu_uuids()[0]).previous) == "1g.6gb"


def test_after_a_reboot_the_same_instances_made_by_others_are_theirs() -> None:
    world = cut("a100-40gb", "3g@4")
    (gpu,) = gpus_of(world)
    world.host.reboot()
    others.create(world.host, gpu.uuid, others.place(gpu, "3g@4"))
    assert world.attempt(order(world, "7g@0")) == "done"
    assert told(world) == ("Blocked", "ForeignInstances")


def test_somebody_who_always_undoes_the_step_before_the_last_is_given_up_on() -> None:
    world = cut("a100-40gb", "3g@4")
    done: list[str] = []

    def listen(step: Progress) -> None:
        steps(done)(step)
        assert len(done) < 2 * TURNS_MAX, "no end"
        if step.done and str(step.effect).startswith("create GPU instance 1g"):
            machine = world.host.snapshot().gpus[0]
            machine.instances[:] = machine.instances[-1:]

    assert world.attempt(order(world, "1g@0 1g@1"), listen) == "done"
    assert TURNS_MAX <= len(done) <= TURNS_MAX + 10
    assert told(world) == ("Failed", "NVMLError")
    assert shown(gpus_of(world)[0]) == "3g.20gb@4"  # the way back has turns of its own


def test_a_call_that_hangs_ends_the_command_with_the_record_open() -> None:
    world = cut("a100-40gb", "3g@4")
    world.host.inject(Fault(CREATE_GI, "hang", when="after"))
    wish, done = order(world, "1g@0 1g@1"), list[str]()
    assert world.attempt(wish, steps(done)).startswith("gave up")
    assert done[-1].endswith("create GPU instance 1g.5gb@0")  # NVML answers nobody any more: nothing else was tried
    assert world.record().open == tuple(wish.goals)
    assert world.attempt(None) == "done"
    assert shown(gpus_of(world)[0]) == "3g.20gb@4", "what hung is put back"


def test_another_plan_does_not_take_over_a_gpu_that_is_lost() -> None:
    gpu = SeenGpu("GPU-0", 0, "", "", 0, None, lost=True)
    parked = Transaction("first", Layout(True), Layout(False), parked=True)
    lost = Outcome("Lost", Cause("GPUUnhealthy", "lost"))
    record = Record("boot", "", {gpu.uuid: GpuRecord(transaction=parked, outcome=lost)})
    now, effect = decide(record, Seen("boot", 0.0, (gpu,), Order("second", {gpu.uuid: Layout(False)})))
    assert now.gpu(gpu.uuid).transaction == parked
    assert not isinstance(effect, LookAgain)
