"""The simulated host: one machine with its clock, processes and faults, and any number of NVML clients on it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from migd.sim import driver, happening, processes
from migd.sim.catalog import Model
from migd.sim.core import Call, Core, Timekeeper
from migd.sim.errors import ResetRefusedError, SimFileError, SimulationError, SpecMismatchError
from migd.sim.face.calling import PRIVILEGES
from migd.sim.face.monitor import Nvml
from migd.sim.faults import Fault
from migd.sim.filing import MachineFile
from migd.sim.machine import Gpu, Machine
from migd.sim.spec import parse_spec, write_spec
from migd.sim.switches import is_gpu_switch, set_switch
from migd.sim.timing import Caller, Clock

T = TypeVar("T")


class SimHost:
    """One simulated machine as a whole: what the agent, the tests and the demo hold.

    clock, caller: see Clock and Caller. core: what all faces share, for who puts another one on it.
    calls: a log of what was called, bounded; in memory only.
    """

    def __init__(self, core: Core) -> None:
        self.core = self._core = core
        self.clock = Clock(core)
        self.caller = Caller(core)

    # ---- making one

    @classmethod
    def fresh(cls, spec: str, *, seed: str = "", clock: str = "virtual", **switches: Any) -> SimHost:
        """A new machine in memory. seed: machines with different seeds have different GPU UUIDs."""
        host = cls(Core(Machine.of(parse_spec(spec), seed)))
        host.use_clock(clock)
        for name, value in switches.items():
            host.switch(name, value)
        return host

    @classmethod
    def open(
        cls, path: str | Path, spec: str | None = None, *, seed: str = "", clock: str = "real", **switches: Any
    ) -> SimHost:
        """The machine in this file, made at first use; seed, clock and switches count only then.

        Raises SpecMismatchError where the file holds another machine than spec; SimFileError where the file is
        unreadable or no simulated machine (it is left as it is), or where there is none and no spec.
        """
        kinds = None if spec is None else parse_spec(spec)
        file = MachineFile(Path(path))
        missing = SimFileError(f"{path}: no simulated machine is there yet: --simulate 8xa100-80gb makes one")
        machine = file.read_if_changed() if file.exists() else None  # before a lock is put beside what is no machine
        if machine is None and kinds is None:
            raise missing
        file.lock()
        try:
            if file.exists():
                machine = file.read_if_changed() or machine
                assert machine is not None
                if kinds is not None and write_spec(kinds) != machine.spec:
                    raise SpecMismatchError(
                        f"{path} holds the machine {machine.spec}, not {write_spec(kinds)}: "
                        "use that one, or another path, or remove the file to start anew"
                    )
                return cls(Core(machine, file))
            if kinds is None:
                raise missing
            made = cls.fresh(spec or "", seed=seed, clock=clock, **switches).snapshot()
            made.log_calls = False
            file.write(made)
            return cls(Core(made, file))
        except BaseException:
            file.unlock()
            file.close()
            raise
        finally:
            file.unlock()

    # ---- using it

    def nvml(self, pid: int | None = None, *, privilege: str = "root", command: str = "", container: str = "") -> Nvml:
        """A client's NVML: an object with pynvml's face. Faces of one pid are one process.

        pid: None for this process. privilege: root, config, monitor (the two MIG capabilities) or none.
        """
        if privilege not in PRIVILEGES:
            raise SimulationError(f"privilege is one of {', '.join(PRIVILEGES)}, not {privilege!r}")

        def number(machine: Machine) -> str:
            machine.next_client += 1
            return str(machine.next_client)

        client = self._core.change(number)
        return Nvml(self._core, client, os.getpid() if pid is None else pid, privilege, command, container)

    @property
    def calls(self) -> Sequence[Call]:
        """Calls made through this host, oldest first: (client pid, name, GPU index, outcome)."""
        return self._core.calls

    def log_calls(self, on: bool) -> None:
        """Keep the log of calls, or not: on in memory, off for a file until switched on."""
        self._core.change(lambda machine: setattr(machine, "log_calls", on))

    def boot_id(self) -> str:
        """The kernel's boot id; another one after each reboot."""
        return self._core.read(lambda machine: machine.boot_id)

    @property
    def spec(self) -> str:
        """The machine's specification in canonical form."""
        return self._core.read(lambda machine: machine.spec)

    def gpu_uuids(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs in order of their indices."""
        return self._core.read(lambda m: tuple(g.uuid for g in sorted(m.gpus, key=lambda g: g.index)))

    def model(self, gpu_index: int) -> Model:
        """What the model of this GPU offers, as its driver and board show it."""
        return self._core.offer(_found(self._core.machine, gpu_index))

    def snapshot(self) -> Machine:
        """The machine itself, to look at in a test. In memory it is live."""
        return self._core.read(lambda machine: machine)

    def touch(self, name: str, effect: Callable[[], T]) -> T | None:
        """Do something that is not NVML's, at a point where faults can strike: name is what they match.

        An "error" fault is OSError here (EIO); "skip" returns None without the effect.
        """
        if self._point(name, "before"):
            return None
        result = effect()
        self._point(name, "after")
        return result

    def reset(self, uuid: str) -> None:
        """What `nvidia-smi --gpu-reset -i UUID` does; ResetRefusedError says why not. Takes simulated seconds."""

        core = self._core
        machine = core.enter()
        gpu = next((g for g in machine.gpus if g.uuid == uuid), None)
        inside = True
        try:
            if gpu is None:
                raise ResetRefusedError(f"GPU {uuid} is not found")
            skip = core.faults("reset", gpu, "before")
            if core.delayed:
                inside = False
                machine = core.stand_back(os.getpid(), "reset", gpu)
                inside = True
                gpu = _found(machine, uuid)
            if not skip:
                reason = driver.reset_hinders(machine, gpu)
                if reason:
                    raise ResetRefusedError(reason)
                driver.reset(core, gpu)
            core.faults("reset", gpu, "after")
        except BaseException as error:
            if inside:
                core.leave(os.getpid(), "reset", gpu, error)
            if isinstance(error, pynvml.NVMLError):
                raise ResetRefusedError(f"GPU reset failed: {error}") from error
            raise
        core.leave(os.getpid(), "reset", gpu, None)

    def describe(self, pid: int) -> tuple[str, str] | None:
        """(command, container) of a process that has not ended; None where nothing is known of it."""

        def look(machine: Machine) -> tuple[str, str] | None:
            for process in machine.processes.values():
                if process.pid == pid and process.released_at_s is None:
                    return process.command, process.container
            client = next((c for c in machine.clients.values() if c.pid == pid and (c.command or c.container)), None)
            return None if client is None else (client.command, client.container)

        return self._core.read(look)

    def device_users(self, uuid: str) -> tuple[int, ...]:
        """Pids that have this GPU's device file open: processes, silent monitors, and every NVML session."""

        def look(machine: Machine) -> tuple[int, ...]:
            gpu = _found(machine, uuid)
            found = {p.pid for p in processes.running(machine, gpu)} | {c.pid for c in machine.clients.values()}
            return tuple(sorted(found))

        return self._core.read(look)

    # ---- what happens to it

    def start_process(
        self,
        gpu_index: int,
        start: int | None = None,
        command: str = "python train.py",
        container: str = "",
        silent: bool = False,
        ends_after_s: float | None = None,
    ) -> int:
        """Start a process that holds the instance at memory slice `start`, or the whole GPU; its pid.

        silent: it holds without being in the process list, as monitors do. ends_after_s: it ends by itself.
        """

        def act(machine: Machine) -> int:
            return processes.start(
                machine,
                _found(machine, gpu_index),
                self._core.now_s(),
                at=start,
                command=command,
                container=container,
                silent=silent,
                ends_after_s=ends_after_s,
            )

        return self._core.change(act)

    def end_process(self, pid: int) -> None:
        """End a process. The driver lets go of what it held after the switch release_lag_s."""
        self._core.change(lambda machine: processes.end(machine, pid, self._core.now_s()))

    def close_sessions(self, pid: int | None = None) -> None:
        """A process (None: this one) has died, as after a SimulatedCrash: the kernel closes its NVML sessions."""
        gone = os.getpid() if pid is None else pid

        def act(machine: Machine) -> None:
            machine.clients = {key: client for key, client in machine.clients.items() if client.pid != gone}

        self._core.change(act)

    def reboot(self) -> None:
        """Power off and on: processes and instances are gone, the mode stays on Ampere and is off elsewhere [44]."""
        self._core.change(lambda machine: happening.reboot(self._core, machine))

    def reload_driver(self, seconds: float = 0.0) -> None:
        """Unload and load the kernel module [45]; for so long nvmlInit answers DRIVER_NOT_LOADED."""
        self._core.change(lambda machine: happening.reload_driver(self._core, machine, seconds))

    def lose_gpu(self, index: int) -> None:
        """The GPU falls off the bus: every call on it answers GPU_IS_LOST, until a reboot or find_gpu."""
        self._core.change(lambda machine: setattr(_found(machine, index), "lost", True))

    def find_gpu(self, index: int) -> None:
        """A lost GPU is back, as it was."""
        self._core.change(lambda machine: setattr(_found(machine, index), "lost", False))

    def swap_gpu(self, index: int, spec: str | None = None) -> str:
        """Put another board into the slot (of the same model, or as spec says); its UUID."""
        return self._core.change(lambda machine: happening.swap_board(machine, _found(machine, index), spec))

    def swap_indices(self, one: int, other: int) -> None:
        """Two GPUs exchange their NVML indices, as a reboot may do."""

        def act(machine: Machine) -> None:
            a, b = _found(machine, one), _found(machine, other)
            a.index, b.index = b.index, a.index

        self._core.change(act)

    def raise_xid(self, index: int, xid: int, start: int | None = None) -> None:
        """An Xid event on a GPU; start: memory slice of the instance it belongs to, None where that is not known."""
        self._core.change(lambda machine: happening.raise_xid(machine, _found(machine, index), xid, start))

    # ---- how it behaves

    def inject(self, *armed: Fault) -> None:
        """Arm faults; each counts the calls from now on."""
        self._core.change(lambda machine: machine.faults.extend(fault.arm() for fault in armed))
        self._core.rearm()

    def clear_faults(self) -> None:
        """Disarm all faults."""
        self._core.change(lambda machine: machine.faults.clear())
        self._core.rearm()

    def switch(self, name: str, value: Any, gpu: int | None = None) -> None:
        """Set a switch; for one of a GPU, on this one or on all. SimulationError for a wrong name or value."""

        def act(machine: Machine) -> None:
            if not is_gpu_switch(name):
                if gpu is not None:
                    raise SimulationError(f"the switch {name} is the machine's, not one GPU's")
                set_switch(machine.switches, name, value)
            else:
                for found in machine.gpus if gpu is None else [_found(machine, gpu)]:
                    set_switch(found.switches, name, value)
            self._core.forget_offers()

        self._core.change(act)

    def use_clock(self, kind: str) -> None:
        """Virtual: time moves when somebody waits or a call takes time. Real: the host's time, really slept."""
        if kind not in ("virtual", "real"):
            raise SimulationError(f"a clock is virtual or real, not {kind!r}")

        def act(machine: Machine) -> None:
            now = self._core.now_s()
            machine.clock = kind
            machine.now_s = now
            machine.offset_s += now - self._core.now_s()

        self._core.change(act)

    def follow_time(self, keeper: Timekeeper) -> None:
        """Go by somebody else's time from now on: `clock.now_s()` is theirs, and what takes time here moves it.

        Only in memory: a file is shared with programs that do not know of it.
        """
        if self._core.filed:
            raise SimulationError("a machine in a file keeps its own time")
        self._core.machine.offset_s = 0.0
        self._core.keeper = keeper

    def _point(self, name: str, when: str) -> bool:
        core = self._core
        core.enter()
        try:
            skip = core.faults(name, None, when)
        except BaseException as error:
            core.leave(os.getpid(), name, None, error)
            if isinstance(error, pynvml.NVMLError):
                raise OSError(errno.EIO, f"simulated fault at {name}") from error
            raise
        core.leave(os.getpid(), f"{name}:{when}", None, None)
        return skip


def _found(machine: Machine, which: int | str) -> Gpu:
    """A GPU by index or UUID."""
    for gpu in machine.gpus:
        if which in (gpu.index, gpu.uuid):
            return gpu
    raise SimulationError(f"this machine has no GPU {which}: it is {machine.spec}")
