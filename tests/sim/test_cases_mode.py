"""Situations of MIG mode and GPU reset from public reports, through the whole agent on simulated hardware.

Left out: what pods, labels and taints show meanwhile (B19's pod is a process here), and the sharing half of B23: both
come with the cluster.
"""

from __future__ import annotations

import pytest
from staging import (
    OFF,
    apply,
    carry_out,
    changes,
    cut,
    gpu,
    make,
    once_after,
    order_of,
    places,
    roll_back,
    stranger,
    wish,
    world_of,
)
from worlds import World, orphans, serials

from migd.agent.records import Outcome
from migd.cli.exits import Exit, exit_of
from migd.mig.observed import MigMode
from migd.mig.operations import SetMode
from migd.sim.faults import Fault

AMPERE = ["a100-40gb", "a100-80gb", "a30"]
RESETLESS = ["h100-sxm-80gb", "h200", "b200", "rtx-pro-6000-blackwell"]
ONE = {
    "a100-40gb": "1g.5gb",
    "a30": "1g.6gb",
    "h200": "1g.18gb",
    "b200": "1g.23gb",
    "rtx-pro-6000-blackwell": "1g.24gb",
}


def one(key: str) -> str:
    """The plain 1g profile of a model."""
    return ONE.get(key, "1g.10gb")


def facts(outcome: Outcome) -> tuple[str, str, int]:
    """Phase, reason, and the exit code that a command ends with for it."""
    return outcome.phase, outcome.cause.reason, exit_of(outcome)


# --- B15 ---


@pytest.mark.parametrize("key", AMPERE)
def test_a_mode_that_stays_pending_is_reboot_required_and_no_instance_is_tried(key: str) -> None:
    """B15: a virtual machine; the mode is only noted, and a reset succeeds and changes nothing."""
    world = world_of(key, vm=True)
    begun = len(world.host.calls)
    outcome = apply(world, wish({one(key): 2}))[0]
    assert facts(outcome) == ("RebootRequired", "RebootRequired", Exit.BLOCKED)
    assert "reboot" in outcome.cause.message
    assert gpu(world).mode == MigMode(current=False, pending=True)
    assert {name for _, name in changes(world.host, begun)} == {"nvmlDeviceSetMigMode", "reset"}
    assert world.record().open == ()


@pytest.mark.parametrize("key", AMPERE)
def test_after_the_reboot_the_same_plan_is_made_so(key: str) -> None:
    """B15."""
    world = world_of(key, vm=True)
    apply(world, wish({one(key): 2}))
    begun = len(world.host.calls)
    assert apply(world, wish({one(key): 2}))[0].phase == "RebootRequired"
    assert changes(world.host, begun) == [], "asking again in the same boot changes nothing"
    world.host.reboot()
    assert apply(world, wish({one(key): 2}))[0].phase == "Ready"
    assert len(gpu(world).instances) == 2


def test_another_plan_need_not_wait_for_the_reboot() -> None:
    """B15: the pending mode is called off when the next plan does not want it."""
    world = world_of("a100-40gb", vm=True)
    apply(world, wish({"1g.5gb": 7}))
    assert facts(apply(world, OFF)[0]) == ("Ready", "AsWished", Exit.DONE)
    assert gpu(world).mode == MigMode(current=False, pending=False)


def test_a_gpu_that_waits_for_a_reboot_holds_up_no_plan_for_another_gpu() -> None:
    """B15."""
    world = world_of("a100-40gb,h200", vm=True)
    assert apply(world, wish({"1g.5gb": 7}, 0))[0].phase == "RebootRequired"
    assert apply(world, wish({"1g.18gb": 7}, 1))[1].phase == "Ready"


