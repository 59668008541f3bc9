"""The common part of the pynvml face: handles, sessions, and the bracket around every call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

import pynvml

from migd.sim.core import Core
from migd.sim.driver import refusal
from migd.sim.machine import ComputeInstance, Gpu, GpuInstance, Machine

P = ParamSpec("P")
R = TypeVar("R")
_FIRST_ADDRESS: Final = 0x5100_0000
_POINTERS: Final = (
    pynvml.c_nvmlDevice_t,
    pynvml.c_nvmlGpuInstance_t,
    pynvml.c_nvmlComputeInstance_t,
    pynvml.c_nvmlEventSet_t,
)
PRIVILEGES: Final = ("root", "config", "monitor", "none")


class Target(NamedTuple):
    """What a handle denotes. kind: gpu, gi, ci, mig or set; serial: of the instance, or the GPU's generation."""

    kind: str
    uuid: str
    gi_id: int
    serial: int


class Device(NamedTuple):
    """What a device handle stands for: a GPU, and for a MIG device its instances too."""

    gpu: Gpu
    instance: GpuInstance | None = None
    compute: ComputeInstance | None = None


_NO_DEVICE: Final[Any] = Device(None)  # type: ignore[arg-type]
_ACCEPTS: Final = {"gpu": ("gpu",), "device": ("gpu", "mig"), "gi": ("gi",), "ci": ("ci",)}


