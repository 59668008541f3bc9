"""Situations of crashes, partial failure and persistence from public reports, through the whole agent.

Left out: labels that stay paused, readiness on a node and evictions that must not be repeated (B53, B58), whose home is
the cluster. Kills of real processes are in test_kills.py, seeded combinations in test_crashes.py.
"""

from __future__ import annotations

from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from staging import (
    MUTATORS,
    OFF,
    apply,
    carry_out,
    changes,
    compute_counts,
    cut,
    gpu,
    made_by_hand,
    make,
    once_before,
    order_of,
    places,
    remove,
    roll_back,
    stranger,
    wish,
    world_of,
)
from worlds import World, orphans, serials

from migd.agent.records import Outcome
from migd.agent.running import look, run
from migd.agent.simulated import simulated
from migd.agent.store import FileStore
from migd.cli.exits import Exit, exit_of
from migd.mig.geometry import Layout
from migd.mig.observed import MigMode
from migd.mig.operations import SetMode
from migd.nvml.errors import HungError
from migd.sim.faults import Fault


def facts(outcome: Outcome) -> tuple[str, str, int]:
    return outcome.phase, outcome.cause.reason, exit_of(outcome)


# --- B53 ---

BEFORE = "3g@4 2g@0 1g@2"
STORIES = {
    "re-cut": (BEFORE, wish({"1g.5gb": 5, "2g.10gb": 1})),
    "off": (BEFORE, OFF),
    "on": (None, wish({"3g.20gb": 2})),
}
CODES = [2, 3, 4, 6, 19, 23, 999]
"""A handle that died, not supported, no permission, not found, in use, no room, unknown."""


def staged(story: str, gpus: int = 1) -> World:
    world = world_of(f"{gpus}xa100-40gb", duration_scale=0)
    there = STORIES[story][0]
    if there is not None:
        cut(world, *[there] * gpus)
    return world


@cache
def steps(story: str) -> tuple[tuple[str, int], ...]:
    """(call, how often it was made so far) of every mutating call of a story without faults."""
    world = staged(story)
    begun = len(world.host.calls)
    assert apply(world, STORIES[story][1])[0].phase == "Ready"
    counted: dict[str, int] = {}
    found = []
    for _, name in changes(world.host, begun):
        counted[name] = counted.get(name, 0) + 1
        found.append((name, counted[name]))
    return tuple(found)


POINTS = [(story, *step) for story in STORIES for step in steps(story)]


@pytest.mark.parametrize("times", [1, 40, 0])
@pytest.mark.parametrize(("story", "call", "nth"), POINTS)
def test_a_failure_at_any_step_ends_at_rest_and_the_next_try_converges(
    story: str, call: str, nth: int, times: int
) -> None:
    """B53: at every step k, with every error, before and after its effect, once, for long, and for ever."""
    for code in CODES:
        for when in ("before", "after"):
            world = staged(story)
            before = gpu(world).layout
            world.host.inject(Fault(call, code=code, when=when, nth=nth, times=times))
            outcome = apply(world, STORIES[story][1])[0]
            what = f"{code} {when}: {outcome}"
            assert outcome.phase in ("Ready", "Blocked", "Failed"), what
            record = world.record()
            if record.open:  # going back fails too, as long as the fault lasts: rests, and says so
                assert times != 1, what
                assert outcome.phase == "Failed", what
                assert "going back failed too" in outcome.cause.message, what
            elif outcome.phase != "Ready":
                assert gpu(world).layout == before, what
                assert orphans(world.seen()) == [], what
            world.host.clear_faults()
            assert facts(apply(world, STORIES[story][1])[0]) == ("Ready", "AsWished", Exit.DONE), what
            assert orphans(world.seen()) == []
            assert world.record().open == ()


@pytest.mark.parametrize("call", MUTATORS)
def test_one_failure_that_passes_is_not_even_told(call: str) -> None:
    """B53: an error that comes once is tried again within the command."""
    for code in (19, 23, 999):
        for when in ("before", "after"):
            for story, (_, rules) in STORIES.items():
                world = staged(story)
                world.host.inject(Fault(call, code=code, when=when))
                assert facts(apply(world, rules)[0]) == ("Ready", "AsWished", Exit.DONE), (story, code, when)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_of_several_gpus_failing_midway_is_put_back_alone(failing: int) -> None:
    """B53: failure and the way back are each GPU's own."""
    world = staged("re-cut", 3)
    before = gpu(world, failing).layout
    world.host.inject(Fault("nvmlGpuInstanceCreateComputeInstance", gpu=failing, nth=2, times=3))
    outcomes = apply(world, STORIES["re-cut"][1])
    assert {i: facts(o) for i, o in outcomes.items()} == {
        i: ("Failed", "NVMLError", Exit.FAILED) if i == failing else ("Ready", "AsWished", Exit.DONE) for i in range(3)
    }
    assert gpu(world, failing).layout == before
    assert orphans(world.seen()) == []