# --- B17 ---


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("key", AMPERE)
def test_a_mode_that_a_reboot_did_not_change_is_failed_and_nothing_more_is_tried(key: str, wanted: bool) -> None:
    """B17: both directions; migd never reboots, and asks no more until the plan changes."""
    world = world_of(key)
    if not wanted:
        cut(world, "1g@0")
    world.host.switch("mode_change_never_takes", True)
    rules = wish({one(key): 1}) if wanted else OFF
    assert facts(apply(world, rules)[0]) == ("RebootRequired", "RebootRequired", Exit.BLOCKED)
    for _ in range(3):
        world.host.reboot()
        begun = len(world.host.calls)
        outcome = apply(world, rules)[0]
        assert facts(outcome) == ("Failed", "ModeChangeFailed", Exit.FAILED)
        assert "did not take effect" in outcome.cause.message
        assert changes(world.host, begun) == []


def test_a_changed_plan_tries_again() -> None:
    """B17."""
    world = world_of("a100-40gb", mode_change_never_takes=True)
    apply(world, wish({"1g.5gb": 1}))
    world.host.reboot()
    assert apply(world, wish({"1g.5gb": 1}))[0].phase == "Failed"
    world.host.switch("mode_change_never_takes", False)
    assert apply(world, wish({"1g.5gb": 1}))[0].phase == "Failed"
    assert apply(world, wish({"1g.5gb": 2}))[0].phase == "Ready"


def test_a_rollback_after_reboot_required_calls_the_pending_mode_off() -> None:
    """B17: the admin changes their mind before the reboot."""
    world = world_of("a100-40gb", vm=True)
    apply(world, wish({"1g.5gb": 7}))
    assert roll_back(world)[0].phase == "Ready"
    assert gpu(world).mode == MigMode(current=False, pending=False)


@pytest.mark.parametrize("key", RESETLESS)
def test_a_mode_change_that_never_takes_without_a_reset_is_put_back(key: str) -> None:
    """B17, where no reset and no reboot can help: asked a few times, then said."""
    world = world_of(key, mode_change_never_takes=True)
    outcome = apply(world, wish({one(key): 1}))[0]
    assert facts(outcome) == ("Failed", "ModeChangeFailed", Exit.FAILED)
    assert gpu(world).mode == MigMode(current=False, pending=False)
    assert "reset" not in {name for _, name in changes(world.host)}


# --- B19 ---


@pytest.mark.parametrize("vm", [False, True])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_only_the_gpu_of_the_plan_is_asked_for_a_mode_or_reset(changed: int, vm: bool) -> None:
    """B19: whatever runs on the others stays, even where a reset is needed."""
    world = world_of('3x"NVIDIA A100-PCIE-40GB"')
    others = [i for i in range(3) if i != changed]
    for other in others:
        world.host.start_process(other, command="python train.py")
    world.host.switch("vm", vm)
    begun, running = len(world.host.calls), dict(world.host.snapshot().processes)
    outcome = apply(world, wish({"3g.20gb": 1}, changed))[changed]
    assert outcome.phase == ("RebootRequired" if vm else "Ready")
    assert {index for index, _ in changes(world.host, begun)} == {changed}
    assert world.host.snapshot().processes == running
    assert [gpu(world, other).mode for other in others] == [MigMode(current=False, pending=False)] * 2


# --- B22 ---


@pytest.mark.parametrize("key", [*AMPERE, *RESETLESS])
def test_a_mode_change_that_renumbers_and_retires_handles_is_followed_by_uuid(key: str) -> None:
    """B22."""
    world = world_of(f"3x{key}", minor_renumber_on_mode_change=True)
    uuids = world.host.gpu_uuids()
    outcomes = apply(world, wish({one(key): 2}, 1))
    assert outcomes[1].phase == "Ready"
    assert [len(g.instances) for g in sorted(world.host.snapshot().gpus, key=lambda g: g.uuid == uuids[1])] == [0, 0, 2]


@pytest.mark.parametrize("begun", ["MIG mode on", "create GPU instance", "create compute instance"])
@pytest.mark.parametrize("key", ["a100-40gb", "h200"])
def test_gpus_that_exchange_their_indices_midway_keep_their_wishes(key: str, begun: str) -> None:
    """B22: an index is no identity."""
    world = world_of(f"2x{key}")
    first, second = world.host.gpu_uuids()
    order = order_of(world, wish({one(key): 3}, 0))
    outcomes = carry_out(world, order, once_after(begun, lambda: world.host.swap_indices(0, 1)))
    assert {i: o.phase for i, o in outcomes.items()} == {1: "Ready"}
    made = {g.uuid: len(g.instances) for g in world.host.snapshot().gpus}
    assert made == {first: 3, second: 0}


