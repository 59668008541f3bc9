"""One simulated machine with an agent on it that may die at any effect or save, and the rules that must hold always."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from migd.agent.orders import Order
from migd.agent.records import Record
from migd.agent.running import Listener, Machine, look, run
from migd.agent.simulated import simulated
from migd.agent.store import RecordError, decode, encode
from migd.mig.geometry import GpuInstance, Layout
from migd.mig.observed import SeenGpu
from migd.mig.profiles import Placement
from migd.nvml.errors import GpuError
from migd.sim.catalog import models
from migd.sim.errors import SimulatedCrash
from migd.sim.host import SimHost

PIDS_FROM = 900_000
"""Pids of simulated agents: each life of the agent is a process of its own."""


class MemoryStore:
    """Keeps the record as the text a file would hold."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.saves = 0

    def load(self) -> Record | None:
        return None if self.text is None else decode(self.text)

    def save(self, record: Record) -> None:
        self.text = encode(record)
        self.saves += 1


@dataclass
class World:
    """A host, the record, and agents that come and go on it. lives: how many there were."""

    host: SimHost
    store: MemoryStore = field(default_factory=MemoryStore)
    lives: int = 0
    present: Machine | None = None

    def end(self) -> None:
        """The present process ends: the kernel closes what it had open."""
        self.host.close_sessions(PIDS_FROM + self.lives)

    def machine(self) -> Machine:
        """A new process of the agent's: memory is lost, and the one before has ended."""
        self.end()
        self.lives += 1
        self.present = simulated(self.host, self.store, PIDS_FROM + self.lives)
        return self.present

    def attempt(
        self, order: Order | None, listen: Listener = lambda progress: None, machine: Machine | None = None
    ) -> str:
        """One command: "done", or how it died. machine: of the process that does it, a new one where not given."""
        try:
            run(machine or self.machine(), order, listen)
        except SimulatedCrash:
            return "crashed"
        except GpuError as error:
            return f"gave up: {error}"
        except RecordError as error:
            return f"could not save: {error}"
        return "done"

    def roll_back(self) -> str:
        """What `migd rollback` does, in one process."""
        answer = self.attempt(None)
        goals = {uuid: before for uuid, gpu in self.record().gpus.items() if (before := gpu.before) is not None}
        again = Order(f"rollback {goals}", dict(goals))
        return answer if answer != "done" else self.attempt(again, machine=self.present)

    def seen(self) -> tuple[SeenGpu, ...]:
        """The machine as an agent sees it."""
        return look(self.machine()).gpus

    def record(self) -> Record:
        """The record as it lies there."""
        record = self.store.load()
        assert record is not None
        return record


def layouts(gpus: tuple[SeenGpu, ...]) -> dict[str, Layout]:
    return {gpu.uuid: gpu.layout for gpu in gpus}


def serials(host: SimHost) -> dict[tuple[str, int], tuple[int, ...]]:
    """By GPU and start: the serials of the instance and of its compute instances, which nothing can forge."""
    return {
        (gpu.uuid, there.start): (there.serial, *(compute.serial for compute in there.compute))
        for gpu in host.snapshot().gpus
        for there in gpu.instances
    }


def actual(host: SimHost) -> dict[str, Layout]:
    """By UUID, how each GPU that can do MIG really is: from the machine itself, past NVML."""
    found = {}
    for gpu in host.snapshot().gpus:
        profiles = models()[gpu.key].by_id()
        there = (GpuInstance(profiles[i.profile_id].name, Placement(i.start, i.size)) for i in gpu.instances)
        if profiles:
            found[gpu.uuid] = Layout(gpu.mig, frozenset(there))
    return found


def order_for(goals: Mapping[str, Layout], **options: object) -> Order:
    return Order("test", dict(goals), **options)  # type: ignore[arg-type]


def orphans(gpus: tuple[SeenGpu, ...]) -> list[str]:
    """GPU instances that nobody can use: without exactly one compute instance that spans them."""
    return [f"{gpu.index}:{there.instance}" for gpu in gpus for there in gpu.instances if not there.whole]
