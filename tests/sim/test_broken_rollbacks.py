"""The layout that `migd rollback` returns to survives reboots, holds, ways back that fail, and second tries.

What counts as "before" is the layout before the last change that was meant, never one that is half done or that a
reboot left empty.
"""

from __future__ import annotations

import others
import pytest
from boards import at
from others import shown
from worlds import World

from migd.agent.orders import Order
from migd.mig.geometry import Layout
from migd.mig.observed import SeenGpu
from migd.sim.faults import Fault
from migd.sim.host import SimHost

CREATE_GI = "nvmlDeviceCreateGpuInstanceWithPlacement"
GI_CREATE_CI = "nvmlGpuInstanceCreateComputeInstance"


def gpu_of(world: World) -> SeenGpu:
    (gpu,) = world.seen()
    world.end()
    return gpu


def order(world: World, text: str | None, name: str = "test", **options: str) -> Order:
    gpu = gpu_of(world)
    assert gpu.board is not None
    goal = Layout(False) if text is None else Layout(True, at(gpu.board, text))
    return Order(name, {gpu.uuid: goal}, **options)  # type: ignore[arg-type]


def world_with(spec: str, *texts: str | None) -> World:
    """A machine that migd cut so, one layout after the other."""
    world = World(SimHost.fresh(spec))
    for text in texts:
        assert world.attempt(order(world, text)) == "done"
    return world


def said(world: World) -> str:
    gpu = gpu_of(world)
    return shown(gpu) if gpu.mig_on else "off"


def phase(world: World) -> str:
    outcome = world.record().gpu(gpu_of(world).uuid).outcome
    assert outcome is not None
    return outcome.phase


def rolled_back(world: World) -> str:
    assert world.roll_back() == "done"
    return said(world)


@pytest.mark.parametrize("spec", ["a30", "h100-sxm-80gb"])
def test_a_rollback_swaps_the_last_two_layouts(spec: str) -> None:
    world = world_with(spec, "1g@0", "2g@2")
    first, second = said(world), rolled_back(world)
    assert [rolled_back(world), rolled_back(world)] == [first, second]


@pytest.mark.parametrize("spec", ["a30", "h100-sxm-80gb"])
def test_after_a_reboot_and_the_same_plan_again_a_rollback_goes_where_it_went_before_the_reboot(spec: str) -> None:
    world = world_with(spec, "1g@0", "2g@2")
    one = rolled_back(world)
    two = rolled_back(world)
    world.host.reboot()
    assert world.attempt(order(world, "2g@2")) == "done"
    assert said(world) == two
    assert rolled_back(world) == one


@pytest.mark.parametrize("spec", ["a30", "h100-sxm-80gb"])
def test_after_a_reboot_and_another_plan_a_rollback_goes_to_what_the_reboot_took(spec: str) -> None:
    world = world_with(spec, "1g@0", "2g@2")
    lost = said(world)
    world.host.reboot()
    assert world.attempt(order(world, "1g@1")) == "done"
    assert rolled_back(world) == lost


@pytest.mark.parametrize("spec", ["a30", "h100-sxm-80gb"])
@pytest.mark.parametrize("boots", [1, 2])
def test_a_rollback_after_reboots_brings_back_what_they_took_and_then_swaps(spec: str, boots: int) -> None:
    world = world_with(spec, "1g@0", "2g@2")
    lost, earlier = said(world), "1g"
    for _ in range(boots):
        world.host.reboot()
        assert world.attempt(None) == "done"
    assert rolled_back(world) == lost
    assert rolled_back(world).startswith(earlier)


def test_a_layout_that_somebody_made_anew_after_a_reboot_counts_as_the_one_that_was_there() -> None:
    world = world_with("a30", "1g@0", "2g@2")
    now = said(world)
    (there,) = gpu_of(world).geometry
    world.host.reboot()
    others.create(world.host, gpu_of(world).uuid, there)
    assert world.attempt(order(world, "2g@2", foreign="Adopt")) == "done"
    assert said(world) == now
    assert rolled_back(world).startswith("1g")


