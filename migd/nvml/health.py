"""Reads whether one GPU may be worked on, and whether its MIG mode changes without a reset."""

from __future__ import annotations

from typing import Final

import pynvml

from migd.nvml.calls import Calls, Handle
from migd.nvml.errors import GoneError, NotSupportedError, error_for

_RECOVERY: Final[dict[int, str]] = {
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "a GPU reset",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "a reboot of the node",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "its peer-to-peer traffic drained",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "its work drained and then a GPU reset",
    pynvml.NVML_GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN: "its IMEX domain recovered",
    pynvml.NVML_GPU_RECOVERY_ACTION_BUS_RESET: "a reset of its bus",
    pynvml.NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT: "a reboot of the whole system",
}

_MEMBERS: Final[dict[int, str]] = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


def read_resetless(calls: Calls, device: Handle, gpu_uuid: str) -> bool:
    """Whether a MIG mode change takes effect without a GPU reset; drivers without the field: Hopper and later."""
    told = _field(calls, device, gpu_uuid, pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED)
    if told is not None:
        return bool(told)
    try:
        architecture = calls("nvmlDeviceGetArchitecture", gpu_uuid, device)
    except NotSupportedError:
        return False
    return bool(pynvml.NVML_DEVICE_ARCH_HOPPER <= architecture < pynvml.NVML_DEVICE_ARCH_UNKNOWN)


def read_recovery(calls: Calls, device: Handle, gpu_uuid: str) -> str:
    """What the driver says must be done to this GPU first, in words; "" where nothing, or an older driver.

    Source: nvml.h, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION (field 230).
    """
    action = _field(calls, device, gpu_uuid, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
    if not action:
        return ""
    needed = _RECOVERY.get(action, f"recovery action {action}")
    return f"the driver says this GPU needs {needed} before it can be used"


def read_remapped_rows(calls: Calls, device: Handle, gpu_uuid: str) -> str | None:
    """What the row remapper complains of, in words; "" where nothing, None where it cannot be read.

    The driver refuses while any instance exists, so what was read before the first one has to be remembered.
    """
    try:
        _, _, pending, failed = calls("nvmlDeviceGetRemappedRows", gpu_uuid, device)
    except NotSupportedError:
        return None
    if failed:
        return "remapping of faulty memory rows has failed: this GPU should be replaced"
    if pending:
        return "remapping of faulty memory rows is pending: this GPU needs a reset"
    return ""


def _field(calls: Calls, device: Handle, gpu_uuid: str, field_id: int) -> int | None:
    """One field value; None where this driver or GPU does not know it."""
    try:
        (value,) = calls("nvmlDeviceGetFieldValues", gpu_uuid, device, [field_id])
    except (NotSupportedError, GoneError):
        return None
    if value.nvmlReturn == pynvml.NVML_ERROR_GPU_IS_LOST:
        raise error_for("nvmlDeviceGetFieldValues", gpu_uuid, value.nvmlReturn)
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return int(getattr(value.value, _MEMBERS.get(value.valueType, "uiVal")))
