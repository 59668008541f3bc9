"""A tiny NVML with pynvml's face, for what a test scripts: states set by hand, errors by call, a log of calls.

It checks how it is called (fresh handles, references, sizes), not what hardware refuses: that is the simulator's part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from ctypes import byref, c_uint, c_void_p, cast
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

from migd.mig.observed import SeenGpu
from migd.nvml import NvmlGpus

_NO_INSTANCE = 0xFFFFFFFF
_ENUM_END = 10


@dataclass(frozen=True)
class Offer:
    """A profile of the scripted GPU; starts: of its placements, in memory slices."""

    enum: int
    profile_id: int
    name: str
    slices: int
    size: int
    starts: tuple[int, ...]
    memory_mib: int = 4864
    instance_count: int | None = None
    compute: tuple[tuple[int, int], ...] = ((0, 1),)  # (compute profile id, slices)


A100 = (
    Offer(0, 19, "MIG 1g.5gb", 1, 1, tuple(range(7))),
    Offer(7, 20, "MIG 1g.5gb+me", 1, 1, tuple(range(7)), instance_count=1),
    Offer(1, 14, "MIG 2g.10gb", 2, 2, (0, 2, 4), 9856, compute=((0, 1), (1, 2))),
    Offer(2, 9, "MIG 3g.20gb", 3, 4, (0, 4), 19968, compute=((0, 1), (1, 2), (2, 3))),
    Offer(4, 0, "MIG 7g.40gb", 7, 8, (0,), 40192, compute=((0, 1), (1, 2), (2, 3), (3, 4), (4, 7))),
)


@dataclass
class Compute:
    ci_id: int
    profile_id: int
    uuid: str


@dataclass
class Instance:
    gi_id: int
    profile_id: int
    start: int
    size: int
    inside: list[Compute] = field(default_factory=list)


@dataclass
class Gpu:
    uuid: str
    offers: tuple[Offer, ...] = A100
    capable: bool = True
    current: int = 0
    pending: int = 0
    lists_while_off: bool = True
    lost: bool = False
    name: str = "NVIDIA A100-PCIE-40GB"
    pci_device_id: int = 0x20F110DE
    memory_mib: int = 40960
    fields: dict[int, int] = field(default_factory=dict)
    field_errors: dict[int, int] = field(default_factory=dict)
    architecture: int = 7
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    instances: list[Instance] = field(default_factory=list)
    compute_processes: list[tuple[int, int]] = field(default_factory=list)  # (pid, GI id)
    graphics_processes: list[tuple[int, int]] = field(default_factory=list)
    status: int = 0  # the activation status of the next mode change
    effect: bool = True  # whether that mode change becomes active
    lists_all: bool = False  # the list of one profile's instances holds those of every profile
    device_is_mig: bool = True  # whether a compute instance's info.device is its MIG device


class Scripted:
    """The library, with a log of its calls.

    fail: codes to raise by function, one at each call (None: let it pass). always: a code to raise at every call.
    before: what happens, once, just before a function is called next: another program's doing.
    """

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = list(gpus)
        self.log: list[str] = []
        self.fail: dict[str, list[int | None]] = {}
        self.always: dict[str, int] = {}
        self.before: dict[str, Callable[[], None]] = {}
        self.open = 0
        self.driver = "580.65.06"
        self._handles: dict[int, Any] = {}
        self._next = itertools.count(0x1000, 16)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        work = getattr(Scripted, "_" + name)

        def call(*args: Any) -> Any:
            self.log.append(name)
            if name in self.before:
                self.before.pop(name)()
            code = self.fail[name].pop(0) if self.fail.get(name) else self.always.get(name)
            if code is not None:
                raise pynvml.NVMLError(code)
            if name != "nvmlInit" and not self.open:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
            return work(self, *args)

        return call

    def calls(self, name: str) -> int:
        return self.log.count(name)

    def retire(self) -> None:
        """End every handle given out so far, as a mode change may."""
        self._handles.clear()

    # Handles are addresses that are never given out twice.

    def _give(self, what: Any, kind: Any) -> Any:
        number = next(self._next)
        self._handles[number] = what
        return cast(c_void_p(number), kind)

    def _take(self, handle: Any, kind: type) -> Any:
        what = self._handles.get(cast(handle, c_void_p).value or 0)
        if isinstance(what, Gpu) and what.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if not isinstance(what, tuple) or not isinstance(what[-1], kind):
            if isinstance(what, kind):
                return what
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        gpu = what[0]
        alive = what[1] in gpu.instances and (len(what) == 2 or what[2] in what[1].inside)
        if not alive:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return what

    def _gpu(self, device: Any, mig_on: bool = False) -> Gpu:
        gpu: Gpu = self._take(device, Gpu)
        if mig_on and not (gpu.capable and gpu.current):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu

    def _nvmlInit(self) -> None:
        self.open += 1

    def _nvmlShutdown(self) -> None:
        self.open -= 1
        self.retire()

    def _nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def _nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if index >= len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if self.gpus[index].lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self._give(self.gpus[index], pynvml.c_nvmlDevice_t)

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                if gpu.lost:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
                return self._give(gpu, pynvml.c_nvmlDevice_t)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def _nvmlDeviceGetIndex(self, device: Any) -> int:
        return self.gpus.index(self._gpu(device))

    def _nvmlDeviceGetUUID(self, device: Any) -> str:
        try:
            return self._gpu(device).uuid
        except pynvml.NVMLError_InvalidArgument:
            return self._take(device, Compute)[2].uuid

    def _nvmlDeviceGetName(self, device: Any) -> bytes:
        return self._gpu(device).name.encode()

    def _nvmlDeviceGetPciInfo(self, device: Any) -> Any:
        info = pynvml.nvmlPciInfo_t()
        info.pciDeviceId = self._gpu(device).pci_device_id
        return info

    def _nvmlDeviceGetMemoryInfo(self, device: Any) -> Any:
        return SimpleNamespace(total=self._gpu(device).memory_mib << 20)

    def _nvmlDeviceGetArchitecture(self, device: Any) -> int:
        return self._gpu(device).architecture

    def _nvmlDeviceGetFieldValues(self, device: Any, ids: list[int]) -> Any:
        known = self._gpu(device).fields
        values = (pynvml.c_nvmlFieldValue_t * len(ids))()
        for value, field_id in zip(values, ids, strict=True):
            value.fieldId, value.valueType = field_id, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
            if field_id in known:
                value.value.uiVal = known[field_id]
            else:
                value.nvmlReturn = self._gpu(device).field_errors.get(field_id, pynvml.NVML_ERROR_NOT_SUPPORTED)
        return values

    def _nvmlDeviceGetRemappedRows(self, device: Any) -> tuple[int, int, int, int]:
        gpu = self._gpu(device)
        if gpu.instances:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu.rows

    def _nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        gpu = self._gpu(device)
        if not gpu.capable:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [gpu.current, gpu.pending]

    def _nvmlDeviceSetMigMode(self, device: Any, mode: int) -> int:
        gpu = self._gpu(device)
        gpu.pending = mode
        if gpu.effect and not gpu.status:
            gpu.current = mode
            gpu.instances = [] if not mode else gpu.instances
            self.retire()
        return gpu.status

    def _nvmlDeviceGetGpuInstanceProfileInfo(self, device: Any, profile: int, version: int = 2) -> Any:
        gpu = self._gpu(device)
        if profile >= _ENUM_END:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        offer = next((o for o in gpu.offers if o.enum == profile), None)
        if offer is None or not (gpu.current or gpu.lists_while_off):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t()
        info.id, info.sliceCount, info.memorySizeMB = offer.profile_id, offer.slices, offer.memory_mib
        info.instanceCount = len(offer.starts) if offer.instance_count is None else offer.instance_count
        info.copyEngineCount, info.name = offer.slices, offer.name.encode()
        return info

    def _offer(self, gpu: Gpu, profile_id: int) -> Offer:
        for offer in gpu.offers:
            if offer.profile_id == profile_id:
                return offer
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _nvmlDeviceGetGpuInstancePossiblePlacements(self, device: Any, profile_id: int, places: Any, count: Any) -> int:
        offer = self._offer(self._gpu(device), profile_id)
        if places is not None:
            for place, start in zip(places, reversed(offer.starts), strict=True):  # in no order in particular
                place.start, place.size = start, offer.size
        count._obj.value = len(offer.starts)
        return 0

    def _nvmlDeviceGetGpuInstances(self, device: Any, profile_id: int, handles: Any, count: Any) -> int:
        gpu = self._gpu(device, mig_on=True)
        self._offer(gpu, profile_id)
        those = [i for i in gpu.instances if gpu.lists_all or i.profile_id == profile_id]
        assert len(handles) >= len(those), "NVML would write past the end of this array"
        for position, instance in enumerate(those):
            handles[position] = self._give((gpu, instance), pynvml.c_nvmlGpuInstance_t)
        count._obj.value = len(those)
        return 0

    def _nvmlGpuInstanceGetInfo(self, handle: Any) -> Any:
        gpu, instance = self._take(handle, Instance)
        info = pynvml.c_nvmlGpuInstanceInfo_t()
        info.id, info.profileId = instance.gi_id, instance.profile_id
        info.placement.start, info.placement.size = instance.start, instance.size
        info.device = self._give(gpu, pynvml.c_nvmlDevice_t)
        return info

    def _nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, handle: Any, profile: int, engines: int, version: int = 2
    ) -> Any:
        gpu, instance = self._take(handle, Instance)
        if profile >= 9:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for profile_id, slices in self._offer(gpu, instance.profile_id).compute:
            if profile_id == profile:
                info = pynvml.c_nvmlComputeInstanceProfileInfo_v2_t()
                info.id, info.sliceCount = profile_id, slices
                return info
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _nvmlGpuInstanceGetComputeInstances(self, handle: Any, profile_id: int, handles: Any, count: Any) -> int:
        gpu, instance = self._take(handle, Instance)
        those = [c for c in instance.inside if c.profile_id == profile_id]
        for position, compute in enumerate(those):
            handles[position] = self._give((gpu, instance, compute), pynvml.c_nvmlComputeInstance_t)
        count._obj.value = len(those)
        return 0

    def _nvmlComputeInstanceGetInfo(self, handle: Any) -> Any:
        gpu, instance, compute = self._take(handle, Compute)
        info = pynvml.c_nvmlComputeInstanceInfo_t()
        info.id, info.profileId = compute.ci_id, compute.profile_id
        whose = (gpu, instance, compute) if gpu.device_is_mig else gpu
        info.device = self._give(whose, pynvml.c_nvmlDevice_t)
        return info

    def _nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        return 7 if self._gpu(device).current else 0

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any:
        gpu = self._gpu(device)
        devices = [(gpu, i, c) for i in gpu.instances for c in i.inside]
        if index == 0 or index > len(devices):  # a hole at the start: no text promises that there is none
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self._give(devices[index - 1], pynvml.c_nvmlDevice_t)

    def _nvmlDeviceGetGpuInstanceId(self, device: Any) -> int:
        return self._take(device, Compute)[1].gi_id

    def _nvmlDeviceGetComputeInstanceId(self, device: Any) -> int:
        return self._take(device, Compute)[2].ci_id

    def _nvmlDeviceGetComputeRunningProcesses(self, device: Any) -> list[Any]:
        return [_process(*p) for p in self._gpu(device).compute_processes]

    def _nvmlDeviceGetGraphicsRunningProcesses(self, device: Any) -> list[Any]:
        return [_process(*p) for p in self._gpu(device).graphics_processes]

    def _nvmlDeviceGetMPSComputeRunningProcesses(self, device: Any) -> list[Any]:
        self._gpu(device)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _nvmlDeviceCreateGpuInstanceWithPlacement(self, device: Any, profile_id: int, place: Any) -> Any:
        assert type(place) is type(byref(c_uint())), "a placement goes by reference"
        gpu = self._gpu(device, mig_on=True)
        offer, start = self._offer(gpu, profile_id), place._obj.start
        taken = {s for i in gpu.instances for s in range(i.start, i.start + i.size)}
        if taken & set(range(start, start + offer.size)):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
        instance = Instance(7 + start, profile_id, start, offer.size)
        gpu.instances.append(instance)
        return self._give((gpu, instance), pynvml.c_nvmlGpuInstance_t)

    def _nvmlGpuInstanceCreateComputeInstance(self, handle: Any, profile_id: int) -> Any:
        gpu, instance = self._take(handle, Instance)
        if profile_id not in [p for p, _ in self._offer(gpu, instance.profile_id).compute]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        compute = Compute(len(instance.inside), profile_id, f"MIG-{instance.gi_id}-{len(instance.inside)}")
        instance.inside.append(compute)
        return self._give((gpu, instance, compute), pynvml.c_nvmlComputeInstance_t)

    def _nvmlComputeInstanceDestroy(self, handle: Any) -> int:
        _, instance, compute = self._take(handle, Compute)
        instance.inside.remove(compute)
        return 0

    def _nvmlGpuInstanceDestroy(self, handle: Any) -> int:
        gpu, instance = self._take(handle, Instance)
        if instance.inside:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_IN_USE)
        gpu.instances.remove(instance)
        return 0


def _process(pid: int, gi_id: int) -> Any:
    return SimpleNamespace(pid=pid, gpuInstanceId=gi_id, computeInstanceId=0 if gi_id != _NO_INSTANCE else gi_id)


class Inline:
    """Runs calls where it stands; hang: names of what must not return in time."""

    def __init__(self) -> None:
        self.deadlines: list[tuple[str, float]] = []
        self.hang = ""

    def run(self, fn: Callable[[], Any], deadline_s: float) -> Any:
        self.deadlines.append((fn.__name__, deadline_s))
        if self.hang and self.hang in fn.__name__:
            raise TimeoutError(f"no answer within {deadline_s:g} s: {fn.__name__}")
        return fn()


def cut(*instances: Instance, **more: Any) -> Gpu:
    """A GPU in MIG mode with these instances."""
    return Gpu("GPU-a", current=1, pending=1, instances=list(instances), **more)


def whole_1g(start: int, gi_id: int | None = None) -> Instance:
    """A 1g.5gb with its compute instance; its id is 7 + start where none is given."""
    gi_id = 7 + start if gi_id is None else gi_id
    return Instance(gi_id, 19, start, 1, [Compute(0, 0, f"MIG-{gi_id}-0")])


def gpus_of(*gpus: Gpu) -> tuple[Scripted, NvmlGpus]:
    """A library with these GPUs, and ours on it."""
    library = Scripted(*gpus)
    return library, NvmlGpus(library, Inline())


def see(gpu: Gpu) -> SeenGpu:
    """What one look shows of this GPU."""
    return gpus_of(gpu)[1].look()[0]
