"""The same NvmlGpus on the simulated driver, which refuses what hardware refuses: every model, whole life cycles."""

from __future__ import annotations

import pynvml
import pytest

from migd.mig.geometry import GpuInstance
from migd.mig.observed import Holder, MigMode
from migd.mig.operations import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstances,
    DestroyGpuInstance,
    SetMode,
)
from migd.mig.profiles import Placement
from migd.nvml import (
    DriverError,
    GpuError,
    HungError,
    InUseError,
    LostError,
    NoPermissionError,
    NoRoomError,
    NotSupportedError,
    NvmlGpus,
)
from migd.sim import Fault, SimHost
from migd.sim.catalog import models

THREE = GpuInstance("3g.40gb", Placement(4, 4))
ONE = GpuInstance("1g.10gb", Placement(0, 1))


def node(spec="a100-80gb", privilege="root", **switches):
    host = SimHost.fresh(spec, **switches)
    return host, NvmlGpus(host.nvml(privilege=privilege), host.caller), host.gpu_uuids()


def make(gpus, uuid, *instances):
    for instance in instances:
        gpus.perform(CreateGpuInstance(uuid, instance))
        gpus.perform(CreateComputeInstance(uuid, instance))


def unmake(gpus, uuid, instance):
    gpus.perform(DestroyComputeInstances(uuid, instance))
    gpus.perform(DestroyGpuInstance(uuid, instance))


def settle(host, gpus, uuid, enable=True):
    gpus.perform(SetMode(uuid, enable))
    mode = next(g for g in gpus.look() if g.uuid == uuid).mode
    if not mode.settled:
        gpus.close()
        host.reset(uuid)


@pytest.mark.parametrize("key", sorted(models()))
def test_every_profile_of_every_model_is_made_seen_and_unmade_at_its_first_and_last_place(key):
    host, gpus, (uuid,) = node(key)
    if gpus.look()[0].mode is None:
        assert gpus.look()[0].board is None
        return
    settle(host, gpus, uuid)
    board = gpus.look()[0].board
    assert board.profiles
    for profile in board.profiles:
        for place in {profile.placements[0], profile.placements[-1]}:
            instance = GpuInstance(profile.name, place)
            make(gpus, uuid, instance)
            (seen,) = gpus.look()[0].instances
            assert (seen.instance, seen.whole, seen.in_use) == (instance, True, False)
            assert seen.compute_instances[0].mig_uuid.startswith("MIG-")
            unmake(gpus, uuid, instance)
    assert gpus.look()[0].instances == ()


def test_names_with_and_without_the_prefix_make_equal_boards():
    (plain, prefixed) = (node(name_prefix=flag)[1].look()[0].board for flag in (False, True))
    assert plain == prefixed


@pytest.mark.parametrize("options", [{"uuid_changes_on_recreate": True}, {"old_uuid_format": True}])
def test_mig_uuids_are_read_in_whatever_form(options):
    host, gpus, (uuid,) = node(**options)
    settle(host, gpus, uuid)
    make(gpus, uuid, ONE)
    assert gpus.look()[0].instances[0].compute_instances[0].mig_uuid.startswith("MIG-")


def test_an_a30_that_counts_wrong_shows_all_four_instances():
    host, gpus, (uuid,) = node("a30", a30_wrong_count=True)
    settle(host, gpus, uuid)
    wanted = {GpuInstance("1g.6gb", Placement(k, 1)) for k in range(4)}
    make(gpus, uuid, *wanted)
    assert gpus.look()[0].geometry == wanted


def test_an_older_driver_shows_its_board_only_with_mig_on():
    host, gpus, (uuid,) = node(profiles_while_off=False, enum_end=10)
    assert gpus.look()[0].board is None
    settle(host, gpus, uuid)
    assert gpus.look()[0].board.offers("3g.40gb")


def test_a_driver_without_the_versioned_profile_query_is_too_old():
    _, gpus, _ = node(missing_symbols=["nvmlDeviceGetGpuInstanceProfileInfoV"])
    assert "too old to name its MIG profiles" in gpus.look()[0].unreadable