class Face:
    """One client's NVML. Handles are true ctypes pointers to nothing, known only to the face that gave them out."""

    def __init__(self, core: Core, client: str, pid: int, privilege: str) -> None:
        self._core = core
        self._client = client
        self._pid = pid
        self._privilege = privilege
        self._targets: dict[bytes, Target] = {}  # by the bytes of the pointer that is the handle
        self._addresses: dict[Target, bytes] = {}
        self._next_address = _FIRST_ADDRESS
        self._session = 0

    # ---- handles

    def _pointer(self, target: Target, kind: Any) -> Any:
        address = self._addresses.get(target)
        if address is None:
            address = self._addresses[target] = bytes(ctypes.c_void_p(self._next_address))
            self._targets[address] = target
            self._next_address += 64
        return kind.from_buffer_copy(address)

    def _device_pointer(self, gpu: Gpu) -> Any:
        return self._pointer(Target("gpu", gpu.uuid, 0, gpu.generation), pynvml.c_nvmlDevice_t)

    def _gi_pointer(self, gpu: Gpu, instance: GpuInstance) -> Any:
        return self._pointer(Target("gi", gpu.uuid, instance.gi_id, instance.serial), pynvml.c_nvmlGpuInstance_t)

    def _ci_pointer(self, gpu: Gpu, instance: GpuInstance, compute: ComputeInstance) -> Any:
        return self._pointer(Target("ci", gpu.uuid, instance.gi_id, compute.serial), pynvml.c_nvmlComputeInstance_t)

    def _mig_pointer(self, gpu: Gpu, instance: GpuInstance, compute: ComputeInstance) -> Any:
        return self._pointer(Target("mig", gpu.uuid, instance.gi_id, compute.serial), pynvml.c_nvmlDevice_t)

    def _target(self, handle: Any) -> Target:
        if not isinstance(handle, _POINTERS):
            raise ctypes.ArgumentError(f"{type(handle).__name__} is no NVML handle")
        target = self._targets.get(bytes(handle))
        if target is None:
            raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return target

    def _gpu(self, target: Target) -> Gpu:
        for gpu in self._core.machine.gpus:
            if gpu.uuid == target.uuid:
                return gpu
        raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _stale(self, machine: Machine, uuid: str) -> Gpu | None:
        """The GPU as this session first saw it, where old sessions see old devices [48]."""
        if not machine.switches.stale_old_sessions:
            return None
        return next((gpu for gpu in machine.clients[self._client].view if gpu.uuid == uuid), None)

    def _find(self, gpu: Gpu, target: Target) -> Device:
        """What a live handle denotes; INVALID_ARGUMENT for one whose instance is gone [52]."""
        if target.kind == "gpu":
            if target.serial != gpu.generation:
                raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            return Device(gpu)
        found = _among(gpu, target)
        if found is None and target.kind == "mig":
            view = self._stale(self._core.machine, gpu.uuid)
            found = None if view is None else _among(view, target)
        if found is None:
            raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return found

    def _require(self, privilege: str) -> None:
        """NO_PERMISSION where the caller has not this privilege: root has all, a capability only its own [6, 38]."""
        held = "none" if self._core.machine.switches.no_permission else self._privilege
        if held not in ("root", privilege):
            raise refusal(pynvml.NVML_ERROR_NO_PERMISSION)

    def _symbol(self, name: str) -> None:
        """FUNCTION_NOT_FOUND where the library lacks this C symbol."""
        if name in self._core.machine.switches.missing_symbols:
            raise refusal(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def _among(gpu: Gpu, target: Target) -> Device | None:
    for instance in gpu.instances:
        if instance.gi_id != target.gi_id:
            continue
        if target.kind == "gi":
            return Device(gpu, instance) if instance.serial == target.serial else None
        for compute in instance.compute:
            if compute.serial == target.serial:
                return Device(gpu, instance, compute)
    return None


F = TypeVar("F", bound=Face)


def call(
    kind: str = "", *, privilege: str = "none", symbol: str = "", before_init: bool = False, changes: bool = False
) -> Callable[[Callable[Concatenate[F, Device, P], R]], Callable[..., R]]:
    """A function of the face: the bracket around its body.

    kind: what its first argument must be: "gpu", "device" (a GPU or a MIG device), "gi", "ci", or "" for no handle.
    privilege: "none", "config", "monitor" or "root". symbol: the C symbol, where it is not the
    function's name; "by version": the body looks itself.
    changes: the call has an effect, which a fault can skip; a call on a handle without it must change nothing.
    The body gets the device found; it answers what pynvml answers, or raises.
    """

    def wrap(body: Callable[Concatenate[F, Device, P], R]) -> Callable[..., R]:
        name = body.__name__
        query = bool(kind) and not changes
        names = {symbol or name} if symbol in ("", "by version") else {name, symbol}
        accepted, privileged = _ACCEPTS.get(kind, ()), privilege != "none"

        @functools.wraps(body)
        def run(self: F, *args: Any, **keywords: Any) -> R:
            core = self._core
            machine = core.enter()
            gpu: Gpu | None = None
            try:
                switches = machine.switches
                if switches.missing_symbols and not names.isdisjoint(switches.missing_symbols):
                    raise refusal(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
                if not before_init and (self._session != machine.session or self._client not in machine.clients):
                    raise refusal(pynvml.NVML_ERROR_UNINITIALIZED)
                device = _NO_DEVICE
                if kind:
                    target = self._target(args[0])
                    gpu = self._gpu(target)
                    args = args[1:]
                    if gpu.lost:
                        raise refusal(pynvml.NVML_ERROR_GPU_IS_LOST)
                skip = bool(machine.faults) and core.faults(name, gpu, "before")
                if kind:
                    assert gpu is not None
                    if target.kind not in accepted:
                        raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
                    device = self._find(gpu, target)
                    if privileged:
                        self._require(privilege)
                if skip and changes:
                    result = skipped(self, name, device, machine)
                else:
                    result = body(self, device, *args, **keywords)
                if machine.faults:
                    core.faults(name, gpu, "after")
            except BaseException as error:
                core.leave(self._pid, name, gpu, error, query=query)
                raise
            core.leave(self._pid, name, gpu, None, query=query)
            return result  # type: ignore[no-any-return]

        return run

    return wrap


def skipped(face: Face, name: str, device: Device, machine: Machine) -> Any:
    """What a call answers that says success and did nothing: a status of 0, or a handle to what is not there."""
    if "Create" in name and device.instance is not None:
        return face._pointer(  # noqa: SLF001
            Target("ci", device.gpu.uuid, device.instance.gi_id, machine.take_serial()), pynvml.c_nvmlComputeInstance_t
        )
    if "Create" in name:
        return face._pointer(  # noqa: SLF001
            Target("gi", device.gpu.uuid, 0, machine.take_serial()), pynvml.c_nvmlGpuInstance_t
        )
    return pynvml.NVML_SUCCESS