# --- B54 ---


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(("key", "half"), [("a100-40gb", "3g.20gb"), ("h200", "3g.71gb"), ("a30", "2g.12gb")])
def test_twenty_failed_compute_instances_leave_nothing_behind(key: str, half: str, times: int) -> None:
    """B54: a GPU instance without compute instance is no MIG device, so it is looked for as what it is."""
    world = world_of(key)
    for _ in range(20):
        world.host.inject(Fault("nvmlGpuInstanceCreateComputeInstance", nth=2, times=times))
        outcome = apply(world, wish({half: 2}))[0]
        assert outcome.phase == ("Ready" if times == 1 else "Failed")
        assert compute_counts(world) in ((2, 2), (0, 0))
        assert orphans(world.seen()) == []
        if times == 1:
            apply(world, OFF)
        world.host.clear_faults()
    assert apply(world, wish({half: 2}))[0].phase == "Ready"
    assert compute_counts(world) == (2, 2)


def test_a_gpu_instance_without_compute_instance_that_others_left_is_completed_or_told() -> None:
    """B54: an orphan of another tool's fits the wish, or is foreign."""
    world = world_of("a100-40gb")
    with stranger(world.host) as gpus:
        (seen,) = gpus.look()
        gpus.perform(SetMode(seen.uuid, True))
        make(gpus, seen, "3g@4")
        world.host.inject(Fault("nvmlGpuInstanceCreateComputeInstance"))
        with pytest.raises(Exception, match="nvmlGpuInstanceCreateComputeInstance"):
            make(gpus, seen, "3g@0")
    world.host.clear_faults()
    assert facts(apply(world, wish({"7g.40gb": 1}))[0]) == ("Blocked", "ForeignInstances", Exit.BLOCKED)
    assert facts(apply(world, wish({"3g.20gb": 2}))[0]) == ("Ready", "AsWished", Exit.DONE)
    assert compute_counts(world) == (2, 2)


# --- B58 ---


@pytest.mark.parametrize("recur", [True, False])
@pytest.mark.parametrize("key", ["a100-40gb", "a30", "h200", "rtx-pro-6000-blackwell"])
def test_after_a_reboot_what_is_gone_is_rebuilt_and_shown_with_the_uuids_of_now(key: str, recur: bool) -> None:
    """B58: UUIDs may recur or not; neither proves anything."""
    world = world_of(key, uuid_changes_on_recreate=not recur)
    rules = {"gpus": {"all": True}, "instances": [{"memoryGB": 5, "count": 4}]}
    assert apply(world, rules)[0].phase == "Ready"
    before = gpu(world)
    world.host.reboot()
    assert gpu(world).instances == ()
    assert world.attempt(None) == "done"
    assert world.record().gpu(before.uuid).outcome is None, "ready no more"
    assert world.record().gpu(before.uuid).owned == frozenset()
    outcome = apply(world, rules)[0]
    assert (outcome.phase, outcome.changed) == ("Ready", True)
    after = gpu(world)
    assert after.geometry == before.geometry
    uuids = [{c.mig_uuid for i in seen.instances for c in i.compute_instances} for seen in (before, after)]
    assert (uuids[0] == uuids[1]) is recur
    assert world.record().gpu(after.uuid).owned == after.geometry


@pytest.mark.parametrize("story", STORIES)
def test_a_reboot_in_the_middle_of_a_change_leaves_nothing_owed(story: str) -> None:
    """B58 and B53: killed at every step, then rebooted."""
    for call, nth in steps(story):
        world = staged(story)
        world.host.inject(Fault(call, "crash", when="after", nth=nth))
        assert world.attempt(order_of(world, STORIES[story][1])) == "crashed"
        world.end()
        world.host.reboot()
        assert world.attempt(None) == "done"
        assert world.record().open == ()
        assert apply(world, STORIES[story][1])[0].phase == "Ready"
        assert orphans(world.seen()) == []


