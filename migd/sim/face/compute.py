"""The pynvml face: compute instances and the MIG devices that they are."""

# ruff: noqa: N802, N803, N815  (names are pynvml's own)
from __future__ import annotations

import ctypes
from typing import Any

import pynvml

from migd.sim import driver
from migd.sim.catalog import ComputeProfile, SimProfile
from migd.sim.driver import refusal
from migd.sim.face.calling import Device, call
from migd.sim.face.mig import Mig, _fill_handles, _fill_places, _gi, _place
from migd.sim.machine import ComputeInstance


class Compute(Mig):
    """Compute instances inside a GPU instance, and MIG device handles."""

    @call("gi", symbol="by version")
    def nvmlGpuInstanceGetComputeInstanceProfileInfo(
        self, device: Device, profile: int, engProfile: int, version: int = 2
    ) -> Any:
        """The compute profile with this enum value: NOT_SUPPORTED where not offered, INVALID_ARGUMENT past the end."""
        if version not in (1, 2):
            raise refusal(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        self._symbol("nvmlGpuInstanceGetComputeInstanceProfileInfo", "V" if version == 2 else "")
        if engProfile != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
            raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        found = driver.ci_profile(self._core, device.gpu, _gi(device), profile)
        parent = driver.gpu_profile(self._core, device.gpu, _gi(device).profile_id)
        prefix = "MIG " if self._core.machine.switches.name_prefix else ""
        kind = (
            pynvml.c_nvmlComputeInstanceProfileInfo_v2_t if version == 2 else pynvml.c_nvmlComputeInstanceProfileInfo_t
        )
        key = (kind, parent.profile_id, profile, prefix)
        return self._prepared(device.gpu, key, lambda: self._new_compute_info(found, parent, prefix, kind()))

    def _new_compute_info(self, found: ComputeProfile, parent: SimProfile, prefix: str, info: Any) -> Any:
        info.id, info.sliceCount, info.instanceCount = found.profile_id, found.slices, found.count_max
        info.multiprocessorCount = parent.ci_sm[found.slices]
        (
            info.sharedCopyEngineCount,
            info.sharedDecoderCount,
            info.sharedEncoderCount,
            info.sharedJpegCount,
            info.sharedOfaCount,
        ) = parent.engines
        if hasattr(info, "name"):
            narrow = "" if found.slices == parent.slices else f"{found.slices}c."
            info.name = f"{prefix}{narrow}{parent.name}"
        return info

    nvmlGpuInstanceGetComputeInstanceProfileInfoV = nvmlGpuInstanceGetComputeInstanceProfileInfo

    @call("gi", privilege="config")
    def nvmlGpuInstanceGetComputeInstanceRemainingCapacity(self, device: Device, profileId: int) -> int:
        """How many more compute instances of this profile fit in the GPU instance now."""
        profile = driver.ci_profile(self._core, device.gpu, _gi(device), profileId)
        fitting, taken = 0, 0
        for candidate in driver.free_ci_places(_gi(device), profile):
            if not candidate.mask & taken:
                taken |= candidate.mask
                fitting += 1
        return fitting

    @call("gi", privilege="config")
    def nvmlGpuInstanceGetComputeInstancePossiblePlacements(
        self, device: Device, profileId: int, placementsRef: Any, countRef: Any
    ) -> int:
        """Fill the array with every legal place, in compute slices of the GPU instance."""
        places = driver.ci_profile(self._core, device.gpu, _gi(device), profileId).places
        return _fill_places(places, placementsRef, countRef, pynvml.c_nvmlComputeInstancePlacement_t)

    @call("gi", privilege="config", changes=True)
    def nvmlGpuInstanceCreateComputeInstance(self, device: Device, profileId: int) -> Any:
        """Create a compute instance in the first free place."""
        name = "nvmlGpuInstanceCreateComputeInstance"
        made = driver.create_ci(self._core, device.gpu, _gi(device), profileId, None, name)
        return self._ci_pointer(device.gpu, _gi(device), made)

    @call("gi", privilege="config", changes=True)
    def nvmlGpuInstanceCreateComputeInstanceWithPlacement(self, device: Device, profileId: int, placement: Any) -> Any:
        """Create a compute instance at this placement, given as byref()."""
        name = "nvmlGpuInstanceCreateComputeInstanceWithPlacement"
        where = _place(placement, pynvml.c_nvmlComputeInstancePlacement_t)
        made = driver.create_ci(self._core, device.gpu, _gi(device), profileId, where, name)
        return self._ci_pointer(device.gpu, _gi(device), made)

    @call("ci", privilege="config", changes=True)
    def nvmlComputeInstanceDestroy(self, device: Device) -> int:
        """Destroy a compute instance; IN_USE while anybody holds it, listed or not [27]."""
        driver.destroy_ci(self._core, device.gpu, _gi(device), _ci(device))
        return int(pynvml.NVML_SUCCESS)

    @call("gi", privilege="config")
    def nvmlGpuInstanceGetComputeInstances(
        self, device: Device, profileId: int, computeInstancesRef: Any, countRef: Any
    ) -> int:
        """Fill the caller's array with the compute instances of this profile."""
        instance = _gi(device)
        driver.ci_profile(self._core, device.gpu, instance, profileId)
        handles = [self._ci_pointer(device.gpu, instance, c) for c in instance.compute if c.profile_id == profileId]
        return _fill_handles(handles, computeInstancesRef, countRef)

    @call("gi", privilege="config")
    def nvmlGpuInstanceGetComputeInstanceById(self, device: Device, computeInstanceId: int) -> Any:
        """The compute instance with this id; NOT_FOUND where there is none [30]."""
        for compute in _gi(device).compute:
            if compute.ci_id == computeInstanceId:
                return self._ci_pointer(device.gpu, _gi(device), compute)
        raise refusal(pynvml.NVML_ERROR_NOT_FOUND)

    @call("ci", symbol="nvmlComputeInstanceGetInfo_v2")
    def nvmlComputeInstanceGetInfo(self, device: Device) -> Any:
        """Id, profile id, placement, GPU instance, and as `device` the MIG device [35]."""
        compute = _ci(device)
        return pynvml.c_nvmlComputeInstanceInfo_t(
            self._mig_pointer(device.gpu, _gi(device), compute),
            self._gi_pointer(device.gpu, _gi(device)),
            compute.ci_id,
            compute.profile_id,
            pynvml.c_nvmlComputeInstancePlacement_t(compute.start, compute.size),
        )

    nvmlComputeInstanceGetInfo_v2 = nvmlComputeInstanceGetInfo

    # ---- MIG devices

    @call("device")
    def nvmlDeviceIsMigDeviceHandle(self, device: Device) -> Any:
        """A c_uint *object*, as pynvml returns it: use .value."""
        return ctypes.c_uint(int(device.compute is not None))

    @call("device")
    def nvmlDeviceGetGpuInstanceId(self, device: Device) -> int:
        """The GPU instance id of a MIG device; NOT_SUPPORTED for a full GPU."""
        if device.instance is None:
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return device.instance.gi_id

    @call("device")
    def nvmlDeviceGetComputeInstanceId(self, device: Device) -> int:
        """The compute instance id of a MIG device; NOT_SUPPORTED for a full GPU."""
        if device.compute is None:
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return device.compute.ci_id

    @call("gpu")
    def nvmlDeviceGetMaxMigDeviceCount(self, device: Device) -> int:
        """The upper bound of MIG device indices; 0 where MIG is off or impossible, never an error [31]."""
        return self._core.offer(device.gpu).max_mig_devices if device.gpu.mig else 0

    @call("gpu")
    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, index: int) -> Any:
        """The MIG device at this index; NOT_FOUND at an empty one [32]."""
        view = self._mig_view(self._core.machine, device.gpu)
        if not view.mig:
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        found = driver.mig_devices(view)
        if not 0 <= index < len(found):
            raise refusal(pynvml.NVML_ERROR_NOT_FOUND)
        return self._mig_pointer(device.gpu, *found[index])

    @call("device")
    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, device: Device) -> Any:
        """The GPU of a MIG device; INVALID_ARGUMENT for a full GPU."""
        if device.compute is None:
            raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._device_pointer(device.gpu)

    @call("device")
    def nvmlDeviceGetAttributes_v2(self, device: Device) -> Any:
        """What a MIG device has; NOT_SUPPORTED for a full GPU [36]."""
        if device.instance is None or device.compute is None:
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        profile = driver.gpu_profile(self._core, device.gpu, device.instance.profile_id)
        return pynvml.c_nvmlDeviceAttributes(
            profile.ci_sm[device.compute.size],
            *profile.engines,
            profile.slices,
            device.compute.size,
            profile.memory_mib,
        )

    nvmlDeviceGetAttributes = nvmlDeviceGetAttributes_v2


def _ci(device: Device) -> ComputeInstance:
    assert device.compute is not None
    return device.compute
