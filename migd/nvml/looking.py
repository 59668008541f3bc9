"""Looks at GPUs: every one of them as a value, whole or lost, with what NVML says again and again kept as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Final

import pynvml

from migd.mig.boards import Board
from migd.mig.observed import MigMode, SeenGpu
from migd.nvml.boards import read_board
from migd.nvml.callers import Caller
from migd.nvml.calls import Handle, Library, text
from migd.nvml.errors import (
    DriverError,
    GoneError,
    GpuError,
    HungError,
    LostError,
    NoPermissionError,
    NotSupportedError,
)
from migd.nvml.health import read_recovery, read_remapped_rows, read_resetless
from migd.nvml.holders import outside, read_holders, with_holders
from migd.nvml.instances import ComputeProfile, Instances
from migd.nvml.session import Deadlines, Session

_MIB: Final = 1 << 20
_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What does not change about a GPU while a session lasts."""

    model: str
    pci_device_id: str
    memory_mib: int
    resetless: bool


@dataclass(slots=True)
class _Memory:
    """What is kept of one GPU from look to look. No handle is among it: a mode change ends handles."""

    index: int
    rows: str = ""
    fixed: _Fixed | None = None
    mig_on: bool | None = None
    board: Board | None = None
    compute_profiles: dict[int, tuple[ComputeProfile, ...]] = field(default_factory=dict)

    def forget_mode(self) -> None:
        """Drop what holds only while the MIG mode lasts."""
        self.mig_on = None
        self.board = None
        self.compute_profiles = {}


