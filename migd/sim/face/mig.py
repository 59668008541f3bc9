"""The pynvml face: the MIG chapter. Mode, profiles, placements, GPU instances, compute instances, MIG devices."""

# ruff: noqa: N802, N803, N815  (names are pynvml's own)
from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml

from migd.sim import driver, placing
from migd.sim.catalog import SimProfile
from migd.sim.driver import refusal
from migd.sim.errors import SimulationError
from migd.sim.face.calling import Device, call
from migd.sim.face.system import System
from migd.sim.machine import Gpu, GpuInstance

_ARRAY = ctypes.Array
_BYREF = type(ctypes.byref(ctypes.c_uint()))
_POINTER = ctypes._Pointer  # noqa: SLF001  (its only name)
_PLACEMENT: Any = pynvml.c_nvmlGpuInstancePlacement_t
_INSTANCE_INFO: Any = pynvml.c_nvmlGpuInstanceInfo_t


def target_of(reference: Any, kind: Any) -> Any:
    """The object behind byref(), a pointer or an array; None for NULL; INVALID_ARGUMENT for a bare structure.

    A bare structure would go to C by value and be wrong there.
    """
    if reference is None or isinstance(reference, _ARRAY):
        return reference
    found: Any = getattr(reference, "_obj") if type(reference) is _BYREF else reference  # noqa: B009  (typeshed lacks it)
    if isinstance(found, _POINTER):  # ctypes.pointer() instead of byref()
        found = found.contents
    if found is reference and isinstance(found, kind):
        raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return found


