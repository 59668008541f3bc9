"""Going back: by command, after a failure, after a way back that failed itself; and what stays when a plan says Hold.

Left out: rollbacks that wait for pods.
"""

from __future__ import annotations

import pytest
from staging import OFF, apply, carry_out, changes, cut, gpu, once_before, order_of, places, roll_back, wish, world_of
from worlds import World, orphans, serials

from migd.agent.records import Outcome
from migd.cli.exits import Exit, exit_of
from migd.mig.geometry import Layout
from migd.sim.faults import Fault

RECUT = wish({"1g.5gb": 5, "2g.10gb": 1})
BEFORE = "2g.10gb@0 1g.5gb@2 3g.20gb@4"


def staged(gpus: int = 1) -> World:
    world = world_of(f"{gpus}xa100-40gb")
    cut(world, *["3g@4 2g@0 1g@2"] * gpus)
    return world


def facts(outcome: Outcome) -> tuple[str, str, int]:
    return outcome.phase, outcome.cause.reason, exit_of(outcome)


# --- by command ---


@pytest.mark.parametrize("rules", [RECUT, OFF, wish({"7g.40gb": 1})])
def test_a_rollback_returns_to_exact_places_and_once_more_swaps_again(rules: dict[str, object]) -> None:
    world = staged()
    apply(world, rules)
    after = gpu(world).layout
    for _ in range(2):
        assert facts(roll_back(world)[0]) == ("Ready", "AsWished", Exit.DONE)
        assert places(gpu(world)) == BEFORE
        assert facts(roll_back(world)[0]) == ("Ready", "AsWished", Exit.DONE)
        assert gpu(world).layout == after
    assert orphans(world.seen()) == []


@pytest.mark.parametrize("in_use", [0, 3, 6])
def test_a_rollback_with_an_instance_in_use_in_the_way_touches_nothing_and_names_it(in_use: int) -> None:
    world = staged()
    apply(world, wish({"1g.5gb": 7}))
    pid = world.host.start_process(0, in_use)
    begun = len(world.host.calls)
    outcome = roll_back(world)[0]
    assert facts(outcome) == ("Blocked", "InUse", Exit.BLOCKED)
    assert f"pid {pid}" in outcome.cause.message
    assert changes(world.host, begun) == []


def test_a_rollback_keeps_an_instance_in_use_that_was_there_before_too() -> None:
    world = staged()
    apply(world, wish({"1g.5gb": 7}))
    world.host.start_process(0, 2)
    before, uuid = serials(world.host), gpu(world).uuid
    assert facts(roll_back(world)[0]) == ("Ready", "AsWished", Exit.DONE)
    assert serials(world.host)[uuid, 2] == before[uuid, 2]
    assert places(gpu(world)) == BEFORE


def test_a_rollback_covers_every_gpu_that_was_changed_and_no_other() -> None:
    world = staged(3)
    apply(world, {**RECUT, "gpus": {"indices": [0, 2]}})
    untouched = {k: v for k, v in serials(world.host).items() if k[0] == gpu(world, 1).uuid}
    apply(world, {**RECUT, "gpus": {"indices": [1]}})
    roll_back(world)
    assert [places(seen) for seen in world.seen()] == [BEFORE] * 3
    assert untouched.keys() <= serials(world.host).keys()


def test_after_a_change_that_failed_there_is_still_the_layout_before_the_last_one() -> None:
    world = staged()
    apply(world, RECUT)
    world.host.inject(Fault("nvmlGpuInstanceCreateComputeInstance", times=3))
    assert apply(world, wish({"7g.40gb": 1}))[0].phase == "Failed"
    assert roll_back(world)[0].phase == "Ready"
    assert places(gpu(world)) == BEFORE


# --- a way back that fails itself ---


def parked(world: World) -> Outcome:
    """A re-cut that fails, whose way back fails at creating."""
    order = order_of(world, RECUT)

    def breaks() -> None:
        world.host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", times=0))

    world.host.inject(Fault("nvmlGpuInstanceCreateComputeInstance", nth=2, times=3))
    outcome = carry_out(world, order, once_before("create compute instance", breaks))[0]
    assert "going back failed too" in outcome.cause.message
    assert world.record().open == (gpu(world).uuid,)
    return outcome


def test_a_way_back_that_fails_rests_says_so_and_touches_nothing_in_a_loop() -> None:
    world = staged()
    outcome = parked(world)
    assert (outcome.phase, exit_of(outcome), outcome.touched) == ("Failed", Exit.FAILED, True)
    assert "left with" in outcome.cause.message
    assert "migd rollback" in outcome.cause.message
    tried = changes(world.host)
    assert len(tried) < 60


