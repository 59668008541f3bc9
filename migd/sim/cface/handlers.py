"""The functions of the C library that are simulated: how each finds its arguments, asks the face, and writes answers.

A handler is called with the face, the values of the arguments and what the pointers among them point to. It answers
the code and what is to be written: (argument, bytes). The rules are the face's; refusals of it are raised on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from ctypes import byref, c_uint, sizeof
from typing import Any, Final

import pynvml

from migd.sim.cface.shim import FILLED
from migd.sim.driver import refusal

Answer = tuple[int, Sequence[tuple[int, bytes]]]
Handler = Callable[[Any, Sequence[int], Sequence[bytes | None]], Answer]
Reader = Callable[[int, bytes | None], Any]
Writer = Callable[[Any], bytes]

SUCCESS: Final = int(pynvml.NVML_SUCCESS)
INSUFFICIENT_SIZE: Final = int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
ARRAY_MAX: Final = 64
"""Elements of an array that comes out: more than a GPU has instances, and a profile places."""

CHANGING: Final = frozenset(
    {
        "nvmlDeviceSetMigMode",
        "nvmlDeviceCreateGpuInstance",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceDestroy",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
        "nvmlComputeInstanceDestroy",
    }
)
"""Change the machine."""
COUNTED: Final = CHANGING | {
    "nvmlInit",
    "nvmlInit_v2",
    "nvmlInitWithFlags",
    "nvmlShutdown",
    "nvmlEventSetCreate",
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetFree",
}
"""Must not be done twice for one request, nor said to be done when they were not."""
WAITING: Final = frozenset({"nvmlEventSetWait", "nvmlEventSetWait_v2"})
LISTENING: Final = WAITING | {"nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetFree"}
"""Change, when they succeed, what is listened to or has been heard."""

ARRAYS: Final = {
    ("nvmlDeviceGetFieldValues", "values"): "valuesCount",
    ("nvmlDeviceGetGpuInstances", "gpuInstances"): FILLED,
    ("nvmlGpuInstanceGetComputeInstances", "computeInstances"): FILLED,
    ("nvmlDeviceGetGpuInstancePossiblePlacements", "placements"): FILLED,
    ("nvmlDeviceGetGpuInstancePossiblePlacements_v2", "placements"): FILLED,
    ("nvmlGpuInstanceGetComputeInstancePossiblePlacements", "placements"): FILLED,
    ("nvmlDeviceGetRetiredPages", "addresses"): FILLED,
    **{
        (f"nvmlDeviceGet{kind}RunningProcesses{version}", "infos"): FILLED
        for kind in ("Compute", "Graphics", "MPSCompute")
        for version in ("", "_v2", "_v3")
    },
}
"""Pointers that are arrays, though C does not say so; as shim.source takes them."""


# ---- reading arguments


def _device(value: int, _: bytes | None) -> Any:
    return pynvml.c_nvmlDevice_t.from_buffer_copy(value.to_bytes(8, "little"))


def _gi(value: int, _: bytes | None) -> Any:
    return pynvml.c_nvmlGpuInstance_t.from_buffer_copy(value.to_bytes(8, "little"))


def _ci(value: int, _: bytes | None) -> Any:
    return pynvml.c_nvmlComputeInstance_t.from_buffer_copy(value.to_bytes(8, "little"))


def _set(value: int, _: bytes | None) -> Any:
    return pynvml.c_nvmlEventSet_t.from_buffer_copy(value.to_bytes(8, "little"))


def _number(value: int, _: bytes | None) -> int:
    return value & 0xFFFFFFFF


def _mask(value: int, _: bytes | None) -> int:
    return value


def _text(_: int, pointee: bytes | None) -> str:
    if pointee is None:
        raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return pointee.rstrip(b"\0").decode("utf-8", "replace")


def _place(kind: Any) -> Reader:
    def read(_: int, pointee: bytes | None) -> Any:
        if pointee is None or len(pointee) != sizeof(kind):
            raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return byref(kind.from_buffer_copy(pointee))

    return read


# ---- writing answers

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_PROCESS_V1, _PROCESS = struct.Struct("<I4xQ"), struct.Struct("<I4xQII")


def _u32(value: int) -> bytes:
    return _U32.pack(value & 0xFFFFFFFF)


def _u64(value: int) -> bytes:
    return _U64.pack(value)


def _required(values: Sequence[int], *places: int) -> None:
    if not all(values[at] for at in places):
        raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)


def _each(*writers: Writer) -> Callable[[Any], list[bytes]]:
    return lambda found: [write(value) for write, value in zip(writers, found, strict=True)]


def _one(writer: Writer) -> Callable[[Any], list[bytes]]:
    return lambda found: [writer(found)]


def _plain(
    method: str, readers: Sequence[Reader], write: Callable[[Any], list[bytes]], outputs: int = 1, **fixed: Any
) -> Handler:
    """First what goes in, then what comes out: most functions are so. fixed: what is passed besides."""
    count = len(readers)
    places = range(count, count + outputs)

    def handle(face: Any, values: Sequence[int], pointees: Sequence[bytes | None]) -> Answer:
        _required(values, *places)
        taken = [read(values[at], pointees[at]) for at, read in enumerate(readers)]
        return SUCCESS, list(zip(places, write(getattr(face, method)(*taken, **fixed)), strict=True))

    return handle


def _nothing(_: Any) -> list[bytes]:
    return []


def _done(method: str, *readers: Reader) -> Handler:
    """Nothing comes out."""
    return _plain(method, readers, _nothing, outputs=0)


def _says(method: str, *readers: Reader) -> Handler:
    """A text comes out, into a buffer whose size is the last argument."""
    at = len(readers)

    def handle(face: Any, values: Sequence[int], pointees: Sequence[bytes | None]) -> Answer:
        _required(values, at)
        text = getattr(face, method)(*(read(values[i], pointees[i]) for i, read in enumerate(readers)))
        told: bytes = text.encode() + b"\0"
        if len(told) > _number(values[at + 1], None):
            return INSUFFICIENT_SIZE, ()
        return SUCCESS, ((at, told),)

    return handle


def _versioned(method: str, readers: Sequence[Reader], known: dict[int, dict[str, Any]]) -> Handler:
    """A structure comes out that says, going in, which version of it is wanted. known: what else to pass for each."""
    at = len(readers)

    def handle(face: Any, values: Sequence[int], pointees: Sequence[bytes | None]) -> Answer:
        _required(values, at)
        more = known.get(int.from_bytes((pointees[at] or b"")[:4], "little"))
        if more is None:
            raise refusal(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        found = getattr(face, method)(*(read(values[i], pointees[i]) for i, read in enumerate(readers)), **more)
        return SUCCESS, ((at, bytes(found)),)

    return handle


def _filling(method: str, first: Reader, kind: Any, *, optional: bool) -> Handler:
    """(handle, profile, array, count): the array is large enough, or (optional) NULL to ask for the count."""
    size = sizeof(kind)

    def handle(face: Any, values: Sequence[int], _pointees: Sequence[bytes | None]) -> Answer:
        _required(values, 3) if optional else _required(values, 2, 3)
        count, array = c_uint(), (kind * ARRAY_MAX)()
        getattr(face, method)(first(values[0], None), _number(values[1], None), array, byref(count))
        told = bytes(memoryview(array).cast("B")[: count.value * size])
        return SUCCESS, ((2, told), (3, _u32(count.value))) if values[2] else ((3, _u32(count.value)),)

    return handle


def _listing(write: Callable[[Any], bytes], ask: Callable[[Any, Sequence[int]], list[Any]], at: int) -> Handler:
    """(…, count, array): count is the room going in, and how many there are coming out."""

    def handle(face: Any, values: Sequence[int], pointees: Sequence[bytes | None]) -> Answer:
        _required(values, at)
        room = int.from_bytes(pointees[at] or b"", "little") if values[at + 1] else 0
        found = ask(face, values)
        told = (at, _u32(len(found)))
        if len(found) > room:
            return INSUFFICIENT_SIZE, (told,)
        return SUCCESS, (told, (at + 1, b"".join(map(write, found)))) if found else (told,)

    return handle


def _fields(face: Any, values: Sequence[int], pointees: Sequence[bytes | None]) -> Answer:
    _required(values, 2)
    kind, count, given = pynvml.c_nvmlFieldValue_t, _number(values[1], None), pointees[2]
    if given is None or len(given) != count * sizeof(kind):
        raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    wanted = [(field.fieldId, field.scopeId) for field in (kind * count).from_buffer_copy(given)]
    return SUCCESS, ((2, bytes(face.nvmlDeviceGetFieldValues(_device(values[0], None), wanted))),)


def _wait(face: Any, values: Sequence[int], _: Sequence[bytes | None]) -> Answer:
    _required(values, 1)
    return SUCCESS, ((1, bytes(face.nvmlEventSetWait(_set(values[0], None), _number(values[2], None)))),)


def _process(size: int) -> Callable[[Any], bytes]:
    def write(found: Any) -> bytes:
        if size == _PROCESS_V1.size:
            return _PROCESS_V1.pack(found.pid, found.usedGpuMemory)
        return _PROCESS.pack(found.pid, found.usedGpuMemory, found.gpuInstanceId, found.computeInstanceId)

    return write


def _processes(method: str, size: int) -> Handler:
    return _listing(_process(size), lambda face, values: getattr(face, method)(_device(values[0], None)), 1)


def _retired(face: Any, values: Sequence[int]) -> list[Any]:
    found: list[Any] = face.nvmlDeviceGetRetiredPages(_device(values[0], None), _number(values[1], None))
    return found


# ---- the table

_TWO = _each(_u32, _u32)
_ONE, _LONG, _STRUCTURE = _one(_u32), _one(_u64), _one(bytes)
_GI_PLACE, _CI_PLACE = pynvml.c_nvmlGpuInstancePlacement_t, pynvml.c_nvmlComputeInstancePlacement_t
_GI, _CI = pynvml.c_nvmlGpuInstance_t, pynvml.c_nvmlComputeInstance_t

HANDLERS: Final[dict[str, Handler]] = {
    "nvmlInit": _done("nvmlInit"),
    "nvmlInit_v2": _done("nvmlInit"),
    "nvmlInitWithFlags": _done("nvmlInitWithFlags", _number),
    "nvmlShutdown": _done("nvmlShutdown"),
    "nvmlSystemGetDriverVersion": _says("nvmlSystemGetDriverVersion"),
    "nvmlSystemGetNVMLVersion": _says("nvmlSystemGetNVMLVersion"),
    "nvmlSystemGetCudaDriverVersion": _plain("nvmlSystemGetCudaDriverVersion", (), _ONE),
    "nvmlSystemGetCudaDriverVersion_v2": _plain("nvmlSystemGetCudaDriverVersion", (), _ONE),
    "nvmlSystemGetProcessName": _says("nvmlSystemGetProcessName", _number),
    "nvmlDeviceGetCount": _plain("nvmlDeviceGetCount", (), _ONE),
    "nvmlDeviceGetCount_v2": _plain("nvmlDeviceGetCount", (), _ONE),
    "nvmlDeviceGetHandleByIndex": _plain("nvmlDeviceGetHandleByIndex", (_number,), _STRUCTURE),
    "nvmlDeviceGetHandleByIndex_v2": _plain("nvmlDeviceGetHandleByIndex", (_number,), _STRUCTURE),
    "nvmlDeviceGetHandleByPciBusId": _plain("nvmlDeviceGetHandleByPciBusId", (_text,), _STRUCTURE),
    "nvmlDeviceGetHandleByPciBusId_v2": _plain("nvmlDeviceGetHandleByPciBusId", (_text,), _STRUCTURE),
    "nvmlDeviceGetHandleByUUID": _plain("nvmlDeviceGetHandleByUUID", (_text,), _STRUCTURE),
    "nvmlDeviceGetUUID": _says("nvmlDeviceGetUUID", _device),
    "nvmlDeviceGetName": _says("nvmlDeviceGetName", _device),
    "nvmlDeviceGetBrand": _plain("nvmlDeviceGetBrand", (_device,), _ONE),
    "nvmlDeviceGetIndex": _plain("nvmlDeviceGetIndex", (_device,), _ONE),
    "nvmlDeviceGetMinorNumber": _plain("nvmlDeviceGetMinorNumber", (_device,), _ONE),
    "nvmlDeviceGetPciInfo": _plain("nvmlDeviceGetPciInfo", (_device,), _STRUCTURE),
    "nvmlDeviceGetPciInfo_v2": _plain("nvmlDeviceGetPciInfo", (_device,), _STRUCTURE),
    "nvmlDeviceGetPciInfo_v3": _plain("nvmlDeviceGetPciInfo", (_device,), _STRUCTURE),
    "nvmlDeviceGetArchitecture": _plain("nvmlDeviceGetArchitecture", (_device,), _ONE),
    "nvmlDeviceGetCudaComputeCapability": _plain("nvmlDeviceGetCudaComputeCapability", (_device,), _TWO, 2),
    "nvmlDeviceGetVirtualizationMode": _plain("nvmlDeviceGetVirtualizationMode", (_device,), _ONE),
    "nvmlDeviceGetPersistenceMode": _plain("nvmlDeviceGetPersistenceMode", (_device,), _ONE),
    "nvmlDeviceGetComputeMode": _plain("nvmlDeviceGetComputeMode", (_device,), _ONE),
    "nvmlDeviceGetMemoryInfo": _plain("nvmlDeviceGetMemoryInfo", (_device,), _STRUCTURE),
    "nvmlDeviceGetMemoryInfo_v2": _versioned(
        "nvmlDeviceGetMemoryInfo", (_device,), {pynvml.nvmlMemory_v2: {"version": pynvml.nvmlMemory_v2}}
    ),
    # MIG mode and GPU instances
    "nvmlDeviceGetMigMode": _plain("nvmlDeviceGetMigMode", (_device,), _TWO, 2),
    "nvmlDeviceSetMigMode": _plain("nvmlDeviceSetMigMode", (_device, _number), _ONE),
    "nvmlDeviceGetGpuInstanceProfileInfo": _plain(
        "nvmlDeviceGetGpuInstanceProfileInfo", (_device, _number), _STRUCTURE, version=1
    ),
    "nvmlDeviceGetGpuInstanceProfileInfoV": _versioned(
        "nvmlDeviceGetGpuInstanceProfileInfo", (_device, _number), {pynvml.nvmlGpuInstanceProfileInfo_v2: {}}
    ),
    "nvmlDeviceGetGpuInstanceProfileInfoByIdV": _versioned(
        "nvmlDeviceGetGpuInstanceProfileInfoById", (_device, _number), {pynvml.nvmlGpuInstanceProfileInfo_v2: {}}
    ),
    "nvmlDeviceGetGpuInstanceRemainingCapacity": _plain(
        "nvmlDeviceGetGpuInstanceRemainingCapacity", (_device, _number), _ONE
    ),
    "nvmlDeviceGetGpuInstancePossiblePlacements": _filling(
        "nvmlDeviceGetGpuInstancePossiblePlacements", _device, _GI_PLACE, optional=True
    ),
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2": _filling(
        "nvmlDeviceGetGpuInstancePossiblePlacements", _device, _GI_PLACE, optional=True
    ),
    "nvmlDeviceCreateGpuInstance": _plain("nvmlDeviceCreateGpuInstance", (_device, _number), _STRUCTURE),
    "nvmlDeviceCreateGpuInstanceWithPlacement": _plain(
        "nvmlDeviceCreateGpuInstanceWithPlacement", (_device, _number, _place(_GI_PLACE)), _STRUCTURE
    ),
    "nvmlGpuInstanceDestroy": _done("nvmlGpuInstanceDestroy", _gi),
    "nvmlDeviceGetGpuInstances": _filling("nvmlDeviceGetGpuInstances", _device, _GI, optional=False),
    "nvmlDeviceGetGpuInstanceById": _plain("nvmlDeviceGetGpuInstanceById", (_device, _number), _STRUCTURE),
    "nvmlGpuInstanceGetInfo": _plain("nvmlGpuInstanceGetInfo", (_gi,), _STRUCTURE),
    # compute instances and MIG devices
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": _plain(
        "nvmlGpuInstanceGetComputeInstanceProfileInfo", (_gi, _number, _number), _STRUCTURE, version=1
    ),
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV": _versioned(
        "nvmlGpuInstanceGetComputeInstanceProfileInfo",
        (_gi, _number, _number),
        {pynvml.nvmlComputeInstanceProfileInfo_v2: {}},
    ),
    "nvmlGpuInstanceGetComputeInstanceRemainingCapacity": _plain(
        "nvmlGpuInstanceGetComputeInstanceRemainingCapacity", (_gi, _number), _ONE
    ),
    "nvmlGpuInstanceGetComputeInstancePossiblePlacements": _filling(
        "nvmlGpuInstanceGetComputeInstancePossiblePlacements", _gi, _CI_PLACE, optional=True
    ),
    "nvmlGpuInstanceCreateComputeInstance": _plain("nvmlGpuInstanceCreateComputeInstance", (_gi, _number), _STRUCTURE),
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": _plain(
        "nvmlGpuInstanceCreateComputeInstanceWithPlacement", (_gi, _number, _place(_CI_PLACE)), _STRUCTURE
    ),
    "nvmlComputeInstanceDestroy": _done("nvmlComputeInstanceDestroy", _ci),
    "nvmlGpuInstanceGetComputeInstances": _filling("nvmlGpuInstanceGetComputeInstances", _gi, _CI, optional=False),
    "nvmlGpuInstanceGetComputeInstanceById": _plain(
        "nvmlGpuInstanceGetComputeInstanceById", (_gi, _number), _STRUCTURE
    ),
    "nvmlComputeInstanceGetInfo": _plain("nvmlComputeInstanceGetInfo", (_ci,), _STRUCTURE),
    "nvmlComputeInstanceGetInfo_v2": _plain("nvmlComputeInstanceGetInfo", (_ci,), _STRUCTURE),
    "nvmlDeviceIsMigDeviceHandle": _plain("nvmlDeviceIsMigDeviceHandle", (_device,), lambda found: [_u32(found.value)]),
    "nvmlDeviceGetGpuInstanceId": _plain("nvmlDeviceGetGpuInstanceId", (_device,), _ONE),
    "nvmlDeviceGetComputeInstanceId": _plain("nvmlDeviceGetComputeInstanceId", (_device,), _ONE),
    "nvmlDeviceGetMaxMigDeviceCount": _plain("nvmlDeviceGetMaxMigDeviceCount", (_device,), _ONE),
    "nvmlDeviceGetMigDeviceHandleByIndex": _plain(
        "nvmlDeviceGetMigDeviceHandleByIndex", (_device, _number), _STRUCTURE
    ),
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": _plain(
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", (_device,), _STRUCTURE
    ),
    "nvmlDeviceGetAttributes": _plain("nvmlDeviceGetAttributes_v2", (_device,), _STRUCTURE),
    "nvmlDeviceGetAttributes_v2": _plain("nvmlDeviceGetAttributes_v2", (_device,), _STRUCTURE),
    # what monitors read
    "nvmlDeviceGetComputeRunningProcesses": _processes("nvmlDeviceGetComputeRunningProcesses_v2", _PROCESS_V1.size),
    "nvmlDeviceGetComputeRunningProcesses_v2": _processes("nvmlDeviceGetComputeRunningProcesses_v2", _PROCESS.size),
    "nvmlDeviceGetComputeRunningProcesses_v3": _processes("nvmlDeviceGetComputeRunningProcesses_v3", _PROCESS.size),
    **{
        f"nvmlDeviceGet{kind}RunningProcesses{version}": _processes(
            f"nvmlDeviceGet{kind}RunningProcesses_v3", _PROCESS.size if version else _PROCESS_V1.size
        )
        for kind in ("Graphics", "MPSCompute")
        for version in ("", "_v2", "_v3")
    },
    "nvmlDeviceGetUtilizationRates": _plain("nvmlDeviceGetUtilizationRates", (_device,), _STRUCTURE),
    "nvmlDeviceGetEncoderUtilization": _plain("nvmlDeviceGetEncoderUtilization", (_device,), _TWO, 2),
    "nvmlDeviceGetDecoderUtilization": _plain("nvmlDeviceGetDecoderUtilization", (_device,), _TWO, 2),
    "nvmlDeviceGetRemappedRows": _plain("nvmlDeviceGetRemappedRows", (_device,), _each(_u32, _u32, _u32, _u32), 4),
    "nvmlDeviceGetRetiredPages": _listing(_u64, _retired, 2),
    "nvmlDeviceGetRetiredPagesPendingStatus": _plain("nvmlDeviceGetRetiredPagesPendingStatus", (_device,), _ONE),
    "nvmlDeviceGetFieldValues": _fields,
    "nvmlEventSetCreate": _plain("nvmlEventSetCreate", (), _STRUCTURE),
    "nvmlDeviceGetSupportedEventTypes": _plain("nvmlDeviceGetSupportedEventTypes", (_device,), _LONG),
    "nvmlDeviceRegisterEvents": _done("nvmlDeviceRegisterEvents", _device, _mask, _set),
    "nvmlEventSetWait": _wait,
    "nvmlEventSetWait_v2": _wait,
    "nvmlEventSetFree": _done("nvmlEventSetFree", _set),
}
"""By C symbol. What nvml.h has besides answers NOT_SUPPORTED."""
