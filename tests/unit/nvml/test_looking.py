"""What a look sees: instances with and without compute instances, lost GPUs, and races with other programs."""

from __future__ import annotations

import random
from dataclasses import replace

import pynvml
import pytest
from unit.nvml.scripted import A100, Compute, Gpu, Instance, Offer, cut, gpus_of, see, whole_1g

from migd.mig.geometry import GpuInstance
from migd.mig.observed import MigMode
from migd.mig.profiles import Placement
from migd.nvml import GpuError, LostError, NoPermissionError


def test_a_gpu_is_described_in_our_units_and_texts():
    seen = see(Gpu("GPU-a", name="NVIDIA A100-PCIE-40GB", pci_device_id=0x20F110DE, memory_mib=40960))
    assert (seen.index, seen.uuid, seen.model) == (0, "GPU-a", "NVIDIA A100-PCIE-40GB")
    assert (seen.pci_device_id, seen.memory_mib) == ("0x20F110DE", 40960)
    assert seen.mode == MigMode(current=False, pending=False)


def test_a_short_device_id_keeps_its_zeros():
    assert see(Gpu("GPU-a", pci_device_id=0x0ABC10DE)).pci_device_id == "0x0ABC10DE"


def test_a_gpu_without_mig_has_no_mode_and_no_board():
    seen = see(Gpu("GPU-a", capable=False))
    assert (seen.mode, seen.board, seen.instances) == (None, None, ())


def test_a_pending_mode_is_seen_apart_from_the_current_one():
    assert see(Gpu("GPU-a", current=0, pending=1)).mode == MigMode(current=False, pending=True)


def test_instances_come_in_order_of_start_and_with_the_place_that_nvml_reports():
    # A board with exchanged halves: ids do not follow the starts.
    seen = see(cut(whole_1g(6, gi_id=9), whole_1g(0, gi_id=11), Instance(2, 9, 2, 4)))
    assert [(s.instance.placement, s.gi_id) for s in seen.instances] == [
        (Placement(0, 1), 11),
        (Placement(2, 4), 2),
        (Placement(6, 1), 9),
    ]


def test_a_gpu_instance_without_compute_instance_is_found():
    (orphan,) = see(cut(Instance(2, 9, 4, 4))).instances
    assert orphan.instance == GpuInstance("3g.20gb", Placement(4, 4))
    assert orphan.compute_instances == ()
    assert not orphan.whole


def test_a_compute_instance_is_whole_only_where_it_spans_its_gpu_instance():
    full = Instance(1, 9, 0, 4, [Compute(0, 2, "MIG-1-0")])
    part = Instance(2, 9, 4, 4, [Compute(1, 0, "MIG-2-1"), Compute(0, 1, "MIG-2-0")])
    one, other = see(cut(full, part)).instances
    assert one.whole
    assert [(c.ci_id, c.whole, c.mig_uuid) for c in other.compute_instances] == [
        (0, False, "MIG-2-0"),
        (1, False, "MIG-2-1"),
    ]
    assert not other.whole


def test_a_mig_uuid_is_found_by_walking_where_the_driver_gives_the_parent_instead():
    library, gpus = gpus_of(cut(whole_1g(0), whole_1g(3), device_is_mig=False))
    assert [s.compute_instances[0].mig_uuid for s in gpus.look()[0].instances] == ["MIG-7-0", "MIG-10-0"]
    assert library.calls("nvmlDeviceGetMaxMigDeviceCount") == 1  # one walk serves all


def test_a_mig_uuid_that_nobody_tells_is_none_and_the_instance_is_still_seen():
    library, gpus = gpus_of(cut(whole_1g(0), device_is_mig=False))
    library.always["nvmlDeviceGetMigDeviceHandleByIndex"] = pynvml.NVML_ERROR_NOT_FOUND
    (seen,) = gpus.look()[0].instances
    assert seen.compute_instances[0].mig_uuid is None
    assert seen.whole