def test_the_next_command_puts_back_what_could_not_be_before_it_does_its_own_work() -> None:
    world = staged()
    parked(world)
    world.host.clear_faults()
    assert apply(world, RECUT)[0].phase == "Ready"
    assert world.record().open == ()
    assert orphans(world.seen()) == []
    assert roll_back(world)[0].phase == "Ready"
    assert places(gpu(world)) == BEFORE


def test_a_command_without_an_order_puts_back_what_could_not_be() -> None:
    world = staged()
    parked(world)
    world.host.clear_faults()
    assert world.attempt(None) == "done"
    assert places(gpu(world)) == BEFORE
    assert world.record().open == ()


def test_as_long_as_it_cannot_be_put_back_the_same_plan_does_nothing_more() -> None:
    """The layout before would be lost."""
    world = staged()
    parked(world)
    outcome = apply(world, RECUT)[0]
    assert (outcome.phase, exit_of(outcome)) == ("Failed", Exit.FAILED)
    assert world.record().open == (gpu(world).uuid,)
    world.host.clear_faults()
    assert world.attempt(None) == "done"
    assert places(gpu(world)) == BEFORE


def test_another_plan_takes_over_what_could_not_be_put_back() -> None:
    """From what is there; and a rollback returns to the layout before the plan that failed."""
    world = staged()
    parked(world)
    assert facts(apply(world, OFF)[0]) == ("Ready", "AsWished", Exit.DONE)
    assert world.record().open == ()
    assert gpu(world).layout == Layout(False)


def test_a_plan_for_another_gpu_leaves_what_could_not_be_put_back_as_it_is() -> None:
    world = world_of("2xa100-40gb")
    cut(world, "3g@4 2g@0 1g@2", "1g@0")
    order = order_of(world, {**RECUT, "gpus": {"indices": [0]}})
    world.host.inject(Fault("nvmlGpuInstanceCreateComputeInstance", gpu=0, times=0))
    assert carry_out(world, order)[0].phase == "Failed"
    begun = len(world.host.calls)
    assert apply(world, wish({"2g.10gb": 1}, 1))[1].phase == "Ready"
    assert {index for index, _ in changes(world.host, begun)} == {1}
    world.host.clear_faults()
    assert world.attempt(None) == "done"
    assert places(gpu(world, 0)) == BEFORE


def test_a_job_that_came_on_a_new_instance_keeps_it_and_the_way_back_waits_for_the_next_command() -> None:
    world = staged()
    order = order_of(world, wish({"1g.5gb": 7}))
    started: list[int] = []

    def job() -> None:
        started.append(world.host.start_process(0, 0))
        world.host.inject(Fault("nvmlGpuInstanceCreateComputeInstance", times=3))

    outcome = carry_out(world, order, once_before("create compute instance of 1g.5gb@3", job))[0]
    assert facts(outcome) == ("Failed", "InUse", Exit.FAILED)
    assert f"pid {started[0]}" in outcome.cause.message
    world.host.clear_faults()
    world.host.end_process(started[0])
    assert world.attempt(None) == "done"
    assert places(gpu(world)) == BEFORE


# --- Hold ---


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_plan_that_says_hold_stays_where_it_failed(nth: int) -> None:
    world = staged()
    world.host.inject(Fault("nvmlGpuInstanceCreateComputeInstance", nth=nth, times=3))
    outcome = apply(world, RECUT, onFailure="Hold")[0]
    assert facts(outcome) == ("Held", "Held", Exit.FAILED)
    assert "onFailure" in outcome.cause.message
    assert world.record().open == ()
    assert places(gpu(world)) != BEFORE
    begun = len(world.host.calls)
    assert world.attempt(None) == "done"
    assert changes(world.host, begun) == [], "held is held"


@pytest.mark.parametrize("then", ["the same plan", "rollback", "another plan"])
def test_what_is_held_is_ours_and_any_command_goes_on_from_it(then: str) -> None:
    world = staged()
    world.host.inject(Fault("nvmlGpuInstanceCreateComputeInstance", nth=2, times=3))
    assert apply(world, RECUT, onFailure="Hold")[0].phase == "Held"
    assert world.record().gpu(gpu(world).uuid).owned == gpu(world).geometry
    if then == "rollback":
        assert roll_back(world)[0].phase == "Ready"
        assert places(gpu(world)) == BEFORE
    else:
        rules = RECUT if then == "the same plan" else OFF
        assert apply(world, rules, onFailure="Hold")[0].phase == "Ready"
    assert orphans(world.seen()) == []


def test_hold_before_anything_was_touched_is_simply_not_begun() -> None:
    world = world_of("a100-40gb")
    cut(world, "3g@4")
    world.host.start_process(0, 4)
    begun = len(world.host.calls)
    assert facts(apply(world, wish({"7g.40gb": 1}), onFailure="Hold")[0]) == ("Blocked", "InUse", Exit.BLOCKED)
    assert changes(world.host, begun) == []
