"""The GPUs of this machine through NVML: a look at all of them, and one operation at a time on one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass
from typing import Final, TypeVar

import pynvml

from migd.mig.boards import Board
from migd.mig.geometry import GpuInstance
from migd.mig.observed import SeenGpu
from migd.mig.operations import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstances,
    DestroyGpuInstance,
    Operation,
    ResetGpu,
    SetMode,
)
from migd.nvml.callers import Caller, ThreadCaller
from migd.nvml.calls import Handle, Library, is_gone
from migd.nvml.errors import GoneError, GpuError, NotSupportedError, UnknownGpuError, error_for
from migd.nvml.instances import Found, Instances
from migd.nvml.looking import Looking
from migd.nvml.roots import this_library
from migd.nvml.session import Deadlines

T = TypeVar("T")

_DEFAULT_DEADLINES: Final = Deadlines()
_SET_MODE: Final = "nvmlDeviceSetMigMode"
_CREATE: Final = "nvmlDeviceCreateGpuInstanceWithPlacement"
_NOTED: Final = (
    pynvml.NVML_SUCCESS,
    pynvml.NVML_ERROR_RESET_REQUIRED,  # pending until a reset or a reboot
    pynvml.NVML_ERROR_NOT_SUPPORTED,  # as nvidia-smi shows it in a virtual machine that may not reset: pending as well
)
_MIG_OFF: Final = "MIG mode is off on this GPU"


@dataclass(frozen=True, slots=True)
class _Device:
    """One GPU at the moment of an operation. board: None while its MIG mode is off; then it has no instances."""

    handle: Handle
    board: Board | None


class NvmlGpus:
    """Every GPU of this machine, through one long-lived NVML session: the only place where NVML is called.

    library: the pynvml module, or what has its face; see `roots` for the default. caller: who runs the calls; a thread
    of its own by default.
    The session opens at first use, and anew after close() or a DriverError. One look or operation at a time;
    whoever else comes waits. It translates names, units and errors, and decides nothing.
    """

    def __init__(
        self, library: Library = None, caller: Caller | None = None, deadlines: Deadlines = _DEFAULT_DEADLINES
    ) -> None:
        library = library if library is not None else this_library()
        self._looking = Looking(library, caller if caller is not None else ThreadCaller(), deadlines)
        self._session = self._looking.session
        self._calls = self._session.calls
        self._turn = threading.Lock()

    def look(self) -> tuple[SeenGpu, ...]:
        """Every GPU of the machine as it is, by index.

        A GPU that fell off the bus is lost: it carries the UUID and index that this process last saw, or the UUID
        "lost:INDEX" where it never saw it. memory_mib is 0 where it may not be read.
        Raises GpuError; a HungError names the call that hangs.
        """
        with self._turn:
            return self._looking.look()

    def look_at(self, gpu_uuid: str) -> SeenGpu | None:
        """One GPU as it is, under the index it had at the last look.

        None where it is not there as it was (never seen, renumbered, lost, unreadable): a look at all of them tells.
        Raises GpuError as look does.
        """
        with self._turn:
            return self._looking.look_at(gpu_uuid)

    def perform(self, operation: Operation) -> None:
        """Do one operation. That it returns means the driver accepted it: look to see what came of it.

        What it is about is found by profile and place each time. Destroying what is not there succeeds. A SetMode
        that waits for a reset or a reboot returns; the mode is then pending. Raises GpuError by what the caller can
        do, and ValueError for a ResetGpu, which NVML cannot do.
        """
        with self._turn:
            match operation:
                case ResetGpu():
                    raise ValueError("NVML has no GPU reset: that is for the Reset port")
                case SetMode(uuid, enable):
                    self._set_mode(uuid, enable)
                case DestroyComputeInstances(uuid, instance):
                    self._destroy_compute_instances(uuid, instance)
                case DestroyGpuInstance(uuid, instance):
                    self._destroy_gpu_instance(uuid, instance)
                case CreateGpuInstance(uuid, instance):
                    self._create_gpu_instance(uuid, instance)
                case CreateComputeInstance(uuid, instance):
                    self._create_compute_instance(uuid, instance)

    def driver_version(self) -> str:
        """The version of the loaded driver, as it writes it: "580.65.06"."""
        with self._turn:
            read_s = self._session.deadlines.read_s
            return self._session.run("read the driver's version", "", read_s, lambda: self._session.driver or "")

    def close(self) -> None:
        """End the session, which a GPU reset needs; the next use opens another. Harmless when none is open."""
        with self._turn:
            self._session.close()

    # Each operation first finds what it is about, which changes nothing, and then changes it under its own deadline.

    def _set_mode(self, uuid: str, enable: bool) -> None:
        device = self._find(uuid, lambda: self._handle(uuid))
        wish = pynvml.NVML_DEVICE_MIG_ENABLE if enable else pynvml.NVML_DEVICE_MIG_DISABLE
        what = f"switch MIG {'on' if enable else 'off'} on {uuid}"
        mode_s = self._session.deadlines.mode_s
        try:
            status = self._session.run(what, uuid, mode_s, lambda: int(self._calls(_SET_MODE, uuid, device, wish)))
        except GpuError as error:
            if error.code != pynvml.NVML_ERROR_RESET_REQUIRED:
                raise
            status = pynvml.NVML_ERROR_RESET_REQUIRED
        finally:
            self._looking.forget(uuid)
        # The activation status is returned, never raised: success of the call says no more than "noted".
        if status not in _NOTED:
            raise error_for(_SET_MODE, uuid, status)

    def _destroy_compute_instances(self, uuid: str, instance: GpuInstance) -> None:
        def find() -> list[Handle]:
            try:
                instances, found = self._locate(uuid, instance)
                return [handle for handle, _ in instances.compute_instances(found)]
            except GpuError as error:
                if is_gone(error):
                    return []
                raise

        for handle in self._find(uuid, find):
            self._destroy("nvmlComputeInstanceDestroy", uuid, handle)

    def _destroy_gpu_instance(self, uuid: str, instance: GpuInstance) -> None:
        def find() -> Handle | None:
            try:
                return self._locate(uuid, instance)[1].handle
            except GpuError as error:
                if is_gone(error):
                    return None
                raise

        handle = self._find(uuid, find)
        if handle is not None:
            self._destroy("nvmlGpuInstanceDestroy", uuid, handle)

    def _create_gpu_instance(self, uuid: str, instance: GpuInstance) -> None:
        def find() -> tuple[Handle, int]:
            device = self._device(uuid)
            board = self._offering(device, uuid, instance)
            return device.handle, board.profile(instance.profile).profile_id

        device, profile_id = self._find(uuid, find)
        place = pynvml.c_nvmlGpuInstancePlacement_t(instance.placement.start, instance.placement.size)
        # pynvml hands the placement straight to C: a structure that is not by reference would go by value.
        self._change(_CREATE, uuid, device, profile_id, byref(place))

    def _create_compute_instance(self, uuid: str, instance: GpuInstance) -> None:
        def find() -> tuple[Handle, int]:
            instances, found = self._locate(uuid, instance)
            return found.handle, instances.whole_compute_profile(found).profile_id

        gpu_instance, profile_id = self._find(uuid, find)
        self._change("nvmlGpuInstanceCreateComputeInstance", uuid, gpu_instance, profile_id)

    def _destroy(self, call: str, uuid: str, handle: Handle) -> None:
        try:
            self._change(call, uuid, handle)
        except GpuError as error:
            if not is_gone(error):
                raise

    def _change(self, call: str, uuid: str, *args: object) -> None:
        mutation_s = self._session.deadlines.mutation_s
        self._session.run(f"{call} on {uuid}", uuid, mutation_s, lambda: self._calls(call, uuid, *args))

    def _find(self, uuid: str, fn: Callable[[], T]) -> T:
        return self._session.run(f"find what to change on {uuid}", uuid, self._session.deadlines.read_s, fn)

    def _handle(self, uuid: str) -> Handle:
        """The GPU's handle as of now: an earlier one may have died with a mode change."""
        try:
            return self._calls("nvmlDeviceGetHandleByUUID", uuid, uuid)
        except GoneError as error:
            raise UnknownGpuError(error.call, uuid, error.code) from error

    def _device(self, uuid: str) -> _Device:
        handle = self._handle(uuid)
        mode = self._looking.mode(handle, uuid)
        on = mode is not None and mode.current
        return _Device(handle, self._looking.board(handle, uuid, mig_on=True) if on else None)

    def _offering(self, device: _Device, uuid: str, instance: GpuInstance) -> Board:
        """The board, once it is sure that it offers the instance's profile."""
        call = "nvmlDeviceGetGpuInstanceProfileInfo"
        if device.board is None:
            raise NotSupportedError("nvmlDeviceGetMigMode", uuid, pynvml.NVML_ERROR_NOT_SUPPORTED, _MIG_OFF)
        if not device.board.offers(instance.profile):
            offered = ", ".join(p.name for p in device.board.profiles) or "nothing"
            raise NotSupportedError(call, uuid, None, f"this GPU offers no {instance.profile}; it offers {offered}")
        return device.board

    def _locate(self, uuid: str, instance: GpuInstance) -> tuple[Instances, Found]:
        """The GPU instance of this profile at this place; a gone error where there is none, or MIG is off."""
        device = self._device(uuid)
        board = self._offering(device, uuid, instance)
        instances = self._looking.instances(device.handle, uuid, board)
        found = instances.find(instance)
        if found is None:
            hint = f"there is no GPU instance {instance} on it"
            raise GoneError("nvmlDeviceGetGpuInstances", uuid, pynvml.NVML_ERROR_NOT_FOUND, hint)
        return instances, found