@pytest.mark.parametrize("count", [0, 1])
def test_an_a30_that_counts_too_few_instances_still_shows_them_all(count):
    a30 = (Offer(0, 14, "MIG 1g.6gb", 1, 1, (0, 1, 2, 3), instance_count=count),)
    instances = [Instance(3 + k, 14, k, 1) for k in range(4)]
    assert len(see(cut(*instances, offers=a30)).instances) == 4


def test_an_instance_counts_once_and_under_its_own_profile_whatever_list_it_is_in():
    seen = see(cut(Instance(7, 20, 0, 1), Instance(8, 19, 1, 1), lists_all=True))
    assert [(s.instance.profile, s.gi_id) for s in seen.instances] == [("1g.5gb+me", 7), ("1g.5gb", 8)]


def test_memory_that_may_not_be_read_is_zero_and_not_an_error():
    library, gpus = gpus_of(cut())
    library.always["nvmlDeviceGetMemoryInfo"] = pynvml.NVML_ERROR_NO_PERMISSION
    assert gpus.look()[0].memory_mib == 0


def test_gpus_come_by_index():
    _, gpus = gpus_of(*(Gpu(f"GPU-{name}") for name in "dbca"))
    assert [(g.index, g.uuid) for g in gpus.look()] == [(0, "GPU-d"), (1, "GPU-b"), (2, "GPU-c"), (3, "GPU-a")]


def test_a_lost_gpu_is_told_by_its_last_uuid_and_the_others_still_read():
    library, gpus = gpus_of(Gpu("GPU-a"), cut(whole_1g(0)), Gpu("GPU-c"))
    library.gpus[1].uuid = "GPU-b"
    gpus.look()
    library.gpus[1].lost = True
    a, b, c = gpus.look()
    assert (b.uuid, b.index, b.lost, b.instances, b.board, b.mode) == ("GPU-b", 1, True, (), None, None)
    assert (a.lost, c.lost, c.uuid) == (False, False, "GPU-c")


def test_a_gpu_lost_before_it_was_ever_read_is_told_by_its_index():
    _, gpus = gpus_of(Gpu("GPU-a"), Gpu("GPU-b", lost=True), Gpu("GPU-c", lost=True))
    assert [(g.uuid, g.lost) for g in gpus.look()] == [("GPU-a", False), ("lost:1", True), ("lost:2", True)]


def test_a_gpu_that_is_lost_while_it_is_read_keeps_its_uuid():
    library, gpus = gpus_of(Gpu("GPU-a"), Gpu("GPU-b"))
    library.fail["nvmlDeviceGetMigMode"] = [None, pynvml.NVML_ERROR_GPU_IS_LOST]
    assert [(g.uuid, g.lost) for g in gpus.look()] == [("GPU-a", False), ("GPU-b", True)]


def test_a_gpu_that_a_new_session_no_longer_counts_is_lost():
    library, gpus = gpus_of(Gpu("GPU-a"), Gpu("GPU-b"), Gpu("GPU-c"))
    gpus.look()
    gpus.close()
    del library.gpus[1]
    assert [(g.uuid, g.index, g.lost) for g in gpus.look()] == [
        ("GPU-a", 0, False),
        ("GPU-c", 1, False),
        ("GPU-b", 1, True),
    ]


def test_a_gpu_renumbered_and_then_lost_is_one_lost_gpu_at_its_new_index():
    library, gpus = gpus_of(Gpu("GPU-a"), Gpu("GPU-b"))
    gpus.look()
    library.gpus.reverse()
    library.gpus[1].lost = True
    assert [(g.uuid, g.index, g.lost) for g in gpus.look()] == [("GPU-b", 0, False), ("GPU-a", 1, True)]


