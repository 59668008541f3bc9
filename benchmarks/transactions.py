"""How much of a transaction is not NVML's: its wall-clock time over the time that the simulated driver takes.

The simulated driver really sleeps its published durations. Everything else is in the wall-clock time: opening the
session, reading boards, a look at every GPU before each step, the record written and fsynced before each step, what
the simulated driver computes, and the last look that verifies. NVML's own time is nominal: what the same story takes
on the virtual clock, where nothing else passes time. So that sleeps end late counts against us.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from benchmarks.measuring import median
from migd.agent.effects import Pause
from migd.agent.orders import Order
from migd.agent.ports import Gpus, Store
from migd.agent.records import Record
from migd.agent.running import Machine, Progress, look, run
from migd.agent.simulated import simulated
from migd.agent.store import FileStore
from migd.mig.geometry import counts_of
from migd.mig.observed import SeenGpu
from migd.mig.operations import Operation
from migd.plans.plan import GpuSelector, InstanceRule, Rule
from migd.sim.host import SimHost

Kept = Literal["memory", "file"]
"""Where the simulated machine lives. In a file, every call locks, and every change is written."""

SEVEN: Final = (("1g.10gb", 7),)
MIXED: Final = (("1g.10gb", 2), ("2g.20gb", 1), ("3g.40gb", 1))


@dataclass(frozen=True, slots=True)
class Story:
    """One transaction: a machine, what there is (None: MIG off), and what is wished of every GPU; run so often."""

    name: str
    spec: str
    before: tuple[tuple[str, int], ...] | None
    wish: tuple[tuple[str, int], ...]
    runs: int


STORIES: Final = (
    Story("recut 1 GPU", "a100-80gb", SEVEN, MIXED, 5),
    Story("recut 8 GPUs", "8xa100-80gb", SEVEN, MIXED, 3),
    Story("MIG on + 7x1g, A100", "a100-80gb", None, SEVEN, 2),
    Story("MIG on + 7x1g, H100", "h100-sxm-80gb", None, SEVEN, 3),
)


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the time of one run went, in seconds. operations: what performing took beyond NVML's nominal time."""

    wall_s: float
    nvml_s: float
    looks_s: float
    saves_s: float
    operations_s: float
    looks: int
    saves: int
    steps: int

    @property
    def decide_s(self) -> float:
        """Deciding, and all else."""
        return self.wall_s - self.nvml_s - self.looks_s - self.saves_s - self.operations_s


@dataclass(frozen=True, slots=True)
class Transactions:
    """Some runs of one story. ratio_*: wall-clock time by NVML's own. Parts of the rest: of the median run, in seconds.

    steps: operations, one NVML call that changes something each. Every run did the same looks, saves and steps.
    """

    story: str
    kept: Kept
    n: int
    nvml_s: float
    ratio_p50: float
    ratio_max: float
    looks: int
    saves: int
    steps: int
    looks_s: float
    saves_s: float
    operations_s: float
    decide_s: float


def transactions(story: Story, kept: Kept, runs: int, scale: float = 1.0) -> Transactions:
    """Run a story so often. scale: of NVML's durations; 1 is as published, less is for tests of this benchmark."""
    nvml_s, steps = nominal(story, scale)
    spent = [_run(story, kept, scale, nvml_s) for _ in range(runs)]
    works = {(s.looks, s.saves, s.steps) for s in spent}
    assert len(works) == 1, "two runs of one story did different work"
    assert spent[0].steps == steps, "real and virtual clock did different work"
    ratios = sorted(s.wall_s / nvml_s for s in spent)
    middle = next(s for s in spent if s.wall_s / nvml_s == median(ratios))
    return Transactions(
        story.name,
        kept,
        runs,
        nvml_s,
        median(ratios),
        ratios[-1],
        middle.looks,
        middle.saves,
        steps,
        middle.looks_s,
        middle.saves_s,
        middle.operations_s,
        middle.decide_s,
    )


def nominal(story: Story, scale: float) -> tuple[float, int]:
    """NVML's own time for a story in seconds, and its steps: the whole of what passes on the virtual clock."""
    with tempfile.TemporaryDirectory() as folder:
        host = _host(story, "memory", Path(folder), "virtual", scale)
        began = host.clock.now_s()
        spent = _transact(host, Path(folder), story, 0.0)
        return host.clock.now_s() - began, spent.steps


