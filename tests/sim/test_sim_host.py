"""The simulated host in memory: time, deadlines, faults, processes, switches, and what becomes of GPUs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref

import pynvml
import pytest
from controlplane.processes import until
from hypothesis import given, settings
from hypothesis import strategies as st

from migd.sim import Fault, HangError, ResetRefusedError, SimHost, SimulatedCrash, SimulationError
from migd.sim.machine import from_json, to_json
from migd.sim.switches import PLACEMENTS

ONE_G, TWO_G, THREE_G, SEVEN_G = 19, 14, 9, 0


def booted(spec="a100-40gb", **switches):
    host = SimHost.fresh(spec, **switches)
    nvml = host.nvml()
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    nvml.nvmlDeviceSetMigMode(gpu, 1)
    return host, nvml, gpu


def create(nvml, gpu, profile_id, start, size):
    return nvml.nvmlDeviceCreateGpuInstanceWithPlacement(
        gpu, profile_id, byref(pynvml.c_nvmlGpuInstancePlacement_t(start, size))
    )


# ---- time and deadlines


def test_creating_takes_the_published_time_split_three_to_one():
    host, nvml, gpu = booted()
    before = host.clock.now_s()
    gi = create(nvml, gpu, SEVEN_G, 0, 8)
    middle = host.clock.now_s()
    nvml.nvmlGpuInstanceCreateComputeInstance(gi, pynvml.NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE)
    assert middle - before == pytest.approx(0.18)
    assert host.clock.now_s() - middle == pytest.approx(0.06)


def test_a_call_beyond_its_deadline_times_out_though_its_effect_happened():
    host, nvml, gpu = booted()
    before = host.clock.now_s()
    with pytest.raises(TimeoutError):
        host.caller.run(lambda: create(nvml, gpu, THREE_G, 0, 4), deadline_s=0.1)
    assert host.clock.now_s() - before == pytest.approx(0.1)
    assert nvml.nvmlGpuInstanceGetInfo(nvml.nvmlDeviceGetGpuInstanceById(gpu, 1)).profileId == THREE_G


def test_a_deadline_covers_all_that_runs_under_it_and_ends_with_it():
    host, nvml, gpu = booted()

    def two():
        create(nvml, gpu, THREE_G, 0, 4)
        create(nvml, gpu, THREE_G, 4, 4)

    assert host.caller.run(lambda: "fast", deadline_s=0.0) == "fast"
    with pytest.raises(TimeoutError):
        host.caller.run(two, deadline_s=0.2)
    host.clock.sleep(1000)


@pytest.mark.parametrize(("when", "made"), [("before", 0), ("after", 1)])
def test_a_hang_is_a_timeout_under_a_deadline_and_an_error_without_one(when, made):
    host, nvml, gpu = booted()
    host.inject(Fault("nvmlDeviceCreateGpuInstance*", "hang", when=when, times=2))
    before = host.clock.now_s()
    with pytest.raises(TimeoutError):
        host.caller.run(lambda: create(nvml, gpu, THREE_G, 0, 4), deadline_s=30)
    assert host.clock.now_s() - before == pytest.approx(30)
    assert len(host.snapshot().gpus[0].instances) == made
    with pytest.raises(HangError, match="deadline"):
        create(nvml, gpu, THREE_G, 4, 4)


@pytest.mark.parametrize(("when", "made"), [("before", 0), ("after", 1)])
def test_a_delay_past_the_deadline_is_a_timeout_and_had_its_effect_only_where_that_came_first(when, made):
    host, nvml, gpu = booted()
    host.inject(Fault("nvmlDeviceCreateGpuInstance*", "delay", when=when, delay_s=50))
    with pytest.raises(TimeoutError):
        host.caller.run(lambda: create(nvml, gpu, THREE_G, 0, 4), deadline_s=30)
    assert len(host.snapshot().gpus[0].instances) == made
    assert [call.name for call in host.calls][-1] == "nvmlDeviceCreateGpuInstanceWithPlacement"
    create(nvml, gpu, THREE_G, 4, 4)


def test_what_others_do_during_a_delay_before_the_effect_decides_also_for_a_machine_in_a_file(tmp_path):
    host = SimHost.open(tmp_path / "machine", "2xh200", clock="real", duration_scale=0.0)
    other = SimHost.open(tmp_path / "machine")
    nvml = host.nvml(pid=1)
    nvml.nvmlInit()
    gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
    for act, refused in (
        (lambda: other.lose_gpu(0), pynvml.NVMLError_GpuIsLost),
        (other.reboot, pynvml.NVMLError_Uninitialized),
    ):
        host.inject(Fault("nvmlDeviceSetMigMode", "delay", delay_s=0.5))
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(nvml.nvmlDeviceSetMigMode, gpus[0], 1)
            assert until(lambda: other.snapshot().faults[-1].fired, 20.0, 0.01)
            act()
            with pytest.raises(refused):
                call.result()
        other.find_gpu(0)
        host.clear_faults()


def test_a_delay_before_a_reset_lets_somebody_come_who_is_then_in_its_way():
    host, nvml, _ = booted()
    nvml.nvmlShutdown()
    [uuid] = host.gpu_uuids()
    host.use_clock("real")
    host.inject(Fault("reset", "delay", delay_s=0.5))
    with ThreadPoolExecutor(1) as pool:
        reset = pool.submit(host.reset, uuid)
        assert until(lambda: host.snapshot().faults[0].fired, 20.0, 0.01)
        nvml.nvmlInit()
        with pytest.raises(ResetRefusedError, match="in use by"):
            reset.result()


def test_in_a_real_clock_calls_really_take_their_time_and_time_does_not_jump():
    host, nvml, gpu = booted(duration_scale=0.0)
    before = host.clock.now_s()
    host.use_clock("real")
    assert 0 <= host.clock.now_s() - before < 60
    create(nvml, gpu, THREE_G, 0, 4)
    host.switch("duration_scale", 0.1)
    before = host.clock.now_s()
    create(nvml, gpu, THREE_G, 4, 4)
    assert host.clock.now_s() - before >= 0.014
    with pytest.raises(TimeoutError):
        host.caller.run(lambda: host.clock.sleep(9), deadline_s=0.01)
    later = host.clock.now_s()
    host.use_clock("virtual")
    assert host.clock.now_s() == pytest.approx(later, abs=60)


# ---- faults


def test_a_fault_fires_at_the_nth_matching_call_and_so_often():
    host, nvml, gpu = booted("2xa100-40gb")
    other = nvml.nvmlDeviceGetHandleByIndex(1)
    host.inject(Fault("nvmlDeviceGetMig*", code=pynvml.NVML_ERROR_UNKNOWN, gpu=1, nth=2, times=2))
    answers = []
    for handle in (other, gpu, other, other, other):
        try:
            nvml.nvmlDeviceGetMigMode(handle)
            answers.append("ok")
        except pynvml.NVMLError_Unknown:
            answers.append("failed")
    assert answers == ["ok", "ok", "failed", "failed", "ok"]
    host.inject(Fault("nvmlDeviceGetName", times=0))
    for _ in range(3):
        with pytest.raises(pynvml.NVMLError_Unknown):
            nvml.nvmlDeviceGetName(gpu)
    host.clear_faults()
    nvml.nvmlDeviceGetName(gpu)


@pytest.mark.parametrize("how", ["fault", "switch"])
def test_success_without_effect(how):
    host, nvml, gpu = booted()
    kept = create(nvml, gpu, ONE_G, 0, 1)
    if how == "fault":
        host.inject(Fault("nvml*", "skip", times=0))
    else:
        host.switch("success_without_effect", "*")
    before = host.snapshot().gpus[0].mig, len(host.snapshot().gpus[0].instances)
    gi = create(nvml, gpu, THREE_G, 4, 4)
    nvml.nvmlGpuInstanceCreateComputeInstance(kept, 0)
    assert nvml.nvmlGpuInstanceDestroy(kept) == pynvml.NVML_SUCCESS
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        nvml.nvmlGpuInstanceGetInfo(gi)
    assert (host.snapshot().gpus[0].mig, len(host.snapshot().gpus[0].instances)) == before
    assert host.snapshot().gpus[0].instances[0].compute == []
    assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_touch_point_fails_crashes_and_hangs_like_a_call(when):
    host, _, _ = booted()
    done = []
    host.inject(Fault("journal.*", when=when), Fault("journal.save", "crash", when=when, nth=2))
    with pytest.raises(OSError, match=r"journal\.save"):
        host.touch("journal.save", lambda: done.append(1))
    with pytest.raises(SimulatedCrash):
        host.touch("journal.save", lambda: done.append(2))
    assert host.touch("journal.save", lambda: "saved") == "saved"
    assert done == ([] if when == "before" else [1, 2])
    host.inject(Fault("journal.save", "hang", when=when))
    with pytest.raises(TimeoutError):
        host.caller.run(lambda: host.touch("journal.save", lambda: done.append(3)), deadline_s=5)
    assert (3 in done) == (when == "after")


def test_a_reset_is_a_fault_point_too():
    host, nvml, _ = booted()
    nvml.nvmlShutdown()
    [uuid] = host.gpu_uuids()
    host.inject(Fault("reset", "crash", when="after"))
    with pytest.raises(SimulatedCrash):
        host.reset(uuid)
    host.inject(Fault("reset", code=pynvml.NVML_ERROR_UNKNOWN))
    with pytest.raises(ResetRefusedError, match="GPU reset failed"):
        host.reset(uuid)
    with pytest.raises(ResetRefusedError, match="not found"):
        host.reset("GPU-elsewhere")
    host.inject(Fault("reset", "hang"))
    with pytest.raises(TimeoutError):
        host.caller.run(lambda: host.reset(uuid), deadline_s=60)


@pytest.mark.parametrize(
    "wrong", [{"action": "explode"}, {"when": "during"}, {"nth": 0}, {"action": "skip", "when": "after"}]
)
def test_a_fault_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(SimulationError):
        Fault("nvmlInit", **wrong)


# ---- processes and sessions


def test_a_process_ends_by_itself_and_lets_go_after_the_lag():
    host, nvml, gpu = booted(release_lag_s=0.3)
    gi = create(nvml, gpu, THREE_G, 0, 4)
    ci = nvml.nvmlGpuInstanceCreateComputeInstance(gi, 2)
    [uuid] = host.gpu_uuids()
    pid = host.start_process(0, start=0, command="train", container="abc", ends_after_s=10)
    assert host.describe(pid) == ("train", "abc")
    host.clock.sleep(10)
    assert host.describe(pid) is None
    assert pid not in host.device_users(uuid)
    with pytest.raises(pynvml.NVMLError_InUse):
        nvml.nvmlComputeInstanceDestroy(ci)
    host.clock.sleep(0.3)
    nvml.nvmlComputeInstanceDestroy(ci)


def test_nothing_runs_where_nothing_can():
    host, nvml, gpu = booted()
    with pytest.raises(SimulationError, match="no instance at memory slice 0"):
        host.start_process(0, start=0)
    create(nvml, gpu, THREE_G, 0, 4)
    with pytest.raises(SimulationError, match="no compute instance"):
        host.start_process(0, start=0)
    with pytest.raises(SimulationError, match="MIG on"):
        host.start_process(0)
    with pytest.raises(SimulationError, match="no GPU 1"):
        host.start_process(1)
    monitor = host.start_process(0, start=0, silent=True)  # it holds the GPU instance alone
    with pytest.raises(pynvml.NVMLError_InUse):
        nvml.nvmlGpuInstanceDestroy(nvml.nvmlDeviceGetGpuInstanceById(gpu, 1))
    host.end_process(monitor)
    with pytest.raises(SimulationError, match="no simulated process"):
        host.end_process(monitor)


def test_a_session_is_counted_and_shows_as_a_user_of_the_device():
    host = SimHost.fresh("h200")
    [uuid] = host.gpu_uuids()
    nvml = host.nvml(pid=77, command="dcgm", container="c0ffee")
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        nvml.nvmlDeviceGetCount()
    nvml.nvmlInit()
    nvml.nvmlInitWithFlags(0)
    nvml.nvmlShutdown()
    assert host.device_users(uuid) == (77,)
    assert host.describe(77) == ("dcgm", "c0ffee")
    nvml.nvmlShutdown()
    assert host.device_users(uuid) == ()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        nvml.nvmlShutdown()


def test_a_dead_processs_sessions_are_closed_for_it():
    host, nvml, _ = booted()
    host.nvml(pid=5).nvmlInit()
    host.close_sessions()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        nvml.nvmlDeviceGetCount()
    assert host.device_users(host.gpu_uuids()[0]) == (5,)
    host.close_sessions(5)
    host.reset(host.gpu_uuids()[0])


def test_a_handle_of_another_session_means_nothing():
    host, _, gpu = booted()
    other = host.nvml()
    other.nvmlInit()
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        other.nvmlDeviceGetUUID(gpu)


def test_calls_are_logged_with_who_on_what_and_how_it_ended():
    host, nvml, gpu = booted("2xa100-40gb")
    host.nvml(pid=5).nvmlInit()
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        nvml.nvmlDeviceCreateGpuInstance(gpu, 1)
    named = [(c.client, c.name, c.gpu, c.outcome) for c in host.calls]
    assert named[-2] == (5, "nvmlInit", None, "ok")
    assert named[-1][1:] == ("nvmlDeviceCreateGpuInstance", 0, "InvalidArgument")
    assert {c.gpu for c in host.calls} == {None, 0}


# ---- GPUs come and go


def test_a_lost_gpu_answers_nothing_else_until_it_is_back():
    host, nvml, gpu = booted("2xa100-40gb")
    host.lose_gpu(0)
    for refused in (
        lambda: nvml.nvmlDeviceGetMigMode(gpu),
        lambda: nvml.nvmlDeviceGetHandleByIndex(0),
        lambda: nvml.nvmlDeviceGetHandleByUUID(host.gpu_uuids()[0]),
    ):
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            refused()
    assert nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByIndex(1)) == [0, 0]
    host.find_gpu(0)
    assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]


def test_a_swapped_board_is_another_gpu_and_indices_can_change():
    host, nvml, gpu = booted("2xa100-40gb,h200")
    old = host.gpu_uuids()
    fresh = host.swap_gpu(0)
    assert fresh not in old
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        nvml.nvmlDeviceGetUUID(gpu)
    assert nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByIndex(0)) == [0, 0]
    host.swap_indices(1, 2)
    assert host.gpu_uuids() == (fresh, old[2], old[1])


def test_a_mode_change_that_never_takes_survives_reset_and_reboot():
    host, nvml, gpu = booted()
    host.switch("mode_change_never_takes", True)
    assert nvml.nvmlDeviceSetMigMode(gpu, 0) == pynvml.NVML_SUCCESS
    assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 0]
    nvml.nvmlShutdown()
    host.reset(host.gpu_uuids()[0])
    host.reboot()
    nvml.nvmlInit()
    assert nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByIndex(0))[0] == 1


def test_an_ampere_gpu_that_cannot_be_reset_alone_stays_pending():
    host = SimHost.fresh("2xa100-40gb", nvlink_group="bridge")
    nvml = host.nvml()
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_ERROR_IN_USE
    host.switch("nvswitch", True)
    assert nvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_SUCCESS
    assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]


@pytest.mark.parametrize(("switch", "after"), [(False, [1, 1]), (True, [0, 0])])
def test_whether_a_reset_ends_the_mode_on_hopper_is_a_switch(switch, after):
    host, nvml, _ = booted("h200", reset_loses_mode=switch)
    nvml.nvmlShutdown()
    host.reset(host.gpu_uuids()[0])
    nvml.nvmlInit()
    assert nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByIndex(0)) == after


def test_a_busy_hopper_gpu_may_refuse_the_mode_by_a_switch():
    host = SimHost.fresh("h200", busy_resetless_mode="in-use")
    nvml = host.nvml()
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    host.start_process(0)
    assert nvml.nvmlDeviceSetMigMode(gpu, 1) == pynvml.NVML_ERROR_IN_USE
    assert nvml.nvmlDeviceGetMigMode(gpu) == [0, 0]


def test_health_shows_in_the_fields():
    host, nvml, gpu = booted("h200", recovery_action=2)
    wanted = [
        pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED,
        pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
        (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 0),
    ]
    fields = nvml.nvmlDeviceGetFieldValues(gpu, wanted)
    assert [(f.nvmlReturn, f.value.uiVal) for f in fields] == [(0, 1), (0, 2), (3, 0)]
    host.switch("remap_failure", True)
    assert nvml.nvmlDeviceGetRemappedRows(gpu) == (0, 1, 0, 1)


# ---- switches and placement


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("placment", "first-fit", "did you mean placement"),
        ("placement", "random", "takes least-loss or first-fit"),
        ("vm", 1, "takes a bool"),
        ("enum_end", "10", "takes a int"),
    ],
)
def test_a_wrong_switch_says_what_would_be_right(name, value, says):
    with pytest.raises(SimulationError, match=says):
        SimHost.fresh("h200", **{name: value})


@pytest.mark.parametrize(
    ("policy", "starts"),
    [
        ("least-loss", [6, 4, 0]),
        ("first-fit", [0, 1, 2, 4]),
        ("highest", [6, 5, 2]),
        ("mixed-high", [6, 5, 0]),
        ("adversarial", [0, 4, 2]),
    ],
)
def test_small_first_lands_where_the_policy_puts_it(policy, starts):
    """1g, 1g, 2g, 3g (B01): only first-fit has a slot left for the 3g."""
    _, nvml, gpu = booted(placement=policy)
    got = []
    for profile_id in (ONE_G, ONE_G, TWO_G, THREE_G):
        try:
            got.append(nvml.nvmlGpuInstanceGetInfo(nvml.nvmlDeviceCreateGpuInstance(gpu, profile_id)).placement.start)
        except pynvml.NVMLError_InsufficientResources:
            break
    assert got == starts


@pytest.mark.parametrize("policy", PLACEMENTS)
def test_explicit_placements_make_the_layout_under_every_policy(policy):
    _, nvml, gpu = booted(placement=policy)
    for profile_id, start, size in ((ONE_G, 3, 1), (ONE_G, 2, 1), (TWO_G, 0, 2), (THREE_G, 4, 4)):
        create(nvml, gpu, profile_id, start, size)


def test_what_the_fake_lacks_is_said_and_what_is_pynvmls_is_there():
    nvml = SimHost.fresh("h200").nvml()
    assert nvml.NVML_ERROR_IN_USE == 19
    assert nvml.NVMLError_InUse is pynvml.NVMLError_InUse
    assert nvml.nvmlPciInfo_t is pynvml.nvmlPciInfo_t
    with pytest.raises(AttributeError, match="simulated NVML has no nvmlDeviceSetPowerManagementLimit"):
        _ = nvml.nvmlDeviceSetPowerManagementLimit
    with pytest.raises(AttributeError, match="neither"):
        _ = nvml.nothing


def test_too_small_an_array_is_the_callers_bug():
    _, nvml, gpu = booted()
    for start in (0, 4):
        create(nvml, gpu, THREE_G, start, 4)
    with pytest.raises(SimulationError, match="past its end"):
        nvml.nvmlDeviceGetGpuInstances(gpu, THREE_G, (pynvml.c_nvmlGpuInstance_t * 1)(), byref(pynvml.c_uint()))


# ---- any sequence of calls keeps the machine legal, and JSON keeps the machine


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_called_the_machine_stays_legal_and_round_trips(data):
    spec = data.draw(st.sampled_from(["a100-40gb", "a30", "h200", "rtx-pro-6000-blackwell", "b300"]))
    host, nvml, gpu = booted(
        spec, placement=data.draw(st.sampled_from(PLACEMENTS)), swapped_halves=data.draw(st.booleans())
    )
    model = host._core.offer(host.snapshot().gpus[0])
    by_id = model.by_id()
    for _ in range(data.draw(st.integers(0, 25))):
        held = host.snapshot().gpus[0].instances
        try:
            if held and data.draw(st.booleans()):
                victim = data.draw(st.sampled_from(held))
                nvml.nvmlGpuInstanceDestroy(nvml.nvmlDeviceGetGpuInstanceById(gpu, victim.gi_id))
            else:
                gi = nvml.nvmlDeviceCreateGpuInstance(gpu, data.draw(st.sampled_from(sorted(by_id))))
                if data.draw(st.booleans()):
                    nvml.nvmlGpuInstanceCreateComputeInstance(gi, data.draw(st.integers(0, 4)))
        except (pynvml.NVMLError_InsufficientResources, pynvml.NVMLError_NotSupported, pynvml.NVMLError_InUse):
            pass
        held = host.snapshot().gpus[0].instances
        slices = [s for i in held for s in range(i.start, i.start + i.size)]
        assert len(slices) == len(set(slices))
        assert len({i.gi_id for i in held}) == len({i.serial for i in held}) == len(held)
        assert sum(by_id[i.profile_id].slices for i in held) <= model.compute_slices
        if model.engine_pool:
            for kind, pool in enumerate(model.engine_pool):
                assert sum(by_id[i.profile_id].engines[kind] for i in held) <= pool
    machine = host.snapshot()
    assert from_json(json.loads(json.dumps(to_json(machine)))) == machine


def test_an_event_set_never_takes_the_place_of_another():
    nvml = SimHost.fresh("a100-40gb").nvml()
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    first, second = nvml.nvmlEventSetCreate(), nvml.nvmlEventSetCreate()
    nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, second)
    nvml.nvmlEventSetFree(first)
    third = nvml.nvmlEventSetCreate()
    assert bytes(third) not in (bytes(first), bytes(second))
    nvml.nvmlEventSetFree(third)
    with pytest.raises(nvml.NVMLError_Timeout):
        nvml.nvmlEventSetWait(second, 0)