def test_lost_gpus_that_cannot_be_told_apart_are_all_reported_without_a_guess():
    library, gpus = gpus_of(Gpu("GPU-a"), Gpu("GPU-b"), Gpu("GPU-c"), Gpu("GPU-d"))
    gpus.look()
    library.gpus = [library.gpus[2], library.gpus[3], Gpu("GPU-a", lost=True), Gpu("GPU-b", lost=True)]
    assert [(g.uuid, g.index) for g in gpus.look() if g.lost] == [
        ("GPU-a", 0),
        ("GPU-b", 1),
        ("lost:2", 2),
        ("lost:3", 3),
    ]


def test_a_lost_gpu_has_the_index_it_had_last():
    library, gpus = gpus_of(Gpu("GPU-a"), Gpu("GPU-b"))
    gpus.look()
    library.gpus.reverse()
    gpus.look()
    gpus.close()
    del library.gpus[1]
    assert [(g.uuid, g.index) for g in gpus.look()] == [("GPU-b", 0), ("GPU-a", 1)]


def test_a_lost_gpu_that_comes_back_is_well_again():
    library, gpus = gpus_of(Gpu("GPU-a"))
    gpus.look()
    library.gpus[0].lost = True
    assert gpus.look()[0].lost
    library.gpus[0].lost = False
    assert not gpus.look()[0].lost


@pytest.mark.parametrize("call", ["nvmlDeviceGetGpuInstances", "nvmlDeviceGetHandleByIndex"])
def test_denied_reads_are_told_and_not_taken_for_an_empty_gpu(call):
    library, gpus = gpus_of(cut(whole_1g(0)))
    library.always[call] = pynvml.NVML_ERROR_NO_PERMISSION
    with pytest.raises(NoPermissionError):
        gpus.look()


def test_gpus_that_cannot_be_counted_are_an_error_and_the_next_look_is_whole():
    library, gpus = gpus_of(cut(whole_1g(0)))
    library.fail["nvmlDeviceGetCount"] = [pynvml.NVML_ERROR_UNKNOWN]
    with pytest.raises(GpuError, match="nvmlDeviceGetCount"):
        gpus.look()
    assert gpus.look()[0].instances[0].whole


@pytest.mark.parametrize(
    "call",
    [
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetGpuInstances",
        "nvmlGpuInstanceGetInfo",
        "nvmlGpuInstanceGetComputeInstances",
        "nvmlComputeInstanceGetInfo",
        "nvmlDeviceGetName",
    ],
)
def test_a_gpu_that_answers_with_an_unknown_error_is_unreadable_and_hides_no_other(call):
    library, gpus = gpus_of(cut(whole_1g(0)), Gpu("GPU-b"))
    library.fail[call] = [pynvml.NVML_ERROR_UNKNOWN]
    broken, other = gpus.look()
    assert (broken.index, broken.mode, broken.board, broken.instances) == (0, None, None, ())
    assert call in broken.unreadable
    assert broken.out_of_reach == broken.unreadable
    assert other.out_of_reach == ""
    assert other.board is not None
    assert gpus.look()[0].instances[0].whole


def test_an_instance_that_another_program_destroys_meanwhile_is_left_out():
    library, gpus = gpus_of(cut(whole_1g(0), whole_1g(1)))

    def destroyed() -> None:
        del library.gpus[0].instances[0]

    library.before["nvmlGpuInstanceGetInfo"] = destroyed
    assert [s.gi_id for s in gpus.look()[0].instances] == [8]
    library.before["nvmlGpuInstanceGetComputeInstances"] = destroyed
    assert gpus.look()[0].instances == ()


def test_a_compute_instance_that_another_program_destroys_meanwhile_is_left_out():
    library, gpus = gpus_of(cut(whole_1g(0)))
    library.before["nvmlComputeInstanceGetInfo"] = lambda: library.gpus[0].instances[0].inside.clear()
    (seen,) = gpus.look()[0].instances
    assert seen.compute_instances == ()


def test_an_instance_that_exists_is_never_left_out_for_an_odd_answer():
    library, gpus = gpus_of(cut(whole_1g(0)))
    library.always["nvmlGpuInstanceGetComputeInstances"] = pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert "nvmlGpuInstanceGetComputeInstances" in gpus.look()[0].unreadable


