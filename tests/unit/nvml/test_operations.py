"""One operation at a time: found by profile and place, gone counts as destroyed, no handle survives a mode change."""

from __future__ import annotations

from dataclasses import replace

import pynvml
import pytest
from unit.nvml.scripted import A100, Compute, Gpu, Inline, Instance, Offer, Scripted

from migd.mig.geometry import GpuInstance
from migd.mig.operations import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstances,
    DestroyGpuInstance,
    ResetGpu,
    SetMode,
)
from migd.mig.profiles import Placement
from migd.nvml import (
    GoneError,
    GpuError,
    InUseError,
    LostError,
    NoPermissionError,
    NoRoomError,
    NotSupportedError,
    NvmlGpus,
    UnknownGpuError,
)

UUID = "GPU-a"
THREE = GpuInstance("3g.20gb", Placement(4, 4))
ONE = GpuInstance("1g.5gb", Placement(2, 1))
DESTROY_CI, DESTROY_GI = "nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy"
CREATE_GI, CREATE_CI = "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"
SET_MODE = "nvmlDeviceSetMigMode"


def node(*instances, **more):
    library = Scripted(Gpu(UUID, current=1, pending=1, instances=list(instances), **more))
    return library, NvmlGpus(library, Inline())


def three(*inside) -> Instance:
    return Instance(2, 9, 4, 4, list(inside))


def test_a_gpu_instance_is_created_where_it_was_asked_for_and_empty():
    library, gpus = node()
    gpus.perform(CreateGpuInstance(UUID, THREE))
    (made,) = library.gpus[0].instances
    assert (made.profile_id, made.start, made.size, made.inside) == (9, 4, 4, [])


def test_the_driver_is_never_left_to_choose_a_place():
    library, gpus = node()
    gpus.perform(CreateGpuInstance(UUID, ONE))
    assert "nvmlDeviceCreateGpuInstance" not in library.log
    assert gpus.look()[0].geometry == {ONE}


def test_the_compute_instance_spans_its_gpu_instance_and_its_profile_is_read_from_it():
    library, gpus = node(three())
    gpus.perform(CreateComputeInstance(UUID, THREE))
    assert gpus.look()[0].instances[0].whole
    assert library.gpus[0].instances[0].inside[0].profile_id == 2


def test_the_compute_profile_is_not_guessed_where_ids_are_unusual():
    odd = Offer(5, 40, "MIG 4g.20gb", 4, 4, (0,), compute=((1, 1), (6, 4), (8, 4)))
    library, gpus = node(Instance(1, 40, 0, 4), offers=(odd,))
    gpus.perform(CreateComputeInstance(UUID, GpuInstance("4g.20gb", Placement(0, 4))))
    assert library.gpus[0].instances[0].inside[0].profile_id == 6


def test_no_compute_profile_that_spans_the_instance_is_said_in_words():
    narrow = Offer(2, 9, "MIG 3g.20gb", 3, 4, (0, 4), compute=((0, 1),))
    _, gpus = node(three(), offers=(narrow,))
    with pytest.raises(NotSupportedError, match=r"no compute instance spans all 3 slices of a 3g\.20gb"):
        gpus.perform(CreateComputeInstance(UUID, THREE))


def test_all_compute_instances_of_one_gpu_instance_are_destroyed_and_no_others():
    other = Instance(1, 9, 0, 4, [Compute(0, 2, "MIG-1-0")])
    library, gpus = node(three(Compute(0, 0, "MIG-2-0"), Compute(1, 1, "MIG-2-1")), other)
    gpus.perform(DestroyComputeInstances(UUID, THREE))
    assert [len(i.inside) for i in library.gpus[0].instances] == [0, 1]


def test_an_instance_is_found_by_its_place_and_not_by_an_id_it_had():
    library, gpus = node(Instance(2, 19, 2, 1), Instance(9, 19, 5, 1))
    gpus.look()
    first, second = library.gpus[0].instances
    first.gi_id, second.gi_id = second.gi_id, first.gi_id  # ids are reused at once and prove nothing
    gpus.perform(DestroyGpuInstance(UUID, ONE))
    assert [i.start for i in library.gpus[0].instances] == [5]


