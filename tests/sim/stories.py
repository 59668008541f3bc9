"""Stories for the crash tests: from one seed a machine, what is on it, what is wished, and all that goes wrong.

Others beside the agent (foreign instances, processes that come and go, a driver that reloads) are changed in the
machine's own model, so that no armed fault strikes them and nothing they do looks like a call of the agent's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from ctypes import byref
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal

import pynvml
from worlds import World, actual, order_for

from migd.agent.effects import Pause
from migd.agent.orders import Goal, Order
from migd.agent.records import AS_WISHED, GpuRecord, Outcome, Record
from migd.agent.running import Progress
from migd.mig.geometry import Counts, GpuInstance, Layout, by_start
from migd.mig.profiles import Placement
from migd.mig.table import PlacementSet, Table, table_of
from migd.plans.plan import GpuSelector, InstanceRule, Rule
from migd.sim import placing
from migd.sim.catalog import compute_profiles, models
from migd.sim.faults import Fault
from migd.sim.host import SimHost
from migd.sim.machine import ComputeInstance as Compute
from migd.sim.machine import Gpu
from migd.sim.machine import GpuInstance as Made

SPECS: Final = (
    "a100-80gb",
    "a30",
    "h100-sxm-80gb",
    "rtx-pro-6000-blackwell",
    "2xa30",
    "h200,a30",
    "a100-40gb,l40s",
)
MUTATORS: Final = (
    "nvmlDeviceSetMigMode",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
)
READS: Final = ("nvmlDeviceGetMigMode", "nvmlDeviceGetGpuInstances", "nvmlGpuInstanceGetInfo", "nvmlDeviceGetHandleBy*")
# Each error stands for something seen in the field: a monitor or a release that lags (19), a driver that loses its
# nerve (999), a permission taken away (4), a place that another client took (23), a handle retired meanwhile (2, 6).
CODES: Final = (19, 19, 999, 4, 23, 2, 6)
EVERY: Final = GpuSelector(every=True)
DEALER: Final = 800_000
"""The pid of who cuts a new machine for a story to begin with."""


@dataclass
class Others:
    """Whoever else is on the machine. serials: of all GPU instances that they ever made; theirs: those that exist, with
    the compute instances in them. late: made while the agent worked. split: whose compute instances they changed then.
    disturbed: GPUs where they destroyed something.
    """

    host: SimHost
    dice: random.Random
    serials: set[int] = field(default_factory=set)
    theirs: dict[int, frozenset[int]] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    split: set[int] = field(default_factory=set)
    disturbed: set[str] = field(default_factory=set)
    upheavals: int = 0

    def make(self, gpu: Gpu, kind: str, avoid: str = "", late: bool = False) -> bool:
        """Create an instance on a free place: "whole", "bare" (no compute instance) or "narrow" (1c.3g)."""
        if not gpu.mig or gpu.lost:
            return False
        model = models()[gpu.key]
        free = [
            (profile, place)
            for profile in model.profiles
            for place in placing.free_places(model, gpu.instances, profile)
            if f"{profile.name}@{place.start}" not in avoid and (kind != "narrow" or profile.slices > 1)
        ]
        if not free:
            return False
        profile, place = self.dice.choice(free)
        machine = self.host.snapshot()
        serial = machine.take_serial()
        made = Made(
            serial, placing.gi_id(model, place, False), profile.profile_id, place.start, place.size, [*range(8)]
        )
        gpu.instances.append(made)
        self.serials.add(serial)
        if late:
            self.late.add(serial)
        self.fill(made, profile.slices, kind)
        return True

    def fill(self, made: Made, slices: int, kind: str) -> None:
        """Put the compute instances of this kind into an instance, in place of those that are there."""
        made.compute.clear()
        if kind != "bare":
            offered = compute_profiles(slices)
            chosen = offered[-1] if kind == "whole" else offered[0]
            serial = self.host.snapshot().take_serial()
            made.compute.append(Compute(serial, 0, chosen.profile_id, 0, chosen.slices, f"MIG-{serial}"))
        self.theirs[made.serial] = frozenset(compute.serial for compute in made.compute)

    def unheld(self, gpu: Gpu) -> list[Made]:
        held = {process.gi_serial for process in self.host.snapshot().processes.values()}
        return [made for made in gpu.instances if made.serial not in held]

    def destroy(self, gpu: Gpu, made: Made) -> None:
        gpu.instances.remove(made)
        self.theirs.pop(made.serial, None)
        self.disturbed.add(gpu.uuid)

    def tidy_up(self) -> None:
        """They remove what they made while the agent worked, and make whole what they split."""
        for gpu in self.host.snapshot().gpus:
            for made in list(gpu.instances):
                if made.serial in self.late:
                    self.destroy(gpu, made)
                elif made.serial in self.split and made.serial in self.theirs:
                    self.fill(made, models()[gpu.key].by_id()[made.profile_id].slices, "whole")

    def upheave(self, what: Literal["reboot", "reload"]) -> None:
        """Everything on the GPUs is gone; on Hopper and later the mode too."""
        if what == "reboot":
            self.host.reboot()
        else:
            self.host.reload_driver(self.dice.choice((0.0, 2.0)))
        self.theirs.clear()
        self.upheavals += 1

    def act(self, avoid: str) -> None:
        """Do one thing that another program, a user or the machine may do at any time."""
        dice, kind = self.dice, self.dice.random()
        machine = self.host.snapshot()
        gpu = dice.choice([gpu for gpu in machine.gpus if models()[gpu.key].mig])
        own = [made for made in self.unheld(gpu) if made.serial in self.theirs]
        if kind < 0.4:
            self.make(gpu, dice.choice(("whole", "whole", "bare", "narrow")), avoid, late=True)
        elif kind < 0.6 and own:
            self.destroy(gpu, dice.choice(own))
        elif kind < 0.7 and own:
            made = dice.choice(own)
            self.split.add(made.serial)
            self.fill(made, models()[gpu.key].by_id()[made.profile_id].slices, dice.choice(("whole", "narrow", "bare")))
        elif kind < 0.9 and not gpu.lost:
            runnable = [made for made in gpu.instances if made.compute]
            if runnable:
                start, ends = dice.choice(runnable).start, dice.uniform(0, 20)
                self.host.start_process(gpu.index, start, silent=dice.random() < 0.3, ends_after_s=ends)
        elif kind < 0.93:
            self.upheave("reload")
        elif kind < 0.96:
            gpu.lost = True
        else:
            ours = [made for made in self.unheld(gpu) if made.serial not in self.theirs]
            if ours:
                self.destroy(gpu, dice.choice(ours))

    def wronged(self, adopted: bool) -> list[str]:
        """What of theirs has been destroyed, and which processes have lost what they run on: always nothing."""
        machine = self.host.snapshot()
        there = {i.serial: {c.serial for c in i.compute} for gpu in machine.gpus for i in gpu.instances}
        wrong = [
            f"pid {process.pid} lost its instance"
            for process in machine.processes.values()
            if process.gi_serial
            and process.ci_serial not in there.get(process.gi_serial, ())
            and process.released_at_s is None
        ]
        if not adopted:
            wrong += [
                f"foreign {s} was destroyed" for s, inside in self.theirs.items() if not inside <= there.get(s, set())
            ]
            wrong += [f"foreign {s} was destroyed" for s in self.theirs.keys() - there.keys()]
        return wrong


@dataclass
class Story:
    """One seed's world and what is wished of it.

    before: the layouts at the start. wished: what each GPU must have afterwards, None for MIG off. possible: whether
    the wish can be met while nothing changes by itself. pending: GPUs whose mode somebody left pending. rate: how often
    somebody meddles after an operation.
    """

    seed: int
    dice: random.Random
    world: World
    others: Others
    order: Order
    before: dict[str, Layout]
    wished: dict[str, Counts | None]
    possible: bool
    pending: set[str]
    rate: float
    wrong: list[str] = field(default_factory=list)
    listening: bool = True

    @property
    def meddled(self) -> bool:
        return self.rate > 0

    @property
    def adopts(self) -> bool:
        return self.order.foreign == "Adopt"

    def listen(self, step: Progress) -> None:
        """After each operation: look for harm, then perhaps do some."""
        if step.done and not isinstance(step.effect, Pause):
            self.wrong += self.others.wronged(self.adopts)
            if self.listening and self.rate and self.dice.random() < self.rate:
                self.others.act(str(step.effect))


Dealer = Callable[[World, Mapping[str, Layout]], None]
"""Brings a factory-new machine to layouts by UUID, with a record in which all of it is the agent's own."""


