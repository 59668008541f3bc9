"""The pynvml face: library, devices and what they say of themselves."""

# ruff: noqa: N802, N803, N815  (names are pynvml's own)
from __future__ import annotations

import copy
import os
from typing import Any

import pynvml

from migd.sim import driver, processes
from migd.sim.driver import refusal
from migd.sim.face.calling import Device, Face, call
from migd.sim.machine import Client, Gpu, Machine

ERROR_TEXTS = {
    0: "Success",
    1: "Uninitialized",
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    5: "Already Initialized",
    6: "Not Found",
    7: "Insufficient Size",
    9: "Driver Not Loaded",
    10: "Timeout",
    13: "Function Not Found",
    15: "GPU is lost",
    16: "GPU requires reset",
    18: "Driver/library version mismatch",
    19: "In use by another client",
    23: "Insufficient Resources",
    25: "Argument version mismatch",
}
MIB = 1 << 20


class System(Face):
    """nvmlInit to nvmlShutdown, and the device queries."""

    _command = ""
    _container = ""

    # ---- the session

    @call(before_init=True)
    def nvmlInit(self, _: Device) -> None:
        """Open the session, or count one user more of it."""
        self._open()

    @call(before_init=True)
    def nvmlInitWithFlags(self, _: Device, flags: int) -> None:
        """As nvmlInit; flags change nothing here."""
        self._open()

    @call()
    def nvmlShutdown(self, _: Device) -> None:
        """Count one user less; the last one closes the session, and its handles die."""
        clients = self._core.machine.clients
        client = clients[self._client]
        client.inits -= 1
        if not client.inits:
            del clients[self._client]
            self._targets.clear()
            self._addresses.clear()

    def _open(self) -> None:
        machine = self._core.machine
        if machine.driver_back_at_s > self._core.now_s():
            raise refusal(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if self._session != machine.session:
            self._targets.clear()
            self._addresses.clear()
            self._session = machine.session
        client = machine.clients.get(self._client)
        if client is None:
            real = processes.started_at(self._pid) if self._pid == os.getpid() else None
            space = None if real is None else processes.pid_space()
            client = Client(self._pid, 0, self._command, self._container, real, space)
            machine.clients[self._client] = client
            if machine.switches.stale_old_sessions:
                client.view = copy.deepcopy(machine.gpus)
        client.inits += 1

    def nvmlErrorString(self, result: int) -> str:
        """The text of an NVML code, also of those that pynvml's own table lacks."""
        return ERROR_TEXTS.get(result, "Unknown Error")

    @call()
    def nvmlSystemGetDriverVersion(self, _: Device) -> str:
        """The driver's version."""
        return self._core.machine.switches.driver_version

    @call()
    def nvmlSystemGetNVMLVersion(self, _: Device) -> str:
        """The library's version, which follows the driver's."""
        major, _dot, rest = self._core.machine.switches.driver_version.partition(".")
        return f"13.{major}.{rest}"

    @call()
    def nvmlSystemGetCudaDriverVersion(self, _: Device) -> int:
        """13.0, as an integer."""
        return 13000

    @call()
    def nvmlSystemGetProcessName(self, _: Device, pid: int) -> str:
        """The command of a process that the driver knows."""
        for process in self._core.machine.processes.values():
            if process.pid == pid and process.released_at_s is None:
                return process.command
        raise refusal(pynvml.NVML_ERROR_NOT_FOUND)

    # ---- finding devices

    @call()
    def nvmlDeviceGetCount(self, _: Device) -> int:
        """How many GPUs there are."""
        return len(self._core.machine.gpus)

    @call()
    def nvmlDeviceGetHandleByIndex(self, _: Device, index: int) -> Any:
        """The GPU at this index; GPU_IS_LOST where it fell off the bus."""
        return self._handle_where(lambda gpu: gpu.index == index, pynvml.NVML_ERROR_INVALID_ARGUMENT)

    @call()
    def nvmlDeviceGetHandleByPciBusId(self, _: Device, pciBusId: str | bytes) -> Any:
        """The GPU at this PCI address, written with four or eight digits of domain."""
        wanted = _text(pciBusId).upper()
        domain, _colon, rest = wanted.partition(":")
        return self._handle_where(
            lambda gpu: gpu.bus_id == f"{domain.rjust(8, '0')}:{rest}", pynvml.NVML_ERROR_NOT_FOUND
        )

    @call()
    def nvmlDeviceGetHandleByUUID(self, _: Device, uuid: str | bytes) -> Any:
        """The GPU or the MIG device with this UUID; NOT_FOUND when it is gone [34]."""
        wanted = _text(uuid)
        machine = self._core.machine
        for gpu in machine.gpus:
            if gpu.uuid == wanted:
                if gpu.lost:
                    raise refusal(pynvml.NVML_ERROR_GPU_IS_LOST)
                return self._device_pointer(gpu)
        if wanted.startswith("MIG-"):
            for gpu in machine.gpus:
                for instance, compute in driver.mig_devices(self._mig_view(machine, gpu)):
                    if compute.uuid == wanted:
                        return self._mig_pointer(gpu, instance, compute)
        raise refusal(pynvml.NVML_ERROR_NOT_FOUND)

    def _handle_where(self, test: Any, missing: int) -> Any:
        for gpu in self._core.machine.gpus:
            if test(gpu):
                if gpu.lost:
                    raise refusal(pynvml.NVML_ERROR_GPU_IS_LOST)
                return self._device_pointer(gpu)
        raise refusal(missing)

    def _mig_view(self, machine: Machine, gpu: Gpu) -> Gpu:
        return self._stale(machine, gpu.uuid) or gpu

    # ---- identity

    @call("device")
    def nvmlDeviceGetUUID(self, device: Device) -> str:
        """The UUID of a GPU or of a MIG device."""
        return device.gpu.uuid if device.compute is None else device.compute.uuid

    @call("device")
    def nvmlDeviceGetName(self, device: Device) -> str:
        """The GPU's name; of a MIG device "<GPU> MIG <profile>" [37]."""
        if device.instance is None or device.compute is None:
            return device.gpu.name
        profile = driver.gpu_profile(self._core, device.gpu, device.instance.profile_id)
        narrow = "" if device.compute.size == profile.slices else f"{device.compute.size}c."
        return f"{device.gpu.name} MIG {narrow}{profile.name}"

    @call("device")
    def nvmlDeviceGetIndex(self, device: Device) -> int:
        """The GPU's index; of a MIG device its index under its GPU."""
        if device.compute is None:
            return device.gpu.index
        serials = [c.serial for _, c in driver.mig_devices(self._mig_view(self._core.machine, device.gpu))]
        if device.compute.serial not in serials:  # newer than what an old session sees
            raise refusal(pynvml.NVML_ERROR_NOT_FOUND)
        return serials.index(device.compute.serial)

    @call("gpu")
    def nvmlDeviceGetMinorNumber(self, device: Device) -> int:
        """The number of /dev/nvidiaN; a mode change may change it."""
        return device.gpu.minor

    @call("device")
    def nvmlDeviceGetPciInfo(self, device: Device) -> Any:
        """The PCI address and ids, as nvmlPciInfo_t."""
        gpu = device.gpu
        domain, bus, _rest = gpu.bus_id.split(":")
        return pynvml.nvmlPciInfo_t(
            busIdLegacy=gpu.bus_id[4:].encode(),
            domain=int(domain, 16),
            bus=int(bus, 16),
            device=0,
            pciDeviceId=self._core.offer(gpu).pci_ids[gpu.name],
            pciSubSystemId=0x153310DE,
            busId=gpu.bus_id.encode(),
        )

    nvmlDeviceGetPciInfo_v3 = nvmlDeviceGetPciInfo

    @call("device")
    def nvmlDeviceGetBrand(self, device: Device) -> int:
        """NVML_BRAND_…, as newer drivers call every board of a data centre."""
        return int(pynvml.NVML_BRAND_NVIDIA)

    @call("device")
    def nvmlDeviceGetVirtualizationMode(self, device: Device) -> int:
        """NVML_GPU_VIRTUALIZATION_MODE_…: none, or pass-through in a VM."""
        vm = self._core.machine.switches.vm
        return int(pynvml.NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH if vm else pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE)

    @call("device")
    def nvmlDeviceGetArchitecture(self, device: Device) -> int:
        """NVML_DEVICE_ARCH_…"""
        return self._core.offer(device.gpu).arch

    @call("device")
    def nvmlDeviceGetCudaComputeCapability(self, device: Device) -> tuple[int, int]:
        """(major, minor)."""
        return self._core.offer(device.gpu).compute_capability

    @call("gpu")
    def nvmlDeviceGetPersistenceMode(self, device: Device) -> int:
        """On: what a data centre runs with."""
        return int(pynvml.NVML_FEATURE_ENABLED)

    @call("device")
    def nvmlDeviceGetComputeMode(self, device: Device) -> int:
        """Default: nobody changes it here."""
        return int(pynvml.NVML_COMPUTEMODE_DEFAULT)

    @call("device")
    def nvmlDeviceGetMemoryInfo(self, device: Device, version: int | None = None) -> Any:
        """Total, free and used bytes; of a GPU with MIG on only for who has the monitor capability [38]."""
        gpu = device.gpu
        running = processes.running(self._core.machine, gpu)
        if device.instance is None:
            if gpu.mig:
                self._require("monitor")
            total = self._core.offer(gpu).fb_total_mib
            used = sum(p.memory_mib for p in running if not p.silent)
        else:
            total = driver.gpu_profile(self._core, gpu, device.instance.profile_id).memory_mib
            used = sum(p.memory_mib for p in running if p.gi_serial == device.instance.serial and not p.silent)
        if version:
            return pynvml.c_nvmlMemory_v2_t(version, total * MIB, 0, (total - used) * MIB, used * MIB)
        return pynvml.c_nvmlMemory_t(total * MIB, (total - used) * MIB, used * MIB)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
