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
_DEVICE: Final[Any] = pynvml.c_nvmlDevice_t
_GPU_INSTANCE: Final[Any] = pynvml.c_nvmlGpuInstance_t
_COMPUTE_INSTANCE: Final[Any] = pynvml.c_nvmlComputeInstance_t
_POINTERS: Final = frozenset({_DEVICE, _GPU_INSTANCE, _COMPUTE_INSTANCE, pynvml.c_nvmlEventSet_t})
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
_device: Final[Callable[[tuple[Any, ...]], Device]] = functools.partial(tuple.__new__, Device)
"""Device(*fields) at half the price: a named tuple's own constructor is a Python function, and this is every call."""
_ACCEPTS: Final = {"gpu": ("gpu",), "device": ("gpu", "mig"), "gi": ("gi",), "ci": ("ci",)}


class Face:
    """One client's NVML. Handles are true ctypes pointers to nothing, known only to the face that gave them out."""

    def __init__(self, core: Core, client: str, pid: int, privilege: str) -> None:
        self._core = core
        self._client = client
        self._pid = pid
        self._privilege = privilege
        self._targets: dict[bytes, Target] = {}  # by the bytes of the pointer that is the handle
        self._addresses: dict[tuple[str, str, int, int], bytes] = {}  # by the fields of the target
        self._next_address = _FIRST_ADDRESS
        self._session = 0

    # ---- handles

    def _pointer(self, target: tuple[str, str, int, int], kind: Any) -> Any:
        """A handle to a target, given as its fields."""
        address = self._addresses.get(target)
        if address is None:
            address = self._addresses[target] = bytes(ctypes.c_void_p(self._next_address))
            self._targets[address] = Target(*target)
            self._next_address += 64
        return kind.from_buffer_copy(address)

    def _device_pointer(self, gpu: Gpu) -> Any:
        return self._pointer(("gpu", gpu.uuid, 0, gpu.generation), _DEVICE)

    def _gi_pointer(self, gpu: Gpu, instance: GpuInstance) -> Any:
        return self._pointer(("gi", gpu.uuid, instance.gi_id, instance.serial), _GPU_INSTANCE)

    def _ci_pointer(self, gpu: Gpu, instance: GpuInstance, compute: ComputeInstance) -> Any:
        return self._pointer(("ci", gpu.uuid, instance.gi_id, compute.serial), _COMPUTE_INSTANCE)

    def _mig_pointer(self, gpu: Gpu, instance: GpuInstance, compute: ComputeInstance) -> Any:
        return self._pointer(("mig", gpu.uuid, instance.gi_id, compute.serial), _DEVICE)

    def _target(self, handle: Any) -> Target:
        if type(handle) not in _POINTERS:
            raise ctypes.ArgumentError(f"{type(handle).__name__} is no NVML handle")
        target = self._targets.get(bytes(handle))
        if target is None:
            raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return target

    def _stale(self, machine: Machine, uuid: str) -> Gpu | None:
        """The GPU as this session first saw it, where old sessions see old devices [48]."""
        if not machine.switches.stale_old_sessions:
            return None
        return next((gpu for gpu in machine.clients[self._client].view if gpu.uuid == uuid), None)

    def _find(self, gpu: Gpu, kind: str, gi_id: int, serial: int) -> Device:
        """What the live handle of an instance denotes; INVALID_ARGUMENT for one that is gone [52]."""
        found = _among(gpu, kind, gi_id, serial)
        if found is None and kind == "mig":
            view = self._stale(self._core.machine, gpu.uuid)
            found = None if view is None else _among(view, kind, gi_id, serial)
        if found is None:
            raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return found

    def _require(self, privilege: str) -> None:
        """NO_PERMISSION where the caller has not this privilege: root has all, a capability only its own [6, 38]."""
        held = "none" if self._core.machine.switches.no_permission else self._privilege
        if held not in ("root", privilege):
            raise refusal(pynvml.NVML_ERROR_NO_PERMISSION)

    def _symbol(self, name: str, version: str) -> None:
        """FUNCTION_NOT_FOUND where the library lacks this version of a C symbol."""
        missing = self._core.machine.switches.missing_symbols
        if missing and name + version in missing:
            raise refusal(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def _among(gpu: Gpu, kind: str, gi_id: int, serial: int) -> Device | None:
    for instance in gpu.instances:
        if instance.gi_id != gi_id:
            continue
        if kind == "gi":
            return _device((gpu, instance, None)) if instance.serial == serial else None
        for compute in instance.compute:
            if compute.serial == serial:
                return _device((gpu, instance, compute))
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
            inside, waited = True, False
            try:
                while True:
                    switches = machine.switches
                    if switches.missing_symbols and not names.isdisjoint(switches.missing_symbols):
                        raise refusal(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
                    if not before_init and (self._session != machine.session or self._client not in machine.clients):
                        raise refusal(pynvml.NVML_ERROR_UNINITIALIZED)
                    device = _NO_DEVICE
                    if kind:
                        of, uuid, gi_id, serial = self._target(args[0])
                        for gpu in machine.gpus:
                            if gpu.uuid == uuid:
                                break
                        else:
                            gpu = None
                            raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
                        if gpu.lost:
                            raise refusal(pynvml.NVML_ERROR_GPU_IS_LOST)
                    if waited:
                        break
                    armed = core.concerning(name, gpu) if machine.faults else None
                    skip = core.strike(armed, name, "before") if armed else False
                    if not armed or not core.delayed:
                        break
                    inside = False
                    machine = core.stand_back(self._pid, name, gpu)
                    inside = waited = True  # and what the call is about may be another by now
                if gpu is not None:
                    if of not in accepted:
                        raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
                    if of != "gpu":
                        device = self._find(gpu, of, gi_id, serial)
                    elif serial == gpu.generation:
                        device = _device((gpu, None, None))
                    else:
                        raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
                    if privileged and (self._privilege != "root" or switches.no_permission):
                        self._require(privilege)
                if skip and changes:
                    result = skipped(self, name, device, machine)
                else:
                    result = body(self, device, *(args[1:] if kind else args), **keywords)
                if armed:
                    core.strike(armed, name, "after")
            except BaseException as error:
                if inside:
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
            ("ci", device.gpu.uuid, device.instance.gi_id, machine.take_serial()), _COMPUTE_INSTANCE
        )
    if "Create" in name:
        return face._pointer(("gi", device.gpu.uuid, 0, machine.take_serial()), _GPU_INSTANCE)  # noqa: SLF001
    return pynvml.NVML_SUCCESS