# --- B60 ---


def test_instances_made_by_hand_are_shown_and_left_without_a_plan() -> None:
    """B60."""
    world = world_of("a100-80gb")
    made_by_hand(world, " ".join(f"1g@{i}" for i in range(7)))
    begun = len(world.host.calls)
    assert world.attempt(None) == "done"
    assert changes(world.host, begun) == []
    assert gpu(world).layout == Layout(True, gpu(world).geometry)
    assert len(gpu(world).instances) == 7


@pytest.mark.parametrize("busy", [False, True])
def test_instances_made_by_hand_are_refused_or_adopted_as_the_plan_says(busy: bool) -> None:
    """B60: Refuse touches nothing; Adopt converges, under the same rule for what is in use."""
    world = world_of("a100-80gb")
    made_by_hand(world, " ".join(f"1g@{i}" for i in range(7)))
    pid = world.host.start_process(0, 3) if busy else 0
    before, begun = serials(world.host), len(world.host.calls)
    outcome = apply(world, wish({"3g.40gb": 2}))[0]
    assert facts(outcome) == ("Blocked", "ForeignInstances", Exit.BLOCKED) or (busy and outcome.cause.reason == "InUse")
    assert changes(world.host, begun) == []
    adopted = apply(world, wish({"3g.40gb": 2}), foreignInstances="Adopt")[0]
    if busy:
        assert facts(adopted) == ("Blocked", "InUse", Exit.BLOCKED)
        assert changes(world.host, begun) == []
        assert serials(world.host) == before
        world.host.end_process(pid)
        adopted = apply(world, wish({"3g.40gb": 2}), foreignInstances="Adopt")[0]
    assert facts(adopted) == ("Ready", "AsWished", Exit.DONE)
    assert places(gpu(world)) == "3g.40gb@0 3g.40gb@4"


def test_what_is_foreign_is_never_waited_for() -> None:
    """B60: time does not make it ours."""
    world = world_of("a100-80gb")
    made_by_hand(world, "1g@0 1g@1")
    began = world.host.clock.now_s()
    assert apply(world, wish({"7g.80gb": 1}), wait_s=600.0)[0].cause.reason == "ForeignInstances"
    assert world.host.clock.now_s() == began


def test_what_is_foreign_beside_what_is_in_use_is_not_waited_for_either() -> None:
    """B60."""
    world = world_of("a100-80gb")
    cut(world, "3g@4")
    with stranger(world.host) as gpus:
        make(gpus, gpus.look()[0], "1g@0")
    world.host.start_process(0, 4, ends_after_s=5.0)
    began = world.host.clock.now_s()
    outcome = apply(world, wish({"7g.80gb": 1}), wait_s=600.0)[0]
    assert outcome.phase == "Blocked"
    assert "1g.10gb@0" in outcome.cause.message
    assert world.host.clock.now_s() == began


# --- B62 ---


LIES = ["nvmlDeviceCreate*", "nvmlGpuInstanceCreate*", "nvml*InstanceDestroy", "nvmlDeviceSet*"]


@pytest.mark.parametrize(
    ("story", "call"), [(s, c) for s in STORIES for c in LIES if any(fnmatch(name, c) for name, _ in steps(s))]
)
def test_success_without_effect_is_found_by_reading_back(story: str, call: str) -> None:
    """B62 (a): never Ready before NVML shows it. Lies that last also keep the way back from being seen done."""
    world = staged(story)
    before = gpu(world).layout
    world.host.switch("success_without_effect", call)
    outcome = apply(world, STORIES[story][1])[0]
    assert outcome.phase == "Failed"
    assert "NVML does not show it" in outcome.cause.message
    world.host.switch("success_without_effect", "")
    assert world.attempt(None) == "done"
    assert gpu(world).layout == before
    assert orphans(world.seen()) == []
    assert apply(world, STORIES[story][1])[0].phase == "Ready"


@pytest.mark.parametrize("key", ["a100-80gb", "h200", "a30"])
def test_a_create_that_only_says_success_on_an_empty_gpu_is_failed_and_put_back(key: str) -> None:
    """B62 (a)."""
    world = world_of(key, success_without_effect="nvmlDeviceCreate*")
    outcome = apply(world, {"gpus": {"all": True}, "instances": [{"memoryGB": 5}]})[0]
    assert facts(outcome) == ("Failed", "NVMLError", Exit.FAILED)
    assert "NVML does not show it; put back as it was" in outcome.cause.message
    assert gpu(world).mode == MigMode(current=False, pending=False)


