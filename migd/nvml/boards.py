"""Reads what one GPU offers to be cut into: its profiles, under the names and at the places its driver reports."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref, c_uint, sizeof
from functools import lru_cache
from typing import Any, Final

import pynvml

from migd.mig.boards import Board
from migd.mig.profiles import Engines, Placement, Profile
from migd.nvml.calls import Calls, Handle, text
from migd.nvml.errors import GoneError, GpuError, NotSupportedError

ENUM_MAX: Final = 64
"""Where counting through a profile enum ends even if the driver never says so; 18 are known today."""

_PROFILE_INFO: Final = "nvmlDeviceGetGpuInstanceProfileInfo"
_PLACEMENTS: Final = "nvmlDeviceGetGpuInstancePossiblePlacements"
_INFO: Final[Any] = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t
_PLACEMENT: Final[Any] = pynvml.c_nvmlGpuInstancePlacement_t
_TOO_OLD: Final = "this driver is too old to name its MIG profiles; update it"


def read_board(calls: Calls, handle: Handle, gpu_uuid: str, mig_on: bool) -> Board | None:
    """Every profile of this GPU with its placements; None where the driver lists none while MIG is off.

    Contents do not change while a mode lasts, so callers may keep them that long.
    Raises NotSupportedError where the driver cannot name its profiles, else GpuError.
    Source: nvml.h, nvmlDeviceGetGpuInstanceProfileInfoV (v2), nvmlDeviceGetGpuInstancePossiblePlacements_v2.
    """
    found: dict[int, Profile] = {}
    try:
        for info in _profile_infos(calls, handle, gpu_uuid):
            profile = _profile(calls, handle, gpu_uuid, info)
            found.setdefault(profile.profile_id, profile)
    except NotSupportedError as error:
        # Older drivers answer so while MIG is off. With MIG on, or a missing symbol, it is a real answer.
        if mig_on or error.code != pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        return None
    if not found and not mig_on:
        return None
    if len({p.name for p in found.values()}) != len(found):
        names = ", ".join(sorted(p.name for p in found.values()))
        raise GpuError(_PROFILE_INFO, gpu_uuid, 0, f"the driver gives two profiles one name: {names}")
    return Board.of(found.values())


def _profile_infos(calls: Calls, handle: Handle, gpu_uuid: str) -> Iterator[Any]:
    """The v2 profile structures, by counting through the enum; values this GPU lacks are skipped."""
    for value in range(ENUM_MAX):
        try:
            info = calls.where_supported(_PROFILE_INFO, gpu_uuid, handle, value)
        except NotSupportedError as error:
            raise NotSupportedError(error.call, gpu_uuid, error.code, _TOO_OLD) from error
        except GoneError as error:
            # Past the end of this driver's enum. At the very first value it means a structure version it lacks.
            if value == 0:
                raise NotSupportedError(error.call, gpu_uuid, error.code, _TOO_OLD) from error
            return
        if info is not None:
            yield info


def _profile(calls: Calls, handle: Handle, gpu_uuid: str, info: Any) -> Profile:
    name = text(info.name).removeprefix("MIG ").strip()
    if not name:
        raise NotSupportedError(_PROFILE_INFO, gpu_uuid, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, _TOO_OLD)
    return _written(name, bytes(info), _placements(calls, handle, gpu_uuid, info.id))


@lru_cache(maxsize=256)
def _written(name: str, structure: bytes, placements: tuple[Placement, ...]) -> Profile:
    """What the driver wrote as a value; GPUs that are alike, and looks after one another, share it."""
    info = _INFO.from_buffer_copy(structure)
    return Profile(
        name=name,
        profile_id=info.id,
        compute_slices=info.sliceCount,
        memory_mib=info.memorySizeMB,  # which counts MiB, its name notwithstanding
        engines=Engines(info.copyEngineCount, info.decoderCount, info.encoderCount, info.jpegCount, info.ofaCount),
        instance_count_max=info.instanceCount,
        placements=placements,
    )


def _placements(calls: Calls, handle: Handle, gpu_uuid: str, profile_id: int) -> tuple[Placement, ...]:
    count = c_uint(0)
    calls(_PLACEMENTS, gpu_uuid, handle, profile_id, None, byref(count))
    if not count.value:
        return ()
    places = (_PLACEMENT * count.value)()
    calls(_PLACEMENTS, gpu_uuid, handle, profile_id, places, byref(count))
    return _sorted_places(bytes(places), count.value)


@lru_cache(maxsize=256)
def _sorted_places(structures: bytes, count: int) -> tuple[Placement, ...]:
    places = (_PLACEMENT * (len(structures) // sizeof(_PLACEMENT))).from_buffer_copy(structures)
    return tuple(sorted({Placement(p.start, p.size) for p in places[:count]}))