# --- B23, mode back off ---


@pytest.mark.parametrize("key", [*AMPERE, *RESETLESS])
def test_going_back_to_the_whole_gpu_removes_instances_then_the_mode_and_confirms_it(key: str) -> None:
    """B23, the MIG half."""
    world = world_of(key)
    apply(world, wish({one(key): 3}))
    begun = len(world.host.calls)
    assert facts(apply(world, OFF)[0]) == ("Ready", "AsWished", Exit.DONE)
    assert gpu(world).mode == MigMode(current=False, pending=False)
    names = [name for _, name in changes(world.host, begun)]
    assert names == ["nvmlComputeInstanceDestroy"] * 3 + ["nvmlGpuInstanceDestroy"] * 3 + ["nvmlDeviceSetMigMode"]


@pytest.mark.parametrize("status", [4, 3, 999])
def test_where_the_mode_cannot_change_the_old_layout_is_put_back_and_told(status: int) -> None:
    """B23: the old truth stays the truth."""
    world = world_of("a100-40gb")
    cut(world, "3g@0 2g@4")
    world.host.inject(Fault("nvmlDeviceSetMigMode", code=status, times=0))
    outcome = apply(world, OFF)[0]
    assert outcome.phase == "Failed"
    assert "put back as it was" in outcome.cause.message
    assert places(gpu(world)) == "3g.20gb@0 2g.10gb@4"
    assert orphans(world.seen()) == []


@pytest.mark.parametrize("channel", ["return", "status"])
def test_instances_that_appear_before_the_mode_goes_off_are_found_and_left(channel: str) -> None:
    """B23 with a stranger: MIG off is refused while anything exists, however the driver says so."""
    world = world_of("h100-sxm-80gb", disable_with_instances=channel)
    cut(world, "1g@0")
    seen = gpu(world)

    def by_hand() -> None:
        with stranger(world.host) as gpus:
            make(gpus, seen, "3g@4")

    outcome = apply(world, OFF, listen=once_after("destroy GPU instance", by_hand))[0]
    assert (outcome.phase, outcome.cause.reason) == ("Blocked", "ForeignInstances")
    assert places(gpu(world)) == "1g.10gb@0 3g.40gb@4"
    assert orphans(world.seen()) == []


# --- resets ---


def linked(**switches: object) -> World:
    world = world_of("2xa100-80gb", **switches)
    world.host.switch("nvlink_group", "bridge")
    return world


@pytest.mark.parametrize(
    ("switches", "said"),
    [({}, "joined by NVLink to GPU 1"), ({"nvswitch": True, "fabric_manager_down": True}, "Fabric Manager")],
)
def test_a_reset_that_is_refused_although_nobody_is_there_waits_for_a_reboot_and_says_why(
    switches: dict[str, bool], said: str
) -> None:
    world = linked(vm=True, **switches)
    outcome = apply(world, wish({"1g.10gb": 7}, 0))[0]
    assert facts(outcome) == ("RebootRequired", "RebootRequired", Exit.BLOCKED)
    assert said in outcome.cause.message
    assert gpu(world, 1).mode == MigMode(current=False, pending=False)
    world.host.reboot()
    assert apply(world, wish({"1g.10gb": 7}, 0))[0].phase == "Ready"


def test_a_reset_that_a_client_refuses_names_the_client_and_the_mode_is_put_back() -> None:
    world = world_of("a100-80gb", vm=True)
    pid = world.host.start_process(0, command="nv-hostengine", silent=True)
    outcome = apply(world, wish({"1g.10gb": 7}))[0]
    assert facts(outcome) == ("Blocked", "ResetRefused", Exit.BLOCKED)
    assert f"pid {pid} (nv-hostengine)" in outcome.cause.message
    assert gpu(world).mode == MigMode(current=False, pending=False)