def _run(story: Story, kept: Kept, scale: float, nvml_s: float) -> Spent:
    with tempfile.TemporaryDirectory() as folder:
        return _transact(_host(story, kept, Path(folder), "real", scale), Path(folder), story, nvml_s)


def _host(story: Story, kept: Kept, folder: Path, clock: str, scale: float) -> SimHost:
    """The story's machine as it is before, made without time passing and with a record of what was made."""
    if kept == "file":
        host = SimHost.open(folder / "machine.json", story.spec, clock=clock)
    else:
        host = SimHost.fresh(story.spec, clock=clock)
        host.log_calls(False)
    host.switch("duration_scale", 0.0)
    if story.before is not None:
        machine = simulated(host, FileStore(folder))
        run(machine, _order("before", look(machine).gpus, story.before))
        machine.gpus.close()
    host.switch("duration_scale", scale)
    return host


def _order(name: str, gpus: tuple[SeenGpu, ...], wish: tuple[tuple[str, int], ...]) -> Order:
    rows = tuple(InstanceRule(profile=profile, count=number) for profile, number in wish)
    return Order(name, {gpu.uuid: Rule(gpus=GpuSelector(every=True), instances=rows) for gpu in gpus})


def _transact(host: SimHost, folder: Path, story: Story, nvml_s: float) -> Spent:
    """One transaction in a process that knows nothing yet, timed from first call to last, and checked afterwards."""
    machine = simulated(host, FileStore(folder))
    order = _order("wish", look(machine).gpus, story.wish)  # what names the GPUs is not part of it
    machine.gpus.close()
    timing = _Timing(simulated(host, FileStore(folder)))
    began = time.perf_counter()
    record = run(timing.machine, order, timing.heard)
    wall_s = time.perf_counter() - began
    after = look(machine).gpus
    assert all(o.outcome is not None and o.outcome.phase == "Ready" for o in record.gpus.values()), "not as wished"
    assert all(counts_of(gpu.geometry) == story.wish and all(i.whole for i in gpu.instances) for gpu in after)
    assert record.lasting == machine.store.load(), "the record on disk is another"
    return timing.spent(wall_s, nvml_s)


class _Timing:
    """A machine whose ports are timed, and what they took."""

    def __init__(self, machine: Machine) -> None:
        self.took: dict[str, list[float]] = {"look": [], "perform": [], "save": []}
        gpus, store = _TimedGpus(machine.gpus, self), _TimedStore(machine.store, self)
        self.machine = replace(machine, gpus=gpus, store=store)

    def heard(self, progress: Progress) -> None:
        """Nothing may be waited for or fail in a story: that would be counted as ours."""
        assert not isinstance(progress.effect, Pause), f"it waits: {progress.effect}"
        assert not progress.error, progress.error

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.took[name].append(time.perf_counter() - began)

    def spent(self, wall_s: float, nvml_s: float) -> Spent:
        looks, saves, performs = self.took["look"], self.took["save"], self.took["perform"]
        beyond = sum(performs) - nvml_s
        return Spent(wall_s, nvml_s, sum(looks), sum(saves), beyond, len(looks), len(saves), len(performs))


class _TimedGpus:
    def __init__(self, gpus: Gpus, timing: _Timing) -> None:
        self._gpus = gpus
        self._timing = timing

    def look(self) -> tuple[SeenGpu, ...]:
        with self._timing.part("look"):
            return self._gpus.look()

    def look_at(self, gpu_uuid: str) -> SeenGpu | None:
        with self._timing.part("look"):
            return self._gpus.look_at(gpu_uuid)

    def perform(self, operation: Operation) -> None:
        with self._timing.part("perform"):
            self._gpus.perform(operation)

    def close(self) -> None:
        self._gpus.close()


class _TimedStore:
    def __init__(self, store: Store, timing: _Timing) -> None:
        self._store = store
        self._timing = timing

    def load(self) -> Record | None:
        return self._store.load()

    def save(self, record: Record) -> None:
        with self._timing.part("save"):
            self._store.save(record)
