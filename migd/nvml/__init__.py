"""The one place that calls pynvml: reads boards and geometries, performs one operation at a time, maps errors."""

from migd.nvml.callers import Caller, ThreadCaller
from migd.nvml.errors import (
    DriverError,
    GoneError,
    GpuError,
    HungError,
    InUseError,
    LostError,
    NoDriverError,
    NoPermissionError,
    NoRoomError,
    NotSupportedError,
    UnknownGpuError,
)
from migd.nvml.gpus import NvmlGpus
from migd.nvml.session import Deadlines

__all__ = [
    "Caller",
    "Deadlines",
    "DriverError",
    "GoneError",
    "GpuError",
    "HungError",
    "InUseError",
    "LostError",
    "NoDriverError",
    "NoPermissionError",
    "NoRoomError",
    "NotSupportedError",
    "NvmlGpus",
    "ThreadCaller",
    "UnknownGpuError",
]
