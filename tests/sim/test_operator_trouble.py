"""The operator in trouble: two of them, dead watches, an API server that is not well, heartbeats, faults by seed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from fleet_worlds import World, played

from migd.kube.following import TIMING
from migd.sim.cluster.faults import Chances
from migd_operator.probing import HEARD_MAX_S, alive
from migd_operator.reconciling import LEASE_S

ONES = {"profile": "1g.10gb", "count": 7}
HALVES = {"profile": "3g.40gb", "count": 2}
SEEDS = 8


def ready(world: World, *plans: str) -> bool:
    return all(world.said(name, "Ready") == ("True", "AsWished") for name in plans or ("p",))


def writers(world: World) -> list[str]:
    """Whose writes came one after the other, each named once for a run of writes."""
    users = [r.user for r in world.requests()]
    return [user for at, user in enumerate(users) if at == 0 or users[at - 1] != user]


def test_of_two_operators_one_acts_and_the_other_goes_on_where_it_ended():  # B97
    async def story(world: World) -> None:
        for k in range(6):
            world.add_node(f"n{k}", "7g.80gb")
        world.plan("p", HALVES)
        async with world.operator("a") as first, world.operator("b") as second:
            await world.until(lambda: first.health.settled and second.health.settled)
            assert (first.health.leader, second.health.leader) == (True, False)
        async with world.operator("b") as second:
            async with world.operator("a"):
                await world.until(lambda: len(world.started()) == 2)
                assert second.health.leader
            await world.until(lambda: ready(world))

    world = played(story)
    assert writers(world) == ["operator-a", "operator-b"]


def test_an_operator_that_cannot_renew_has_stopped_before_the_next_one_starts():  # B97
    async def story(world: World) -> None:
        for k in range(6):
            world.add_node(f"n{k}", "7g.80gb")
        world.plan("p", HALVES)
        frozen = Freezing(world.server.transport("operator-a"))
        async with world.operator("a", transport=frozen) as first, world.operator("b") as second:
            await world.until(lambda: len(world.started()) == 2)
            frozen.writes.clear()  # requests hang, also the one that renews
            cut_s = asyncio.get_running_loop().time()
            await world.until(lambda: second.health.leader)
            assert not first.health.leader
            assert asyncio.get_running_loop().time() - cut_s < LEASE_S + 5
            frozen.writes.set()  # what hung was given up: it does not arrive now
            await world.until(lambda: ready(world))
            assert second.health.leader

    assert writers(played(story)) == ["operator-a", "operator-b"]


class Freezing:
    """A connection on which writes hang while told to; watches and reads go on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.writes = asyncio.Event()
        self.writes.set()

    async def request(self, method: str, path: str, query: Mapping[str, str], body: Any, kind: str) -> Any:
        if method != "GET":
            await self.writes.wait()
        return await self.inner.request(method, path, query, body, kind)

    def watch(self, path: str, query: Mapping[str, str]) -> Any:
        return self.inner.watch(path, query)


class Silent(Freezing):
    """A connection whose first so many watches stay open and say nothing more."""

    opened = 0
    dead = 0

    @asynccontextmanager
    async def watch(self, path: str, query: Mapping[str, str]) -> Any:
        self.opened += 1
        number = self.opened
        async with self.inner.watch(path, query) as events:
            yield self._unless_dead(number, events)

    async def _unless_dead(self, number: int, events: Any) -> Any:
        async for event in events:
            if number <= self.dead:
                await asyncio.Event().wait()
            yield event


def test_a_watch_that_died_in_silence_hides_an_edit_for_seconds_only():  # B91
    async def story(world: World) -> None:
        world.add_node("n0", "7g.80gb")
        world.plan("p", HALVES)
        through = Silent(world.server.transport("operator-a"))
        async with world.operator(transport=through) as operator:
            await world.until(lambda: ready(world))
            through.dead = through.opened
            world.plan("p", ONES)
            assert await world.until(lambda: world.status("p")["observedGeneration"] == 2, 2000) < 90
            await world.until(lambda: ready(world), 2000)
            assert alive(operator.health) == ""

    played(story)