def test_a_linked_gpu_that_only_says_in_use_is_put_back_and_both_causes_are_named() -> None:
    """The driver tries the reset within the mode change and says no more than that the GPU could not be idled."""
    world = linked()
    outcome = apply(world, wish({"1g.10gb": 7}, 0))[0]
    assert facts(outcome) == ("Blocked", "InUse", Exit.BLOCKED)
    assert "NVLink" in outcome.cause.message
    assert [seen.mode for seen in world.seen()] == [MigMode(current=False, pending=False)] * 2


def test_linked_gpus_behind_a_switch_change_their_mode_one_by_one() -> None:
    assert apply(linked(nvswitch=True), wish({"1g.10gb": 7}, 0))[0].phase == "Ready"


def test_a_reset_that_fails_once_is_tried_again() -> None:
    """A driver that notes the mode and leaves the reset to us."""
    world = world_of("a100-80gb", mode_change_never_takes=True)
    world.host.inject(Fault("reset", code=999))
    order = order_of(world, wish({"1g.10gb": 7}))

    def takes() -> None:
        world.host.switch("mode_change_never_takes", False)

    outcomes = carry_out(world, order, once_after("GPU reset", takes))
    assert outcomes[0].phase == "Ready"
    assert len(gpu(world).instances) == 7


@pytest.mark.parametrize("loses", [False, True])
def test_a_pending_mode_left_by_others_is_finished_or_called_off(loses: bool) -> None:
    """Somebody asked for a mode and went away before it took effect."""
    world = world_of("a100-40gb", mode_change_never_takes=True)
    with stranger(world.host) as gpus:
        gpus.perform(SetMode(gpus.look()[0].uuid, True))
    world.host.switch("mode_change_never_takes", False)
    assert gpu(world).mode == MigMode(current=False, pending=True)
    assert apply(world, OFF if loses else wish({"1g.5gb": 1}))[0].phase == "Ready"
    assert gpu(world).mode == MigMode(current=not loses, pending=not loses)


# --- an older driver, which lists no profiles while MIG is off ---


@pytest.mark.parametrize("key", ["a100-40gb", "a30", "h200"])
def test_a_target_that_is_known_only_once_mig_is_on_is_found_then(key: str) -> None:
    world = world_of(key, profiles_while_off=False)
    assert gpu(world).board is None
    assert apply(world, wish({one(key): 3}))[0].phase == "Ready"
    assert len(gpu(world).instances) == 3


@pytest.mark.parametrize("key", ["a100-40gb", "a30", "h200"])
def test_a_wish_found_impossible_only_once_mig_is_on_puts_the_mode_back(key: str) -> None:
    """Something was touched by then, so it is a failure (1), not a refusal (3)."""
    world = world_of(key, profiles_while_off=False)
    for impossible in ({one(key): 9}, {"5g.77gb": 1}):
        outcome = apply(world, wish(impossible))[0]
        assert outcome.phase == "Failed"
        assert outcome.cause.reason in ("Infeasible", "UnknownProfile")
        assert exit_of(outcome) == Exit.FAILED
        assert gpu(world).mode == MigMode(current=False, pending=False)


def test_a_gpu_found_impossible_late_does_not_keep_the_other_from_being_done() -> None:
    world = world_of("2xh200", profiles_while_off=False)
    outcomes = apply(world, wish({"3g.71gb": 3}, 0), wish({"3g.71gb": 2}, 1))
    assert {i: o.phase for i, o in outcomes.items()} == {0: "Failed", 1: "Ready"}
    assert [str(seen.layout) for seen in world.seen()] == ["MIG off", "2×3g.71gb"]


def test_nothing_is_created_twice_where_profiles_vanish_with_the_mode() -> None:
    """The old driver again, from an instance to MIG off and back."""
    world = world_of("h200", profiles_while_off=False)
    apply(world, wish({"7g.141gb": 1}))
    before = serials(world.host)
    assert apply(world, OFF)[0].phase == "Ready"
    assert roll_back(world)[0].phase == "Ready"
    assert places(gpu(world)) == "7g.141gb@0"
    assert serials(world.host) != before
