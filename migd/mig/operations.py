"""The operations that change one GPU, as values: exact, one hardware call each, addressed by UUID and place."""

from __future__ import annotations

from dataclasses import dataclass

from migd.mig.geometry import GpuInstance


@dataclass(frozen=True, slots=True)
class SetMode:
    """Ask for MIG mode on or off. Accepted is not active: the mode is read again before anything else."""

    gpu_uuid: str
    enable: bool

    def __str__(self) -> str:
        return f"MIG mode {'on' if self.enable else 'off'}"


@dataclass(frozen=True, slots=True)
class ResetGpu:
    """Reset this one GPU, so that a pending MIG mode becomes current. Needs every client gone, ours included."""

    gpu_uuid: str

    def __str__(self) -> str:
        return "GPU reset"


@dataclass(frozen=True, slots=True)
class DestroyComputeInstances:
    """Destroy every compute instance of the GPU instance at this place; fails where one is in use."""

    gpu_uuid: str
    instance: GpuInstance

    def __str__(self) -> str:
        return f"destroy compute instance of {self.instance}"


@dataclass(frozen=True, slots=True)
class DestroyGpuInstance:
    """Destroy the GPU instance at this place; its compute instances must be gone."""

    gpu_uuid: str
    instance: GpuInstance

    def __str__(self) -> str:
        return f"destroy GPU instance {self.instance}"


@dataclass(frozen=True, slots=True)
class CreateGpuInstance:
    """Create a GPU instance at an explicit placement. It has no compute instance yet."""

    gpu_uuid: str
    instance: GpuInstance

    def __str__(self) -> str:
        return f"create GPU instance {self.instance}"


@dataclass(frozen=True, slots=True)
class CreateComputeInstance:
    """Create the compute instance that spans the whole GPU instance at this place."""

    gpu_uuid: str
    instance: GpuInstance

    def __str__(self) -> str:
        return f"create compute instance of {self.instance}"


Operation = (
    SetMode | ResetGpu | DestroyComputeInstances | DestroyGpuInstance | CreateGpuInstance | CreateComputeInstance
)
