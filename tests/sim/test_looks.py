"""What the agent looks at between two steps: the GPU it works on, and all of them before it turns to another."""

from __future__ import annotations

import pytest
import worlds
from worlds import PIDS_FROM, World, serials

from migd.agent.effects import Pause
from migd.agent.running import Progress, run
from migd.agent.simulated import simulated
from migd.mig.operations import Operation
from migd.nvml import NvmlGpus
from migd.plans.plan import GpuSelector, InstanceRule, Rule
from migd.sim.host import SimHost


def cut(host: SimHost, **counts: int) -> dict[str, Rule]:
    rows = tuple(InstanceRule(profile=name.lstrip("_").replace("_", "."), count=n) for name, n in counts.items())
    return {uuid: Rule(gpus=GpuSelector(every=True), instances=rows) for uuid in host.gpu_uuids()}


def cut_world(spec: str) -> World:
    world = World(SimHost.fresh(spec))
    assert world.attempt(worlds.order_for(cut(world.host, _2g_12gb=2))) == "done"  # type: ignore[arg-type]
    return world


def test_between_two_steps_on_one_gpu_only_that_one_is_read() -> None:
    world = cut_world("3xa30")
    spans: list[tuple[int, int]] = []  # where the log of calls stood when a step began, and when it ended
    uuids: list[str] = []

    def listen(step: Progress) -> None:
        assert not isinstance(step.effect, Pause)
        if not step.done:
            spans.append((len(world.host.calls), 0))
            uuids.append(step.effect.gpu_uuid)
        else:
            spans[-1] = (spans[-1][0], len(world.host.calls))

    run(world.machine(), worlds.order_for(cut(world.host, _1g_6gb=4)), listen)  # type: ignore[arg-type]
    index = {uuid: i for i, uuid in enumerate(world.host.gpu_uuids())}
    calls = list(world.host.calls)
    between = list(zip(spans, spans[1:], uuids, uuids[1:], strict=False))
    assert len(between) == 3 * 12 - 1  # two of 2g go, four of 1g come, two calls each
    for (_, ended), (begins, _), last, following in between:
        read = {call.gpu for call in calls[ended:begins]} - {None}
        assert read == ({index[last]} if last == following else set(index.values()))


def test_what_happens_to_a_later_gpu_meanwhile_is_seen_before_it_is_touched() -> None:
    world = cut_world("2xa30")
    first, second = world.host.gpu_uuids()
    before = {place: serial for place, serial in serials(world.host).items() if place[0] == second}
    begun: list[Operation] = []

    def listen(step: Progress) -> None:
        assert not isinstance(step.effect, Pause)
        if not begun:
            world.host.start_process(1, 0)
        begun.append(step.effect)

    record = run(world.machine(), worlds.order_for(cut(world.host, _1g_6gb=4)), listen)  # type: ignore[arg-type]
    outcomes = [record.gpu(uuid).outcome for uuid in (first, second)]
    assert [outcome and outcome.phase for outcome in outcomes] == ["Ready", "Blocked"]
    assert {place: serial for place, serial in serials(world.host).items() if place[0] == second} == before
    assert {operation.gpu_uuid for operation in begun} == {first}


@pytest.fixture
def seen_once() -> tuple[SimHost, NvmlGpus]:
    host = SimHost.fresh("2xa100-80gb")
    gpus = simulated(host, worlds.MemoryStore(), PIDS_FROM).gpus
    assert isinstance(gpus, NvmlGpus)
    gpus.look()
    return host, gpus


def test_a_look_at_one_gpu_is_what_a_look_at_all_says_of_it(seen_once: tuple[SimHost, NvmlGpus]) -> None:
    host, gpus = seen_once
    host.start_process(1, command="train")
    assert [gpus.look_at(uuid) for uuid in host.gpu_uuids()] == list(gpus.look())


def test_a_gpu_that_is_not_where_it_was_is_left_to_a_look_at_all(seen_once: tuple[SimHost, NvmlGpus]) -> None:
    host, gpus = seen_once
    one, other = host.gpu_uuids()
    assert gpus.look_at("GPU-never-seen") is None
    host.swap_indices(0, 1)
    assert gpus.look_at(one) is None
    assert [gpu.uuid for gpu in gpus.look()] == [other, one]
    assert gpus.look_at(one) is not None
    host.lose_gpu(1)
    assert gpus.look_at(one) is None
    assert gpus.look()[1].lost
