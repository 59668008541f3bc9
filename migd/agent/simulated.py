"""The agent's ports on a simulated machine, for `--simulate`, tests and demos."""

from __future__ import annotations

import os

from migd.agent.host import RESET_TIMEOUT_S
from migd.agent.ports import ResetRefusedError, Store
from migd.agent.records import Record
from migd.agent.running import Machine
from migd.agent.store import RecordError
from migd.nvml.gpus import NvmlGpus
from migd.sim import errors
from migd.sim.host import SimHost


class SimReset:
    """GPU reset on the simulated machine, with the agent's own error."""

    def __init__(self, host: SimHost) -> None:
        self._host = host

    def reset(self, gpu_uuid: str) -> None:
        """Reset this GPU; ResetRefusedError with the simulated program's words."""
        try:
            self._host.caller.run(lambda: self._host.reset(gpu_uuid), RESET_TIMEOUT_S)
        except errors.ResetRefusedError as error:
            raise ResetRefusedError(str(error)) from error
        except TimeoutError:
            raise ResetRefusedError(f"the reset did not end within {RESET_TIMEOUT_S:g} s and was ended") from None


class SimStore:
    """A store whose writes are fault points of the simulated machine, named "record.save"."""

    def __init__(self, host: SimHost, store: Store) -> None:
        self._host = host
        self._store = store

    def load(self) -> Record | None:
        """As the store beneath."""
        return self._store.load()

    def save(self, record: Record) -> None:
        """As the store beneath, unless a fault strikes before or after."""
        try:
            self._host.touch("record.save", lambda: self._store.save(record))
        except OSError as error:
            raise RecordError(f"cannot write the record: {error}") from error


class SimProcesses:
    """The simulated machine's processes. pid: our own, which holds nothing that we would be told of."""

    def __init__(self, host: SimHost, pid: int) -> None:
        self._host = host
        self._pid = pid

    def describe(self, pid: int) -> tuple[str, str] | None:
        """The command and the container of a process; None where it is gone."""
        return self._host.describe(pid)

    def device_users(self, gpu_uuid: str) -> tuple[int, ...]:
        """Processes other than ours with the GPU's device file open."""
        return tuple(pid for pid in self._host.device_users(gpu_uuid) if pid != self._pid)


def simulated(host: SimHost, store: Store, pid: int | None = None) -> Machine:
    """A machine whose GPUs, processes, clock and boots are `host`'s and whose record is kept in `store`.

    pid: of the process that works, this one where not given. Called again after a simulated crash, with another pid,
    it is a new process: a new NVML client, the same machine, the same record.
    """
    ours = os.getpid() if pid is None else pid
    gpus = NvmlGpus(host.nvml(pid=ours), host.caller)
    return Machine(gpus, SimReset(host), SimProcesses(host, ours), host.clock, host, SimStore(host, store))
