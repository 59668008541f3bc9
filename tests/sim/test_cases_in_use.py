"""Situations of GPUs in use from public reports: holders are processes and silent monitors, through the whole agent.

Left out: everything that needs pods: pausing GPU clients by label (B25's first half), a pod that owns a GPU and runs
nothing (B30), evictions, budgets and cordons (B31 to B39). They come with the cluster; so does h11's list of services.
"""

from __future__ import annotations

import pytest
from staging import OFF, apply, carry_out, changes, cut, gpu, once_before, order_of, places, wish, world_of
from worlds import World, orphans, serials

from migd.agent.effects import Pause
from migd.agent.records import Outcome
from migd.agent.running import Progress
from migd.cli.exits import Exit, exit_of
from migd.mig.geometry import counts, counts_of
from migd.mig.observed import MigMode
from migd.sim.faults import Fault


def facts(outcome: Outcome) -> tuple[str, str, int]:
    return outcome.phase, outcome.cause.reason, exit_of(outcome)


# --- B25 ---


def silent(world: World, **options: object) -> int:
    return world.host.start_process(0, command="nv-hostengine", silent=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["a100-40gb", "a100-80gb", "a30"])
@pytest.mark.parametrize("wanted", ["on", "off", "off, with instances"])
def test_a_silent_daemon_that_holds_the_gpu_blocks_a_mode_change_and_is_named(key: str, wanted: str) -> None:
    """B25: NVML lists no process, so it is found by trying, and named by who has the device file open."""
    world = world_of(key)
    if wanted != "on":
        cut(world, "1g@0 2g@2" if "," in wanted else "")
    before = gpu(world).layout
    pid = silent(world)
    outcome = apply(world, wish({"1g.6gb" if key == "a30" else gpu_one(key): 1}) if wanted == "on" else OFF)[0]
    assert facts(outcome) == ("Blocked", "InUse", Exit.BLOCKED)
    assert f"pid {pid} (nv-hostengine)" in outcome.cause.message
    assert gpu(world).layout == before
    assert gpu(world).mode == MigMode(current=wanted != "on", pending=wanted != "on")
    assert orphans(world.seen()) == []


def gpu_one(key: str) -> str:
    return {"a100-40gb": "1g.5gb", "a100-80gb": "1g.10gb"}[key]


def test_it_works_once_the_daemon_is_gone() -> None:
    """B25."""
    world = world_of("a100-40gb")
    cut(world, "1g@0")
    pid = silent(world)
    assert apply(world, OFF)[0].phase == "Blocked"
    world.host.end_process(pid)
    assert facts(apply(world, OFF)[0]) == ("Ready", "AsWished", Exit.DONE)


@pytest.mark.parametrize("ends_after_s", [1.0, 40.0, 300.0])
@pytest.mark.parametrize("disable", [False, True])
def test_waiting_waits_for_a_daemon_that_only_the_driver_sees(disable: bool, ends_after_s: float) -> None:
    """B25, with --wait-idle."""
    world = world_of("a100-40gb")
    if disable:
        cut(world, "1g@0")
    silent(world, ends_after_s=ends_after_s)
    began = world.host.clock.now_s()
    outcome = apply(world, OFF if disable else wish({"1g.5gb": 1}), wait_s=600.0)[0]
    assert facts(outcome) == ("Ready", "AsWished", Exit.DONE)
    assert world.host.clock.now_s() - began < ends_after_s + 40.0


def test_waiting_for_a_daemon_ends_when_the_time_is_over() -> None:
    """B25: bounded, named, and everything as it was."""
    world = world_of("a100-40gb")
    cut(world, "1g@0 2g@2")
    pid = silent(world)
    began = world.host.clock.now_s()
    outcome = apply(world, OFF, wait_s=120.0)[0]
    assert facts(outcome) == ("Blocked", "NeverIdle", Exit.BLOCKED)
    assert f"pid {pid}" in outcome.cause.message
    assert 100.0 < world.host.clock.now_s() - began < 160.0
    assert places(gpu(world)) == "1g.5gb@0 2g.10gb@2"
    assert orphans(world.seen()) == []


def test_waiting_for_one_gpu_says_of_the_others_what_was_done() -> None:
    """B25 on one of two GPUs: the other is done once, and its result is not forgotten while the first waits."""
    world = world_of("2xa100-40gb")
    silent(world, ends_after_s=60.0)
    before = world.host.clock.now_s()
    outcomes = apply(world, wish({"3g.20gb": 2}), wait_s=600.0)
    assert {i: (o.phase, o.changed) for i, o in outcomes.items()} == {0: ("Ready", True), 1: ("Ready", True)}
    assert world.host.clock.now_s() - before < 120.0
    creates = [index for index, name in changes(world.host) if name == "nvmlDeviceCreateGpuInstanceWithPlacement"]
    assert creates.count(1) == 2


