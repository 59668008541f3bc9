"""The decision table of the NVML semantics, row by row (docs/simulator.md lists them).

Written against pynvml's names alone. `pynvml` is the fake in process, and the real module on the simulated C library
(docs/c-face.md), or on the driver with --hardware, which runs the read-only rows. `box` is the machine round it.
Left out: what only a C caller can see (NULL buffers, struct versions); test_c_calls.py has that.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from ctypes import byref, c_uint
from pathlib import Path

import pynvml as real_pynvml
import pytest

from migd.sim import Fault, ResetRefusedError, SimHost, SimulatedCrash
from migd.sim.catalog import auto_placement, models

readonly = pytest.mark.readonly
ONE_G, ONE_G_ME, ONE_G_DOUBLE, TWO_G, THREE_G, FOUR_G, SEVEN_G = 19, 20, 15, 14, 9, 5, 0
DATA = Path(__file__).parent.parent / "data"


def machine(spec, **switches):
    return pytest.mark.machine(spec, **switches)


def first_gpu(nvml):
    return nvml.nvmlDeviceGetHandleByIndex(0)


def mig_gpu(nvml, index=0):
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    assert nvml.nvmlDeviceSetMigMode(gpu, nvml.NVML_DEVICE_MIG_ENABLE) == nvml.NVML_SUCCESS
    return gpu


def create_at(nvml, gpu, profile_id, start, size):
    return nvml.nvmlDeviceCreateGpuInstanceWithPlacement(
        gpu, profile_id, byref(nvml.c_nvmlGpuInstancePlacement_t(start, size))
    )


def whole_ci(nvml, gi):
    for value in reversed(range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT)):
        try:
            info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, value, 0)
        except nvml.NVMLError_NotSupported:
            continue
        return nvml.nvmlGpuInstanceCreateComputeInstance(gi, info.id)
    raise AssertionError("no compute instance profile")


def cut(nvml, gpu, *wanted):
    """Instances of (profile id, start, size), each with its whole compute instance: [(gi, ci)]."""
    made = [create_at(nvml, gpu, *one) for one in wanted]
    return [(gi, whole_ci(nvml, gi)) for gi in made]


def placements(nvml, gpu, profile_id, room=16):
    array, count = (nvml.c_nvmlGpuInstancePlacement_t * room)(), c_uint()
    assert nvml.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile_id, array, byref(count)) == nvml.NVML_SUCCESS
    return [(p.start, p.size) for p in array[: count.value]]


def instances(nvml, gpu, *profile_ids, room=8):
    found = {}
    for profile_id in profile_ids or [i.id for i in profiles(nvml, gpu)]:
        array, count = (nvml.c_nvmlGpuInstance_t * room)(), c_uint()
        assert nvml.nvmlDeviceGetGpuInstances(gpu, profile_id, array, byref(count)) == nvml.NVML_SUCCESS
        for gi in array[: count.value]:
            info = nvml.nvmlGpuInstanceGetInfo(gi)
            found[info.id] = (info.profileId, info.placement.start, info.placement.size)
    return found


def profiles(nvml, gpu):
    found = []
    for value in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT + 1):
        try:
            found.append(nvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, value))
        except nvml.NVMLError_NotSupported:
            continue
        except nvml.NVMLError_InvalidArgument:
            break
    return found


def mig_devices(nvml, gpu):
    """{MIG index: (GI id, CI id)}, walked as a client must: skip holes, go to the end."""
    found = {}
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except nvml.NVMLError_NotFound:
            continue
        found[index] = (nvml.nvmlDeviceGetGpuInstanceId(device), nvml.nvmlDeviceGetComputeInstanceId(device))
    return found


def can_mig(nvml, gpu):
    try:
        return bool(nvml.nvmlDeviceGetMigMode(gpu))
    except nvml.NVMLError_NotSupported:
        return False


# ---- 1-10: mode


@readonly
@machine("a100-40gb,l40s,t4")
def test_row_01_the_mode_is_a_pair_and_not_supported_where_mig_is_impossible(pynvml, box):
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        if not can_mig(pynvml, gpu):
            with pytest.raises(pynvml.NVMLError_NotSupported):
                pynvml.nvmlDeviceGetMigMode(gpu)
            continue
        current, pending = pynvml.nvmlDeviceGetMigMode(gpu)
        assert {current, pending} <= {0, 1}
    if box is not None:
        assert [can_mig(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(3)] == [True, False, False]


def test_row_02_activation_status_is_returned_and_errors_are_raised(pynvml, box):
    gpu = first_gpu(pynvml)
    box.start_process(0)
    assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_ERROR_IN_USE
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceSetMigMode(gpu, 2)


@pytest.mark.parametrize("holder", ["process", "silent monitor", "another NVML session"])
def test_row_03_a_busy_ampere_gpu_stays_pending_until_it_is_idle_and_asked_again(pynvml, box, holder):
    gpu = first_gpu(pynvml)
    if holder == "another NVML session":
        other = box.nvml(pid=4711)
        other.nvmlInit()
        release = other.nvmlShutdown
    else:
        pid = box.start_process(0, silent=holder == "silent monitor")
        release = lambda: box.end_process(pid)  # noqa: E731
    assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_ERROR_IN_USE
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [0, 1]
    release()
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [0, 1]
    assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_SUCCESS
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]


@machine("a100-40gb", vm=True)
def test_row_04_in_a_vm_ampere_answers_reset_required_and_waits_for_the_reboot(pynvml, box):
    gpu = first_gpu(pynvml)
    assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_ERROR_RESET_REQUIRED
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [0, 1]
    uuid = pynvml.nvmlDeviceGetUUID(gpu)
    pynvml.nvmlShutdown()
    box.reset(uuid)  # "success" that changes nothing
    box.reload_driver()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetMigMode(first_gpu(pynvml)) == [0, 1]
    box.reboot()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetMigMode(first_gpu(pynvml)) == [1, 1]


@pytest.mark.parametrize("model", [m for m in models().values() if m.resetless], ids=lambda m: m.key)
def test_row_05_hopper_and_later_switch_at_once(model, boxed):
    nvml = boxed(model.key, vm=True).nvml()
    nvml.nvmlInit()
    gpu = first_gpu(nvml)
    assert nvml.nvmlDeviceSetMigMode(gpu, 1) == nvml.NVML_SUCCESS
    assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]


@pytest.mark.parametrize("privilege", ["none", "config", "monitor"])
def test_row_06_only_root_sets_the_mode(pynvml, box, privilege):
    caller = box.nvml(privilege=privilege)
    caller.nvmlInit()
    with pytest.raises(pynvml.NVMLError_NoPermission):
        caller.nvmlDeviceSetMigMode(first_gpu(caller), 1)
    box.switch("no_permission", True)
    with pytest.raises(pynvml.NVMLError_NoPermission):
        pynvml.nvmlDeviceSetMigMode(first_gpu(pynvml), 1)
    assert caller.nvmlDeviceGetMigMode(first_gpu(caller)) == [0, 0]


@machine("a100-40gb,h200")
def test_row_07_setting_the_present_mode_does_nothing(pynvml, box):
    for index in range(2):
        gpu = mig_gpu(pynvml, index)
        before = create_at(pynvml, gpu, THREE_G, 4, 4)
        assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_SUCCESS
        assert pynvml.nvmlGpuInstanceGetInfo(before).placement.start == 4


@machine("a100-40gb,h200")
@pytest.mark.parametrize("channel", ["return", "status"])
def test_row_08_disabling_with_instances_is_in_use(pynvml, box, channel):
    box.switch("disable_with_instances", channel)
    for index in range(2):
        gpu = mig_gpu(pynvml, index)
        create_at(pynvml, gpu, ONE_G, 0, 1)
        if channel == "return":
            with pytest.raises(pynvml.NVMLError_InUse):
                pynvml.nvmlDeviceSetMigMode(gpu, 0)
        else:
            assert pynvml.nvmlDeviceSetMigMode(gpu, 0) == pynvml.NVML_ERROR_IN_USE
        assert pynvml.nvmlDeviceGetMigMode(gpu)[0] == 1
        assert len(instances(pynvml, gpu)) == 1


def test_row_09_a_mode_change_or_reset_kills_old_handles_and_may_change_the_minor_number(pynvml, box):
    gpu = mig_gpu(pynvml)
    [(gi, ci)] = cut(pynvml, gpu, (THREE_G, 0, 4))
    mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    pynvml.nvmlComputeInstanceDestroy(ci)
    pynvml.nvmlGpuInstanceDestroy(gi)
    box.switch("minor_renumber_on_mode_change", True)
    minor, uuid = pynvml.nvmlDeviceGetMinorNumber(gpu), pynvml.nvmlDeviceGetUUID(gpu)
    assert pynvml.nvmlDeviceSetMigMode(gpu, 0) == pynvml.NVML_SUCCESS
    for dead in (
        lambda: pynvml.nvmlGpuInstanceGetInfo(gi),
        lambda: pynvml.nvmlComputeInstanceGetInfo(ci),
        lambda: pynvml.nvmlDeviceGetUUID(mig),
        lambda: pynvml.nvmlDeviceGetMigMode(gpu),
    ):
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            dead()
    again = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    assert pynvml.nvmlDeviceGetMinorNumber(again) != minor
    assert pynvml.nvmlDeviceGetMigMode(again) == [0, 0]


@machine("a100-40gb,h200,rtx-pro-6000-blackwell")
def test_row_10_instance_calls_are_not_supported_while_mig_is_off(pynvml, box):
    for index in range(3):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        for refused in (
            lambda gpu=gpu: pynvml.nvmlDeviceCreateGpuInstance(gpu, 0),
            lambda gpu=gpu: create_at(pynvml, gpu, 0, 0, 8),
            lambda gpu=gpu: instances(pynvml, gpu, 0),
            lambda gpu=gpu: pynvml.nvmlDeviceGetGpuInstanceById(gpu, 0),
            lambda gpu=gpu: pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, 0),
            lambda gpu=gpu: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0),
        ):
            with pytest.raises(pynvml.NVMLError_NotSupported):
                refused()


# ---- 11-15: profiles and placements


@readonly
def test_row_11_profiles_are_enumerated_past_gaps_up_to_invalid_argument(pynvml, box):
    gpu = first_gpu(pynvml)
    if not can_mig(pynvml, gpu):
        pytest.skip("this GPU cannot do MIG")
    answers = []
    for value in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT + 8):
        try:
            pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, value)
            answers.append("offered")
        except pynvml.NVMLError_NotSupported:
            answers.append("absent")
        except pynvml.NVMLError_InvalidArgument:
            answers.append("past")
    assert answers[-1] == "past"
    assert "past" not in answers[: answers.index("past")]
    assert set(answers[answers.index("past") :]) == {"past"}
    if box is not None:
        assert [v for v, a in enumerate(answers) if a == "offered"] == [0, 1, 2, 3, 4, 7, 9]
        assert answers.index("past") == 18


@readonly
@machine("a100-40gb,a30,h200,rtx-pro-6000-blackwell,b300")
def test_row_12_numeric_ids_are_the_gpus_own_and_no_enum_values(pynvml, box):
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        if not can_mig(pynvml, gpu):
            continue
        found = profiles(pynvml, gpu)
        assert len({p.id for p in found}) == len(found) > 0
        if box is not None:
            model = models()[box.snapshot().gpus[index].key]
            assert {p.id: p.name for p in found} == {p.profile_id: p.name for p in model.profiles}
    if box is not None:
        gpu = mig_gpu(pynvml)
        info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE)
        assert (info.id, info.name) == (19, "1g.5gb")
        with pytest.raises(pynvml.NVMLError_InvalidArgument):  # the enum of 2 slices is no id here
            pynvml.nvmlDeviceCreateGpuInstance(gpu, pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE)


@pytest.mark.parametrize("newer", [True, False])
def test_row_13_whether_profiles_are_listed_while_mig_is_off_depends_on_the_driver(pynvml, box, newer):
    box.switch("profiles_while_off", newer)
    gpu = first_gpu(pynvml)
    [field] = pynvml.nvmlDeviceGetFieldValues(gpu, [pynvml.NVML_FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE])
    assert field.value.uiVal == int(newer)
    assert bool(profiles(pynvml, gpu)) == newer
    assert profiles(pynvml, mig_gpu(pynvml))


def test_row_14_instance_count_is_static_and_remaining_capacity_is_not(pynvml, box):
    gpu = first_gpu(pynvml)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, ONE_G)
    mig_gpu(pynvml)
    assert [pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, p) for p in (ONE_G, TWO_G, THREE_G)] == [7, 3, 2]
    create_at(pynvml, gpu, THREE_G, 4, 4)
    assert [pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, p) for p in (ONE_G, TWO_G, THREE_G)] == [4, 2, 1]
    assert {p.id: p.instanceCount for p in profiles(pynvml, gpu)}[THREE_G] == 2


@machine("h200")
def test_row_14_free_counts_of_a_real_listing_are_reproduced(pynvml, box):
    listing = json.loads((DATA / "h15-hopper141-free-counts.json").read_text())
    gpu = mig_gpu(pynvml)
    ids = {p.name: p.id for p in profiles(pynvml, gpu)}
    totals = {p.name: p.instanceCount for p in profiles(pynvml, gpu)}
    create_at(pynvml, gpu, FOUR_G, 0, 4)
    create_at(pynvml, gpu, TWO_G, 4, 2)  # slices 0 to 5 are taken
    for name, (free, total) in listing["free_total"].items():
        assert (pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, ids[name]), totals[name]) == (free, total), name


@readonly
@machine("a100-40gb,a30,rtx-pro-6000-blackwell")
def test_row_15_placements_are_static_and_known_while_mig_is_off(pynvml, box):
    found = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        for profile in profiles(pynvml, gpu) if can_mig(pynvml, gpu) else ():
            count = c_uint()
            pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile.id, None, byref(count))
            found[index, profile.name] = places = placements(pynvml, gpu, profile.id)
            assert count.value == len(places) > 0
    if box is not None:
        assert found[0, "3g.20gb"] == [(0, 4), (4, 4)]
        assert found[0, "7g.40gb"] == [(0, 8)]
        assert found[1, "2g.12gb"] == [(0, 2), (2, 2)]
        assert found[2, "1g.24gb"] == [(0, 3), (3, 3), (6, 3), (9, 3)]
        gpu = mig_gpu(pynvml)
        create_at(pynvml, gpu, SEVEN_G, 0, 8)
        assert placements(pynvml, gpu, THREE_G) == [(0, 4), (4, 4)]
        stranger = box.nvml(privilege="none")
        stranger.nvmlInit()
        with pytest.raises(pynvml.NVMLError_NoPermission):
            placements(stranger, first_gpu(stranger), THREE_G)


# ---- 16-24: creating GPU instances


def test_row_16_overlap_and_the_same_place_again_are_insufficient_resources(pynvml, box):
    gpu = mig_gpu(pynvml)
    create_at(pynvml, gpu, TWO_G, 2, 2)
    for profile_id, start, size in ((TWO_G, 2, 2), (ONE_G, 3, 1), (THREE_G, 0, 4), (SEVEN_G, 0, 8)):
        with pytest.raises(pynvml.NVMLError_InsufficientResources):
            create_at(pynvml, gpu, profile_id, start, size)
    assert instances(pynvml, gpu) == {4: (TWO_G, 2, 2)}


@pytest.mark.parametrize("code", [2, 3, 23])
def test_row_17_a_placement_outside_the_list_is_refused_with_a_configurable_code(pynvml, box, code):
    gpu = mig_gpu(pynvml)
    if code != 2:
        box.switch("placement_error_code", code)
    for start, size in ((1, 2), (0, 1), (6, 2), (8, 2)):
        with pytest.raises(pynvml.NVMLError) as refused:
            create_at(pynvml, gpu, TWO_G, start, size)
        assert refused.value.value == code


@pytest.mark.parametrize("sequence", auto_placement(), ids=lambda s: "-".join(map(str, s["ids"])))
def test_row_18_the_driver_places_by_least_loss_as_in_public_transcripts(sequence, boxed):
    spec = "rtx-pro-6000-blackwell" if sequence.get("geometry") == "twelve_unit_quarters" else "a100-80gb"
    nvml = boxed(spec).nvml()
    nvml.nvmlInit()
    gpu = mig_gpu(nvml)
    got = []
    for profile_id in sequence["ids"]:
        try:
            got.append(nvml.nvmlGpuInstanceGetInfo(nvml.nvmlDeviceCreateGpuInstance(gpu, profile_id)).id)
        except nvml.NVMLError_InsufficientResources:
            got.append("NVML_ERROR_INSUFFICIENT_RESOURCES")
    assert got == sequence["gpu_instances"]


def test_row_19_small_first_fails_at_the_last_and_keeps_the_earlier_large_first_succeeds(pynvml, boxed):
    gpu = mig_gpu(pynvml)
    for profile_id in (ONE_G, ONE_G, TWO_G):
        pynvml.nvmlDeviceCreateGpuInstance(gpu, profile_id)
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        pynvml.nvmlDeviceCreateGpuInstance(gpu, THREE_G)
    assert len(instances(pynvml, gpu)) == 3
    fresh = boxed("a100-40gb").nvml()
    fresh.nvmlInit()
    gpu = mig_gpu(fresh)
    for profile_id in (THREE_G, ONE_G, TWO_G, ONE_G):
        fresh.nvmlDeviceCreateGpuInstance(gpu, profile_id)
    assert len(instances(fresh, gpu)) == 4


@pytest.mark.parametrize("model", [m for m in models().values() if m.memory_slices == 8], ids=lambda m: m.key)
def test_row_20_two_3g_fill_a_seven_slice_gpu_and_4g_goes_with_3g(model, boxed):
    nvml = boxed(model.key).nvml()
    nvml.nvmlInit()
    gpu = mig_gpu(nvml)
    widths = {p.profile_id: {x.size for x in p.places} for p in model.profiles}
    assert (widths[THREE_G], widths[SEVEN_G]) == ({4}, {8})
    low, _ = create_at(nvml, gpu, THREE_G, 0, 4), create_at(nvml, gpu, THREE_G, 4, 4)
    for start in range(7):
        with pytest.raises(nvml.NVMLError_InsufficientResources):
            create_at(nvml, gpu, ONE_G, start, 1)
    nvml.nvmlGpuInstanceDestroy(low)
    assert nvml.nvmlGpuInstanceGetInfo(create_at(nvml, gpu, FOUR_G, 0, 4)).placement.size == 4


@machine("rtx-pro-6000-blackwell,a30")
def test_row_21_other_grids_twelve_units_and_four_units(pynvml, box):
    pro, a30 = mig_gpu(pynvml, 0), mig_gpu(pynvml, 1)
    create_at(pynvml, pro, 5, 6, 6)
    create_at(pynvml, pro, 14, 3, 3)
    assert instances(pynvml, pro) == {2: (5, 6, 6), 4: (14, 3, 3)}
    create_at(pynvml, a30, 5, 2, 2)
    create_at(pynvml, a30, 14, 1, 1)
    assert instances(pynvml, a30) == {2: (5, 2, 2), 4: (14, 1, 1)}
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        create_at(pynvml, a30, 5, 0, 2)


@machine("a100-40gb,rtx-pro-6000-blackwell,a30,b300")
def test_row_22_engines_are_a_pool_one_me_and_me_all_only_beside_no_me(pynvml, box):
    gpu = mig_gpu(pynvml, 0)
    create_at(pynvml, gpu, ONE_G_ME, 0, 1)
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        create_at(pynvml, gpu, ONE_G_ME, 1, 1)
    pro = mig_gpu(pynvml, 1)
    create_at(pynvml, pro, 65, 0, 3)  # 1g.24gb+me.all
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        create_at(pynvml, pro, 14, 3, 3)  # 1g.24gb
    create_at(pynvml, pro, 67, 3, 3)  # 1g.24gb-me
    a30 = mig_gpu(pynvml, 2)
    create_at(pynvml, a30, 21, 0, 1)  # 1g.6gb+me
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        create_at(pynvml, a30, 6, 2, 2)  # 2g.12gb+me
    b300 = mig_gpu(pynvml, 3)  # its pool is not known: the instance count alone limits +me
    create_at(pynvml, b300, ONE_G_ME, 0, 1)
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        create_at(pynvml, b300, ONE_G_ME, 1, 1)


@pytest.mark.parametrize(("swapped", "ids"), [(False, [7, 8, 9, 10, 11, 12, 13]), (True, [11, 12, 13, 14, 7, 8, 9])])
def test_row_23_the_gi_id_is_the_place_and_is_reused(pynvml, box, swapped, ids):
    box.switch("swapped_halves", swapped)
    gpu = mig_gpu(pynvml)
    made = [create_at(pynvml, gpu, ONE_G, start, 1) for start in range(7)]
    assert [pynvml.nvmlGpuInstanceGetInfo(gi).id for gi in made] == ids
    pynvml.nvmlGpuInstanceDestroy(made[2])
    assert pynvml.nvmlGpuInstanceGetInfo(create_at(pynvml, gpu, ONE_G, 2, 1)).id == ids[2]
    for gi in instances(pynvml, gpu):
        pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(gpu, gi))
    halves = [pynvml.nvmlGpuInstanceGetInfo(create_at(pynvml, gpu, THREE_G, s, 4)).id for s in (0, 4)]
    assert halves == ([2, 1] if swapped else [1, 2])


def test_row_24_the_ci_id_is_the_lowest_free_one(pynvml, box):
    gi = create_at(pynvml, mig_gpu(pynvml), THREE_G, 0, 4)
    made = [pynvml.nvmlGpuInstanceCreateComputeInstance(gi, 0) for _ in range(3)]
    assert [pynvml.nvmlComputeInstanceGetInfo(ci).id for ci in made] == [0, 1, 2]
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        pynvml.nvmlGpuInstanceCreateComputeInstance(gi, 0)
    pynvml.nvmlComputeInstanceDestroy(made[1])
    again = pynvml.nvmlComputeInstanceGetInfo(pynvml.nvmlGpuInstanceCreateComputeInstance(gi, 0))
    assert (again.id, again.placement.start) == (1, 1)


# ---- 25-30: compute instances, destruction


def test_row_25_only_a_compute_instance_makes_a_mig_device(pynvml, box):
    gpu = mig_gpu(pynvml)
    gi = create_at(pynvml, gpu, TWO_G, 0, 2)
    assert mig_devices(pynvml, gpu) == {}
    assert instances(pynvml, gpu) == {3: (TWO_G, 0, 2)}
    whole_ci(pynvml, gi)
    assert mig_devices(pynvml, gpu) == {0: (3, 0)}


def test_row_26_a_gi_with_a_ci_is_in_use_and_nothing_cascades(pynvml, box):
    gpu = mig_gpu(pynvml)
    [(gi, ci)] = cut(pynvml, gpu, (THREE_G, 0, 4))
    with pytest.raises(pynvml.NVMLError_InUse):
        pynvml.nvmlGpuInstanceDestroy(gi)
    assert mig_devices(pynvml, gpu) == {0: (1, 0)}
    assert pynvml.nvmlComputeInstanceDestroy(ci) == pynvml.NVML_SUCCESS
    assert instances(pynvml, gpu) == {1: (THREE_G, 0, 4)}
    assert pynvml.nvmlGpuInstanceDestroy(gi) == pynvml.NVML_SUCCESS
    assert instances(pynvml, gpu) == {}


@pytest.mark.parametrize("silent", [False, True])
def test_row_27_a_held_ci_is_in_use_and_a_silent_monitor_is_not_listed(pynvml, box, silent):
    gpu = mig_gpu(pynvml)
    [(_, ci), (_, other)] = cut(pynvml, gpu, (THREE_G, 0, 4), (THREE_G, 4, 4))
    pid = box.start_process(0, start=0, silent=silent)
    listed = [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)]
    assert listed == ([] if silent else [pid])
    assert pid in box.device_users(pynvml.nvmlDeviceGetUUID(gpu))
    with pytest.raises(pynvml.NVMLError_InUse):
        pynvml.nvmlComputeInstanceDestroy(ci)
    pynvml.nvmlComputeInstanceDestroy(other)
    box.end_process(pid)
    pynvml.nvmlComputeInstanceDestroy(ci)


def test_row_28_in_use_clears_after_a_delay_and_destroying_takes_time(pynvml, box):
    box.switch("release_lag_s", 0.4)
    gpu = mig_gpu(pynvml)
    [(gi, ci)] = cut(pynvml, gpu, (THREE_G, 0, 4))
    box.end_process(box.start_process(0, start=0))
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(gpu) == []
    with pytest.raises(pynvml.NVMLError_InUse):
        pynvml.nvmlComputeInstanceDestroy(ci)
    box.clock.sleep(0.5)
    before = box.clock.now_s()
    pynvml.nvmlComputeInstanceDestroy(ci)
    pynvml.nvmlGpuInstanceDestroy(gi)
    assert box.clock.now_s() - before == pytest.approx(0.21)
    box.inject(Fault("nvmlGpuInstanceDestroy", "delay", delay_s=1.0))
    gi, before = create_at(pynvml, gpu, ONE_G, 0, 1), box.clock.now_s()
    pynvml.nvmlGpuInstanceDestroy(gi)
    assert box.clock.now_s() - before > 1.0


@machine("h200")
def test_row_29_the_first_instance_on_a_busy_gpu_is_in_use_though_mig_is_on(pynvml, box):
    gpu = first_gpu(pynvml)
    pid = box.start_process(0)
    assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_SUCCESS
    with pytest.raises(pynvml.NVMLError_InUse):
        pynvml.nvmlDeviceCreateGpuInstance(gpu, THREE_G)
    box.end_process(pid)
    pynvml.nvmlDeviceCreateGpuInstance(gpu, THREE_G)


def test_row_30_an_absent_id_is_not_found(pynvml, box):
    gpu = mig_gpu(pynvml)
    [(gi, _)] = cut(pynvml, gpu, (THREE_G, 0, 4))
    assert pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceGetGpuInstanceById(gpu, 1)).profileId == THREE_G
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetGpuInstanceById(gpu, 2)
    assert pynvml.nvmlComputeInstanceGetInfo(pynvml.nvmlGpuInstanceGetComputeInstanceById(gi, 0)).id == 0
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlGpuInstanceGetComputeInstanceById(gi, 1)


# ---- 31-37: MIG devices


@readonly
@machine("a100-40gb,a30,l40s,rtx-pro-6000-blackwell")
def test_row_31_the_number_of_mig_devices_is_bounded_and_zero_while_off(pynvml, box):
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        on = can_mig(pynvml, gpu) and pynvml.nvmlDeviceGetMigMode(gpu)[0]
        assert bool(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)) == bool(on)
    if box is not None:
        for index, most in ((0, 7), (1, 4), (3, 4)):
            assert pynvml.nvmlDeviceGetMaxMigDeviceCount(mig_gpu(pynvml, index)) == most


def test_row_32_mig_indices_follow_the_ids_and_shift(pynvml, box):
    gpu = mig_gpu(pynvml)
    made = cut(pynvml, gpu, (ONE_G, 1, 1), (THREE_G, 4, 4), (ONE_G, 0, 1))
    assert mig_devices(pynvml, gpu) == {0: (2, 0), 1: (7, 0), 2: (8, 0)}
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 3)
    last = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 2)
    assert pynvml.nvmlDeviceGetIndex(last) == 2
    pynvml.nvmlComputeInstanceDestroy(made[1][1])
    assert mig_devices(pynvml, gpu) == {0: (7, 0), 1: (8, 0)}
    assert pynvml.nvmlDeviceGetIndex(last) == 1


def mig_uuids(nvml, gpu):
    return [nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, i)) for i in mig_devices(nvml, gpu)]


@pytest.mark.parametrize("changes", [False, True])
def test_row_33_mig_uuids_come_from_the_place_and_recur(pynvml, box, changes):
    box.switch("uuid_changes_on_recreate", changes)
    gpu = mig_gpu(pynvml)
    made = cut(pynvml, gpu, (THREE_G, 0, 4), (THREE_G, 4, 4))
    before = mig_uuids(pynvml, gpu)
    assert len(set(before)) == 2
    assert all(re.fullmatch(r"MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", u) and u[18] == "5" for u in before)
    for gi, ci in made:
        pynvml.nvmlComputeInstanceDestroy(ci)
        pynvml.nvmlGpuInstanceDestroy(gi)
    cut(pynvml, gpu, (THREE_G, 0, 4), (THREE_G, 4, 4))
    assert (mig_uuids(pynvml, gpu) == before) != changes
    box.reboot()
    pynvml.nvmlInit()
    cut(pynvml, mig_gpu(pynvml), (THREE_G, 0, 4), (THREE_G, 4, 4))
    assert (mig_uuids(pynvml, first_gpu(pynvml)) == before) != changes


@machine("a100-40gb", old_uuid_format=True)
def test_row_33_old_drivers_write_the_uuid_as_parent_and_ids(pynvml, box):
    gpu = mig_gpu(pynvml)
    cut(pynvml, gpu, (THREE_G, 4, 4))
    assert mig_uuids(pynvml, gpu) == [f"MIG-{pynvml.nvmlDeviceGetUUID(gpu)}/2/0"]


@readonly
def test_row_34_a_uuid_finds_its_device_and_is_not_found_when_gone(pynvml, box):
    gpu = first_gpu(pynvml)
    uuid = pynvml.nvmlDeviceGetUUID(gpu)
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == uuid
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000000")
    if box is not None:
        mig_gpu(pynvml)
        [(_, ci)] = cut(pynvml, gpu, (THREE_G, 4, 4))
        [mig] = mig_uuids(pynvml, gpu)
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(mig.encode())) == mig
        pynvml.nvmlComputeInstanceDestroy(ci)
        with pytest.raises(pynvml.NVMLError_NotFound):
            pynvml.nvmlDeviceGetHandleByUUID(mig)


def test_row_35_the_device_of_a_ci_is_its_mig_device(pynvml, box):
    gpu = mig_gpu(pynvml)
    [(_, ci)] = cut(pynvml, gpu, (THREE_G, 4, 4))
    device = pynvml.nvmlComputeInstanceGetInfo_v2(ci).device
    assert pynvml.nvmlDeviceIsMigDeviceHandle(device).value == 1
    assert [pynvml.nvmlDeviceGetUUID(device)] == mig_uuids(pynvml, gpu)
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
    assert pynvml.nvmlDeviceGetUUID(parent) == pynvml.nvmlDeviceGetUUID(gpu)


@readonly
def test_row_36_attributes_are_for_mig_devices_only(pynvml, box):
    gpu = first_gpu(pynvml)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetAttributes_v2(gpu)
    if box is not None:
        mig_gpu(pynvml)
        gi = create_at(pynvml, gpu, THREE_G, 0, 4)
        pynvml.nvmlGpuInstanceCreateComputeInstance(gi, 1)
        has = pynvml.nvmlDeviceGetAttributes(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0))
        assert (has.gpuInstanceSliceCount, has.computeInstanceSliceCount) == (3, 2)
        assert (has.multiprocessorCount, has.sharedCopyEngineCount, has.memorySizeMB) == (28, 3, 19968)


@machine("b300", name_prefix=True)
def test_row_37_a_mig_device_is_named_after_its_gpu_and_profile(pynvml, box):
    gpu = mig_gpu(pynvml)
    cut(pynvml, gpu, (ONE_G, 6, 1))
    pynvml.nvmlGpuInstanceCreateComputeInstance(create_at(pynvml, gpu, THREE_G, 0, 4), 0)
    names = {pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, i)) for i in range(2)}
    assert names == {"NVIDIA B300 SXM6 AC MIG 1g.34gb", "NVIDIA B300 SXM6 AC MIG 1c.3g.135gb"}
    assert {p.name for p in profiles(pynvml, gpu)} >= {"MIG 1g.34gb", "MIG 7g.269gb"}


# ---- 38-43: what monitors read


def test_row_38_parent_queries_need_a_privilege_in_mig_mode(pynvml, box):
    stranger, monitor = box.nvml(privilege="none"), box.nvml(privilege="monitor")
    for who in (stranger, monitor):
        who.nvmlInit()
    assert stranger.nvmlDeviceGetMemoryInfo(first_gpu(stranger)).total == 40960 << 20
    cut(pynvml, mig_gpu(pynvml), (THREE_G, 0, 4))
    for query in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"):
        with pytest.raises(pynvml.NVMLError_NoPermission):
            getattr(stranger, query)(first_gpu(stranger))
        getattr(monitor, query)(first_gpu(monitor))
        getattr(stranger, query)(stranger.nvmlDeviceGetMigDeviceHandleByIndex(first_gpu(stranger), 0))


@readonly
def test_row_39_there_is_no_utilisation_of_a_mig_gpu(pynvml, box):
    gpu = first_gpu(pynvml)
    if not can_mig(pynvml, gpu) or not pynvml.nvmlDeviceGetMigMode(gpu)[0]:
        assert 0 <= pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu <= 100
    if box is not None:
        mig_gpu(pynvml)
        cut(pynvml, gpu, (THREE_G, 0, 4))
        for device in (gpu, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)):
            for query in (pynvml.nvmlDeviceGetUtilizationRates, pynvml.nvmlDeviceGetEncoderUtilization):
                with pytest.raises(pynvml.NVMLError_NotSupported):
                    query(device)


@readonly
@machine("a100-40gb,a100-40gb")
def test_row_40_processes_carry_their_instance_ids(pynvml, box):
    gpu = first_gpu(pynvml)
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu):
        assert process.pid > 0
    if box is not None:
        mig_gpu(pynvml)
        cut(pynvml, gpu, (THREE_G, 0, 4), (THREE_G, 4, 4))
        pids = [box.start_process(0, start=4), box.start_process(1)]
        [on_mig] = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)
        [whole] = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(pynvml.nvmlDeviceGetHandleByIndex(1))
        assert (on_mig.pid, on_mig.gpuInstanceId, on_mig.computeInstanceId) == (pids[0], 2, 0)
        assert (whole.pid, whole.gpuInstanceId, whole.computeInstanceId) == (pids[1], 0xFFFFFFFF, 0xFFFFFFFF)
        devices = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, i) for i in range(2)]
        owned = [[p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(d)] for d in devices]
        assert owned == [[], [pids[0]]]


@readonly
@machine("h200,t4")
def test_row_41_row_remapping_is_unreadable_with_instances_and_ampere_retires_no_pages(pynvml, box):
    gpu = first_gpu(pynvml)
    assert len(pynvml.nvmlDeviceGetRemappedRows(gpu)) == 4
    if pynvml.nvmlDeviceGetArchitecture(gpu) >= pynvml.NVML_DEVICE_ARCH_AMPERE:
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetRetiredPages(gpu, pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
    if box is not None:
        box.switch("remap_pending", True, gpu=0)
        mig_gpu(pynvml)
        assert pynvml.nvmlDeviceGetRemappedRows(gpu)[2:] == (1, 0)
        create_at(pynvml, gpu, ONE_G, 0, 1)
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetRemappedRows(gpu)
        assert pynvml.nvmlDeviceGetRetiredPages(pynvml.nvmlDeviceGetHandleByIndex(1), 0) == []


@readonly
def test_row_42_events_come_from_the_parent_and_a_timeout_is_raised(pynvml, box):
    gpu = first_gpu(pynvml)
    events = pynvml.nvmlEventSetCreate()
    xid = pynvml.nvmlEventTypeXidCriticalError
    pynvml.nvmlDeviceRegisterEvents(gpu, xid & pynvml.nvmlDeviceGetSupportedEventTypes(gpu), events)
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait(events, 1)
    if box is not None:
        mig_gpu(pynvml)
        cut(pynvml, gpu, (THREE_G, 4, 4))
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceRegisterEvents(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0), xid, events)
        box.raise_xid(0, 48)
        box.raise_xid(0, 31, start=4)
        heard = [pynvml.nvmlEventSetWait_v2(events, 1000) for _ in range(2)]
        assert [(e.eventData, e.gpuInstanceId, e.computeInstanceId) for e in heard] == [
            (48, 0xFFFFFFFF, 0xFFFFFFFF),
            (31, 2, 0),
        ]
        assert pynvml.nvmlDeviceGetUUID(heard[0].device) == pynvml.nvmlDeviceGetUUID(gpu)
        box.lose_gpu(0)
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            pynvml.nvmlEventSetWait(events, 1)
    pynvml.nvmlEventSetFree(events)


def test_row_43_every_change_of_gpu_instances_is_an_event(pynvml, box):
    gpu = mig_gpu(pynvml)
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventMigConfigChange, events)
    pynvml.nvmlGpuInstanceDestroy(create_at(pynvml, gpu, ONE_G, 0, 1))
    for _ in range(2):
        assert pynvml.nvmlEventSetWait(events, 0).eventType == pynvml.nvmlEventMigConfigChange
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait(events, 0)


# ---- 44-49: what outlives what


@machine("a100-40gb,h200")
def test_row_44_a_reboot_ends_instances_and_on_hopper_the_mode(pynvml, box):
    for index in range(2):
        cut(pynvml, mig_gpu(pynvml, index), (THREE_G, 0, 4))
    boot = box.boot_id()
    box.reboot()
    assert box.boot_id() != boot
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()
    pynvml.nvmlInit()
    ampere, hopper = (pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(2))
    assert pynvml.nvmlDeviceGetMigMode(ampere) == [1, 1]
    assert pynvml.nvmlDeviceGetMigMode(hopper) == [0, 0]
    assert instances(pynvml, ampere) == {}


@machine("a100-40gb,h200")
def test_row_45_a_driver_reload_ends_instances_and_calls_fail_meanwhile(pynvml, box):
    for index in range(2):
        cut(pynvml, mig_gpu(pynvml, index), (THREE_G, 0, 4))
    boot = box.boot_id()
    box.reload_driver(20)
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()
    box.clock.sleep(21)
    pynvml.nvmlInit()
    modes = [pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(2)]
    assert modes == [[1, 1], [0, 0]]
    assert instances(pynvml, first_gpu(pynvml)) == {}
    assert box.boot_id() == boot


def test_row_46_instances_outlive_the_last_client(pynvml, box):
    gpu = mig_gpu(pynvml)
    cut(pynvml, gpu, (THREE_G, 4, 4), (ONE_G, 0, 1))
    before = instances(pynvml, gpu), mig_uuids(pynvml, gpu)
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    with pytest.raises(pynvml.NVMLError_InvalidArgument):  # a handle of the closed session
        pynvml.nvmlDeviceGetUUID(gpu)
    again = first_gpu(pynvml)
    assert (instances(pynvml, again), mig_uuids(pynvml, again)) == before


@machine("4xa100-40gb,h200")
def test_row_47_a_reset_applies_the_pending_mode_and_is_refused_while_anybody_is_there(pynvml, box):
    gpu = first_gpu(pynvml)
    uuids = box.gpu_uuids()
    pid = box.start_process(0, silent=True)
    assert pynvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_ERROR_IN_USE
    with pytest.raises(ResetRefusedError, match="in use"):  # our own session
        box.reset(uuids[0])
    pynvml.nvmlShutdown()
    with pytest.raises(ResetRefusedError, match=f"pid {pid}"):
        box.reset(uuids[0])
    box.end_process(pid)
    for index in (1, 2):
        box.switch("nvlink_group", "bridge", gpu=index)
    with pytest.raises(ResetRefusedError, match="NVLink to GPU 2"):
        box.reset(uuids[1])
    box.switch("nvswitch", True)
    box.reset(uuids[1])
    box.switch("fabric_manager_down", True)
    with pytest.raises(ResetRefusedError, match="Fabric Manager"):
        box.reset(uuids[1])
    before = box.clock.now_s()
    box.reset(uuids[0])
    assert 5 <= box.clock.now_s() - before <= 10
    pynvml.nvmlInit()
    cut(pynvml, first_gpu(pynvml), (THREE_G, 0, 4))
    cut(pynvml, mig_gpu(pynvml, 4), (THREE_G, 0, 4))
    pynvml.nvmlShutdown()
    for index in (0, 4):
        box.reset(uuids[index])
    pynvml.nvmlInit()
    for index in (0, 4):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
        assert instances(pynvml, gpu) == {}


@pytest.mark.parametrize("stale", [False, True])
def test_row_48_another_process_may_change_things_between_two_calls(pynvml, box, stale):
    cut(pynvml, mig_gpu(pynvml), (THREE_G, 0, 4))
    box.switch("stale_old_sessions", stale)
    old = box.nvml(pid=100)
    old.nvmlInit()
    gi = old.nvmlDeviceGetGpuInstanceById(first_gpu(old), 1)
    ci = old.nvmlGpuInstanceGetComputeInstanceById(gi, 0)
    mig = old.nvmlDeviceGetMigDeviceHandleByIndex(first_gpu(old), 0)
    uuid = old.nvmlDeviceGetUUID(mig)
    other = box.nvml(pid=200)
    other.nvmlInit()
    theirs = other.nvmlDeviceGetGpuInstanceById(first_gpu(other), 1)
    other.nvmlComputeInstanceDestroy(other.nvmlGpuInstanceGetComputeInstanceById(theirs, 0))
    other.nvmlGpuInstanceDestroy(theirs)
    for dead in (lambda: old.nvmlComputeInstanceDestroy(ci), lambda: old.nvmlGpuInstanceDestroy(gi)):
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            dead()
    with pytest.raises(pynvml.NVMLError_NotFound):
        old.nvmlDeviceGetGpuInstanceById(first_gpu(old), 1)
    assert mig_devices(old, first_gpu(old)) == ({0: (1, 0)} if stale else {})
    if stale:
        assert old.nvmlDeviceGetUUID(old.nvmlDeviceGetHandleByUUID(uuid)) == uuid
        old.nvmlShutdown()
        old.nvmlInit()
    assert mig_devices(old, first_gpu(old)) == {}
    with pytest.raises(pynvml.NVMLError_NotFound):
        old.nvmlDeviceGetHandleByUUID(uuid)


@machine("a100-80gb")
def test_row_49_names_and_memory_differ_by_driver_for_the_same_ids(pynvml, box):
    gpu = first_gpu(pynvml)
    newer = {p.id: (p.name, p.memorySizeMB) for p in profiles(pynvml, gpu)}
    box.switch("names", {"7g.80gb": "7g.79gb", "3g.40gb": "3g.39gb"})
    box.switch("memory_variant", 1)
    older = {p.id: (p.name, p.memorySizeMB) for p in profiles(pynvml, gpu)}
    assert newer.keys() == older.keys()
    assert (newer[THREE_G], older[THREE_G]) == (("3g.40gb", 40448), ("3g.39gb", 40192))
    assert older[SEVEN_G][0] == "7g.79gb"
    assert (newer[ONE_G][1], older[ONE_G][1]) == (9984, 9728)


# ---- 50-55


@machine("gb300", capacity_overstates=True, fewer_placements=[f"1g.35gb@{s}" for s in (3, 4, 5, 6)])
def test_row_50_capacity_may_overstate_and_placements_may_be_fewer(pynvml, box):
    gpu = mig_gpu(pynvml)
    assert placements(pynvml, gpu, ONE_G) == [(0, 1), (1, 1), (2, 1)]
    for _ in range(3):
        assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, ONE_G) == 7
        pynvml.nvmlDeviceCreateGpuInstance(gpu, ONE_G)
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        pynvml.nvmlDeviceCreateGpuInstance(gpu, ONE_G)


@readonly
def test_row_51_shapes_are_pynvmls(pynvml, box):
    gpu = first_gpu(pynvml)
    other = first_gpu(pynvml)
    assert isinstance(gpu, pynvml.c_nvmlDevice_t)
    assert gpu is not other
    assert isinstance(pynvml.nvmlDeviceGetName(gpu), str)
    assert re.fullmatch(r"GPU-[0-9a-f-]{36}", pynvml.nvmlDeviceGetUUID(gpu))
    assert isinstance(pynvml.nvmlDeviceIsMigDeviceHandle(gpu), c_uint)
    assert pynvml.nvmlDeviceGetPciInfo(gpu).pciDeviceId & 0xFFFF == 0x10DE
    assert [pynvml.nvmlErrorString(code) for code in (19, 23)] == ["In use by another client", "Insufficient Resources"]
    with pytest.raises(pynvml.NVMLError) as refused:
        pynvml.nvmlDeviceGetHandleByUUID("MIG-nonsense")
    assert isinstance(refused.value, pynvml.NVMLError)
    if can_mig(pynvml, gpu):
        assert isinstance(pynvml.nvmlDeviceGetMigMode(gpu), list)
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0, version=3)
        assert not hasattr(pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0, version=1), "name")
        assert isinstance(pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0).name, str)
    if box is not None:
        mig_gpu(pynvml)
        bare = pynvml.c_nvmlGpuInstancePlacement_t(0, 4)  # by value: wrong in C, refused here
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, THREE_G, bare)
        box.switch("missing_symbols", ["nvmlDeviceGetGpuInstanceProfileInfoV"])
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0)
        assert pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 0, version=1).id == ONE_G


def test_row_52_a_dead_handle_never_means_the_new_instance(pynvml, box):
    gpu = mig_gpu(pynvml)
    [(gi, ci)] = cut(pynvml, gpu, (THREE_G, 0, 4))
    mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    pynvml.nvmlComputeInstanceDestroy(ci)
    pynvml.nvmlGpuInstanceDestroy(gi)
    cut(pynvml, gpu, (THREE_G, 0, 4))
    for dead in (
        lambda: pynvml.nvmlComputeInstanceDestroy(ci),
        lambda: pynvml.nvmlGpuInstanceDestroy(gi),
        lambda: pynvml.nvmlGpuInstanceGetInfo(gi),
        lambda: pynvml.nvmlDeviceGetUUID(mig),
    ):
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            dead()
    assert mig_devices(pynvml, gpu) == {0: (1, 0)}


FUNCTIONS = sorted(
    name
    for name in dir(SimHost.fresh("a100-40gb").nvml())
    if name.startswith("nvml") and name not in ("nvmlErrorString", "nvmlInitWithFlags")
)


@pytest.mark.parametrize("code", [19, 4, 15, 999])
@pytest.mark.parametrize("when", ["before", "after"])
def test_row_53_any_error_can_be_injected_before_and_after_the_effect_of_a_change(pynvml, box, when, code):
    gpu = first_gpu(pynvml)
    effect = when == "after"

    def refused(name, act, code=code):
        box.inject(Fault(name, code=code, when=when))
        with pytest.raises(pynvml.NVMLError) as error:
            act()
        assert error.value.value == code

    refused("nvmlDeviceSetMigMode", lambda: pynvml.nvmlDeviceSetMigMode(gpu, 1))
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [int(effect)] * 2
    mig_gpu(pynvml)
    refused("nvmlDeviceCreateGpuInstance*", lambda: create_at(pynvml, gpu, THREE_G, 0, 4))
    assert len(instances(pynvml, gpu)) == int(effect)
    gi = pynvml.nvmlDeviceGetGpuInstanceById(gpu, 1) if effect else create_at(pynvml, gpu, THREE_G, 0, 4)
    refused("nvmlGpuInstanceCreateComputeInstance", lambda: whole_ci(pynvml, gi))
    assert len(mig_devices(pynvml, gpu)) == int(effect)
    ci = pynvml.nvmlGpuInstanceGetComputeInstanceById(gi, 0) if effect else whole_ci(pynvml, gi)
    refused("nvmlComputeInstanceDestroy", lambda: pynvml.nvmlComputeInstanceDestroy(ci))
    assert len(mig_devices(pynvml, gpu)) == int(not effect)
    if not effect:
        pynvml.nvmlComputeInstanceDestroy(ci)
    refused("nvmlGpuInstanceDestroy", lambda: pynvml.nvmlGpuInstanceDestroy(gi))
    assert len(instances(pynvml, gpu)) == int(not effect)


def anything(nvml, name, gpu, gi, ci):
    """Arguments with which a function can be called, whatever it answers."""
    events, handles = nvml.nvmlEventSetCreate(), {"nvmlG": gi, "nvmlC": ci}
    given = {
        **dict.fromkeys(
            ("device", "handle", "migDevice", "gpuInstance", "computeInstance"), handles.get(name[:5], gpu)
        ),
        "uuid": "GPU-x",
        "pciBusId": "0000:03:00.0",
        "eventSet": events,
        "countRef": byref(c_uint()),
        "fieldIds": [184],
        "placement": byref(nvml.c_nvmlGpuInstancePlacement_t(0, 1)),
        "version": 2,
        "gpuInstancesRef": (nvml.c_nvmlGpuInstance_t * 8)(),
        "placementsRef": None,
        "computeInstancesRef": (nvml.c_nvmlComputeInstance_t * 8)(),
    }
    if "MemoryInfo" in name:
        given["version"] = None
    if "Compute" in name:
        given["placement"] = byref(nvml.c_nvmlComputeInstancePlacement_t(0, 1))
    return [given.get(word, 0) for word in inspect.signature(getattr(real_pynvml, name)).parameters]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_row_53_every_call_is_a_fault_point(pynvml, box, library, name):
    gpu = mig_gpu(pynvml)
    [(gi, ci)] = cut(pynvml, gpu, (THREE_G, 0, 4))
    arguments = anything(pynvml, name, gpu, gi, ci)
    box.inject(Fault("*", action="crash"))
    ends = SimulatedCrash
    if library == "c":  # a crash of ours ends no C program: only the answer is lost, and nobody knows what became of it
        ends = pynvml.NVMLError_Timeout if "EventSetWait" in name else pynvml.NVMLError_Unknown
    with pytest.raises(ends):
        getattr(pynvml, name)(*arguments)


@machine("a30")
def test_row_54_an_a30_may_report_a_wrong_instance_count(pynvml, box):
    gpu = mig_gpu(pynvml)
    right = {p.id: p.instanceCount for p in profiles(pynvml, gpu)}
    box.switch("a30_wrong_count", True)
    wrong = {p.id: p.instanceCount for p in profiles(pynvml, gpu)}
    assert right == {p.profile_id: p.count_max for p in models()["a30"].profiles}
    assert all(wrong[i] != right[i] for i in right)
    for start in range(4):
        create_at(pynvml, gpu, 14, start, 1)
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        pynvml.nvmlDeviceCreateGpuInstance(gpu, 14)


@machine("rtx-pro-6000-blackwell", enum_end=10)
def test_row_55_old_drivers_end_the_enumeration_earlier(pynvml, box):
    gpu = first_gpu(pynvml)
    assert {p.name for p in profiles(pynvml, gpu)} == {"1g.24gb", "1g.24gb+me", "2g.48gb", "4g.96gb"}
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, pynvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE_GFX)


def test_every_row_of_the_table_has_a_test():
    rows = {int(name[9:11]) for name in vars(sys.modules[__name__]) if re.match(r"test_row_\d\d_", name)}
    assert rows == set(range(1, 56))