def test_watches_that_stay_silent_turn_the_liveness_red_and_a_list_finds_the_edit_all_the_same():  # B91
    async def story(world: World) -> None:
        world.add_node("n0", "7g.80gb")
        world.plan("p", HALVES)
        through = Silent(world.server.transport("operator-a"))
        async with world.operator(transport=through) as operator:
            await world.until(lambda: ready(world))
            through.dead = 1 << 30
            world.plan("p", ONES)
            assert await world.until(lambda: alive(operator.health), 2000) < HEARD_MAX_S + 90
            assert "nothing was heard of" in alive(operator.health)
            await world.until(lambda: world.status("p")["observedGeneration"] == 2, 3600)
            before = len(world.requests())
            await asyncio.sleep(1000)
            spared = [r for r in world.requests()[before:] if r.resource in ("nodes", "gpupartitions")]
            assert spared == []  # who hears nothing says nothing of others' silence

    played(story)


class Lagging(Freezing):
    """A connection whose watches of one kind tell nothing new until told to."""

    def __init__(self, inner: Any, of: str) -> None:
        super().__init__(inner)
        self.of = of
        self.told = asyncio.Event()

    @asynccontextmanager
    async def watch(self, path: str, query: Mapping[str, str]) -> Any:
        async with self.inner.watch(path, query) as events:
            yield self._late(events) if path.endswith(self.of) else events

    async def _late(self, events: Any) -> Any:
        async for event in events:
            if event["type"] != "BOOKMARK":
                await self.told.wait()
            yield event


def test_a_gpu_that_is_heard_of_before_its_node_is_not_taken_for_one_of_a_node_that_is_gone():
    async def story(world: World) -> None:
        through = Lagging(world.server.transport("operator-a"), "/nodes")
        world.plan("p", HALVES)
        async with world.operator(transport=through) as operator:
            await world.until(lambda: operator.health.leader and operator.health.settled)
            world.add_node("n0", "7g.80gb")
            await asyncio.sleep(20)
            assert len(world.partitions()) == 1
            assert [r for r in world.requests() if r.verb == "delete"] == []
            through.told.set()
            await world.until(lambda: ready(world))

    played(story)


def test_a_new_leader_that_has_not_heard_of_a_plan_withdraws_nothing_of_it():
    async def story(world: World) -> None:
        world.add_node("n0", "7g.80gb")
        world.phase = lambda _node: "WaitingForIdle"
        through = Lagging(world.server.transport("operator-b"), "/gpupartitionplans")
        async with AsyncExitStack() as of_the_first:
            first = await of_the_first.enter_async_context(world.operator("a"))
            await world.until(lambda: first.health.leader)
            async with world.operator("b", transport=through) as second:
                await world.until(lambda: second.health.settled)
                world.plan("p", HALVES)
                await world.until(world.started)
                await of_the_first.aclose()
                await world.until(lambda: second.health.leader)
                await asyncio.sleep(20)
                assert world.started() == {"n0"}
                through.told.set()
                world.phase = lambda _node: "Ready"
                await world.until(lambda: ready(world))
        assert len([r for r in world.requests() if r.resource == "gpupartitions"]) == 1

    played(story)


class Unwell(Freezing):
    """A connection on which writes of one kind are answered as ordered, before they reach anybody."""

    answers: tuple[int, ...] = ()
    of = "gpupartitionplans"

    async def request(self, method: str, path: str, query: Mapping[str, str], body: Any, kind: str) -> Any:
        if method == "PATCH" and f"/{self.of}/" in path and self.answers:
            code, *rest = self.answers
            self.answers = tuple(rest)
            self.times.append((asyncio.get_running_loop().time(), code))
            return code, ({"Retry-After": "5"} if code == 429 else {}), {"message": "not now", "code": code}
        return await self.inner.request(method, path, query, body, kind)

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.times: list[tuple[float, int]] = []


def test_refusals_for_the_moment_are_waited_out_and_nothing_is_lost_or_done_twice():  # B93
    for of in ("gpupartitionplans", "gpupartitions"):

        async def story(world: World, of: str = of) -> None:
            world.add_node("n0", "7g.80gb")
            world.plan("p", HALVES)
            through = Unwell(world.server.transport("operator-a"))
            through.of, through.answers = of, (504, *[429] * 10)
            async with world.operator(transport=through):
                await world.until(lambda: ready(world))
                await asyncio.sleep(5)
            gaps = [after[0] - before[0] for before, after in zip(through.times, through.times[1:], strict=False)]
            assert len(through.times) == 11
            assert all(gap >= 5 for gap in gaps[1:])
            turns = [r for r in world.requests() if r.resource == "gpupartitions"]
            assert len(turns) == 1

        played(story)


