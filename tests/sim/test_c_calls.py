"""What only a C caller can do: NULL, small buffers, versions of structures, pointers to nowhere; and a program in C."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import byref, c_int, c_uint, c_uint64, c_void_p, create_string_buffer

import pynvml
import pytest
from c_clients import served

from migd.sim import SimHost
from migd.sim.cface.building import find_header
from migd.sim.cface.header import find_compiler

SUCCESS, INVALID, UNSUPPORTED = 0, pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_SUPPORTED
TOO_SMALL, MISMATCH = pynvml.NVML_ERROR_INSUFFICIENT_SIZE, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
THREE_G = 9
NOWHERE = c_void_p(0x400000000)


@pytest.fixture
def box(c_library, tmp_path):
    with served(SimHost.fresh("a100-40gb"), tmp_path) as box:
        yield box


@pytest.fixture
def lib(box):
    loaded = box.nvml()._loaded
    assert loaded.nvmlInit_v2() == SUCCESS
    return loaded


@pytest.fixture
def gpu(lib):
    handle = c_void_p()
    assert lib.nvmlDeviceGetHandleByIndex_v2(0, byref(handle)) == SUCCESS
    status = c_int(77)
    assert (lib.nvmlDeviceSetMigMode(handle, 1, byref(status)), status.value) == (SUCCESS, SUCCESS)
    return handle


def test_a_null_pointer_is_an_invalid_argument(lib, gpu):
    handle, count = c_void_p(), c_uint(0)
    assert lib.nvmlDeviceGetHandleByIndex_v2(0, None) == INVALID
    assert lib.nvmlDeviceGetHandleByUUID(None, byref(handle)) == INVALID
    assert lib.nvmlDeviceGetName(gpu, None, 96) == INVALID
    assert lib.nvmlDeviceGetName(None, create_string_buffer(96), 96) == INVALID
    assert lib.nvmlDeviceGetMigMode(gpu, byref(count), None) == INVALID
    assert lib.nvmlDeviceGetGpuInstances(gpu, THREE_G, None, byref(count)) == INVALID
    assert lib.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, THREE_G, None, byref(handle)) == INVALID
    assert lib.nvmlDeviceGetFieldValues(gpu, 1, None) == INVALID
    assert lib.nvmlDeviceGetGpuInstanceProfileInfoV(gpu, 0, None) == INVALID


def test_a_refused_call_with_null_has_no_effect(lib, gpu, box):
    assert lib.nvmlDeviceCreateGpuInstance(gpu, THREE_G, None) == INVALID
    assert box.snapshot().gpus[0].instances == []


def test_a_pointer_to_nowhere_is_refused_before_anything_is_done(lib, gpu, box):
    handle = c_void_p()
    assert lib.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, THREE_G, NOWHERE, byref(handle)) == INVALID
    assert box.snapshot().gpus[0].instances == []
    assert lib.nvmlDeviceGetMigMode(gpu, byref(c_uint()), byref(c_uint())) == SUCCESS  # on the same connection


def test_a_number_that_is_no_handle_is_an_invalid_argument(lib, gpu):
    for number in (1, 0xDEAD, gpu.value ^ 1, gpu.value ^ 1 << 40, gpu.value ^ 1 << 53, gpu.value ^ 1 << 61, 2**64 - 1):
        assert lib.nvmlDeviceGetIndex(c_void_p(number), byref(c_uint())) == INVALID


def test_a_text_that_does_not_fit_is_not_written(lib, gpu):
    buffer = create_string_buffer(b"as it was", 64)
    assert lib.nvmlDeviceGetUUID(gpu, buffer, 40) == TOO_SMALL
    assert buffer.value == b"as it was"
    assert lib.nvmlDeviceGetUUID(gpu, buffer, 41) == SUCCESS
    assert len(buffer.value) == 40
    assert lib.nvmlDeviceGetUUID(gpu, buffer, 0) == TOO_SMALL


def test_a_structure_of_a_version_that_nobody_knows_is_refused_unread(lib, gpu):
    for version in (0, 1, 0x02000000, 0x02FFFFFF, 0xFFFFFFFF):
        word = c_uint(version)  # four bytes: reading as many as the version says would leave them
        assert lib.nvmlDeviceGetGpuInstanceProfileInfoV(gpu, 0, byref(word)) == MISMATCH
        assert lib.nvmlDeviceGetMemoryInfo_v2(gpu, byref(word)) == MISMATCH
        assert word.value == version
    info = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t()
    assert lib.nvmlDeviceGetGpuInstanceProfileInfoV(gpu, 0, byref(info)) == SUCCESS
    assert info.name == "1g.5gb"


def test_processes_are_counted_for_who_has_no_room_and_have_the_version_asked_for(lib, gpu, box):
    handle, ci = c_void_p(), c_void_p()
    assert lib.nvmlDeviceCreateGpuInstance(gpu, THREE_G, byref(handle)) == SUCCESS
    assert lib.nvmlGpuInstanceCreateComputeInstance(handle, 2, byref(ci)) == SUCCESS
    pids = [box.start_process(0, start=4) for _ in range(3)]
    for room, array in ((5, None), (2, (pynvml.c_nvmlProcessInfo_v3_t * 2)())):
        count = c_uint(room)
        assert lib.nvmlDeviceGetComputeRunningProcesses_v3(gpu, byref(count), array) == TOO_SMALL
        assert count.value == 3
    new, count = (pynvml.c_nvmlProcessInfo_v3_t * 5)(), c_uint(5)
    assert lib.nvmlDeviceGetComputeRunningProcesses_v3(gpu, byref(count), new) == SUCCESS
    assert [(p.pid, p.usedGpuMemory, p.gpuInstanceId) for p in new[: count.value]] == [(p, 512 << 20, 2) for p in pids]
    old, count = (c_uint64 * 10)(), c_uint(5)  # pid and memory alone: 16 bytes each
    assert lib.nvmlDeviceGetComputeRunningProcesses(gpu, byref(count), old) == SUCCESS
    assert list(old[:6:2]) == pids
    assert not any(old[6:])


def test_what_is_written_is_no_more_than_there_is(lib, gpu):
    array, count = (c_void_p * 4)(*[7] * 4), c_uint(0)
    assert lib.nvmlDeviceGetGpuInstances(gpu, THREE_G, array, byref(count)) == SUCCESS
    assert (count.value, list(array)) == (0, [7] * 4)
    first = c_void_p()
    assert lib.nvmlDeviceCreateGpuInstance(gpu, THREE_G, byref(first)) == SUCCESS
    assert lib.nvmlDeviceGetGpuInstances(gpu, THREE_G, array, byref(count)) == SUCCESS
    assert (count.value, list(array)) == (1, [first.value, 7, 7, 7])


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_a_number_of_fields_that_nobody_sends_is_refused(lib, gpu, count):
    assert lib.nvmlDeviceGetFieldValues(gpu, count, (pynvml.c_nvmlFieldValue_t * 4)()) == INVALID


def test_many_fields_are_answered_each(lib, gpu):
    values = (pynvml.c_nvmlFieldValue_t * 300)()
    for at, value in enumerate(values):
        value.fieldId = 230 if at % 2 else 1
    assert lib.nvmlDeviceGetFieldValues(gpu, 300, values) == SUCCESS
    assert {(v.fieldId, v.nvmlReturn) for v in values} == {(1, UNSUPPORTED), (230, SUCCESS)}


def test_what_is_not_simulated_says_so_and_is_counted(lib, gpu, box):
    for _ in range(2):
        assert lib.nvmlDeviceGetTemperature(gpu, 0, byref(c_uint())) == UNSUPPORTED
    assert lib.nvmlDeviceGetGpuFabricInfo(gpu, None) == UNSUPPORTED
    assert box.server.records.unsimulated() == {"nvmlDeviceGetGpuFabricInfo": 1, "nvmlDeviceGetTemperature": 2}
    assert lib.nvmlShutdown() == SUCCESS
    assert lib.nvmlDeviceGetTemperature(gpu, 0, byref(c_uint())) == pynvml.NVML_ERROR_UNINITIALIZED


def test_error_texts_need_no_server(lib, box):
    lib.nvmlErrorString.restype = ctypes.c_char_p
    box.server.stop()
    texts = [lib.nvmlErrorString(code).decode() for code in (0, 19, 4711)]
    assert texts == ["Success", "In use by another client", "Unknown Error"]


def test_the_first_call_without_a_server_answers_at_once_that_there_is_no_driver(c_library, box):
    box.server.stop()
    loaded = box.nvml()._loaded
    assert loaded.nvmlInit_v2() == pynvml.NVML_ERROR_DRIVER_NOT_LOADED


def test_a_socket_may_lie_deeper_than_an_address_is_long(c_library, tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    with served(SimHost.fresh("a100-40gb"), deep) as box:
        nvml = box.nvml()
        nvml.nvmlInit()
        assert nvml.nvmlDeviceGetCount() == 1


PROGRAM = """
#include <stdio.h>
#include "nvml.h"

