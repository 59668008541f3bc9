"""Every NVML code becomes an error named by what the caller can do. What the calls do with them is tested elsewhere."""

from __future__ import annotations

import pynvml
import pytest
from unit.nvml.scripted import Gpu, Scripted

from migd.nvml import (
    DriverError,
    GoneError,
    GpuError,
    HungError,
    InUseError,
    LostError,
    NoDriverError,
    NoPermissionError,
    NoRoomError,
    NotSupportedError,
    UnknownGpuError,
)
from migd.nvml.calls import Calls
from migd.nvml.errors import VersionError, error_for, text_of

KINDS = {
    pynvml.NVML_ERROR_UNINITIALIZED: DriverError,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: GoneError,
    pynvml.NVML_ERROR_NOT_SUPPORTED: NotSupportedError,
    pynvml.NVML_ERROR_NO_PERMISSION: NoPermissionError,
    pynvml.NVML_ERROR_NOT_FOUND: GoneError,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: DriverError,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: NoDriverError,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: NotSupportedError,
    pynvml.NVML_ERROR_GPU_IS_LOST: LostError,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: VersionError,
    pynvml.NVML_ERROR_IN_USE: InUseError,
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: NoRoomError,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: NotSupportedError,
    pynvml.NVML_ERROR_NOT_READY: DriverError,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: UnknownGpuError,
}
ALL_CODES = sorted(
    {v for k, v in vars(pynvml).items() if k.startswith("NVML_ERROR_") and isinstance(v, int)} | {31, 4242}
)


@pytest.mark.parametrize("code", ALL_CODES)
def test_every_code_of_any_call_becomes_the_error_for_it(code):
    library = Scripted(Gpu("GPU-a"))
    library.always["nvmlGpuInstanceDestroy"] = code
    with pytest.raises(GpuError) as caught:
        Calls(library)("nvmlGpuInstanceDestroy", "GPU-a", None)
    assert type(caught.value) is KINDS.get(code, GpuError)
    assert (caught.value.call, caught.value.gpu_uuid, caught.value.code) == ("nvmlGpuInstanceDestroy", "GPU-a", code)


def test_only_what_passes_by_itself_invites_a_retry():
    assert {kind for kind in (*KINDS.values(), HungError, GpuError) if kind.retry} == {
        InUseError,
        DriverError,
        VersionError,
    }


@pytest.mark.parametrize("code", ALL_CODES)
def test_a_message_is_made_without_asking_the_library(code, monkeypatch):
    def asked(*_: object) -> str:
        raise AssertionError("the library was asked for a text")

    monkeypatch.setattr(pynvml, "nvmlErrorString", asked)
    message = str(error_for("nvmlGpuInstanceDestroy", "GPU-a", code))
    assert message.startswith("nvmlGpuInstanceDestroy on GPU-a: ")
    assert f"(NVML code {code})" in message


def test_in_use_and_insufficient_resources_have_words_although_pynvml_has_none():
    assert text_of(pynvml.NVML_ERROR_IN_USE) == "in use by another client"
    assert text_of(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES) == "insufficient resources"


def test_a_refused_mode_change_names_root_and_other_refusals_the_capability():
    mode = error_for("nvmlDeviceSetMigMode", "GPU-a", pynvml.NVML_ERROR_NO_PERMISSION)
    other = error_for("nvmlDeviceGetGpuInstances", "GPU-a", pynvml.NVML_ERROR_NO_PERMISSION)
    assert "CAP_SYS_ADMIN" in str(mode)
    assert "no capability file" in str(mode)
    assert "mig/config" in str(other)


def test_an_error_about_the_driver_names_no_gpu():
    error = error_for("nvmlInit", "", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert str(error).startswith("nvmlInit: driver not loaded (NVML code 9); ")


def test_a_place_that_the_driver_does_not_offer_is_no_dead_handle():
    error = error_for("nvmlDeviceCreateGpuInstanceWithPlacement", "GPU-a", pynvml.NVML_ERROR_INVALID_ARGUMENT)
    assert type(error) is NotSupportedError
    assert "at this place" in str(error)


def test_a_process_query_that_the_driver_lacks_is_a_missing_function():
    library = Scripted(Gpu("GPU-a"))

    def mismatch() -> None:
        raise pynvml.NVMLLibraryMismatchError("use _v2")

    library.before["nvmlDeviceGetComputeRunningProcesses"] = mismatch
    with pytest.raises(NotSupportedError) as caught:
        Calls(library)("nvmlDeviceGetComputeRunningProcesses", "GPU-a", None)
    assert caught.value.code == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND


def test_errors_can_be_kept_in_sets_although_those_of_pynvml_cannot():
    error = error_for("nvmlInit", "", 9)
    assert len({error, error_for("nvmlInit", "", 9)}) == 2
    with pytest.raises(TypeError):
        hash(pynvml.NVMLError(9))