def test_another_profile_at_the_same_start_is_not_it():
    library, gpus = node(Instance(3, 14, 2, 2))
    gpus.perform(DestroyGpuInstance(UUID, ONE))
    assert DESTROY_GI not in library.log
    assert len(library.gpus[0].instances) == 1


def test_another_profile_at_the_same_place_is_not_it_either():
    library, gpus = node(Instance(7, 20, 2, 1), lists_all=True)
    gpus.perform(DestroyGpuInstance(UUID, ONE))
    assert len(library.gpus[0].instances) == 1


def test_compute_profiles_are_read_again_after_another_program_changed_the_mode():
    library, gpus = node(three())
    gpus.look()
    gpu = library.gpus[0]
    gpu.current = 0
    gpus.look()
    gpu.current, gpu.offers = 1, (replace(A100[3], compute=((7, 3),)),)
    gpus.perform(CreateComputeInstance(UUID, THREE))
    assert gpu.instances[0].inside[0].profile_id == 7


def test_destroying_twice_succeeds_twice():
    library, gpus = node(three(Compute(0, 2, "MIG-2-0")))
    for _ in range(2):
        gpus.perform(DestroyComputeInstances(UUID, THREE))
    for _ in range(2):
        gpus.perform(DestroyGpuInstance(UUID, THREE))
    gpus.perform(DestroyComputeInstances(UUID, THREE))
    assert library.gpus[0].instances == []
    assert (library.calls(DESTROY_CI), library.calls(DESTROY_GI)) == (1, 1)


@pytest.mark.parametrize("code", [2, 3, 6])
@pytest.mark.parametrize(
    ("operation", "call"),
    [(DestroyComputeInstances(UUID, THREE), DESTROY_CI), (DestroyGpuInstance(UUID, THREE), DESTROY_GI)],
)
def test_what_is_gone_when_it_is_to_be_destroyed_counts_as_destroyed(operation, call, code):
    library, gpus = node(three(Compute(0, 2, "MIG-2-0")))
    library.always[call] = code
    gpus.perform(operation)
    assert library.calls(call) == 1


@pytest.mark.parametrize("operation", [DestroyComputeInstances(UUID, THREE), DestroyGpuInstance(UUID, THREE)])
def test_with_mig_off_everything_is_gone(operation):
    library = Scripted(Gpu(UUID, lists_while_off=False))
    NvmlGpus(library, Inline()).perform(operation)
    assert not {DESTROY_CI, DESTROY_GI} & set(library.log)


def test_mig_switched_off_while_the_instance_is_looked_for_means_gone():
    library, gpus = node(three())

    def switched_off() -> None:
        library.gpus[0].current, library.gpus[0].instances = 0, []

    library.before["nvmlDeviceGetGpuInstances"] = switched_off
    gpus.perform(DestroyGpuInstance(UUID, THREE))
    assert DESTROY_GI not in library.log


@pytest.mark.parametrize(
    ("operation", "call"),
    [(DestroyComputeInstances(UUID, THREE), DESTROY_CI), (DestroyGpuInstance(UUID, THREE), DESTROY_GI)],
)
@pytest.mark.parametrize(
    ("code", "kind"),
    [(19, InUseError), (4, NoPermissionError), (15, LostError), (13, NotSupportedError), (999, GpuError)],
)
def test_a_refused_destroy_is_never_taken_for_gone(operation, call, code, kind):
    library, gpus = node(three(Compute(0, 2, "MIG-2-0")))
    library.always[call] = code
    with pytest.raises(kind) as caught:
        gpus.perform(operation)
    assert (type(caught.value), caught.value.call, caught.value.gpu_uuid) == (kind, call, UUID)


def test_a_gpu_instance_is_not_destroyed_over_its_compute_instance():
    library, gpus = node(three(Compute(0, 2, "MIG-2-0")))
    with pytest.raises(InUseError, match="a compute instance still exists"):
        gpus.perform(DestroyGpuInstance(UUID, THREE))
    assert library.calls(DESTROY_CI) == 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (23, NoRoomError),
        (19, InUseError),
        (2, NotSupportedError),
        (3, NotSupportedError),
        (4, NoPermissionError),
        (15, LostError),
        (999, GpuError),
    ],
)
def test_a_refused_creation_says_what_can_be_done(code, kind):
    library, gpus = node()
    library.always[CREATE_GI] = code
    with pytest.raises(kind) as caught:
        gpus.perform(CreateGpuInstance(UUID, THREE))
    assert type(caught.value) is kind


