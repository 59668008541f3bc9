"""One program's NVML as the server keeps it: a face whose handles are numbers that outlive a restart of the server."""

from __future__ import annotations

import ctypes
import os
import zlib
from typing import Any, Final

import pynvml

from migd.sim import processes
from migd.sim.core import Core
from migd.sim.driver import refusal
from migd.sim.face.calling import Target
from migd.sim.face.monitor import Nvml
from migd.sim.machine import Machine

KINDS: Final = ("gpu", "gi", "ci", "mig", "set")
HANDLES_KEPT: Final = 4096
"""So many are looked up without being read."""
_CRC_BITS, _SERIAL_BITS, _GI_BITS, _SESSION_BITS = 24, 24, 4, 9


class Session(Nvml):
    """A face for one process, whatever its threads.

    A handle is a number that says what it is of: from the top 3 bits kind, 9 session, 4 GPU instance, 24 GPU (of its
    UUID), 24 serial number or generation. It is looked up in the machine at each call, as all handles are; a
    number that no call gave out finds nothing. None is an address that a program could have.
    """

    def __init__(
        self, core: Core, client: str, pid: int, privilege: str, command: str, container: str, started: int | None
    ) -> None:
        super().__init__(core, client, pid, privilege, command, container)
        self._started = started

    @property
    def client(self) -> str:
        """Its key among the machine's clients."""
        return self._client

    @property
    def open(self) -> bool:
        """Whether it is initialised, and the driver was not loaded anew since."""
        machine = self._core.machine
        return self._session == machine.session and self._client in machine.clients

    def resume(self, machine: Machine) -> bool:
        """Go on with a session that a server before this one had opened for the same process; False for none."""
        for key, client in machine.clients.items():
            if client.pid == self._pid and client.started == self._started:
                self._client, self._session = key, machine.session
                return True
        return False

    def listened(self) -> dict[str, Any]:
        """Its event sets as JSON values, for `listen_on`."""
        sets = {str(number): [heard, dict(wanted)] for number, (heard, wanted) in self._sets.items()}
        return {"next": self._next_set, "sets": sets}

    def listen_on(self, kept: dict[str, Any]) -> None:
        """Have the event sets that `listened` told."""
        self._next_set = int(kept["next"])
        self._sets = {int(number): (int(heard), dict(wanted)) for number, (heard, wanted) in kept["sets"].items()}

    def close(self, machine: Machine) -> None:
        """The process has ended: its session is over."""
        machine.clients.pop(self._client, None)

    def newest_event(self, machine: Machine) -> tuple[object, ...]:
        """What a waiter for events watches: it differs when there may be something to tell."""
        return machine.next_event, machine.session, tuple(gpu.lost for gpu in machine.gpus)

    def gpu_of(self, handle: bytes) -> str:
        """The UUID of the GPU that a handle is of, as far as that is known without looking; else ""."""
        target = self._targets.get(handle)
        return "" if target is None else target.uuid

    # ---- what differs from the face in process

    def _open(self) -> None:
        machine = self._core.machine
        fresh = self._client not in machine.clients
        if fresh:  # another number, so that no handle of the session before is one of this
            machine.next_client += 1  # as SimHost.nvml counts, whose sessions are beside this one
            self._client = str(machine.next_client)
        super()._open()
        if fresh and self._started is not None and self._pid != os.getpid():
            client = machine.clients[self._client]
            client.started, client.space = self._started, processes.pid_space()

    def _pointer(self, target: tuple[str, str, int, int], kind: Any) -> Any:
        address = self._addresses.get(target)
        if address is None:
            if len(self._targets) >= HANDLES_KEPT:  # instances come and go, and each has a number of its own
                self._targets.clear()
                self._addresses.clear()
            address = self._addresses[target] = bytes(ctypes.c_uint64(self._number_of(*target)))
            self._targets[address] = Target(*target)
        return kind.from_buffer_copy(address)

    def _number_of(self, kind: str, uuid: str, gi_id: int, serial: int) -> int:
        assert gi_id < 1 << _GI_BITS, gi_id
        assert serial < 1 << _SERIAL_BITS, serial
        number = KINDS.index(kind) + 1
        for bits, field in (
            (_SESSION_BITS, self._mark),
            (_GI_BITS, gi_id),
            (_CRC_BITS, _crc(uuid)),
            (_SERIAL_BITS, serial),
        ):
            number = number << bits | field
        return number

    @property
    def _mark(self) -> int:
        return int(self._client) % (1 << _SESSION_BITS)

    def _target(self, handle: Any) -> Target:
        found = self._targets.get(bytes(handle))
        return found if found is not None else self._read(int.from_bytes(bytes(handle), "little"))

    def _read(self, number: int) -> Target:
        """What a number stands for that this server has not given out: one before it may have."""
        number, serial = divmod(number, 1 << _SERIAL_BITS)
        number, crc = divmod(number, 1 << _CRC_BITS)
        number, gi_id = divmod(number, 1 << _GI_BITS)
        kind, mark = divmod(number, 1 << _SESSION_BITS)
        if mark == self._mark and 1 <= kind <= len(KINDS):
            if KINDS[kind - 1] == "set":
                return Target("set", "", 0, serial)
            for gpu in self._core.machine.gpus:
                if _crc(gpu.uuid) == crc:
                    return Target(KINDS[kind - 1], gpu.uuid, gi_id, serial)
        raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)


def _crc(text: str) -> int:
    return zlib.crc32(text.encode()) & ((1 << _CRC_BITS) - 1)