def test_a_compute_profile_list_that_fails_at_once_is_not_taken_for_an_empty_one():
    library, gpus = gpus_of(cut(whole_1g(0)))
    library.fail["nvmlGpuInstanceGetComputeInstanceProfileInfo"] = [2, 2, 2]
    assert gpus.look()[0].unreadable
    assert gpus.look()[0].instances[0].whole


def test_what_was_remembered_of_a_gpu_that_changed_under_a_look_is_read_again():
    library, gpus = gpus_of(cut(whole_1g(0)))
    gpus.look()
    library.gpus[0].offers = tuple(replace(o, name=o.name.replace("5gb", "6gb")) for o in A100)
    library.fail["nvmlDeviceGetGpuInstances"] = [pynvml.NVML_ERROR_INVALID_ARGUMENT]
    assert gpus.look()[0].instances[0].instance.profile == "1g.6gb"


def test_handles_that_end_during_a_look_are_acquired_again():
    library, gpus = gpus_of(cut(whole_1g(0)))

    def switched_off() -> None:
        gpu = library.gpus[0]
        gpu.current = gpu.pending = 0
        gpu.instances = []
        library.retire()

    library.before["nvmlDeviceGetGpuInstances"] = switched_off
    seen = gpus.look()[0]
    assert (seen.mig_on, seen.instances) == (False, ())


def test_mig_switched_off_between_two_reads_is_seen_as_off():
    library, gpus = gpus_of(cut(whole_1g(0)))

    def switched_off() -> None:
        gpu = library.gpus[0]
        gpu.current, gpu.pending, gpu.instances = 0, 0, []

    library.before["nvmlDeviceGetGpuInstances"] = switched_off
    assert gpus.look()[0].mode == MigMode(current=False, pending=False)


def test_gpus_renumbered_during_a_look_are_looked_at_again():
    library, gpus = gpus_of(Gpu("GPU-a"), Gpu("GPU-b"))
    gpus.look()
    library.before["nvmlDeviceGetMigMode"] = library.gpus.reverse
    assert [(g.index, g.uuid) for g in gpus.look()] == [(0, "GPU-b"), (1, "GPU-a")]


def test_gpus_renumbered_between_looks_keep_their_own_facts():
    library, gpus = gpus_of(Gpu("GPU-a", name="A"), Gpu("GPU-b", name="B", capable=False))
    gpus.look()
    library.gpus.reverse()
    assert [(g.uuid, g.model, g.mode is None) for g in gpus.look()] == [
        ("GPU-b", "B", True),
        ("GPU-a", "A", False),
    ]


def test_a_look_is_the_same_in_whatever_order_the_driver_lists():
    instances = [whole_1g(k) for k in range(7)]
    expected = see(cut(*instances))
    for seed in range(5):
        random.Random(seed).shuffle(instances)
        assert see(cut(*instances, offers=tuple(reversed(A100)))) == expected


def test_a_second_look_asks_only_for_what_may_have_changed():
    library, gpus = gpus_of(cut(*(whole_1g(k) for k in range(7))))
    gpus.look()
    library.log.clear()
    gpus.look()
    once = {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMigMode", "nvmlDeviceGetFieldValues"}
    assert all(library.calls(name) == 1 for name in once)
    assert library.calls("nvmlDeviceGetGpuInstances") == len(A100)
    per_instance = 4  # its info, its compute instances, the info and the UUID of the one it has
    assert len(library.log) == len(once) + 1 + 3 + len(A100) + 7 * per_instance


def test_losing_the_gpu_outside_a_look_is_an_error_of_its_own():
    library, gpus = gpus_of(cut(whole_1g(0)))
    library.always["nvmlDeviceGetCount"] = pynvml.NVML_ERROR_GPU_IS_LOST
    with pytest.raises(LostError):
        gpus.look()