def test_an_occupied_place_is_no_room():
    _, gpus = node(three())
    with pytest.raises(NoRoomError):
        gpus.perform(CreateGpuInstance(UUID, THREE))


def test_a_busy_gpu_refuses_its_first_instance_in_words():
    library, gpus = node()
    library.always[CREATE_GI] = pynvml.NVML_ERROR_IN_USE
    with pytest.raises(InUseError, match="the first GPU instance needs a GPU that no process"):
        gpus.perform(CreateGpuInstance(UUID, THREE))


def test_creation_with_mig_off_is_not_supported_and_says_why():
    for operation in (CreateGpuInstance(UUID, THREE), CreateComputeInstance(UUID, THREE)):
        with pytest.raises(NotSupportedError, match="MIG mode is off"):
            NvmlGpus(Scripted(Gpu(UUID)), Inline()).perform(operation)


def test_a_compute_instance_for_a_gpu_instance_that_is_not_there_is_gone():
    library, gpus = node()
    with pytest.raises(GoneError, match=r"no GPU instance 3g\.20gb@4"):
        gpus.perform(CreateComputeInstance(UUID, THREE))
    assert CREATE_CI not in library.log


@pytest.mark.parametrize("operation", [CreateGpuInstance, DestroyGpuInstance])
def test_a_profile_that_this_board_lacks_names_those_it_has(operation):
    _, gpus = node()
    with pytest.raises(NotSupportedError, match=r"offers no 1g\.10gb; it offers 1g\.5gb, 1g\.5gb\+me"):
        gpus.perform(operation(UUID, GpuInstance("1g.10gb", Placement(0, 1))))


@pytest.mark.parametrize("code", [2, 6])
@pytest.mark.parametrize(
    "operation",
    [
        SetMode(UUID, True),
        DestroyComputeInstances(UUID, THREE),
        DestroyGpuInstance(UUID, THREE),
        CreateGpuInstance(UUID, THREE),
        CreateComputeInstance(UUID, THREE),
    ],
)
def test_a_gpu_that_is_not_here_is_unknown_also_to_a_destroy(operation, code):
    library, gpus = node()
    library.always["nvmlDeviceGetHandleByUUID"] = code
    with pytest.raises(UnknownGpuError):
        gpus.perform(operation)


def test_a_lost_gpu_is_lost_to_a_destroy_too():
    library, gpus = node(three())
    library.gpus[0].lost = True
    with pytest.raises(LostError):
        gpus.perform(DestroyGpuInstance(UUID, THREE))


def test_a_driver_that_names_no_profiles_does_not_make_a_destroy_succeed():
    library, gpus = node(three())
    library.always["nvmlDeviceGetGpuInstanceProfileInfo"] = pynvml.NVML_ERROR_INVALID_ARGUMENT
    with pytest.raises(NotSupportedError, match="too old"):
        gpus.perform(DestroyGpuInstance(UUID, THREE))


def test_a_reset_is_not_done_here():
    library, gpus = node()
    with pytest.raises(ValueError, match="Reset port"):
        gpus.perform(ResetGpu(UUID))
    assert library.log == []


# The mode: a return code and an activation status, and both count.


@pytest.mark.parametrize("enable", [True, False])
def test_a_mode_change_that_takes_is_seen_by_the_next_look(enable):
    library = Scripted(Gpu(UUID, current=int(not enable), pending=int(not enable)))
    gpus = NvmlGpus(library, Inline())
    gpus.perform(SetMode(UUID, enable))
    assert gpus.look()[0].mig_on is enable


@pytest.mark.parametrize("status", [pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_NOT_SUPPORTED])
def test_a_reset_or_reboot_to_come_is_no_error_and_the_mode_is_pending(status):
    gpus = NvmlGpus(Scripted(Gpu(UUID, status=status)), Inline())
    gpus.perform(SetMode(UUID, True))
    mode = gpus.look()[0].mode
    assert (mode.current, mode.pending, mode.settled) == (False, True, False)