def dealt(world: World, layouts: Mapping[str, Layout]) -> None:
    """As an agent leaves a new machine when nothing goes wrong, without one: by the calls to NVML that change it."""
    host, nvml = world.host, world.host.nvml(pid=DEALER)
    nvml.nvmlInit()
    for gpu in host.snapshot().gpus:
        layout = layouts.get(gpu.uuid)
        if layout is not None and layout.mig:
            _cut(nvml, gpu, by_start(layout.instances))
    host.close_sessions(DEALER)
    off, at_rest = Layout(False), Outcome("Ready", AS_WISHED)
    gpus = {u: GpuRecord(a.instances, off if a.mig else None, outcome=at_rest) for u, a in layouts.items()}
    world.store.save(Record(host.boot_id(), order_for(layouts).id, gpus))


def _cut(nvml: Any, gpu: Gpu, instances: tuple[GpuInstance, ...]) -> None:
    nvml.nvmlDeviceSetMigMode(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid), pynvml.NVML_DEVICE_MIG_ENABLE)
    device = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)  # the mode change may have ended the other one
    profiles = {profile.name: profile for profile in models()[gpu.key].profiles}
    made = []
    for instance in instances:
        profile, at = profiles[instance.profile], instance.placement
        place = pynvml.c_nvmlGpuInstancePlacement_t(at.start, at.size)
        made.append(nvml.nvmlDeviceCreateGpuInstanceWithPlacement(device, profile.profile_id, byref(place)))
    for instance, handle in zip(instances, made, strict=True):
        whole = compute_profiles(profiles[instance.profile].slices)[-1]
        nvml.nvmlGpuInstanceCreateComputeInstance(handle, whole.profile_id)