@pytest.mark.parametrize("start", [0, 2, 4])
def test_a_silent_monitor_of_one_instance_blocks_and_every_instance_is_put_back(start: int) -> None:
    """B25 for one instance: idle ones lost their compute instances before it was met, and get them back."""
    world = world_of("a100-80gb")
    cut(world, "1g@0 2g@2 3g@4")
    pid = world.host.start_process(0, start, command="dcgm-exporter", silent=True)
    held = {k: v for k, v in serials(world.host).items() if k[1] == start}
    outcome = apply(world, wish({"7g.80gb": 1}))[0]
    assert facts(outcome) == ("Blocked", "InUse", Exit.BLOCKED)
    assert f"pid {pid} (dcgm-exporter)" in outcome.cause.message
    assert places(gpu(world)) == "1g.10gb@0 2g.20gb@2 3g.40gb@4"
    assert orphans(world.seen()) == []
    assert held.items() <= serials(world.host).items()


def test_where_a_busy_gpu_switches_its_mode_the_first_instance_fails_and_the_mode_goes_back() -> None:
    """B25 on Hopper and later: the second gate, a process that came after the look."""
    world = world_of("h100-sxm-80gb")

    def job() -> None:
        world.host.start_process(0, command="python train.py")

    outcome = apply(world, wish({"1g.10gb": 7}), listen=once_before("MIG mode on", job))[0]
    assert (outcome.phase, outcome.cause.reason) == ("Blocked", "InUse")
    assert gpu(world).mode == MigMode(current=False, pending=False)


@pytest.mark.parametrize("key", ["h100-sxm-80gb", "h200", "b200"])
def test_a_resetless_gpu_that_refuses_while_busy_is_put_back(key: str) -> None:
    world = world_of(key, busy_resetless_mode="in-use")
    silent(world)
    outcome = apply(world, {"gpus": {"all": True}, "instances": [{"memoryGB": 10}]})[0]
    assert facts(outcome) == ("Blocked", "InUse", Exit.BLOCKED)
    assert gpu(world).mode == MigMode(current=False, pending=False)


# --- B27 ---


@pytest.mark.parametrize("uuids_change", [False, True])
@pytest.mark.parametrize(("there", "held"), [("3g@4 2g@0 1g@2 1g@3", 3), ("3g@4 2g@0 1g@2 1g@3", 2), ("3g@0 1g@6", 6)])
def test_an_instance_in_use_that_fits_keeps_its_id_serial_and_uuid(there: str, held: int, uuids_change: bool) -> None:
    """B27."""
    world = world_of("a100-40gb", uuid_changes_on_recreate=uuids_change)
    cut(world, there)
    pid = world.host.start_process(0, held)
    kept = {k: v for k, v in serials(world.host).items() if k[1] == held}
    (before,) = (i for i in gpu(world).instances if i.instance.placement.start == held)
    assert facts(apply(world, wish({"1g.5gb": 7}))[0]) == ("Ready", "AsWished", Exit.DONE)
    (after,) = (i for i in gpu(world).instances if i.instance.placement.start == held)
    assert kept.items() <= serials(world.host).items()
    assert (after.gi_id, after.compute_instances) == (before.gi_id, before.compute_instances)
    assert world.host.describe(pid) is not None
    assert counts_of(gpu(world).geometry) == (("1g.5gb", 7),)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("held", range(7))
def test_wherever_the_instance_in_use_lies_the_others_are_cut_around_it(held: int, swapped: bool) -> None:
    """B27, at every place, also on a board that shows its halves exchanged."""
    world = world_of("h200")
    world.host.switch("swapped_halves", swapped)
    cut(world, " ".join(f"1g@{start}" for start in range(7)))
    world.host.start_process(0, held)
    kept = {k: v for k, v in serials(world.host).items() if k[1] == held}
    wanted = {"3g.71gb": 1, "1g.18gb": 2}
    assert apply(world, wish(wanted))[0].phase == "Ready"
    assert kept.items() <= serials(world.host).items()
    assert counts_of(gpu(world).geometry) == counts(wanted)


@pytest.mark.parametrize("container", ["", "f" * 64])
def test_what_is_in_use_and_in_the_way_is_named_and_nothing_is_touched(container: str) -> None:
    """B27, where the instance in use does not fit the wish."""
    world = world_of("a100-40gb")
    cut(world, "3g@4 1g@0")
    pid = world.host.start_process(0, 4, command="python serve.py", container=container)
    begun = len(world.host.calls)
    outcome = apply(world, wish({"7g.40gb": 1}))[0]
    assert facts(outcome) == ("Blocked", "InUse", Exit.BLOCKED)
    assert f"3g.20gb@4 by pid {pid}" in outcome.cause.message
    assert "python serve.py" in outcome.cause.message
    assert (container[:12] in outcome.cause.message) is True
    assert changes(world.host, begun) == []


# --- between the look and the call ---