def test_a_change_that_says_success_and_does_not_take_is_left_to_the_look():
    gpus = NvmlGpus(Scripted(Gpu(UUID, effect=False)), Inline())
    gpus.perform(SetMode(UUID, True))
    assert not gpus.look()[0].mode.current


@pytest.mark.parametrize(
    ("code", "kind"),
    [(19, InUseError), (4, NoPermissionError), (15, LostError), (999, GpuError)],
)
def test_an_activation_status_is_an_error_by_itself(code, kind):
    gpus = NvmlGpus(Scripted(Gpu(UUID, status=code)), Inline())
    with pytest.raises(kind) as caught:
        gpus.perform(SetMode(UUID, True))
    assert (type(caught.value), caught.value.code) == (kind, code)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(19, InUseError), (3, NotSupportedError), (4, NoPermissionError), (2, GoneError), (15, LostError)],
)
def test_a_return_code_of_the_mode_change_is_an_error_of_its_own(code, kind):
    library = Scripted(Gpu(UUID))
    library.always[SET_MODE] = code
    with pytest.raises(kind) as caught:
        NvmlGpus(library, Inline()).perform(SetMode(UUID, True))
    assert type(caught.value) is kind


def test_reset_required_as_a_return_code_means_the_same_as_a_status():
    library = Scripted(Gpu(UUID))
    library.always[SET_MODE] = pynvml.NVML_ERROR_RESET_REQUIRED
    NvmlGpus(library, Inline()).perform(SetMode(UUID, True))
    assert library.calls(SET_MODE) == 1


def test_after_a_mode_change_renumbered_the_gpus_the_right_one_is_worked_on():
    library = Scripted(Gpu(UUID), Gpu("GPU-b", current=1, pending=1))
    gpus = NvmlGpus(library, Inline())
    gpus.look()
    gpus.perform(SetMode(UUID, True))  # which ends every handle
    library.gpus.reverse()
    gpus.perform(CreateGpuInstance(UUID, THREE))
    gpus.perform(CreateComputeInstance(UUID, THREE))
    assert {gpu.uuid: len(gpu.instances) for gpu in library.gpus} == {UUID: 1, "GPU-b": 0}
    assert [(g.index, g.uuid) for g in gpus.look()] == [(0, "GPU-b"), (1, UUID)]


def test_no_handle_outlives_a_call():
    library, gpus = node(three(Compute(0, 2, "MIG-2-0")))
    for operation in (
        DestroyComputeInstances(UUID, THREE),
        CreateComputeInstance(UUID, THREE),
        DestroyComputeInstances(UUID, THREE),
        DestroyGpuInstance(UUID, THREE),
        CreateGpuInstance(UUID, THREE),
    ):
        gpus.look()
        library.retire()
        gpus.perform(operation)
    assert gpus.look()[0].geometry == {THREE}


def test_operations_need_no_look_first():
    library, gpus = node()
    gpus.perform(CreateGpuInstance(UUID, THREE))
    assert len(library.gpus[0].instances) == 1
    assert gpus.look()[0].index == 0


def test_only_the_gpu_that_is_named_is_called():
    library = Scripted(Gpu(UUID), Gpu("GPU-b", lost=True))
    NvmlGpus(library, Inline()).perform(SetMode(UUID, True))
    assert library.calls("nvmlDeviceGetHandleByUUID") == 1
    assert library.calls(SET_MODE) == 1


def test_every_profile_and_place_of_the_board_can_be_made_and_unmade():
    library, gpus = node()
    for offer in A100:
        for start in offer.starts:
            instance = GpuInstance(offer.name.removeprefix("MIG "), Placement(start, offer.size))
            gpus.perform(CreateGpuInstance(UUID, instance))
            gpus.perform(CreateComputeInstance(UUID, instance))
            (seen,) = gpus.look()[0].instances
            assert (seen.instance, seen.whole) == (instance, True)
            gpus.perform(DestroyComputeInstances(UUID, instance))
            gpus.perform(DestroyGpuInstance(UUID, instance))
    assert library.gpus[0].instances == []