class Mig(System):
    """MIG mode and GPU instances."""

    @call("gpu")
    def nvmlDeviceGetMigMode(self, device: Device) -> list[int]:
        """[current, pending]; NOT_SUPPORTED where the GPU cannot do MIG [1]."""
        if not self._core.offer(device.gpu).mig:
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(device.gpu.mig), int(device.gpu.pending)]

    @call("gpu", privilege="root", changes=True)
    def nvmlDeviceSetMigMode(self, device: Device, mode: int) -> int:
        """The activation status, which is never raised [2]: SUCCESS, IN_USE, RESET_REQUIRED."""
        if mode not in (pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_ENABLE):
            raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if driver.idle_success(self._core.machine, "nvmlDeviceSetMigMode"):
            return int(pynvml.NVML_SUCCESS)
        return driver.set_mode(self._core, device.gpu, bool(mode), self._pid)

    # ---- profiles

    @call("gpu", symbol="by version")
    def nvmlDeviceGetGpuInstanceProfileInfo(self, device: Device, profile: int, version: int = 2) -> Any:
        """The profile with this *enum* value [11]. version 2 has the name; 1 has not."""
        if version not in (1, 2):
            raise refusal(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        self._symbol("nvmlDeviceGetGpuInstanceProfileInfo", "V" if version == 2 else "")
        switches = self._core.machine.switches
        self._listing(device.gpu)
        if not 0 <= profile < min(switches.enum_end, pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):  # [55]
            raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        found = self._core.offered(device.gpu).by_enum.get(profile)
        if found is None:
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self._profile_info(device.gpu, found, version)

    nvmlDeviceGetGpuInstanceProfileInfoV = nvmlDeviceGetGpuInstanceProfileInfo

    @call("gpu", symbol="nvmlDeviceGetGpuInstanceProfileInfoByIdV")
    def nvmlDeviceGetGpuInstanceProfileInfoById(self, device: Device, profileId: int) -> Any:
        """The profile with this numeric id."""
        self._listing(device.gpu)
        return self._profile_info(device.gpu, driver.gpu_profile(self._core, device.gpu, profileId), 2)

    nvmlDeviceGetGpuInstanceProfileInfoByIdV = nvmlDeviceGetGpuInstanceProfileInfoById

    def _listing(self, gpu: Gpu) -> None:
        """NOT_SUPPORTED where the driver lists no profiles of this GPU now."""
        if not self._core.offer(gpu).mig or not (gpu.mig or self._core.machine.switches.profiles_while_off):  # [13]
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _profile_info(self, gpu: Gpu, profile: SimProfile, version: int) -> Any:
        switches = self._core.machine.switches
        kind = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t if version == 2 else pynvml.c_nvmlGpuInstanceProfileInfo_t
        key = (kind, profile.profile_id, switches.a30_wrong_count, switches.name_prefix)
        return self._prepared(gpu, key, lambda: self._new_profile_info(gpu, profile, kind()))

    def _prepared(self, gpu: Gpu, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """A structure as `make` makes it, filled once while what the GPU offers lasts. key: its kind and what for."""
        structures = self._core.offered(gpu).structures
        found = structures.get(key)
        if found is None:
            found = structures[key] = bytes(make())
        return key[0].from_buffer_copy(found)

    def _new_profile_info(self, gpu: Gpu, profile: SimProfile, info: Any) -> Any:
        switches = self._core.machine.switches
        info.id, info.isP2pSupported, info.sliceCount = profile.profile_id, 0, profile.slices
        info.instanceCount = profile.count_max
        if switches.a30_wrong_count and gpu.key == "a30":  # [54]
            info.instanceCount = profile.count_max + 1
        info.multiprocessorCount, info.memorySizeMB = profile.sm, profile.memory_mib
        info.copyEngineCount, info.decoderCount, info.encoderCount, info.jpegCount, info.ofaCount = profile.engines
        if hasattr(info, "name"):
            info.name = ("MIG " if switches.name_prefix else "") + profile.name
        return info

    @call("gpu", privilege="config")
    def nvmlDeviceGetGpuInstanceRemainingCapacity(self, device: Device, profileId: int) -> int:
        """How many more of this profile fit now [14]."""
        driver.require_mig(self._core, device.gpu)
        profile = driver.gpu_profile(self._core, device.gpu, profileId)
        if self._core.machine.switches.capacity_overstates:  # [50]
            return profile.count_max
        return placing.capacity(self._core.offer(device.gpu), device.gpu.instances, profile)

    @call("gpu", privilege="config", symbol="nvmlDeviceGetGpuInstancePossiblePlacements_v2")
    def nvmlDeviceGetGpuInstancePossiblePlacements(
        self, device: Device, profileId: int, placementsRef: Any, countRef: Any
    ) -> int:
        """Fill the array with every legal place, whatever is occupied [15]; NULL: only the count."""
        if not self._core.offer(device.gpu).mig:
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        places = driver.gpu_profile(self._core, device.gpu, profileId).places
        return _fill_places(places, placementsRef, countRef, pynvml.c_nvmlGpuInstancePlacement_t)

    # ---- GPU instances

    @call("gpu", privilege="config", changes=True)
    def nvmlDeviceCreateGpuInstance(self, device: Device, profileId: int) -> Any:
        """Create a GPU instance where the driver likes [18]."""
        made = driver.create_gi(self._core, device.gpu, profileId, None, "nvmlDeviceCreateGpuInstance")
        return self._gi_pointer(device.gpu, made)

    @call("gpu", privilege="config", changes=True)
    def nvmlDeviceCreateGpuInstanceWithPlacement(self, device: Device, profileId: int, placement: Any) -> Any:
        """Create a GPU instance at this placement, given as byref()."""
        where = _place(placement, pynvml.c_nvmlGpuInstancePlacement_t)
        made = driver.create_gi(self._core, device.gpu, profileId, where, "nvmlDeviceCreateGpuInstanceWithPlacement")
        return self._gi_pointer(device.gpu, made)

    @call("gi", privilege="config", changes=True)
    def nvmlGpuInstanceDestroy(self, device: Device) -> int:
        """Destroy a GPU instance; IN_USE while a compute instance or a client is there [26]."""
        driver.destroy_gi(self._core, device.gpu, _gi(device))
        return int(pynvml.NVML_SUCCESS)

    @call("gpu", privilege="config")
    def nvmlDeviceGetGpuInstances(self, device: Device, profileId: int, gpuInstancesRef: Any, countRef: Any) -> int:
        """Fill the caller's array with the instances of this profile."""
        gpu = device.gpu
        driver.require_mig(self._core, gpu)
        driver.gpu_profile(self._core, gpu, profileId)
        if not gpu.instances:
            return _fill_handles([], gpuInstancesRef, countRef)
        handles = [self._gi_pointer(gpu, i) for i in gpu.instances if i.profile_id == profileId]
        return _fill_handles(handles, gpuInstancesRef, countRef)

    @call("gpu", privilege="config")
    def nvmlDeviceGetGpuInstanceById(self, device: Device, gpuInstanceId: int) -> Any:
        """The GPU instance with this id; NOT_FOUND where there is none [30]."""
        driver.require_mig(self._core, device.gpu)
        for instance in device.gpu.instances:
            if instance.gi_id == gpuInstanceId:
                return self._gi_pointer(device.gpu, instance)
        raise refusal(pynvml.NVML_ERROR_NOT_FOUND)

    @call("gi")
    def nvmlGpuInstanceGetInfo(self, device: Device) -> Any:
        """Parent, id, numeric profile id and placement."""
        instance = _gi(device)
        return _INSTANCE_INFO(
            self._device_pointer(device.gpu),
            instance.gi_id,
            instance.profile_id,
            _PLACEMENT(instance.start, instance.size),
        )


def _gi(device: Device) -> GpuInstance:
    assert device.instance is not None
    return device.instance


def _place(placement: Any, kind: Any) -> tuple[int, int]:
    found = target_of(placement, kind)
    if not isinstance(found, kind):
        raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return found.start, found.size


def _fill_places(places: Any, array: Any, count: Any, kind: Any) -> int:
    counter = target_of(count, ())
    if counter is None:
        raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    target = target_of(array, kind)
    if target is not None and len(target) < len(places):
        raise SimulationError(
            f"an array of {len(target)} placements for {len(places)}: a real driver writes past its end"
        )
    counter.value = len(places)
    if target is not None:
        for at, where in enumerate(places):
            target[at].start, target[at].size = where.start, where.size
    return int(pynvml.NVML_SUCCESS)


def _fill_handles(handles: list[Any], array: Any, count: Any) -> int:
    counter = target_of(count, ())
    target: Any = target_of(array, ()) if handles else ()
    if counter is None or target is None:
        raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    if len(target) < len(handles):
        raise SimulationError(
            f"an array of {len(target)} handles for {len(handles)} instances: a real driver writes past its end"
        )
    if handles:
        target[: len(handles)] = handles
    counter.value = len(handles)
    return int(pynvml.NVML_SUCCESS)