def by_its_agent(world: World, layouts: Mapping[str, Layout]) -> None:
    assert world.attempt(order_for(layouts)) == "done"
    world.end()


@cache
def _tables(spec: str) -> tuple[Table | None, ...]:
    """By index, what each GPU of such a machine can be cut into; None where it cannot do MIG."""
    seen = World(SimHost.fresh(spec)).seen()
    return tuple(table_of(gpu.board) if gpu.board is not None else None for gpu in seen)


def told(seed: int, deal: Dealer = dealt) -> Story:
    dice = random.Random(seed)
    host = SimHost.fresh(dice.choice(SPECS), seed=str(seed % 97))
    host.log_calls(False)
    world, others = World(host), Others(host, dice)
    host.switch("minor_renumber_on_mode_change", dice.random() < 0.3)
    host.switch("uuid_changes_on_recreate", dice.random() < 0.3)
    host.switch("busy_resetless_mode", dice.choice(("switches", "in-use")))
    machine = {gpu.uuid: gpu for gpu in host.snapshot().gpus}
    offered = zip(machine, _tables(host.spec), strict=True)
    tables = {uuid: table for uuid, table in offered if table is not None}
    deal(world, {uuid: _some_layout(dice, table) for uuid, table in tables.items()})
    foreign: dict[str, list[str]] = {}
    if dice.random() < 0.3:
        for uuid in tables:
            for kind in dice.sample(("whole", "bare", "narrow"), dice.randint(0, 2)):
                if others.make(machine[uuid], kind):
                    foreign.setdefault(uuid, []).append(kind)
    adopts = bool(foreign) and dice.random() < 0.4
    before, goals, wished, possible = actual(host), dict[str, Goal](), dict[str, Counts | None](), True
    for uuid, table in tables.items():
        busy = {made.start for made in _runnable(machine[uuid]) if dice.random() < 0.3}
        for start in sorted(busy):
            host.start_process(machine[uuid].index, start)
        stay = {i for i in before[uuid].instances if i.placement.start in busy}
        if not adopts:
            stay |= {i for i in before[uuid].instances if _is_theirs(machine[uuid], i, others)}
            possible = possible and "narrow" not in foreign.get(uuid, ())
        goals[uuid], wished[uuid] = _some_wish(dice, table, frozenset(stay))
    vm, pending = dice.random() < 0.1, set[str]()
    if vm:
        host.switch("vm", True)
        host.switch("vm_refuses_reset", dice.random() < 0.5)
        for gpu in machine.values():
            if models()[gpu.key].mig and not models()[gpu.key].resetless and not gpu.instances and dice.random() < 0.3:
                gpu.pending = not gpu.mig
                pending.add(gpu.uuid)
    wait = dice.random() < 0.2
    if wait or dice.random() < 0.1:
        _leavers(dice, host, machine)
    if dice.random() < 0.3:
        host.switch("release_lag_s", 0.4)
    host.switch("profiles_while_off", dice.random() < 0.8)
    order = Order(
        f"wish {seed}",
        goals,
        "Adopt" if adopts else "Refuse",
        "Hold" if dice.random() < 0.15 else "Rollback",
        host.clock.now_s() + dice.choice((5.0, 60.0)) if wait else None,
    )
    for _ in range(dice.randint(0, 3)):
        host.inject(_some_death(dice))
    for _ in range(dice.randint(0, 3)):
        host.inject(_some_error(dice))
    rate = dice.choice((0.0, 0.0, 0.0, 0.1, 0.3))
    return Story(seed, dice, world, others, order, before, wished, possible, pending, rate)