# --- B63 ---


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("story", "call", "nth"), POINTS)
def test_a_call_that_hangs_ends_the_command_and_the_next_one_recovers(
    story: str, call: str, nth: int, when: str
) -> None:
    """B63, for NVML itself: no call of it has a deadline, so we have one."""
    world = staged(story, 2)
    order = order_of(world, STORIES[story][1])
    world.host.inject(Fault(call, "hang", gpu=0, when=when, nth=nth))
    began = world.host.clock.now_s()
    with pytest.raises(HungError, match=call):
        carry_out(world, order)
    assert world.host.clock.now_s() - began < 300.0
    world.end()
    assert world.record().open != ()
    assert {facts(o) for o in apply(world, STORIES[story][1]).values()} == {("Ready", "AsWished", Exit.DONE)}
    assert world.record().open == ()
    assert orphans(world.seen()) == []


@pytest.mark.parametrize("call", ["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"])
def test_a_gpu_that_hangs_again_and_again_keeps_no_plan_for_another_gpu_from_running(call: str) -> None:
    """B63: later plans run, and what hangs can still be undone."""
    world = staged("re-cut", 2)
    before = gpu(world, 0).layout
    first = order_of(world, wish({"1g.5gb": 7}, 0))
    world.host.inject(Fault(call, "hang", gpu=0, times=0))
    for _ in range(2):
        with pytest.raises(HungError):
            carry_out(world, first)
    world.end()
    outcomes = apply(world, wish({"1g.5gb": 7}, 1))
    assert facts(outcomes[1]) == ("Ready", "AsWished", Exit.DONE)
    assert world.record().open == (gpu(world, 0).uuid,)
    world.host.clear_faults()
    assert world.attempt(None) == "done"
    assert gpu(world, 0).layout == before


# --- B65 ---


@pytest.mark.parametrize("begun", ["destroy compute instance", "destroy GPU instance"])
@pytest.mark.parametrize("key", ["a100-40gb", "h100-sxm-80gb"])
@pytest.mark.parametrize("disable", [True, False])
def test_what_somebody_else_removed_with_the_mode_counts_as_gone(key: str, begun: str, disable: bool) -> None:
    """B65: the instance and the mode vanish between our look and our call; its handles are dead, which is no error."""
    world = world_of(key, minor_renumber_on_mode_change=True)
    cut(world, "3g@0 3g@4")
    seen = gpu(world)

    def by_hand() -> None:
        with stranger(world.host) as gpus:
            remove(gpus, seen, seen.geometry)
            world.end()  # on Ampere no session but the one that asks may be open
            gpus.perform(SetMode(seen.uuid, False))

    rules = OFF if disable else {"gpus": {"all": True}, "instances": [{"memoryGB": 5, "count": 7}]}
    outcome = apply(world, rules, listen=once_before(begun, by_hand))[0]
    assert facts(outcome) == ("Ready", "AsWished", Exit.DONE)
    assert len(gpu(world).instances) == (0 if disable else 7)
    assert orphans(world.seen()) == []


# --- B69 ---


@pytest.mark.parametrize("spec", ["h100-sxm-80gb", "2xa100-40gb,a30,l40s"])
def test_fifty_restarts_on_a_converged_machine_write_nothing(spec: str, tmp_path: Path) -> None:
    """B69: not to the GPUs, and not to the record."""
    world = world_of(spec)
    store = FileStore(tmp_path)
    rules = [
        {"gpus": {"models": ["*H100*", "*A100*"]}, "instances": [{"memoryGB": 5, "count": 7}]},
        {"gpus": {"models": ["*A30*"]}, "instances": [{"profile": "1g.6gb", "count": 4}]},
    ]
    rules = [rule for rule in rules if spec.startswith("2x") or "*A30*" not in rule["gpus"]["models"]]
    order = order_of(world, *rules)
    run(simulated(world.host, store, 1), order)
    world.host.close_sessions(1)
    before, begun = serials(world.host), len(world.host.calls)
    written = (store.path.stat().st_ino, store.path.stat().st_mtime_ns, store.path.read_bytes())
    for pid in range(2, 52):
        record = run(simulated(world.host, store, pid), order if pid % 2 else None)
        assert {gpu.outcome.phase for gpu in record.gpus.values() if gpu.outcome} == {"Ready"}
        world.host.close_sessions(pid)
    assert changes(world.host, begun) == []
    assert "record.save" not in {call.name for call in list(world.host.calls)[begun:]}
    assert (store.path.stat().st_ino, store.path.stat().st_mtime_ns, store.path.read_bytes()) == written
    assert serials(world.host) == before


