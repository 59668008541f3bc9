"""Which GPUs and MIG devices a container has: those whose device nodes it was given, as CUDA finds them.

Source: the MIG user guide, device nodes; /proc/driver/nvidia-caps/mig-minors, which the driver's root has here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pynvml

MINORS: Final = "proc/driver/nvidia-caps/mig-minors"
"""Under the driver's root: the minor number of each capability."""


def devices_of(nvml: Any, driver: Path, dev: Path = Path("/dev")) -> list[str]:
    """The UUIDs. nvml: initialized; driver: its root; dev: the container's own."""
    minors = dict(line.split() for line in (driver / MINORS).read_text().splitlines())
    found: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        number = nvml.nvmlDeviceGetMinorNumber(gpu)
        if not (dev / f"nvidia{number}").exists():
            continue
        if not _cut(nvml, gpu):
            found.append(nvml.nvmlDeviceGetUUID(gpu))
            continue
        for device in mig_devices(nvml, gpu):
            instance = f"gpu{number}/gi{nvml.nvmlDeviceGetGpuInstanceId(device)}"
            compute = f"{instance}/ci{nvml.nvmlDeviceGetComputeInstanceId(device)}"
            nodes = [dev / "nvidia-caps" / f"nvidia-cap{minors[f'{one}/access']}" for one in (instance, compute)]
            if all(node.exists() for node in nodes):
                found.append(nvml.nvmlDeviceGetUUID(device))
    return found


def mig_devices(nvml: Any, gpu: Any) -> list[Any]:
    """The MIG devices of a GPU, by the slots that they may be in."""
    found = []
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot))
        except pynvml.NVMLError_NotFound:
            continue
    return found


def _cut(nvml: Any, gpu: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(gpu)[0])
    except pynvml.NVMLError_NotSupported:
        return False
