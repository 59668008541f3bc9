"""Who holds a GPU and its instances, and whether it may be worked on, as far as NVML tells."""

from __future__ import annotations

import pynvml
import pytest
from unit.nvml.scripted import Gpu, cut, gpus_of, see, whole_1g

from migd.mig.observed import Holder
from migd.nvml import DriverError

ALL = 0xFFFFFFFF
UNKNOWN = Holder(None)


def test_processes_hold_the_instance_they_run_in_and_no_other():
    gpu = cut(whole_1g(0), whole_1g(1), compute_processes=[(120, 8), (77, 8), (120, 8)])
    idle, busy = see(gpu).instances
    assert (idle.in_use, idle.holders) == (False, ())
    assert (busy.in_use, busy.holders) == (True, (Holder(77), Holder(120)))
    assert not see(gpu).in_use


def test_graphics_processes_hold_as_well():
    seen = see(cut(whole_1g(0), graphics_processes=[(5, 7)]))
    assert seen.instances[0].holders == (Holder(5),)


@pytest.mark.parametrize("gi_id", [ALL, 5])
def test_processes_outside_every_instance_hold_the_gpu(gi_id):
    seen = see(cut(whole_1g(0), compute_processes=[(9, gi_id)]))
    assert (seen.in_use, seen.holders) == (True, (Holder(9),))
    assert not seen.instances[0].in_use


def test_processes_on_a_gpu_without_mig_hold_the_gpu():
    seen = see(Gpu("GPU-a", compute_processes=[(9, ALL)]))
    assert (seen.in_use, seen.holders) == (True, (Holder(9),))


def test_a_process_that_has_no_pid_here_is_an_unknown_client():
    seen = see(cut(whole_1g(0), compute_processes=[(0, 7), (4, 7)]))
    assert seen.instances[0].holders == (Holder(4), UNKNOWN)


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_UNKNOWN, 3])
def test_where_processes_cannot_be_listed_everything_counts_as_in_use(code):
    library, gpus = gpus_of(cut(whole_1g(0), whole_1g(1)))
    library.always["nvmlDeviceGetComputeRunningProcesses"] = code
    seen = gpus.look()[0]
    assert (seen.in_use, seen.holders) == (True, (UNKNOWN,))
    assert [(s.in_use, s.holders) for s in seen.instances] == [(True, (UNKNOWN,))] * 2


@pytest.mark.parametrize("call", ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"])
def test_a_gpu_that_is_lost_under_the_process_query_is_lost_and_not_in_use(call):
    library, gpus = gpus_of(cut(whole_1g(0)))
    library.always[call] = pynvml.NVML_ERROR_GPU_IS_LOST
    (seen,) = gpus.look()
    assert (seen.lost, seen.in_use) == (True, False)


def test_a_driver_that_goes_under_the_process_query_is_a_driver_error():
    library, gpus = gpus_of(cut(whole_1g(0)))
    library.fail["nvmlDeviceGetComputeRunningProcesses"] = [pynvml.NVML_ERROR_UNINITIALIZED]
    with pytest.raises(DriverError):
        gpus.look()
    assert library.open == 0


def test_a_gpu_that_is_lost_in_the_answer_of_one_field_is_lost():
    assert see(Gpu("GPU-a", field_errors={230: pynvml.NVML_ERROR_GPU_IS_LOST})).lost


def test_a_gpu_without_mig_is_not_resetless_whatever_its_age():
    assert not see(Gpu("GPU-a", capable=False, fields={184: 1})).resetless


def test_a_new_driver_may_change_the_mode_without_a_reset():
    library, gpus = gpus_of(Gpu("GPU-a"))
    assert not gpus.look()[0].resetless
    library.gpus[0].fields[184] = 1
    gpus.close()
    assert gpus.look()[0].resetless


def test_a_refused_graphics_query_makes_everything_in_use_and_an_unsupported_one_nothing():
    library, gpus = gpus_of(cut(whole_1g(0), compute_processes=[(3, 7)]))
    library.fail["nvmlDeviceGetGraphicsRunningProcesses"] = [pynvml.NVML_ERROR_UNKNOWN, 3]
    seen = gpus.look()[0]
    assert (seen.instances[0].holders, seen.holders) == ((Holder(3), UNKNOWN), (UNKNOWN,))
    seen = gpus.look()[0]
    assert (seen.instances[0].holders, seen.holders) == ((Holder(3),), ())


@pytest.mark.parametrize(
    ("fields", "architecture", "resetless"),
    [
        ({184: 1}, pynvml.NVML_DEVICE_ARCH_AMPERE, True),
        ({184: 0}, pynvml.NVML_DEVICE_ARCH_HOPPER, False),
        ({}, pynvml.NVML_DEVICE_ARCH_AMPERE, False),
        ({}, pynvml.NVML_DEVICE_ARCH_HOPPER, True),
        ({}, pynvml.NVML_DEVICE_ARCH_BLACKWELL, True),
        ({}, pynvml.NVML_DEVICE_ARCH_UNKNOWN, False),
    ],
)
def test_resetless_is_what_the_driver_says_and_else_follows_the_architecture(fields, architecture, resetless):
    assert see(Gpu("GPU-a", fields=fields, architecture=architecture)).resetless is resetless


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (0, ""),
        (1, "a GPU reset"),
        (2, "reboot of the node"),
        (3, "peer-to-peer"),
        (4, "drained"),
        (5, "IMEX"),
        (6, "bus"),
        (7, "whole system"),
        (8, "recovery action 8"),
    ],
)
def test_the_recovery_action_is_said_in_words(action, words):
    trouble = see(cut(whole_1g(0), fields={230: action})).trouble
    assert (words in trouble) if words else (trouble == "")


@pytest.mark.parametrize(
    ("rows", "words"), [((0, 0, 1, 0), "pending"), ((0, 0, 1, 1), "has failed"), ((4, 2, 0, 0), "")]
)
def test_remapped_rows_are_remembered_over_the_first_instance(rows, words):
    library, gpus = gpus_of(cut(rows=rows))
    before = gpus.look()[0].trouble
    assert (words in before) if words else (before == "")
    asked = library.calls("nvmlDeviceGetRemappedRows")
    library.gpus[0].instances.append(whole_1g(0))
    assert gpus.look()[0].trouble == before
    assert library.calls("nvmlDeviceGetRemappedRows") == asked


def test_remapped_rows_refused_for_an_instance_that_just_came_are_remembered():
    library, gpus = gpus_of(cut(rows=(0, 0, 1, 0)))
    before = gpus.look()[0].trouble
    library.before["nvmlDeviceGetRemappedRows"] = lambda: library.gpus[0].instances.append(whole_1g(0))
    assert gpus.look()[0].trouble == before


def test_remapped_rows_are_forgotten_once_the_driver_says_all_is_well():
    library, gpus = gpus_of(Gpu("GPU-a", rows=(0, 0, 1, 0)))
    assert gpus.look()[0].trouble
    library.gpus[0].rows = (0, 1, 0, 0)
    assert gpus.look()[0].trouble == ""


def test_both_troubles_are_told():
    trouble = see(Gpu("GPU-a", rows=(0, 0, 0, 1), fields={230: 1})).trouble
    assert "a GPU reset" in trouble
    assert "replaced" in trouble


def test_a_gpu_too_old_for_row_remapping_is_not_in_trouble():
    library, gpus = gpus_of(Gpu("GPU-a"))
    library.always["nvmlDeviceGetRemappedRows"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert gpus.look()[0].trouble == ""
