"""What the agent needs of the world, as small protocols; each has a real and a simulated side."""

from __future__ import annotations

from typing import Protocol

from migd.agent.records import Record
from migd.mig.observed import SeenGpu
from migd.mig.operations import Operation


class Gpus(Protocol):
    """The GPUs of this machine. Raises migd.nvml.errors.GpuError."""

    def look(self) -> tuple[SeenGpu, ...]:
        """Every GPU as it is now, by index."""
        ...

    def look_at(self, gpu_uuid: str) -> SeenGpu | None:
        """This GPU as it is now, where it was; None where that cannot be said without looking at every GPU."""
        ...

    def perform(self, operation: Operation) -> None:
        """Do one operation. Returning means accepted; whether it is so, the next look tells."""
        ...

    def close(self) -> None:
        """End the session, as a GPU reset needs; the next call opens another."""
        ...


class Reset(Protocol):
    """Resets one GPU. There is none in NVML: it is another program's work."""

    def reset(self, gpu_uuid: str) -> None:
        """Reset this GPU and no other; ResetRefusedError, with what the program said, where it cannot be."""
        ...


class Processes(Protocol):
    """Who the processes are that hold GPUs."""

    def describe(self, pid: int) -> tuple[str, str] | None:
        """The command of a process and its container's id ("" for a host process); None where it is gone."""
        ...

    def device_users(self, gpu_uuid: str) -> tuple[int, ...]:
        """Processes that have the GPU's device file open, ours left out: they may hold it unseen by NVML."""
        ...


class Clock(Protocol):
    """Time that only moves forward within one boot."""

    def now_s(self) -> float:
        """Seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class Boot(Protocol):
    """Which boot of the machine this is."""

    def boot_id(self) -> str:
        """Another text after every boot."""
        ...


class Store(Protocol):
    """Keeps the record."""

    def load(self) -> Record | None:
        """The record, or None where there is none yet."""
        ...

    def save(self, record: Record) -> None:
        """Returns when the record is safe from a crash."""
        ...


class ResetRefusedError(Exception):
    """The GPU could not be reset; the text is what the program said."""