class Looking:
    """Reads the GPUs of this machine in one session. Not for several threads at once.

    session: where to run what changes a GPU too; forget() must follow whatever may change a MIG mode.
    """

    def __init__(self, library: Library, caller: Caller, deadlines: Deadlines) -> None:
        self.session = Session(library, caller, deadlines, self._upset)
        self._calls = self.session.calls
        self._memories: dict[str, _Memory] = {}

    def look(self) -> tuple[SeenGpu, ...]:
        """Every GPU, by index."""
        for _ in range(_TRIES):
            seen = self._look_once()
            if len({gpu.uuid for gpu in seen}) == len(seen):
                return seen
        hint = "the GPUs were renumbered while they were read: another program is changing MIG modes; try again"
        raise GpuError("nvmlDeviceGetHandleByIndex", "", pynvml.NVML_SUCCESS, hint)

    def look_at(self, uuid: str) -> SeenGpu | None:
        """The GPU of this UUID; None where it is not whole, or not under the index it had before."""
        memory = self._memories.get(uuid)
        if memory is None:
            return None
        read = partial(self._read, memory.index)
        gpu = self.session.run(f"read GPU {memory.index}", uuid, self.session.deadlines.read_s, read)
        return gpu if gpu is not None and gpu.uuid == uuid and not gpu.out_of_reach else None

    def mode(self, device: Handle, uuid: str) -> MigMode | None:
        """The MIG mode, or None where the GPU cannot do MIG."""
        try:
            current, pending = self._calls("nvmlDeviceGetMigMode", uuid, device)
        except NotSupportedError:
            return None
        return MigMode(current == pynvml.NVML_DEVICE_MIG_ENABLE, pending == pynvml.NVML_DEVICE_MIG_ENABLE)

    def board(self, device: Handle, uuid: str, mig_on: bool) -> Board | None:
        """What the GPU offers, read once while the mode lasts; None where the driver does not list it now."""
        memory = self._memory(device, uuid)
        if memory.mig_on is not mig_on:
            memory.forget_mode()
            memory.board = read_board(self._calls, device, uuid, mig_on)
            memory.mig_on = mig_on
        return memory.board

    def instances(self, device: Handle, uuid: str, board: Board) -> Instances:
        """The instances of a GPU in MIG mode, for one look or one operation."""
        return Instances(self._calls, device, uuid, board, self._memory(device, uuid).compute_profiles)

    def forget(self, uuid: str) -> None:
        """Drop what is remembered of this GPU's MIG mode."""
        if uuid in self._memories:
            self._memories[uuid].forget_mode()

    def _upset(self, new_session: bool) -> None:
        for memory in list(self._memories.values()):  # a call that hung may still be adding to them
            memory.forget_mode()
            if new_session:
                memory.fixed = None

    def _memory(self, device: Handle, uuid: str) -> _Memory:
        if uuid not in self._memories:
            self._memories[uuid] = _Memory(self._calls("nvmlDeviceGetIndex", uuid, device))
        return self._memories[uuid]

    def _look_once(self) -> tuple[SeenGpu, ...]:
        run, read_s = self.session.run, self.session.deadlines.read_s
        count = run("count the GPUs", "", read_s, lambda: int(self._calls("nvmlDeviceGetCount", "")))
        last = {memory.index: uuid for uuid, memory in self._memories.items()}
        read = [run(f"read GPU {i}", last.get(i, ""), read_s, partial(self._read, i)) for i in range(count)]
        seen = [gpu for gpu in read if gpu is not None]
        found = {gpu.uuid for gpu in seen}
        missing = {uuid: memory.index for uuid, memory in self._memories.items() if uuid not in found}
        nameless = [index for index, gpu in enumerate(read) if gpu is None]
        seen += _named(nameless, missing)
        return tuple(sorted(seen, key=lambda gpu: (gpu.index, gpu.lost, gpu.uuid)))

    def _read(self, index: int) -> SeenGpu | None:
        """The GPU of this index; None where it is lost and cannot even say its UUID."""
        for attempt in range(1, _TRIES + 1):
            try:
                return self._read_whole(index)
            except (DriverError, HungError, NoPermissionError):
                raise  # not about this GPU alone
            except (GoneError, NotSupportedError) as error:
                # Another program changed the mode or an instance, which ends handles while they are read: once more.
                self.forget(error.gpu_uuid)
                if attempt == _TRIES:
                    return _unreadable(error, index)
            except GpuError as error:
                return _unreadable(error, index)
        raise AssertionError("the loop returns or raises")

    def _read_whole(self, index: int) -> SeenGpu | None:
        uuid = ""
        try:
            device = self._calls("nvmlDeviceGetHandleByIndex", "", index)
            uuid = text(self._calls("nvmlDeviceGetUUID", "", device))
            return self._read_gpu(index, uuid, device)
        except LostError:
            return _lost(uuid, index) if uuid else None

    def _read_gpu(self, index: int, uuid: str, device: Handle) -> SeenGpu:
        memory = self._memories.setdefault(uuid, _Memory(index))
        memory.index = index
        mode = self.mode(device, uuid)
        fixed = memory.fixed = memory.fixed or self._fixed(device, uuid, mode is not None)
        board = None if mode is None else self.board(device, uuid, mode.current)
        instances = self.instances(device, uuid, board).all() if mode and mode.current and board else ()
        holders = read_holders(self._calls, device, uuid)
        unnested = outside(instances, holders)
        if not instances:
            rows = read_remapped_rows(self._calls, device, uuid)
            memory.rows = memory.rows if rows is None else rows
        return SeenGpu(
            uuid=uuid,
            index=index,
            model=fixed.model,
            pci_device_id=fixed.pci_device_id,
            memory_mib=fixed.memory_mib,
            mode=mode,
            resetless=fixed.resetless,
            board=board,
            instances=with_holders(instances, holders),
            in_use=bool(unnested),
            holders=unnested,
            trouble="; ".join(filter(None, (read_recovery(self._calls, device, uuid), memory.rows))),
        )

    def _fixed(self, device: Handle, uuid: str, mig_capable: bool) -> _Fixed:
        try:
            memory_mib = int(self._calls("nvmlDeviceGetMemoryInfo", uuid, device).total) // _MIB
        except (NoPermissionError, NotSupportedError):
            memory_mib = 0
        return _Fixed(
            model=text(self._calls("nvmlDeviceGetName", uuid, device)),
            pci_device_id=f"0x{self._calls('nvmlDeviceGetPciInfo', uuid, device).pciDeviceId:08X}",
            memory_mib=memory_mib,
            resetless=mig_capable and read_resetless(self._calls, device, uuid),
        )


def _unreadable(error: GpuError, index: int) -> SeenGpu:
    """One GPU that answers with errors must not hide the others; where it has not even said its UUID, it has to."""
    if not error.gpu_uuid:
        raise error
    return SeenGpu(error.gpu_uuid, index, "", "", 0, None, unreadable=str(error))


def _named(nameless: list[int], missing: dict[str, int]) -> list[SeenGpu]:
    """The lost GPUs: indices that no longer say who they are, and GPUs known from before that no index is.

    missing: UUID -> last index. An index is the missing GPU that had it last; one left of each is the same GPU.
    """
    by_index = {index: uuid for uuid, index in missing.items()}
    names = {index: by_index[index] for index in nameless if index in by_index}
    indices = [index for index in nameless if index not in names]
    uuids = [uuid for uuid in missing if uuid not in names.values()]
    if len(indices) == len(uuids) == 1:
        return [*(_lost(uuid, index) for index, uuid in names.items()), _lost(uuids[0], indices[0])]
    return [
        *(_lost(uuid, index) for index, uuid in names.items()),
        *(_lost(f"lost:{index}", index) for index in indices),
        *(_lost(uuid, missing[uuid]) for uuid in uuids),
    ]


def _lost(uuid: str, index: int) -> SeenGpu:
    return SeenGpu(uuid, index, model="", pci_device_id="", memory_mib=0, mode=None, lost=True)