def test_a_reboot_in_the_middle_of_a_change_keeps_the_layout_before_it() -> None:
    world = world_with("a30", "1g@0", "2g@2")
    before = said(world)
    world.host.inject(Fault(CREATE_GI, "crash", when="after"))
    assert world.attempt(order(world, "4g@0")) == "crashed"
    world.host.reboot()
    assert world.attempt(order(world, "4g@0")) == "done"
    assert rolled_back(world) == before


def test_a_mode_change_that_waited_for_a_reboot_rolls_back_to_mig_off() -> None:
    world = World(SimHost.fresh("a30", vm=True))
    wish = order(world, "4g@0")
    assert world.attempt(wish) == "done"
    assert phase(world) == "RebootRequired"
    world.host.reboot()
    assert world.attempt(wish) == "done"
    assert said(world) == "4g.24gb@0"
    assert str(world.record().gpu(gpu_of(world).uuid).before) == "MIG off"


def test_after_a_hold_and_a_second_try_a_rollback_goes_to_the_layout_before_the_first() -> None:
    world = world_with("a30", "1g@0", "2g@2")
    before = said(world)
    wish = order(world, "1g@0 1g@1", on_failure="Hold")
    world.host.inject(Fault(GI_CREATE_CI, "error", 999, nth=2, times=9))
    assert world.attempt(wish) == "done"
    assert phase(world) == "Held"
    world.host.clear_faults()
    assert world.attempt(wish) == "done"
    assert phase(world) == "Ready"
    assert rolled_back(world) == before


def test_a_hold_that_is_rolled_back_leaves_no_trace() -> None:
    world = world_with("a30", "1g@0", "2g@2")
    first = rolled_back(world)
    second = rolled_back(world)
    world.host.inject(Fault(CREATE_GI, "error", 999, times=9))
    assert world.attempt(order(world, "4g@0", on_failure="Hold")) == "done"
    assert phase(world) == "Held"
    world.host.clear_faults()
    assert rolled_back(world) == second
    assert rolled_back(world) == first


def test_a_failed_change_that_was_put_back_changes_nothing_of_the_rollback() -> None:
    world = world_with("a30", "1g@0", "2g@2")
    now = said(world)
    world.host.inject(Fault(CREATE_GI, "error", 999, times=3))
    assert world.attempt(order(world, "4g@0")) == "done"
    assert phase(world) == "Failed"
    assert said(world) == now
    assert rolled_back(world).startswith("1g")


def test_a_rollback_that_failed_both_ways_is_tried_again_by_the_next_and_then_swaps() -> None:
    world = world_with("a30", "1g@0", "2g@2")
    now = said(world)
    world.host.inject(Fault(CREATE_GI, "error", 999, times=0))
    assert world.roll_back() == "done"
    assert phase(world) == "Failed"
    assert world.record().open != ()
    world.host.clear_faults()
    assert rolled_back(world).startswith("1g")
    assert rolled_back(world) == now


def test_another_plan_that_takes_over_a_parked_gpu_keeps_the_layout_before() -> None:
    world = world_with("a30", "1g@0", "2g@2")
    before = said(world)
    world.host.inject(Fault(CREATE_GI, "error", 999, times=0))
    assert world.attempt(order(world, "4g@0")) == "done"
    assert phase(world) == "Failed"
    world.host.start_process(0, silent=True)  # a monitor that holds the GPU, so that the way back fails once more
    assert world.attempt(order(world, "1g@3", "another")) == "done"
    world.host.clear_faults()
    world.host.snapshot().processes.clear()
    assert world.attempt(order(world, "1g@3", "a third")) == "done"
    assert said(world) == "1g.6gb@3"
    assert rolled_back(world) == before