def test_a_process_that_starts_between_the_recheck_and_the_destroy_keeps_its_instance() -> None:
    """The driver refuses, and what had gone already comes back."""
    world = world_of("a100-40gb")
    cut(world, "1g@0 2g@2 3g@4")
    started: list[int] = []

    def job() -> None:
        started.append(world.host.start_process(0, 4))

    kept = {k: v for k, v in serials(world.host).items() if k[1] == 4}
    outcome = apply(world, wish({"7g.40gb": 1}), listen=once_before("destroy compute instance of 3g", job))[0]
    assert facts(outcome) == ("Blocked", "InUse", Exit.BLOCKED)
    assert f"pid {started[0]}" in outcome.cause.message
    assert kept.items() <= serials(world.host).items()
    assert places(gpu(world)) == "1g.5gb@0 2g.10gb@2 3g.20gb@4"
    assert orphans(world.seen()) == []


@pytest.mark.parametrize("lag_s", [0.3, 1.0])
def test_a_release_that_lags_behind_its_process_is_waited_for(lag_s: float) -> None:
    """The process list is empty before the driver lets go."""
    world = world_of("a100-40gb", release_lag_s=lag_s)
    cut(world, "3g@4")
    world.host.end_process(world.host.start_process(0, 4))
    assert apply(world, wish({"7g.40gb": 1}))[0].phase == "Ready"


# --- waiting ---


@pytest.mark.parametrize("ends_after_s", [1.0, 59.0, 1700.0])
def test_waiting_looks_without_touching_until_all_that_must_go_is_idle(ends_after_s: float) -> None:
    world = world_of("a100-40gb")
    cut(world, "3g@0 3g@4")
    world.host.start_process(0, 0, ends_after_s=ends_after_s)
    begun, began = len(world.host.calls), world.host.clock.now_s()
    first_change: list[float] = []

    def listen(progress: Progress) -> None:
        if not isinstance(progress.effect, Pause) and not first_change:
            first_change.append(world.host.clock.now_s() - began)

    assert apply(world, wish({"7g.40gb": 1}), wait_s=1800.0, listen=listen)[0].phase == "Ready"
    assert ends_after_s <= first_change[0] <= ends_after_s + 3.0
    assert changes(world.host, begun) != []


def test_what_is_never_idle_is_told_and_nothing_is_touched() -> None:
    world = world_of("2xa100-40gb")
    cut(world, "3g@0", "3g@0")
    pid = world.host.start_process(1, 0)
    begun, began = len(world.host.calls), world.host.clock.now_s()
    outcomes = apply(world, wish({"7g.40gb": 1}), wait_s=90.0)
    assert facts(outcomes[1]) == ("Blocked", "NeverIdle", Exit.BLOCKED)
    assert f"pid {pid}" in outcomes[1].cause.message
    assert facts(outcomes[0]) == ("Blocked", "Waiting", Exit.BLOCKED)
    assert changes(world.host, begun) == []
    assert 90.0 <= world.host.clock.now_s() - began < 100.0


def test_a_job_that_starts_while_the_wait_ends_is_waited_for_again() -> None:
    """Not idle after all: put back, and on with the waiting while there is time."""
    world = world_of("a100-40gb")
    cut(world, "1g@0 3g@4")
    world.host.start_process(0, 4, ends_after_s=20.0)

    def job() -> None:
        world.host.start_process(0, 4, ends_after_s=50.0)

    listen = once_before("destroy compute instance of 3g", job)
    assert apply(world, wish({"7g.40gb": 1}), wait_s=600.0, listen=listen)[0].phase == "Ready"
    assert places(gpu(world)) == "7g.40gb@0"


def test_without_waiting_an_instance_in_use_ends_the_command_at_once() -> None:
    world = world_of("a100-40gb")
    cut(world, "3g@0")
    world.host.start_process(0, 0, ends_after_s=1.0)
    began = world.host.clock.now_s()
    assert facts(apply(world, wish({"7g.40gb": 1}))[0]) == ("Blocked", "InUse", Exit.BLOCKED)
    assert world.host.clock.now_s() == began


def test_the_order_of_a_waiting_command_counts_what_becomes_idle_on_every_gpu() -> None:
    world = world_of("3xa100-40gb")
    cut(world, "3g@0", "3g@0", "3g@0")
    for index, ends_after_s in ((0, 30.0), (1, 10.0), (2, 50.0)):
        world.host.start_process(index, 0, ends_after_s=ends_after_s)
    order = order_of(world, wish({"7g.40gb": 1}), wait_s=100.0)
    assert {o.phase for o in carry_out(world, order).values()} == {"Ready"}


def test_an_error_of_the_driver_ends_a_wait_as_a_failure() -> None:
    """Only what is in use is waited for."""
    world = world_of("a100-40gb")
    cut(world, "3g@0")
    world.host.start_process(0, 0, ends_after_s=10.0)
    world.host.inject(Fault("nvmlGpuInstanceDestroy", code=4, times=0))
    began = world.host.clock.now_s()
    assert facts(apply(world, wish({"7g.40gb": 1}), wait_s=600.0)[0]) == ("Failed", "NoPermission", Exit.FAILED)
    assert world.host.clock.now_s() - began < 60.0