int main(void)
{
    unsigned count = 0, current = 9, pending = 9, index;
    char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
    nvmlDevice_t gpu;
    nvmlReturn_t code = nvmlInit();
    if (code != NVML_SUCCESS) {
        printf("nvmlInit: %s\\n", nvmlErrorString(code));
        return 1;
    }
    nvmlDeviceGetCount(&count);
    for (index = 0; index < count; index++) {
        nvmlDeviceGetHandleByIndex(index, &gpu);
        nvmlDeviceGetName(gpu, name, sizeof name);
        code = nvmlDeviceGetMigMode(gpu, &current, &pending);
        printf("%u %s: %s %u %u\\n", index, name, nvmlErrorString(code), current, pending);
    }
    return nvmlShutdown() == NVML_SUCCESS ? 0 : 1;
}
"""


def test_a_program_in_c_is_compiled_linked_and_run(c_library, box, tmp_path):
    folder = box.server.library.parent
    (tmp_path / "small.c").write_text(PROGRAM)
    made = [find_compiler(), "-Wall", "-Werror", f"-I{find_header().parent}", str(tmp_path / "small.c")]
    subprocess.run([*made, "-o", tmp_path / "small", f"-L{folder}", "-l:libnvidia-ml.so.1"], check=True)
    environment = {"LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run([tmp_path / "small"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 NVIDIA A100-SXM4-40GB: Success 0 0\n")
    elsewhere = {**environment, "MIGD_SIM_SOCKET": str(tmp_path / "none.sock")}
    done = subprocess.run([tmp_path / "small"], env=elsewhere, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "nvmlInit: Driver Not Loaded\n")