def test_a_machine_that_migd_never_changed_gets_no_record_from_looking(tmp_path: Path) -> None:
    """B69, before there is anything to remember."""
    world = world_of("h100-sxm-80gb")
    store = FileStore(tmp_path)
    run(simulated(world.host, store, 1), None)
    assert not store.path.exists()


# --- lost and reloaded ---


@pytest.mark.parametrize("begun", ["MIG mode on", "create GPU instance", "create compute instance"])
@pytest.mark.parametrize("back", ["same boot", "reboot"])
def test_a_gpu_that_falls_off_the_bus_midway_is_told_and_finished_once_it_is_back(begun: str, back: str) -> None:
    world = world_of("2xa100-40gb")
    order = order_of(world, wish({"3g.20gb": 2}))
    outcomes = carry_out(world, order, once_before(begun, lambda: world.host.lose_gpu(0)))
    assert facts(outcomes[0]) == ("Lost", "GPUUnhealthy", Exit.FAILED)
    assert facts(outcomes[1]) == ("Ready", "AsWished", Exit.DONE)
    if back == "reboot":
        world.host.reboot()
    else:
        world.host.find_gpu(0)
    assert {facts(o) for o in apply(world, wish({"3g.20gb": 2})).values()} == {("Ready", "AsWished", Exit.DONE)}
    assert world.record().open == ()
    for seen in world.seen():
        assert world.record().gpu(seen.uuid).owned == seen.geometry, "what was made before the loss is still ours"
    assert orphans(world.seen()) == []


def test_a_gpu_that_is_still_lost_keeps_no_plan_for_another_gpu_from_running() -> None:
    world = world_of("2xa100-40gb")
    order = order_of(world, wish({"3g.20gb": 2}, 0))
    carry_out(world, order, once_before("create GPU", lambda: world.host.lose_gpu(0)))
    assert apply(world, wish({"3g.20gb": 2}, 1))[1].phase == "Ready"


def test_a_lost_gpu_that_comes_back_can_be_rolled_back() -> None:
    world = world_of("a100-40gb")
    cut(world, "1g@0")
    before = gpu(world).layout
    order = order_of(world, wish({"3g.20gb": 2}))
    carry_out(world, order, once_before("create compute", lambda: world.host.lose_gpu(0)))
    world.host.find_gpu(0)
    assert roll_back(world)[0].phase == "Ready"
    assert gpu(world).layout == before
    assert orphans(world.seen()) == []


@pytest.mark.parametrize("seconds", [0.0, 3.0, 12.0])
@pytest.mark.parametrize("begun", ["MIG mode", "destroy", "create GPU", "create compute"])
@pytest.mark.parametrize("key", ["a100-40gb", "h100-sxm-80gb"])
def test_a_driver_that_is_reloaded_midway_is_waited_for(key: str, begun: str, seconds: float) -> None:
    """On Ampere the mode survives, on Hopper not; the instances never do, not even those that were to stay."""
    world = world_of(key)
    small = {"a100-40gb": "1g.5gb", "h100-sxm-80gb": "1g.10gb"}[key]
    if begun != "MIG mode":
        cut(world, "1g@0 3g@4")
    outcome = apply(world, wish({small: 5}), listen=once_before(begun, lambda: world.host.reload_driver(seconds)))[0]
    assert facts(outcome) == ("Ready", "AsWished", Exit.DONE)
    assert len(gpu(world).instances) == 5
    assert world.record().gpu(gpu(world).uuid).owned == gpu(world).geometry
    assert orphans(world.seen()) == []


def test_a_driver_that_stays_away_ends_the_command_and_the_next_one_recovers() -> None:
    world = world_of("a100-40gb")
    order = order_of(world, wish({"3g.20gb": 2}))
    with pytest.raises(Exception, match="driver is not loaded"):
        carry_out(world, order, once_before("create GPU", lambda: world.host.reload_driver(3600.0)))
    world.end()
    world.host.clock.sleep(3600.0)
    assert apply(world, wish({"3g.20gb": 2}))[0].phase == "Ready"
    assert look(world.machine()).gpus[0].mig_on