def test_plans_deleted_while_nobody_watched_are_gone_and_so_is_what_they_wished():  # B95
    async def story(world: World) -> None:
        for k in range(20):
            world.add_node(f"n{k:02}", "7g.80gb", labels={"pool": f"p{k}"})
            world.plan(f"p{k:02}", HALVES, nodeSelector={"matchLabels": {"pool": f"p{k}"}})
        every = [f"p{k:02}" for k in range(20)]
        async with world.operator("a"):
            await world.until(lambda: ready(world, *every))
            await asyncio.sleep(5)
        for name in every[:10]:
            world.delete_plan(name)
        world.kept.discard("n03")
        world.ask("DELETE", "/api/v1/nodes/n03", {})
        async with world.operator("b"):
            gone = {f"n{k:02}" for k in range(10)}
            await world.until(
                lambda: all(p.spec.desired is None for p in world.partitions() if p.spec.node_name in gone)
            )
            await world.until(lambda: "n03" not in {p.spec.node_name for p in world.partitions()})
            await asyncio.sleep(60)
        assert ready(world, *every[10:])
        touched = {r.name for r in world.requests("b")}
        assert touched | {"gpu-n03-0"} == {f"gpu-{name}-0" for name in gone}

    played(story)


def test_heartbeats_of_many_nodes_are_no_work_and_cause_no_write():  # B102
    async def story(world: World) -> None:
        world.add_node("n0", "7g.80gb")
        for k in range(500):
            world.add_node(f"other-{k}", agent=False)
        world.plan("p", HALVES)
        async with world.operator() as operator:
            await world.until(lambda: ready(world))
            await asyncio.sleep(5)
            before, looks = len(world.requests()), operator.looks
            for _ in range(12):
                for k in range(500):
                    world.heartbeat(f"other-{k}")
                world.heartbeat("n0")
                await asyncio.sleep(10)
            assert len(world.requests()) == before
            assert operator.looks == looks

    played(story)


def test_what_it_writes_itself_is_no_reason_to_look_at_the_fleet_again():
    async def story(world: World) -> None:
        for k in range(5):
            world.add_node(f"n{k}", "7g.80gb")
        async with world.operator() as operator:
            await asyncio.sleep(60)
            before, looks = len(world.requests()), operator.looks
            world.plan("p", HALVES, paused=True)
            await asyncio.sleep(60)
            assert world.said("p", "Progressing")[1] == "Paused"
            assert len(world.requests()) >= before + 1
            assert operator.looks == looks + 1

    played(story)


def test_faults_by_seed_end_in_what_was_wished_with_never_two_nodes_at_once(first_seed: int, soak: int):
    for seed in range(first_seed, first_seed + SEEDS * soak):
        world = World(seed, Chances(request=0.08, watch=0.04))

        async def story(world: World) -> None:
            for k in range(3):
                world.add_node(f"n{k}", "7g.80gb", None)
            world.plan("p", HALVES)
            often = replace(TIMING, resync_s=240.0)
            async with (
                world.operator("a", seed=world.seed, timing=often),
                world.operator("b", seed=world.seed + 1, timing=often),
            ):
                await _watched(world, lambda: ready(world), 3600)
                world.plan("p", ONES)
                await asyncio.sleep(world.seed % 40)
                world.plan("q", HALVES, priority=1, nodeSelector={"matchLabels": {"pool": "a"}})
                await _watched(world, lambda: ready(world, "q"), 7200)
                world.server.faults.calm()
                await world.until(lambda: ready(world, "q") and world.said("p", "Ready")[0] == "False", 7200)
                await asyncio.sleep(400)  # whatever was left over is found by the lists
                before = len(world.requests())
                await asyncio.sleep(200)
                assert len(world.requests()) == before, f"seed {world.seed}: not at rest"

        played(story, world)


async def _watched(world: World, holds: Any, within_s: float) -> None:
    """Wait for something, and see all the while that no two nodes are under way."""
    ends_s = asyncio.get_running_loop().time() + within_s
    while not holds():
        going = {p.spec.node_name for p in world.partitions() if p.status.phase not in ("Ready", "Idle")}
        assert len(going) <= 1, f"seed {world.seed}: {going}"
        assert asyncio.get_running_loop().time() < ends_s, f"seed {world.seed}: not within {within_s} s"
        await asyncio.sleep(0.5)