def _some_layout(dice: random.Random, table: Table) -> Layout:
    return Layout(False) if dice.random() < 0.25 else Layout(True, table.geometry(dice.choice(table.sets).bits))


def _some_wish(dice: random.Random, table: Table, stay: frozenset[GpuInstance]) -> tuple[Goal, Counts | None]:
    """A rule that can be met around what stays, as a goal and as what must be there afterwards (None: MIG off)."""
    if not stay and dice.random() < 0.2:
        return Rule(gpus=EVERY, mig="Disabled"), None
    held = table.bits_of(stay)
    assert held is not None
    chosen = dice.choice(_around(table, held))
    if dice.random() < 0.2:
        return Layout(True, table.geometry(chosen.bits)), chosen.counts
    wanted = tuple(InstanceRule(profile=name, count=number) for name, number in chosen.counts)
    return Rule(gpus=EVERY, instances=wanted, allow_empty=not wanted), chosen.counts


@cache
def _around(table: Table, held: int) -> tuple[PlacementSet, ...]:
    """The sets that contain these instances, in the table's order."""
    return tuple(s for s in table.sets if not held & ~s.bits)


def _runnable(gpu: Gpu) -> list[Made]:
    """Instances that a process can run on and that the planner can keep as they are."""
    slices = models()[gpu.key].by_id()
    return [i for i in gpu.instances if len(i.compute) == 1 and i.compute[0].size == slices[i.profile_id].slices]


def _is_theirs(gpu: Gpu, instance: GpuInstance, others: Others) -> bool:
    return any(made.serial in others.serials and made.start == instance.placement.start for made in gpu.instances)


def _leavers(dice: random.Random, host: SimHost, machine: dict[str, Gpu]) -> None:
    """Processes, some of them silent, that leave by themselves: on instances, and on GPUs as a whole."""
    for gpu in machine.values():
        for made in _runnable(gpu):
            if dice.random() < 0.3:
                host.start_process(gpu.index, made.start, silent=dice.random() < 0.4, ends_after_s=dice.uniform(0, 30))
        if not gpu.mig and dice.random() < 0.3:
            host.start_process(gpu.index, silent=dice.random() < 0.5, ends_after_s=dice.uniform(0, 30))


def _some_death(dice: random.Random) -> Fault:
    call = dice.choice(("record.save", "record.save", "reset", *MUTATORS, *READS))
    return Fault(call, "crash", when=dice.choice(("before", "after")), nth=dice.randint(1, 12))


def _some_error(dice: random.Random) -> Fault:
    kind = dice.random()
    call, nth = dice.choice((*MUTATORS, "reset")), dice.randint(1, 6)
    if kind < 0.1:
        return Fault(call, "hang", when=dice.choice(("before", "after")), nth=nth)
    if kind < 0.2:
        return Fault(call, "skip", nth=nth)
    if kind < 0.25:
        return Fault("record.save", "error", nth=nth)
    if kind < 0.4:
        call = dice.choice(READS)
    return Fault(
        call, "error", dice.choice(CODES), None, dice.choice(("before", "after")), nth, dice.choice((1, 1, 2, 3, 9))
    )


def placed(made: Made, key: str) -> GpuInstance:
    """An instance of the machine's model as a value."""
    return GpuInstance(models()[key].by_id()[made.profile_id].name, Placement(made.start, made.size))
