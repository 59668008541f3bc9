"""The pynvml face: what monitors read. Processes, utilisation, fields, row remapping, events."""

# ruff: noqa: N802, N803, N815  (names are pynvml's own)
from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn

import pynvml

from migd.sim import driver, processes
from migd.sim.driver import refusal
from migd.sim.face.calling import Device, call
from migd.sim.face.compute import Compute
from migd.sim.machine import Gpu

_TURING = 6
_FIELD_VALUE: Any = pynvml.c_nvmlFieldValue_t
_PLAIN = ("nvmlExceptionClass", "nvmlStructToFriendlyObject", "nvmlFriendlyObjectToStruct")


@lru_cache(maxsize=256)
def _field_value(field: int, scope: int, known: int | None) -> bytes:
    """The structure of a field's value, but for its time; NOT_SUPPORTED where none is known."""
    value = _FIELD_VALUE()
    value.fieldId, value.scopeId = field, scope
    if known is None:
        value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
    else:
        value.valueType, value.nvmlReturn = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, pynvml.NVML_SUCCESS
        value.value.uiVal = known
    return bytes(value)


class Monitor(Compute):
    """Queries of health and use, and event sets."""

    _sets: dict[int, tuple[int, dict[str, int]]]
    _next_set = 1

    # ---- processes

    @call("device", symbol="nvmlDeviceGetComputeRunningProcesses_v3")
    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Device) -> list[Any]:
        """Listed processes, each with pid, usedGpuMemory (bytes), gpuInstanceId, computeInstanceId [40]."""
        return self._listed(device)

    @call("device", symbol="nvmlDeviceGetComputeRunningProcesses_v2")
    def nvmlDeviceGetComputeRunningProcesses_v2(self, device: Device) -> list[Any]:
        """As _v3."""
        return self._listed(device)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        """As _v3; a library without it raises pynvml's NVMLLibraryMismatchError."""
        return self._versioned(self.nvmlDeviceGetComputeRunningProcesses_v3, handle)

    @call("device", symbol="nvmlDeviceGetGraphicsRunningProcesses_v3")
    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, device: Device) -> list[Any]:
        """No simulated process draws."""
        return self._none_listed(device)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:
        """As _v3."""
        return self._versioned(self.nvmlDeviceGetGraphicsRunningProcesses_v3, handle)

    @call("device", symbol="nvmlDeviceGetMPSComputeRunningProcesses_v3")
    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, device: Device) -> list[Any]:
        """No simulated process runs under MPS."""
        return self._none_listed(device)

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: Any) -> list[Any]:
        """As _v3."""
        return self._versioned(self.nvmlDeviceGetMPSComputeRunningProcesses_v3, handle)

    def _versioned(self, call_v3: Any, handle: Any) -> list[Any]:
        try:
            found: list[Any] = call_v3(handle)
        except pynvml.NVMLError_FunctionNotFound:
            raise pynvml.NVMLLibraryMismatchError("the library has no such function: use one with _v2") from None
        return found

    def _none_listed(self, device: Device) -> list[Any]:
        if device.gpu.mig and device.instance is None:
            self._require("monitor")
        return []

    def _listed(self, device: Device) -> list[Any]:
        gpu = device.gpu
        self._none_listed(device)
        ids = {i.serial: i.gi_id for i in gpu.instances}
        ci_ids = {c.serial: c.ci_id for i in gpu.instances for c in i.compute}
        return [
            pynvml.nvmlFriendlyObject(
                {
                    "pid": process.pid,
                    "usedGpuMemory": process.memory_mib << 20,
                    "gpuInstanceId": ids.get(process.gi_serial, driver.ANY_INSTANCE),
                    "computeInstanceId": ci_ids.get(process.ci_serial, driver.ANY_INSTANCE),
                }
            )
            for process in processes.running(self._core.machine, gpu)
            if not process.silent and (device.compute is None or process.ci_serial == device.compute.serial)
        ]

    # ---- use and health

    @call("device")
    def nvmlDeviceGetUtilizationRates(self, device: Device) -> Any:
        """Percent of the last moment; NOT_SUPPORTED with MIG on [39]."""
        self._no_utilisation(device)
        busy = any(not p.silent for p in processes.running(self._core.machine, device.gpu))
        return pynvml.c_nvmlUtilization_t(50 * busy, 10 * busy)

    @call("device")
    def nvmlDeviceGetEncoderUtilization(self, device: Device) -> list[int]:
        """[percent, sampling period in µs]; NOT_SUPPORTED with MIG on [39]."""
        self._no_utilisation(device)
        return [0, 167_000]

    @call("device")
    def nvmlDeviceGetDecoderUtilization(self, device: Device) -> list[int]:
        """[percent, sampling period in µs]; NOT_SUPPORTED with MIG on [39]."""
        self._no_utilisation(device)
        return [0, 167_000]

    def _no_utilisation(self, device: Device) -> None:
        if device.gpu.mig:
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)

    @call("gpu")
    def nvmlDeviceGetRemappedRows(self, device: Device) -> tuple[int, int, int, int]:
        """(correctable, uncorrectable, pending, failed); NOT_SUPPORTED while instances exist [41]."""
        gpu = device.gpu
        if gpu.instances or self._core.offer(gpu).arch <= _TURING:
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        pending, failed = int(gpu.switches.remap_pending), int(gpu.switches.remap_failure)
        return (0, pending + failed, pending, failed)

    @call("gpu")
    def nvmlDeviceGetRetiredPages(self, device: Device, sourceFilter: int) -> list[int]:
        """Addresses of retired pages; NOT_SUPPORTED on Ampere and later [41]."""
        self._before_ampere(device)
        return []

    @call("gpu")
    def nvmlDeviceGetRetiredPagesPendingStatus(self, device: Device) -> int:
        """Whether pages wait for a reset to be retired; NOT_SUPPORTED on Ampere and later [41]."""
        self._before_ampere(device)
        return int(pynvml.NVML_FEATURE_DISABLED)

    def _before_ampere(self, device: Device) -> None:
        if self._core.offer(device.gpu).arch > _TURING:
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)

    @call("device")
    def nvmlDeviceGetFieldValues(self, device: Device, fieldIds: Any) -> Any:
        """An array of c_nvmlFieldValue_t; each has its own nvmlReturn. Known here: 184, 199, 230."""
        wanted = [w if isinstance(w, tuple) else (w, 0) for w in fieldIds]
        told = [_field_value(field, scope, self._field(device.gpu, field)) for field, scope in wanted]
        values = (_FIELD_VALUE * len(told)).from_buffer_copy(b"".join(told))
        for value in values:
            value.timestamp = int(self._core.now_s() * 1e6)
        return values

    def _field(self, gpu: Gpu, field: int) -> int | None:
        match field:
            case pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:
                return gpu.switches.recovery_action
            case pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED:
                model = self._core.offer(gpu)
                return int(model.mig and model.resetless)
            case pynvml.NVML_FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE:
                return int(self._core.offer(gpu).mig and self._core.machine.switches.profiles_while_off)
        return None

    # ---- events

    @call()
    def nvmlEventSetCreate(self, _: Device) -> Any:
        """An empty event set; it hears what happens from now on."""
        number = self._next_set  # never that of a set before: its handle is dead
        self._next_set += 1
        self._sets[number] = (self._core.machine.next_event, {})
        return self._pointer(("set", "", 0, number), pynvml.c_nvmlEventSet_t)

    @call("device")
    def nvmlDeviceGetSupportedEventTypes(self, device: Device) -> int:
        """The mask of what can be registered; nothing on a MIG device."""
        if device.compute is not None:
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        kinds = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
        return int(kinds | (pynvml.nvmlEventMigConfigChange if self._core.offer(device.gpu).mig else 0))

    @call("device")
    def nvmlDeviceRegisterEvents(self, device: Device, eventTypes: int, eventSet: Any) -> None:
        """Listen to this GPU; a MIG device has no events of its own [42]."""
        if device.compute is not None:
            raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        wanted = self._set(eventSet)[1]
        wanted[device.gpu.uuid] = wanted.get(device.gpu.uuid, 0) | eventTypes

    @call()
    def nvmlEventSetWait(self, _: Device, eventSet: Any, timeoutms: int) -> Any:
        """The next event; TIMEOUT is raised when there is none, which is the usual outcome [42]."""
        number = self._number(eventSet)
        heard, wanted = self._sets[number]
        machine = self._core.machine
        for event in machine.events:
            if event.number < heard:
                continue
            gpu = next((g for g in machine.gpus if g.uuid == event.gpu_uuid), None)
            if gpu is None or not wanted.get(event.gpu_uuid, 0) & event.kind:
                continue
            self._sets[number] = (event.number + 1, wanted)
            return pynvml.c_nvmlEventData_t(self._device_pointer(gpu), event.kind, event.data, event.gi_id, event.ci_id)
        if any(g.lost and g.uuid in wanted for g in machine.gpus):
            raise refusal(pynvml.NVML_ERROR_GPU_IS_LOST)
        self._core.linger(timeoutms / 1000)
        raise refusal(pynvml.NVML_ERROR_TIMEOUT)

    nvmlEventSetWait_v2 = nvmlEventSetWait

    @call()
    def nvmlEventSetFree(self, _: Device, eventSet: Any) -> None:
        """Forget the set."""
        del self._sets[self._number(eventSet)]

    def _set(self, handle: Any) -> tuple[int, dict[str, int]]:
        return self._sets[self._number(handle)]

    def _number(self, handle: Any) -> int:
        target = self._target(handle)
        if target.kind != "set" or target.serial not in self._sets:
            raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return target.serial


class Nvml(Monitor):
    """The whole face: pynvml's functions on a simulated machine; constants, structures and errors are pynvml's."""

    def __init__(self, core: Any, client: str, pid: int, privilege: str, command: str, container: str) -> None:
        super().__init__(core, client, pid, privilege)
        self._sets = {}
        self._command, self._container = command, container

    def __getattr__(self, name: str) -> Any:
        if (
            name not in _PLAIN
            and name.startswith("nvml")
            and name[4:5].isupper()
            and callable(getattr(pynvml, name, None))
        ):
            if isinstance(getattr(pynvml, name), type):
                return getattr(pynvml, name)
            self._not_simulated(name)
        try:
            return getattr(pynvml, name)
        except AttributeError:
            raise AttributeError(f"neither the simulated NVML nor pynvml has {name}") from None

    def _not_simulated(self, name: str) -> NoReturn:
        raise AttributeError(f"the simulated NVML has no {name}: it has what a reconfigurer and a monitor use")
