"""Reads the instances of one GPU, and finds one by its profile and place; no handle is kept from call to call."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref, c_uint
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pynvml

from migd.mig.boards import Board
from migd.mig.geometry import GpuInstance
from migd.mig.observed import SeenComputeInstance, SeenInstance
from migd.mig.profiles import Placement, Profile
from migd.nvml.boards import ENUM_MAX
from migd.nvml.calls import Calls, Handle, is_gone, text
from migd.nvml.errors import GoneError, GpuError, LostError, NotSupportedError

INSTANCES_MAX: Final = 8
"""The driver holds at most 8 GPU instances a GPU, and 8 compute instances in one. Source: open kernel modules."""

_GPU_INSTANCE: Final[Any] = pynvml.c_nvmlGpuInstance_t
_COMPUTE_INSTANCES: Final[Any] = pynvml.c_nvmlComputeInstance_t * INSTANCES_MAX


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """One kind of compute instance that a GPU instance offers: its numeric id, and how many slices it spans."""

    profile_id: int
    compute_slices: int


class Found(NamedTuple):  # and no dataclass, because one is made for each instance at every look
    """A GPU instance with the handle it has right now; good until the next change on its GPU."""

    handle: Handle
    gi_id: int
    profile: Profile
    placement: Placement


class Instances:
    """The instances of one GPU, through one device handle; made for one look or one operation, then dropped.

    compute_profiles: what GPU instances of a profile id offer; shared with the next reader while the MIG mode lasts.
    """

    def __init__(
        self,
        calls: Calls,
        device: Handle,
        gpu_uuid: str,
        board: Board,
        compute_profiles: dict[int, tuple[ComputeProfile, ...]],
    ) -> None:
        self._calls = calls
        self._device = device
        self._uuid = gpu_uuid
        self._board = board
        self._compute_profiles = compute_profiles
        self._walked: dict[tuple[int, int], str] | None = None

    def all(self) -> tuple[SeenInstance, ...]:
        """Every GPU instance, with or without compute instances, in order of start; holders are not looked up.

        GoneError where one vanishes while it is read: the caller reads the GPU again. It is not left out, because one
        wrong answer would make its place look free.
        """
        found: dict[int, Found] = {}
        for profile in self._board.profiles:
            for handle in self._handles(profile):
                instance = self._found(handle, profile)
                found.setdefault(instance.gi_id, instance)
        return tuple(sorted(map(self._seen, found.values()), key=lambda s: (s.instance.placement, s.gi_id)))

    def find(self, wanted: GpuInstance) -> Found | None:
        """The GPU instance of this profile at this place, or None where there is none; the board must offer it."""
        profile = self._board.profile(wanted.profile)
        for handle in self._handles(profile):
            try:
                found = self._found(handle, profile)
            except GpuError as error:
                if not is_gone(error):
                    raise
                continue  # destroyed by another program since it was listed
            if GpuInstance(found.profile.name, found.placement) == wanted:
                return found
        return None

    def compute_instances(self, found: Found) -> Iterator[tuple[Handle, ComputeProfile]]:
        """The handles of the compute instances in one GPU instance, by compute profile."""
        call = "nvmlGpuInstanceGetComputeInstances"
        for profile in self.compute_profiles(found):
            count = c_uint(0)
            handles = _COMPUTE_INSTANCES()
            self._calls(call, self._uuid, found.handle, profile.profile_id, handles, byref(count))
            if count.value:
                yield from ((handle, profile) for handle in handles[: min(count.value, INSTANCES_MAX)])

    def compute_profiles(self, found: Found) -> tuple[ComputeProfile, ...]:
        """What compute instances this GPU instance offers, in the driver's order; it must exist to be asked."""
        known = self._compute_profiles.get(found.profile.profile_id)
        if known is None:
            known = tuple(self._read_compute_profiles(found.handle))
            self._compute_profiles[found.profile.profile_id] = known
        return known

    def whole_compute_profile(self, found: Found) -> ComputeProfile:
        """The compute profile that spans every slice of this GPU instance: the first such, which is the plain one."""
        for profile in self.compute_profiles(found):
            if profile.compute_slices == found.profile.compute_slices:
                return profile
        hint = f"no compute instance spans all {found.profile.compute_slices} slices of a {found.profile.name}"
        call = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
        raise NotSupportedError(call, self._uuid, pynvml.NVML_ERROR_NOT_SUPPORTED, hint)

    def _handles(self, profile: Profile) -> list[Handle]:
        # The driver writes as many as there are and checks no size. The A30 has reported too small an instanceCount.
        room = max(profile.instance_count_max, len(profile.placements), INSTANCES_MAX)
        count = c_uint(0)
        handles = (_GPU_INSTANCE * room)()
        self._calls("nvmlDeviceGetGpuInstances", self._uuid, self._device, profile.profile_id, handles, byref(count))
        return handles[: min(count.value, room)] if count.value else []

    def _found(self, handle: Handle, profile: Profile) -> Found:
        info = self._calls("nvmlGpuInstanceGetInfo", self._uuid, handle)
        its_profile = self._board.by_id(info.profileId) or profile
        place = info.placement
        return Found(handle, info.id, its_profile, Placement(place.start, place.size))

    def _read_compute_profiles(self, gpu_instance: Handle) -> Iterator[ComputeProfile]:
        call = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
        engines = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
        for value in range(ENUM_MAX):
            try:
                info = self._calls.where_supported(call, self._uuid, gpu_instance, value, engines)
            except GoneError:
                if value == 0:
                    raise  # not the end of the enum: the handle is dead
                return
            if info is not None:
                yield ComputeProfile(info.id, info.sliceCount)

    def _seen(self, found: Found) -> SeenInstance:
        """One GPU instance as a value."""
        inside = [self._seen_compute(found, handle, profile) for handle, profile in self.compute_instances(found)]
        present = sorted(inside, key=lambda c: c.ci_id)
        return SeenInstance(GpuInstance(found.profile.name, found.placement), found.gi_id, tuple(present))

    def _seen_compute(self, found: Found, handle: Handle, profile: ComputeProfile) -> SeenComputeInstance:
        info = self._calls("nvmlComputeInstanceGetInfo", self._uuid, handle)
        whole = profile.compute_slices == found.profile.compute_slices
        return SeenComputeInstance(info.id, whole, self._mig_uuid(found.gi_id, info))

    def _mig_uuid(self, gi_id: int, info: Any) -> str | None:
        """The UUID of the MIG device that a compute instance is; None where the driver would not tell.

        nvml.h calls info.device the parent, while in practice it is the MIG device: hence the check, which the UUID
        allows, so that nothing more is asked of each instance at every look.
        """
        try:
            uuid = text(self._calls("nvmlDeviceGetUUID", self._uuid, info.device))
            if uuid.startswith("MIG-"):
                return uuid
        except LostError:
            raise
        except (GoneError, NotSupportedError):
            pass
        if self._walked is None:
            self._walked = dict(self._walk())
        return self._walked.get((gi_id, info.id))

    def _walk(self) -> Iterator[tuple[tuple[int, int], str]]:
        """Every MIG device by (GI id, CI id), the slow way; holes are skipped, for nothing says there are none."""
        for index in range(self._calls("nvmlDeviceGetMaxMigDeviceCount", self._uuid, self._device)):
            try:
                handle = self._calls("nvmlDeviceGetMigDeviceHandleByIndex", self._uuid, self._device, index)
                gi_id = self._calls("nvmlDeviceGetGpuInstanceId", self._uuid, handle)
                ci_id = self._calls("nvmlDeviceGetComputeInstanceId", self._uuid, handle)
                yield (gi_id, ci_id), text(self._calls("nvmlDeviceGetUUID", self._uuid, handle))
            except (GoneError, NotSupportedError):
                continue