def test_a_process_holds_its_instance_and_a_silent_monitor_shows_only_in_the_refusal():
    host, gpus, (uuid,) = node()
    settle(host, gpus, uuid)
    make(gpus, uuid, ONE, THREE)
    pid = host.start_process(0, start=0)
    host.start_process(0, start=4, silent=True)
    one, three = gpus.look()[0].instances
    assert (one.in_use, one.holders) == (True, (Holder(pid),))
    assert (three.in_use, three.holders) == (False, ())
    for instance in (ONE, THREE):
        with pytest.raises(InUseError):
            gpus.perform(DestroyComputeInstances(uuid, instance))
    assert gpus.look()[0].geometry == {ONE, THREE}


def test_without_privilege_a_look_names_what_is_missing_and_with_config_alone_all_counts_as_in_use():
    host, gpus, (uuid,) = node()
    settle(host, gpus, uuid)
    make(gpus, uuid, ONE)
    with pytest.raises(NoPermissionError, match="mig/config"):
        NvmlGpus(host.nvml(privilege="none"), host.caller).look()
    seen = NvmlGpus(host.nvml(privilege="config"), host.caller).look()[0]
    assert (seen.in_use, seen.instances[0].in_use) == (True, True)
    assert seen.instances[0].holders == (Holder(None),)


def test_a_mode_change_needs_root_whatever_the_capability():
    _, gpus, (uuid,) = node(privilege="config")
    with pytest.raises(NoPermissionError, match="no capability file replaces it"):
        gpus.perform(SetMode(uuid, True))


def test_an_ampere_gpu_in_a_vm_has_a_pending_mode():
    _, gpus, (uuid,) = node(vm=True)
    gpus.perform(SetMode(uuid, True))
    assert gpus.look()[0].mode == MigMode(current=False, pending=True)


def test_a_busy_ampere_gpu_refuses_the_mode_as_in_use():
    host, gpus, (uuid,) = node()
    host.start_process(0)
    with pytest.raises(InUseError):
        gpus.perform(SetMode(uuid, True))


@pytest.mark.parametrize("channel", ["return", "status"])
def test_mig_off_over_instances_is_in_use_by_either_channel(channel):
    host, gpus, (uuid,) = node("h200", disable_with_instances=channel)
    settle(host, gpus, uuid)
    make(gpus, uuid, GpuInstance(gpus.look()[0].board.profiles[0].name, Placement(0, 1)))
    with pytest.raises(InUseError):
        gpus.perform(SetMode(uuid, False))


def test_minors_renumbered_by_the_mode_change_of_one_gpu_leave_the_others_alone():
    host, gpus, (first, second) = node("2xa100-80gb", minor_renumber_on_mode_change=True)
    settle(host, gpus, second)
    make(gpus, second, THREE)
    assert [(g.uuid, g.geometry) for g in gpus.look()] == [(first, frozenset()), (second, {THREE})]


def test_an_overlap_is_no_room_and_a_place_that_is_not_offered_is_not_supported():
    host, gpus, (uuid,) = node()
    settle(host, gpus, uuid)
    make(gpus, uuid, ONE)
    with pytest.raises(NoRoomError):
        gpus.perform(CreateGpuInstance(uuid, GpuInstance("3g.40gb", Placement(0, 4))))
    with pytest.raises(NotSupportedError):
        gpus.perform(CreateGpuInstance(uuid, GpuInstance("3g.40gb", Placement(1, 4))))


def test_an_orphan_is_found_and_destroyed_and_destroying_it_again_succeeds():
    host, gpus, (uuid,) = node()
    settle(host, gpus, uuid)
    host.inject(Fault("nvmlGpuInstanceCreateComputeInstance", code=pynvml.NVML_ERROR_UNKNOWN))
    with pytest.raises(GpuError):
        make(gpus, uuid, THREE)
    (orphan,) = gpus.look()[0].instances
    assert orphan.compute_instances == ()
    for _ in range(2):
        unmake(gpus, uuid, THREE)
    assert gpus.look()[0].instances == ()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("code", [4, 15, 19, 999])
