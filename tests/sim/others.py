"""Other programs that change GPUs beside the agent: their instances, bare or narrow ones, at the moment that hurts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_uint
from typing import Any

import pynvml
from boards import at

from migd.agent.effects import Pause
from migd.agent.running import Listener, Progress
from migd.mig.geometry import GpuInstance, by_start
from migd.mig.observed import SeenGpu
from migd.mig.operations import CreateComputeInstance, CreateGpuInstance, DestroyComputeInstances, DestroyGpuInstance
from migd.nvml.gpus import NvmlGpus
from migd.sim.host import SimHost

PID = 77_777


@contextmanager
def somebody(host: SimHost) -> Iterator[NvmlGpus]:
    """Another program with NVML open; its session ends with it, for an open one blocks mode changes."""
    try:
        yield NvmlGpus(host.nvml(pid=PID), host.caller)
    finally:
        host.close_sessions(PID)


def place(gpu: SeenGpu, text: str) -> GpuInstance:
    """An instance in short, by the GPU's own names and places: "3g@4"."""
    assert gpu.board is not None
    (instance,) = at(gpu.board, text)
    return instance


def create(host: SimHost, uuid: str, instance: GpuInstance, *, bare: bool = False) -> None:
    """Somebody creates an instance, with the compute instance that spans it or without any."""
    with somebody(host) as gpus:
        gpus.perform(CreateGpuInstance(uuid, instance))
        if not bare:
            gpus.perform(CreateComputeInstance(uuid, instance))


def destroy(host: SimHost, uuid: str, instance: GpuInstance) -> None:
    """Somebody destroys an instance."""
    with somebody(host) as gpus:
        gpus.perform(DestroyComputeInstances(uuid, instance))
        gpus.perform(DestroyGpuInstance(uuid, instance))


def narrow(host: SimHost, uuid: str, instance: GpuInstance) -> None:
    """Somebody replaces the compute instance of an instance by one that spans a single slice (1c.3g)."""
    with somebody(host) as gpus:
        gpus.perform(DestroyComputeInstances(uuid, instance))
        nvml: Any = host.nvml(pid=PID)
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        for value in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
            try:
                profile = nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, value)
            except pynvml.NVMLError:
                continue
            handles, count = (pynvml.c_nvmlGpuInstance_t * 8)(), c_uint(0)
            nvml.nvmlDeviceGetGpuInstances(device, profile.id, handles, byref(count))
            for handle in handles[: count.value]:
                if nvml.nvmlGpuInstanceGetInfo(handle).placement.start == instance.placement.start:
                    nvml.nvmlGpuInstanceCreateComputeInstance(handle, 0)
                    return
    raise AssertionError(f"there is no {instance}")


def before(text: str, deed: Callable[[], object]) -> Listener:
    """Does something once, between the look that decided on the first operation whose text begins so and its call."""
    return _once(lambda step: not step.done and str(step.effect).startswith(text), deed)


def after(text: str, deed: Callable[[], object]) -> Listener:
    """Does something once, when the first operation whose text begins so has ended and before the next look."""
    return _once(lambda step: step.done and str(step.effect).startswith(text), deed)


def _once(when: Callable[[Progress], bool], deed: Callable[[], object]) -> Listener:
    left = [deed]

    def listen(step: Progress) -> None:
        if left and not isinstance(step.effect, Pause) and when(step):
            left.pop()()

    return listen


def shown(gpu: SeenGpu) -> str:
    """What is on a GPU in short: "3g.20gb@0 1g.5gb@4"."""
    return " ".join(map(str, by_start(gpu.geometry)))
