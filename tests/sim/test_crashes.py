"""An agent that may die at any save or effect, on hardware that fails before or after its effect: it always converges.

Every run is a seed: a machine, what migd and others made on it, holders, a plan, and what goes wrong: see `stories`. A
failure prints the seed; `pytest tests/sim/test_crashes.py --seed N` replays it. Left out: the file on disk and real
kills, which test_kills.py has.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest
from stories import Story, by_its_agent, placed, told
from worlds import actual

from migd.agent.records import Record
from migd.mig.geometry import EMPTY, Counts, GpuInstance, Layout, counts_of
from migd.sim.catalog import models

RUNS: Final = 20_000
PARTS: Final = 40


def play(story: Story) -> None:
    """Run commands until one ends by itself, then some without faults; check every operation and the end."""
    world, host, others = story.world, story.world.host, story.others
    for _ in range(10):
        answer = world.attempt(story.order, story.listen)
        harmless(story)
        if answer == "done":
            break
        if story.dice.random() < 0.1:
            others.upheave("reboot")
        find_all(story)
    find_all(story)
    host.clear_faults()
    story.listening = False
    host.clock.sleep(60.0)  # by now everybody who leaves has left, and the driver is back
    assert world.attempt(None, story.listen) == "done"
    if world.record().open:  # others are in the way of the way back: they go, it goes on
        others.tidy_up()
        assert world.attempt(None, story.listen) == "done"
    harmless(story)
    record = world.record()
    assert record.open == (), "the record is not at rest"
    at_rest(story, record)
    others.tidy_up()
    as_wished(story)
    if story.dice.random() < 0.1 and not others.theirs:
        rolled_back(story)


def harmless(story: Story) -> None:
    wrong = story.wrong + story.others.wronged(story.adopts)
    assert wrong == [], f"harm was done: {wrong}"


def find_all(story: Story) -> None:
    for gpu in story.world.host.snapshot().gpus:
        gpu.lost = False


def at_rest(story: Story, record: Record) -> None:
    """Nothing half done is left: the wish or the layout before, whole, and the record knows exactly what is ours."""
    others, now = story.others, actual(story.world.host)
    for gpu in story.world.host.snapshot().gpus:
        if gpu.uuid not in now:
            continue
        found = record.gpu(gpu.uuid)
        phase = found.outcome.phase if found.outcome else ""
        ours = [made for made in gpu.instances if made.serial not in others.serials]
        if not story.adopts and not others.upheavals and gpu.uuid not in others.disturbed:
            assert found.owned == {placed(made, gpu.key) for made in ours}, "the record is wrong about what is ours"
        if story.order.on_failure == "Hold":
            continue
        widths = models()[gpu.key].by_id()
        halves = [i for i in ours if [c.size for c in i.compute] != [widths[i.profile_id].slices]]
        assert not halves, f"half made: {halves}"
        waits = phase == "RebootRequired" or gpu.uuid in story.pending
        assert gpu.mig == gpu.pending or waits, "a mode is left pending"
        if others.upheavals or gpu.uuid in others.disturbed or phase == "RebootRequired":
            continue
        late = frozenset(placed(made, gpu.key) for made in gpu.instances if made.serial in others.late)
        is_now, was = now[gpu.uuid], story.before[gpu.uuid]
        back = is_now.mig == was.mig and is_now.instances - late <= was.instances
        gone = was.instances - is_now.instances
        assert (back and (not gone or story.meddled)) or _is_wished(is_now, story.wished[gpu.uuid], late), (
            f"neither the wish nor the layout before: {was} became {is_now}"
        )


def as_wished(story: Story) -> None:
    """Without faults the wish is met, or nothing is touched; with the reboots that it asks for.

    By the process that has brought the record to rest, which goes on from one order to the next as a node's agent does.
    """
    world, host, process = story.world, story.world.host, story.world.present
    untouched = {gpu.uuid: [i.serial for i in gpu.instances] for gpu in host.snapshot().gpus}
    for _ in range(4):
        assert world.attempt(story.order, story.listen, process) == "done"
        record = world.record()
        phases = {uuid: found.phase for uuid in story.wished if (found := record.gpu(uuid).outcome)}
        if "RebootRequired" not in phases.values():
            break
        story.others.upheave("reboot")
        process = None
    harmless(story)
    if set(phases.values()) != {"Ready"}:
        assert not story.possible, f"not as wished without faults: {phases}"
        assert untouched == {gpu.uuid: [i.serial for i in gpu.instances] for gpu in host.snapshot().gpus}
        return
    for uuid, now in actual(host).items():
        assert _is_wished(now, story.wished[uuid]), f"said to be as wished: {now}"
        gpu = next(gpu for gpu in host.snapshot().gpus if gpu.uuid == uuid)
        ours = {placed(made, gpu.key) for made in gpu.instances if made.serial not in story.others.theirs}
        assert record.gpu(uuid).owned == (now.instances if story.adopts else ours)


def rolled_back(story: Story) -> None:
    """A rollback returns to the layouts before, or says what holds it up; one more swaps again."""
    world, host = story.world, story.world.host
    host.snapshot().processes.clear()
    host.switch("vm", False)
    first = actual(host)
    record = world.record()
    goals = {uuid: record.gpu(uuid).before for uuid in first}
    assert world.roll_back() == "done"
    second = actual(host)
    assert second == {uuid: goals[uuid] or first[uuid] for uuid in first}
    assert world.roll_back() == "done"
    assert actual(host) == first


def _is_wished(now: Layout, wish: Counts | None, late: frozenset[GpuInstance] = EMPTY) -> bool:
    """Whether a layout is as wished. late: instances that others made meanwhile, which may be part of it or not."""
    if wish is None:
        return now == Layout(False)
    wanted, have, least = Counter(dict(wish)), Counter(dict(counts_of(now.instances))), counts_of(now.instances - late)
    return now.mig and Counter(dict(least)) <= wanted <= have


@pytest.mark.parametrize("part", range(PARTS))
def test_every_run_converges_and_touches_nothing_in_use(part: int, first_seed: int, soak: int) -> None:
    each = RUNS * soak // PARTS
    for seed in range(first_seed + part * each, first_seed + (part + 1) * each):
        story = told(seed)
        try:
            play(story)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_story_begins_on_the_machine_that_its_agent_would_have_made() -> None:
    for seed in range(150):
        quick, real = told(seed), told(seed, by_its_agent)
        machine, same = quick.world.host.snapshot(), real.world.host.snapshot()
        machine.next_client = same.next_client  # how many NVML sessions there were
        assert machine == same, f"seed {seed}"
        assert quick.world.store.text == real.world.store.text, f"seed {seed}"
        assert (quick.order, quick.before, quick.wished) == (real.order, real.before, real.wished), f"seed {seed}"
