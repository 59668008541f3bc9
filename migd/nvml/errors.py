"""Errors of one NVML call, named by what the caller can do about them, with a sentence for people."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, Final

import pynvml

_TEXTS: Final[dict[int, str]] = {
    # Our own words: str() of an NVMLError asks the library for codes 19 and 23, and fails when none is loaded.
    pynvml.NVML_ERROR_UNINITIALIZED: "not initialised",
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "invalid argument",
    pynvml.NVML_ERROR_NOT_SUPPORTED: "not supported",
    pynvml.NVML_ERROR_NO_PERMISSION: "insufficient permissions",
    pynvml.NVML_ERROR_NOT_FOUND: "not found",
    pynvml.NVML_ERROR_INSUFFICIENT_SIZE: "insufficient size",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "driver not loaded",
    pynvml.NVML_ERROR_TIMEOUT: "timeout",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 not found",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "function not found in libnvidia-ml",
    pynvml.NVML_ERROR_GPU_IS_LOST: "GPU is lost",
    pynvml.NVML_ERROR_RESET_REQUIRED: "GPU requires a reset",
    pynvml.NVML_ERROR_OPERATING_SYSTEM: "blocked by the operating system",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "library and kernel driver differ in version",
    pynvml.NVML_ERROR_IN_USE: "in use by another client",
    pynvml.NVML_ERROR_MEMORY: "insufficient host memory",
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: "insufficient resources",
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: "argument version mismatch",
    pynvml.NVML_ERROR_NOT_READY: "not ready",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "GPU not found",
    pynvml.NVML_ERROR_UNKNOWN: "unknown error",
}


class GpuError(Exception):
    """One call to NVML failed, in a way that no more special class names.

    call: the NVML function. gpu_uuid: the GPU it was about, "" for the driver as a whole.
    code: the nvmlReturn_t, None where NVML did not answer or was not asked. hint: what to do, for people; may be "".
    retry (class attribute): the same call may succeed later without anybody changing anything in migd.
    """

    retry: ClassVar[bool] = False
    advice: ClassVar[str] = ""

    def __init__(self, call: str, gpu_uuid: str, code: int | None, hint: str = "") -> None:
        self.call = call
        self.gpu_uuid = gpu_uuid
        self.code = code
        self.hint = hint or self.advice
        super().__init__(call, gpu_uuid, code, hint)

    def __str__(self) -> str:
        where = f" on {self.gpu_uuid}" if self.gpu_uuid else ""
        told = "" if self.code is None else f"{text_of(self.code)} (NVML code {self.code})"
        return f"{self.call}{where}: " + "; ".join(filter(None, (told, self.hint)))


class InUseError(GpuError):
    """A process, a monitor or a compute instance still holds it: drain or wait, then retry."""

    retry = True
    advice = "a process, a monitoring daemon or a compute instance still holds it; end that, or wait, and try again"


class NoRoomError(GpuError):
    """The place is taken, or what the profile needs is used up: look again and plan anew."""

    advice = "the place or the engines it needs are taken by another instance"


class NoPermissionError(GpuError):
    """This process lacks a privilege; the hint names it. Retrying is useless until it is granted."""

    advice = (
        "run as root, or grant the mig/config capability "
        "(/proc/driver/nvidia/capabilities/mig/config and its node under /dev/nvidia-caps)"
    )


class NotSupportedError(GpuError):
    """This GPU, this driver or its present MIG mode does not offer it."""


class GoneError(GpuError):
    """What the call was about does not exist, or its handle is dead: look again."""

    advice = "it is not there any more; another program may have changed this GPU"


class LostError(GpuError):
    """The GPU fell off the bus: nothing on it works until the machine or the GPU is reset."""

    advice = "the GPU does not answer on the bus; it needs a reset or a reboot, or is broken"


class DriverError(GpuError):
    """The driver is not loaded, being reloaded, or differs from the library: the next look opens a new session."""

    retry = True


class NoDriverError(DriverError):
    """There is no libnvidia-ml on this machine, or not where the loader looks: waiting does not bring it."""

    retry = False


class VersionError(DriverError):
    """The library and the kernel driver differ in version: a process that loaded the one before needs a successor."""


class HungError(GpuError):
    """The deadline passed and the call has not returned: its effect is unknown until the GPU is read again."""

    advice = "it has not returned; if it changes the GPU, whether it took effect is not known"


class UnreadableError(GpuError):
    """A GPU that is there cannot be read now; the hint says what it answered. A later look may succeed."""

    retry = True

    def __str__(self) -> str:
        return f"{self.gpu_uuid} cannot be read: {self.hint}"


class UnknownGpuError(GpuError):
    """No GPU with this UUID is here."""

    advice = "no GPU of this machine has this UUID; `migd gpus` lists those that do"


_CLASSES: Final[dict[int, type[GpuError]]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: DriverError,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: GoneError,
    pynvml.NVML_ERROR_NOT_SUPPORTED: NotSupportedError,
    pynvml.NVML_ERROR_NO_PERMISSION: NoPermissionError,
    pynvml.NVML_ERROR_NOT_FOUND: GoneError,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: DriverError,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: NoDriverError,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: NotSupportedError,
    pynvml.NVML_ERROR_GPU_IS_LOST: LostError,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: VersionError,
    pynvml.NVML_ERROR_IN_USE: InUseError,
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: NoRoomError,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: NotSupportedError,
    pynvml.NVML_ERROR_NOT_READY: DriverError,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: UnknownGpuError,
}

_HINTS_BY_CODE: Final[dict[int, str]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: "the driver was reloaded under this process, or is being unloaded",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA kernel driver is not loaded, or is being reloaded",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "install the NVIDIA driver, or add its libraries to the loader's path",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was upgraded under the running module; reload it or reboot",
    pynvml.NVML_ERROR_NOT_READY: "the driver is still starting",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the installed driver is too old for migd",
    pynvml.NVML_ERROR_RESET_REQUIRED: "reset the GPU, or reboot the machine",
}

_HINTS_BY_CALL: Final[dict[tuple[str, int], str]] = {
    ("nvmlDeviceSetMigMode", pynvml.NVML_ERROR_NO_PERMISSION): (
        "changing the MIG mode needs root with CAP_SYS_ADMIN; no capability file replaces it"
    ),
    ("nvmlDeviceSetMigMode", pynvml.NVML_ERROR_NOT_SUPPORTED): "this GPU cannot do MIG, or not in this machine",
    ("nvmlDeviceSetMigMode", pynvml.NVML_ERROR_IN_USE): (
        "a process, a monitoring daemon or a GPU instance still holds the GPU, so the mode cannot change"
    ),
    ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_NO_PERMISSION): (
        "this process may not open the GPU's device node (/dev/nvidia*); run as root, outside a restricted container"
    ),
    ("nvmlDeviceGetHandleByUUID", pynvml.NVML_ERROR_NO_PERMISSION): (
        "this process may not open the GPU's device node (/dev/nvidia*); run as root, outside a restricted container"
    ),
    ("nvmlGpuInstanceDestroy", pynvml.NVML_ERROR_IN_USE): (
        "a compute instance still exists in it, or a client such as a monitoring daemon holds it"
    ),
    ("nvmlDeviceCreateGpuInstanceWithPlacement", pynvml.NVML_ERROR_IN_USE): (
        "the GPU itself is busy: the first GPU instance needs a GPU that no process or monitoring daemon holds"
    ),
    ("nvmlDeviceCreateGpuInstanceWithPlacement", pynvml.NVML_ERROR_INVALID_ARGUMENT): (
        "the driver does not offer this profile at this place"
    ),
    ("nvmlDeviceCreateGpuInstanceWithPlacement", pynvml.NVML_ERROR_NOT_SUPPORTED): (
        "MIG mode is off, or this mix of profiles is not allowed on this GPU"
    ),
}


def text_of(code: int) -> str:
    """The meaning of an nvmlReturn_t in words, without asking the library."""
    return _TEXTS.get(code, "unexpected error")


def error_for(call: str, gpu_uuid: str, code: int) -> GpuError:
    """The error for a code that an NVML call returned, ready to raise.

    INVALID_ARGUMENT means a dead handle, except at creation, where handle and profile are fresh and only the place
    can be wrong. Source: nvml.h, the return codes listed at each call.
    """
    kind, hint = _meaning(call, code)
    return kind(call, gpu_uuid, code, hint)


@lru_cache(maxsize=1024)
def _meaning(call: str, code: int) -> tuple[type[GpuError], str]:
    kind = _CLASSES.get(code, GpuError)
    if (call, code) == ("nvmlDeviceCreateGpuInstanceWithPlacement", pynvml.NVML_ERROR_INVALID_ARGUMENT):
        kind = NotSupportedError
    return kind, _HINTS_BY_CALL.get((call, code)) or _HINTS_BY_CODE.get(code, "")
