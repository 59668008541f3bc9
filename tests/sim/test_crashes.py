"""An agent that may die at any save or effect, on hardware that fails before or after its effect: it always converges.

Every run is a seed: a machine, a layout that migd made, holders, a plan, and what goes wrong. A failure prints the
seed; `pytest tests/sim/test_crashes.py --seed N` replays it. Left out: the file on disk and real kills, which
test_kills.py has.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

import pytest
import worlds
from worlds import World, orphans, serials

from migd.agent.orders import Goal, Order
from migd.mig.geometry import Counts, Layout, counts_of
from migd.mig.observed import SeenGpu
from migd.mig.table import PlacementSet, table_of
from migd.plans.plan import GpuSelector, InstanceRule, Rule
from migd.sim.faults import Fault
from migd.sim.host import SimHost

RUNS: Final = 20_000
PARTS: Final = 40
SPECS: Final = (
    "a100-80gb",
    "a30",
    "h100-sxm-80gb",
    "rtx-pro-6000-blackwell",
    "2xa100-40gb",
    "h200,a30",
    "a100-80gb,l40s",
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


@dataclass
class Story:
    """One seed's world and what is wished of it."""

    seed: int
    world: World
    order: Order
    before: dict[str, Layout]
    wished: dict[str, Counts | None]
    busy: frozenset[tuple[str, int]]


def told(seed: int) -> Story:
    dice = random.Random(seed)
    host = SimHost.fresh(dice.choice(SPECS), seed=str(seed % 97))
    host.log_calls(False)
    if dice.random() < 0.3:
        host.switch("release_lag_s", 0.4)
    host.switch("minor_renumber_on_mode_change", dice.random() < 0.3)
    host.switch("uuid_changes_on_recreate", dice.random() < 0.3)
    world = World(host)
    gpus = [gpu for gpu in world.seen() if gpu.mode is not None]
    first = {gpu.uuid: _some_layout(dice, gpu) for gpu in gpus}
    assert world.attempt(worlds.order_for(first)) == "done"
    gpus = [gpu for gpu in world.seen() if gpu.mode is not None]
    busy = {
        (gpu.uuid, there.instance.placement.start) for gpu in gpus for there in gpu.instances if dice.random() < 0.3
    }
    for gpu in gpus:
        for uuid, start in sorted(busy):
            if uuid == gpu.uuid:
                host.start_process(gpu.index, start)
    goals: dict[str, Goal] = {}
    wished: dict[str, Counts | None] = {}
    for gpu in gpus:
        goal, wish = _some_wish(dice, gpu, {start for uuid, start in busy if uuid == gpu.uuid})
        goals[gpu.uuid], wished[gpu.uuid] = goal, wish
    order = Order(f"wish {seed}", goals)
    for _ in range(dice.randint(0, 3)):
        host.inject(_some_death(dice))
    for _ in range(dice.randint(0, 3)):
        host.inject(_some_error(dice))
    return Story(seed, world, order, {gpu.uuid: gpu.layout for gpu in gpus}, wished, frozenset(busy))


def _some_layout(dice: random.Random, gpu: SeenGpu) -> Layout:
    if dice.random() < 0.25 or gpu.board is None:
        return Layout(False)
    table = table_of(gpu.board)
    return Layout(True, table.geometry(dice.choice(table.sets).bits))


def _some_wish(dice: random.Random, gpu: SeenGpu, busy: set[int]) -> tuple[Goal, Counts | None]:
    """A rule that can be met around what is busy, as a goal and as what must be there afterwards (None: MIG off)."""
    every = GpuSelector(every=True)
    if not busy and dice.random() < 0.2:
        return Rule(gpus=every, mig="Disabled"), None
    assert gpu.board is not None
    table = table_of(gpu.board)
    held = table.bits_of(i.instance for i in gpu.instances if i.instance.placement.start in busy)
    assert held is not None
    around: list[PlacementSet] = [s for s in table.sets if not held & ~s.bits]
    chosen = dice.choice(around)
    if dice.random() < 0.2:
        return Layout(True, table.geometry(chosen.bits)), chosen.counts
    wanted = tuple(InstanceRule(profile=name, count=number) for name, number in chosen.counts)
    return Rule(gpus=every, instances=wanted, allow_empty=not wanted), chosen.counts


def _some_death(dice: random.Random) -> Fault:
    call = dice.choice(("record.save", "record.save", "reset", *MUTATORS, *READS))
    return Fault(call, "crash", when=dice.choice(("before", "after")), nth=dice.randint(1, 12))


def _some_error(dice: random.Random) -> Fault:
    kind = dice.random()
    call, nth = dice.choice(MUTATORS), dice.randint(1, 6)
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


def play(story: Story) -> None:
    """Run commands until one ends by itself, then one without faults; check every turn and the end."""
    world, host = story.world, story.world.host
    held = {place: serial for place, serial in serials(host).items() if place in story.busy}
    for _ in range(10):
        answer = world.attempt(story.order)
        assert held.items() <= serials(host).items(), "a busy instance was touched"
        if answer == "done":
            break
    host.clear_faults()
    assert world.attempt(None) == "done"
    assert world.record().open == (), "the record is not at rest"
    gpus = {gpu.uuid: gpu for gpu in world.seen()}
    assert held.items() <= serials(host).items(), "a busy instance was touched"
    assert orphans(tuple(gpus.values())) == []
    for uuid, before in story.before.items():
        now = gpus[uuid].layout
        assert now == before or _is_wished(now, story.wished[uuid]), f"neither the wish nor the layout before: {now}"
        mode = gpus[uuid].mode
        assert mode is not None
        assert mode.settled
    assert world.attempt(story.order) == "done"
    after = {gpu.uuid: gpu for gpu in world.seen()}
    for uuid, wish in story.wished.items():
        assert _is_wished(after[uuid].layout, wish), f"not as wished without faults: {after[uuid].layout}"
        assert world.record().gpu(uuid).owned == after[uuid].geometry
    assert held.items() <= serials(host).items(), "a busy instance was touched"


def _is_wished(now: Layout, wish: Counts | None) -> bool:
    return now == Layout(False) if wish is None else now.mig and counts_of(now.instances) == wish


@pytest.mark.parametrize("part", range(PARTS))
def test_every_run_converges_and_touches_nothing_in_use(part: int, first_seed: int, soak: int) -> None:
    each = RUNS * soak // PARTS
    for seed in range(first_seed + part * each, first_seed + (part + 1) * each):
        story = told(seed)
        try:
            play(story)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
