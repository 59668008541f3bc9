"""The simulated machine as a value: plain mutable records of everything a driver keeps, exact through JSON and back."""

from __future__ import annotations

import types
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, lru_cache
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from migd.sim.catalog import models
from migd.sim.errors import SimFileError
from migd.sim.spec import Kind, write_spec
from migd.sim.switches import GpuSwitches, Switches

FORMAT: Final = "migd-sim-machine"
VERSION: Final = 1
NEVER: Final = 1e18
_NAMESPACE: Final = uuid.UUID("8f2f4c1e-7a1b-5d0e-9c53-6d6967642d73")


@lru_cache(maxsize=4096, typed=True)
def derived_uuid(*parts: object) -> str:
    """A version-5 UUID that depends on these parts alone."""
    return str(uuid.uuid5(_NAMESPACE, "/".join(map(str, parts))))


@dataclass(slots=True)
class ComputeInstance:
    """A compute instance. serial never repeats on one machine; ci_id does. Placement in compute slices."""

    serial: int
    ci_id: int
    profile_id: int
    start: int
    size: int
    uuid: str


@dataclass(slots=True)
class GpuInstance:
    """A GPU instance. engines: the graphics engines it got, lowest free first. Placement in memory slices."""

    serial: int
    gi_id: int
    profile_id: int
    start: int
    size: int
    engines: list[int]
    compute: list[ComputeInstance] = field(default_factory=list)


@dataclass(slots=True)
class Gpu:
    """One physical GPU. generation rises when old handles of it must die."""

    uuid: str
    key: str
    name: str
    index: int
    minor: int
    bus_id: str
    mig: bool = False
    pending: bool = False
    lost: bool = False
    generation: int = 0
    instances: list[GpuInstance] = field(default_factory=list)
    switches: GpuSwitches = field(default_factory=GpuSwitches)


@dataclass(slots=True)
class Process:
    """Something that holds a GPU or an instance. gi_serial: 0 for the whole GPU; ci_serial: 0 for no compute instance.

    silent: holds without being in the process list. ends_at_s: when it will end by itself. released_at_s: it has ended,
    and the driver lets go of what it held at this time. memory_mib: what the process list says it uses.
    """

    pid: int
    gpu_uuid: str
    gi_serial: int
    ci_serial: int
    command: str
    container: str
    silent: bool
    memory_mib: int = 512
    ends_at_s: float | None = None
    released_at_s: float | None = None


@dataclass(slots=True)
class Client:
    """One NVML session. started: the process's start time in clock ticks, None where the process is not a real one.

    space: the pid namespace in which it has its pid, None where there are none; see processes.pid_space.
    """

    pid: int
    inits: int
    command: str
    container: str
    started: int | None = None
    space: int | None = None
    view: list[Gpu] = field(default_factory=list)


@dataclass(slots=True)
class ArmedFault:
    """A fault and how far it got. Fields as in faults.Fault; seen: matching calls so far; fired: how often it fired."""

    call: str
    action: str
    gpu: int | None
    when: str
    nth: int
    times: int
    code: int
    delay_s: float
    seen: int = 0
    fired: int = 0


@dataclass(slots=True)
class Event:
    """Something NVML tells its listeners. gi_id, ci_id: 0xFFFFFFFF where it cannot be attributed."""

    number: int
    gpu_uuid: str
    kind: int
    data: int
    gi_id: int
    ci_id: int


@dataclass(slots=True)
class Machine:
    """A whole machine. serial, next_pid, next_client, next_event: the next unused number of each kind.

    clock: "virtual" or "real"; now_s: virtual time; offset_s: added to the host's time in a real one.
    next_at_s: nothing happens by itself before this time. driver_back_at_s: the driver is being reloaded until then.
    session: rises when every NVML session ends by force (reboot, driver reload).
    """

    spec: str
    seed: str
    boot: int = 1
    session: int = 1
    clock: str = "virtual"
    now_s: float = 1_000_000.0
    offset_s: float = 0.0
    next_at_s: float = NEVER
    driver_back_at_s: float = 0.0
    serial: int = 1
    next_pid: int = 40_000
    next_client: int = 1
    next_event: int = 1
    log_calls: bool = True
    gpus: list[Gpu] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)
    clients: dict[str, Client] = field(default_factory=dict)
    faults: list[ArmedFault] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    switches: Switches = field(default_factory=Switches)

    @classmethod
    def of(cls, kinds: Sequence[Kind], seed: str = "") -> Machine:
        """A machine as it comes from the factory: MIG off everywhere, nothing running."""
        machine = cls(write_spec(kinds), seed)
        machine.gpus = [new_gpu(kind, index, seed) for index, kind in enumerate(kinds)]
        return machine

    @property
    def boot_id(self) -> str:
        """The kernel's boot id: another one after each reboot."""
        return derived_uuid("boot", self.seed, self.spec, self.boot)

    def take_serial(self) -> int:
        """A number that no other object of this machine ever had."""
        self.serial += 1
        return self.serial


def new_gpu(kind: Kind, index: int, seed: str, board: int = 0) -> Gpu:
    """A factory-new GPU for this slot. board: tells boards in one slot apart, so that each has its own UUID."""
    parts = (seed, kind.name, index, board) if seed or board else (kind.name, index)
    return Gpu(
        uuid="GPU-" + derived_uuid(*parts),
        key=kind.key,
        name=kind.name,
        index=index,
        minor=index,
        bus_id=f"00000000:{(index + 1) * 3:02X}:00.0",
    )


def to_json(machine: Machine) -> dict[str, Any]:
    """The machine as plain JSON values."""
    return {"format": FORMAT, "version": VERSION, "machine": _encode(machine)}


def from_json(document: Any) -> Machine:
    """The machine that to_json wrote; SimFileError, which says what it is instead, for anything else."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise SimFileError("this is not a simulated machine")
    if document.get("version") != VERSION:
        raise SimFileError(f"this simulated machine has format version {document.get('version')}, not {VERSION}")
    try:
        machine: Machine = _decoder(Machine)(document["machine"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise SimFileError(f"this simulated machine is damaged: {error!r}") from error
    strange = [gpu.key for gpu in machine.gpus if gpu.key not in models()]
    if strange:
        raise SimFileError(f"this simulated machine has GPUs that are not known here: {', '.join(strange)}")
    return machine


def _encode(value: Any) -> Any:
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if is_dataclass(value):
        cls: Any = type(value)
        return {name: _encode(getattr(value, name)) for name in _names(cls)}
    return value


@cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


@cache
def _decoder(hint: Any) -> Callable[[Any], Any]:
    origin = get_origin(hint)
    if origin is list:
        item = _decoder(get_args(hint)[0])
        return lambda values: [item(value) for value in values]
    if origin is dict:
        entry = _decoder(get_args(hint)[1])
        return lambda values: {key: entry(value) for key, value in values.items()}
    if origin in (Union, types.UnionType):
        inner = _decoder(next(a for a in get_args(hint) if a is not type(None)))
        return lambda value: None if value is None else inner(value)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        parts = {name: _decoder(kind) for name, kind in get_type_hints(hint).items()}

        def build(values: Any) -> Any:
            if values.keys() != parts.keys():
                odd = sorted(values.keys() ^ parts.keys())
                raise ValueError(f"{hint.__name__}: unexpected or missing {', '.join(odd)}")
            return hint(**{name: parts[name](value) for name, value in values.items()})

        return build

    def plain(value: Any) -> Any:
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
            raise TypeError(f"{value!r} where {hint.__name__} belongs")
        return value

    return plain
