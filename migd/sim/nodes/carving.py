"""Instances made and destroyed on a simulated machine by somebody else, as with `nvidia-smi mig`."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import byref
from typing import Any, Final

import pynvml

from migd.sim.errors import SimulationError
from migd.sim.host import SimHost

_SMI_PID: Final = 2_000


def carve(host: SimHost, index: int, layout: Iterable[str]) -> None:
    """`nvidia-smi mig -cgi … -C` by somebody else: MIG on, and these instances, each "3g.40gb" or "3g.40gb@4".

    SimulationError where the board has no such profile; NVML's errors where it refuses.
    """
    set_mode(host, index, True)
    for item in layout:
        name, _, start = item.partition("@")
        _make(host, index, name, int(start) if start else None)


def fill(host: SimHost, index: int, profile: str) -> None:
    """MIG on, and as many instances of a profile as fit."""
    set_mode(host, index, True)
    while True:
        try:
            _make(host, index, profile, None)
        except pynvml.NVMLError_InsufficientResources:
            return


def set_mode(host: SimHost, index: int, on: bool) -> int:
    """Ask for MIG mode; the activation status."""
    with _smi(host) as smi:
        return int(smi.nvmlDeviceSetMigMode(smi.nvmlDeviceGetHandleByIndex(index), int(on)))


def clear(host: SimHost, index: int) -> None:
    """Destroy every instance of a GPU; NVML's IN_USE where somebody holds one."""
    with _smi(host) as smi:
        gpu = smi.nvmlDeviceGetHandleByIndex(index)
        board = next(g for g in host.snapshot().gpus if g.index == index)
        for instance in list(board.instances):
            gi = smi.nvmlDeviceGetGpuInstanceById(gpu, instance.gi_id)
            for compute in list(instance.compute):
                smi.nvmlComputeInstanceDestroy(smi.nvmlGpuInstanceGetComputeInstanceById(gi, compute.ci_id))
            smi.nvmlGpuInstanceDestroy(gi)


def _make(host: SimHost, index: int, name: str, start: int | None) -> None:
    with _smi(host) as smi:
        gpu = smi.nvmlDeviceGetHandleByIndex(index)
        profile = next((p for p in host.model(index).profiles if p.name == name), None)
        if profile is None:
            raise SimulationError(f"GPU {index} has no profile {name}")
        if start is None:
            gi = smi.nvmlDeviceCreateGpuInstance(gpu, profile.profile_id)
        else:
            size = next((place.size for place in profile.places if place.start == start), 0)
            where = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
            gi = smi.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, profile.profile_id, byref(where))
        whole = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}[profile.slices]
        info = smi.nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, whole, 0)
        smi.nvmlGpuInstanceCreateComputeInstance(gi, info.id)


class _Smi:
    """One run of nvidia-smi: its session is open for as long as it takes, and no longer."""

    def __init__(self, host: SimHost) -> None:
        self._nvml = host.nvml(pid=_SMI_PID, command="nvidia-smi")

    def __enter__(self) -> Any:
        self._nvml.nvmlInit()
        return self._nvml

    def __exit__(self, *_: object) -> None:
        self._nvml.nvmlShutdown()


def _smi(host: SimHost) -> _Smi:
    return _Smi(host)
