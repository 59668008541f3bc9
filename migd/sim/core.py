"""The core that all faces of one machine share: one call at a time, its file, its clock, its faults and its log."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, NoReturn, Protocol, TypeVar

import pynvml

from migd.sim import faults, processes
from migd.sim.catalog import Model, SimProfile, models, with_variant
from migd.sim.errors import HangError, SimulatedCrash
from migd.sim.filing import MachineFile
from migd.sim.machine import NEVER, ArmedFault, Gpu, Machine

T = TypeVar("T")
CALLS_KEPT: Final = 20_000


class Call(NamedTuple):
    """One call that was made. client: pid of the caller; gpu: index, None without one; outcome: "ok" or why not."""

    client: int
    name: str
    gpu: int | None
    outcome: str


class Offer(NamedTuple):
    """What a GPU offers, until a switch changes that. by_id, by_enum: its profiles by these.

    structures: bytes of structures that tell of it, kept by who fills them.
    """

    model: Model
    by_id: dict[int, SimProfile]
    by_enum: dict[int, SimProfile]
    structures: dict[tuple[object, ...], bytes]


class Timekeeper(Protocol):
    """Whose time a machine goes by, where it is not its own: such as a loop in virtual time."""

    def time(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        ...


class Caller(Protocol):
    """The program that a thread makes calls for, where that is another one: it waits and dies in its own way."""

    def wait(self, seconds: float | None) -> None:
        """Let so much real time pass; None: for ever. Ends early by raising, where the program is gone."""
        ...

    def die(self) -> NoReturn:
        """A "kill" fault struck: end that program, and this call by raising a BaseException."""
        ...


class Hung(BaseException):
    """The call hangs: turned into what its caller sees when the call is left."""


class Core:
    """One machine and whatever happens to it.

    Every outside action is bracketed by enter() and leave(): enter locks and, for a file, reads what others changed;
    leave saves, logs, unlocks and then lets the action's simulated time pass.
    """

    def __init__(self, machine: Machine, file: MachineFile | None = None) -> None:
        self.machine = machine
        self.keeper: Timekeeper | None = None
        self.calls: deque[Call] = deque(maxlen=CALLS_KEPT)
        self._file = file
        self._lock = threading.RLock()
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._mine = threading.local()
        self._spent_s = 0.0
        self._stirred = False
        self._watched: list[ArmedFault] | None = None  # for which faults _by_call was made
        self._watching = 0
        self._by_call: dict[str, list[ArmedFault]] = {}
        self._offers: dict[str | tuple[str, frozenset[str]], Offer] = {}

    # ---- one action

    def enter(self) -> Machine:
        """Begin an action: the machine as it is now, with all that was due by now done."""
        self._acquire()
        if self._file is not None or self.machine.next_at_s < NEVER:
            try:
                self._catch_up()
            except BaseException:
                self._release()
                raise
        self._spent_s = 0.0
        return self.machine

    def _catch_up(self) -> None:
        """What others changed in the file, and what was due by now."""
        self._stirred = False
        if self._file is not None:
            self._read()
        machine = self.machine
        if machine.next_at_s < NEVER and machine.next_at_s <= self.now_s():
            self._stirred = True
            processes.settle(machine, self.now_s())

    def leave(
        self, client: int, name: str, gpu: Gpu | None, error: BaseException | None, *, query: bool = False
    ) -> None:
        """End an action: save it, log it, and let its time pass; TimeoutError where that passes the deadline.

        query: it changes nothing, so there is nothing to save but what happened by itself and what faults count.
        """
        machine = self.machine
        try:
            if machine.log_calls:
                self.calls.append(Call(client, name, None if gpu is None else gpu.index, _outcome(error)))
            if self._file is not None and (not query or self._stirred or machine.faults):
                self._file.write(machine)
        finally:
            if self._file is not None:
                self._file.unlock()
            spent = self._spent_s
            self._release()
        if error is not None and isinstance(error, Hung):
            self.pass_time(None, name)
        elif spent and not isinstance(error, SimulatedCrash):
            self.pass_time(spent, name)

    def stand_back(self, client: int, name: str, gpu: Gpu | None) -> Machine:
        """Let the time pass that faults take before the effect, with everybody else free to act; the machine then.

        Out of the action where that raises: the caller's deadline has passed, or the caller is gone.
        """
        seconds, self._spent_s = self._spent_s, 0.0
        if self._file is not None:
            self._file.unlock()
        self._release()
        try:
            self.pass_time(seconds, name)
        except BaseException as error:
            if self.machine.log_calls:
                self.calls.append(Call(client, name, None if gpu is None else gpu.index, _outcome(error)))
            raise
        return self.enter()

    @property
    def delayed(self) -> bool:
        """Whether the action now running has time to let pass."""
        return self._spent_s > 0

    def spend(self, seconds: float) -> None:
        """The action now running takes so much longer."""
        self._spent_s += seconds * self.machine.switches.duration_scale

    def linger(self, seconds: float) -> None:
        """The action now running waits so long, whatever the scale of durations."""
        self._spent_s += seconds

    def faults(self, name: str, gpu: Gpu | None, when: str) -> bool:
        """Let the faults due at this point of a call happen; True where its effect is to be skipped."""
        return self.strike(self.concerning(name, gpu), name, when)

    def concerning(self, name: str, gpu: Gpu | None) -> Sequence[ArmedFault]:
        """The faults that a call is counted on; gpu: the one that it is about, if any."""
        armed = self.machine.faults
        if self._watched is not armed or self._watching != len(armed):
            self.rearm()
        found = self._by_call.get(name)
        if found is None:
            found = self._by_call[name] = [fault for fault in armed if faults.matches(fault.call, name)]
        return found and [f for f in found if f.gpu is None or (gpu is not None and f.gpu == gpu.index)]

    def rearm(self) -> None:
        """Other faults are armed than before."""
        self._watched, self._watching = self.machine.faults, len(self.machine.faults)
        self._by_call.clear()

    def strike(self, armed: Sequence[ArmedFault], name: str, when: str) -> bool:
        """As `faults`, with those that concern the call."""
        firing = faults.due(armed, when) if armed else None
        if not firing:
            return False
        skip = False
        if self._file is not None:
            self._file.write(self.machine)  # counted before it fires: a killed process must not meet it again
        for fault in firing:
            if fault.action == "error":
                raise pynvml.NVMLError(fault.code)
            if fault.action == "delay":
                self._spent_s += fault.delay_s
            elif fault.action == "hang":
                raise Hung
            elif fault.action == "crash":
                raise SimulatedCrash(f"{when} {name}")
            elif fault.action == "kill":
                if self.caller is not None:
                    self.caller.die()
                os.kill(os.getpid(), signal.SIGKILL)
            skip = skip or fault.action == "skip"
        return skip

    # ---- time

    @property
    def deadline_at_s(self) -> float | None:
        """When what this thread now calls must have returned; None for no deadline."""
        found: float | None = getattr(self._mine, "deadline_at_s", None)
        return found

    @deadline_at_s.setter
    def deadline_at_s(self, at_s: float | None) -> None:
        self._mine.deadline_at_s = at_s

    @property
    def caller(self) -> Caller | None:
        """The program for which this thread makes calls; None for this one."""
        found: Caller | None = getattr(self._mine, "caller", None)
        return found

    @caller.setter
    def caller(self, caller: Caller | None) -> None:
        self._mine.caller = caller

    def now_s(self) -> float:
        """Simulated time, in seconds from an arbitrary start; it never goes back, reboots included."""
        machine = self.machine
        if self.keeper is not None:
            return self.keeper.time() + machine.offset_s
        return machine.now_s if machine.clock == "virtual" else time.time() + machine.offset_s

    def pass_time(self, seconds: float | None, what: str) -> None:
        """Let time pass, at most up to the caller's deadline: then TimeoutError. None: what hangs for ever."""
        deadline = self.deadline_at_s
        if deadline is not None:
            left = max(deadline - self.now_s(), 0.0)
            if seconds is None or seconds > left:
                self._wait(left)
                raise TimeoutError(f"{what} did not return within its deadline")
        if seconds is not None:
            self._wait(seconds)
            return
        if self.caller is not None:
            self.caller.wait(None)
        if self.machine.clock == "virtual":
            raise HangError(f"{what} hangs for ever: call it through host.caller, which has a deadline")
        while True:
            time.sleep(3600)

    def _wait(self, seconds: float) -> None:
        if self.keeper is not None:
            self.keeper.advance(seconds)
            return
        if self.machine.clock == "real":
            (time.sleep if self.caller is None else self.caller.wait)(seconds)
            return
        if self._file is None:
            self.machine.now_s += seconds
            return
        self.change(lambda machine: setattr(machine, "now_s", machine.now_s + seconds))

    # ---- reading and changing without being a client

    @property
    def filed(self) -> bool:
        """Whether the machine lives in a file."""
        return self._file is not None

    def read(self, look: Callable[[Machine], T]) -> T:
        """What `look` sees in the machine as it is now."""
        return self.change(look)

    def change(self, act: Callable[[Machine], T]) -> T:
        """Let `act` see or change the machine, as its builder or as chance would, not as a client of its driver."""
        machine = self.enter()
        try:
            return act(machine)
        finally:
            try:
                if self._file is not None:
                    self._file.write(machine)
            finally:
                if self._file is not None:
                    self._file.unlock()
                self._lock.release()

    def offer(self, gpu: Gpu) -> Model:
        """The GPU's model as its driver and board show it."""
        return self.offered(gpu).model

    def profile(self, gpu: Gpu, profile_id: int) -> SimProfile | None:
        """The GPU's profile with this numeric id, or None."""
        return self.offered(gpu).by_id.get(profile_id)

    def forget_offers(self) -> None:
        """A switch changed: what GPUs offer is worked out anew."""
        self._offers.clear()

    def offered(self, gpu: Gpu) -> Offer:
        """What `offer` and `profile` answer from, and a place to keep what is made of it."""
        fewer = gpu.switches.fewer_placements
        key = (gpu.key, frozenset(fewer)) if fewer else gpu.key
        found = self._offers.get(key)
        if found is None:
            switches = self.machine.switches
            model = with_variant(models()[gpu.key], switches.names, switches.memory_variant, frozenset(fewer))
            found = self._offers[key] = Offer(model, model.by_id(), {p.enum: p for p in reversed(model.profiles)}, {})
        return found

    def _read(self) -> None:
        assert self._file is not None
        self._file.lock()
        try:
            fresh = self._file.read_if_changed()
            if fresh is not None:
                if fresh.switches != self.machine.switches:
                    self._offers.clear()
                self.machine = fresh
            self._stirred = processes.prune_clients(self.machine)
        except BaseException:
            self._file.unlock()
            raise


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    return type(error).__name__.removeprefix("NVMLError_")