def test_an_error_at_any_mutation_before_or_after_its_effect_is_told_and_the_look_says_what_came_of_it(when, code):
    for step, call in enumerate(
        (
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            "nvmlGpuInstanceCreateComputeInstance",
            "nvmlComputeInstanceDestroy",
            "nvmlGpuInstanceDestroy",
        )
    ):
        host, gpus, (uuid,) = node()
        settle(host, gpus, uuid)
        steps = [
            CreateGpuInstance(uuid, THREE),
            CreateComputeInstance(uuid, THREE),
            DestroyComputeInstances(uuid, THREE),
            DestroyGpuInstance(uuid, THREE),
        ]
        for operation in steps[:step]:
            gpus.perform(operation)
        host.inject(Fault(call, code=code, when=when))
        with pytest.raises(GpuError) as caught:
            gpus.perform(steps[step])
        assert (caught.value.call, caught.value.code) == (call, code)
        done = step + (when == "after")
        (seen,) = gpus.look()[0].instances or (None,)
        assert (seen is not None, bool(seen and seen.whole)) == [
            (False, False),
            (True, False),
            (True, True),
            (True, False),
            (False, False),
        ][done]


def test_a_hanging_creation_is_hung_and_may_have_taken_effect():
    host, gpus, (uuid,) = node()
    settle(host, gpus, uuid)
    host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", action="hang", when="after"))
    with pytest.raises(HungError) as caught:
        gpus.perform(CreateGpuInstance(uuid, THREE))
    assert caught.value.call == "nvmlDeviceCreateGpuInstanceWithPlacement"
    assert gpus.look()[0].geometry == {THREE}


def test_a_slow_call_within_its_deadline_is_no_hang():
    host, gpus, (uuid,) = node()
    settle(host, gpus, uuid)
    host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", action="delay", delay_s=50))
    gpus.perform(CreateGpuInstance(uuid, THREE))
    assert gpus.look()[0].geometry == {THREE}


def test_a_lost_gpu_is_lost_and_the_others_read_on():
    host, gpus, (first, second) = node("2xa100-80gb")
    gpus.look()
    host.lose_gpu(0)
    assert [(g.uuid, g.lost) for g in gpus.look()] == [(first, True), (second, False)]
    with pytest.raises(LostError):
        gpus.perform(SetMode(first, True))
    host.find_gpu(0)
    assert not gpus.look()[0].lost


def test_indices_that_change_places_do_not_mislead():
    host, gpus, (first, second) = node("2xa100-80gb")
    gpus.look()
    host.swap_indices(0, 1)
    assert [(g.index, g.uuid) for g in gpus.look()] == [(0, second), (1, first)]


def test_a_reloaded_driver_is_an_error_once_and_then_a_new_session():
    host, gpus, (uuid,) = node()
    settle(host, gpus, uuid)
    make(gpus, uuid, ONE)
    host.reload_driver(seconds=5)
    for _ in range(2):
        with pytest.raises(DriverError):
            gpus.look()
    host.clock.sleep(6)
    seen = gpus.look()[0]
    assert (seen.mig_on, seen.instances) == (True, ())


def test_our_own_session_is_no_hindrance_to_a_reset_once_it_is_closed():
    host, gpus, (uuid,) = node()
    gpus.look()
    gpus.close()
    host.reset(uuid)
    assert gpus.look()[0].uuid == uuid


def test_trouble_is_read_before_the_first_instance_and_remembered():
    host, gpus, (uuid,) = node()
    settle(host, gpus, uuid)
    host.switch("remap_pending", True, gpu=0)
    before = gpus.look()[0].trouble
    assert "pending" in before
    make(gpus, uuid, ONE)
    assert gpus.look()[0].trouble == before
    host.switch("recovery_action", 4, gpu=0)
    assert "drained" in gpus.look()[0].trouble


@pytest.mark.parametrize(("key", "resetless"), [("a100-80gb", False), ("h200", True)])
def test_resetless_follows_the_hardware(key, resetless):
    assert node(key)[1].look()[0].resetless is resetless


def test_a_repeated_look_writes_nothing_and_costs_little():
    host, gpus, (uuid,) = node()
    settle(host, gpus, uuid)
    make(gpus, uuid, *(GpuInstance("1g.10gb", Placement(k, 1)) for k in range(7)))
    first = gpus.look()
    before = len(host.calls)
    assert gpus.look() == first
    names = [call.name for call in list(host.calls)[before:]]
    assert len(names) <= 1 + 8 + len(first[0].board.profiles) + 5 * 7
    assert not [name for name in names if any(word in name for word in ("Create", "Destroy", "Set", "Init"))]
