"""The operator and the pods that must go, on a simulated API server: whom it evicts, whom not, and what is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from drain_worlds import SPACE, Deaf, DrainWorld, Dying, on_evictions
from fleet_worlds import API, World, played
from unit.migd_operator.fleets import answered, gpu_name, remade

from migd.plans.partitions import Pod
from migd.sim.cluster.faults import Chances
from migd.sim.cluster.server import SimRequest

HALVES = {"profile": "3g.40gb", "count": 2}
SEEDS = 4
EVICT = {"policy": "Evict"}
GPU0, GPU1 = gpu_name("n0", 0), gpu_name("n0", 1)


def play(story: Callable[[Any], Awaitable[None]], world: DrainWorld | None = None) -> DrainWorld:
    return cast("DrainWorld", played(story, world or DrainWorld()))


def ready(world: World, *plans: str) -> bool:
    return all(world.said(name, "Ready") == ("True", "AsWished") for name in plans or ("p",))


def one_node(world: DrainWorld, *pods: str, **disruption: Any) -> dict[str, str]:
    """A node with a GPU that these pods hold, and a plan that evicts them; their uids by name."""
    world.add_node("n0", "7g.80gb")
    uids = {name: world.add_pod(name, GPU0) for name in pods}
    world.plan("p", HALVES, disruption={**EVICT, **disruption})
    return uids


def test_the_pods_that_must_go_are_evicted_once_each_and_counted_and_told():
    async def story(world: DrainWorld) -> None:
        one_node(world, "a", "b", gracePeriodSeconds=5)
        world.add_pod("other", node="n0")
        async with world.operator() as operator:
            await world.until(lambda: ready(world))
            await asyncio.sleep(5)
            before, looks = len(world.requests()), operator.looks
            await asyncio.sleep(60)
            assert (len(world.requests()), operator.looks) == (before, looks), "at rest"

    world = play(story)
    assert sorted(world.evicted()) == ["a", "b"]
    assert world.pod("other") is not None
    assert world.counted() == (2, [])
    assert world.status("p")["history"][0]["evicted"] == 2
    asked = [r.body["deleteOptions"] for r in world.server.requests if r.resource == "pods/eviction"]
    assert {options["gracePeriodSeconds"] for options in asked} == {5}
    deleted = [r for r in world.server.requests if r.verb == "delete" and r.user.startswith("operator")]
    assert deleted == [], "never a plain delete"
    told = [(kind, note.partition(":")[0]) for kind, reason, note in world.events() if reason == "InUse"]
    assert sorted(told) == [("Normal", f"pod {SPACE}/{name} holds what must go") for name in ("a", "b")]


def test_the_count_is_written_before_the_first_call_and_each_pod_is_looked_at_right_before_its_call():
    async def story(world: DrainWorld) -> None:
        uids = one_node(world, "a", "b")
        async with world.operator():
            await world.until(lambda: ready(world))
        mine = [r for r in world.server.requests if r.user == "operator-a"]
        first = next(n for n, r in enumerate(mine) if r.resource == "pods/eviction")
        counts = [r.body["status"].get("evictions") for r in mine[:first] if r.resource == "gpupartitionplans/status"]
        assert counts[-1]["pending"] == sorted(uids.values())
        for n, one in enumerate(mine):
            if one.resource == "pods/eviction":
                assert (mine[n - 1].verb, mine[n - 1].resource, mine[n - 1].name) == ("get", "pods", one.name)

    play(story)


def test_a_pod_on_several_gpus_is_one_eviction():
    async def story(world: DrainWorld) -> None:
        world.add_node("n0", "7g.80gb", "7g.80gb")
        world.add_pod("a", GPU0, GPU1)
        world.plan("p", HALVES, disruption={**EVICT, "maxEvictions": 1})
        async with world.operator():
            await world.until(lambda: ready(world))

    world = play(story)
    assert (world.evictions(), world.counted()) == ([("a", 201)], (1, []))


def test_a_budget_is_named_asked_every_five_seconds_and_yields_in_the_end():  # B31, B33 (a)
    async def story(world: DrainWorld) -> None:
        world.budget("guard", 0)
        uids = one_node(world, "a")
        async with world.operator():
            await world.until(lambda: world.answers().get(uids["a"], {}).get("reason") == "DrainBlocked")
            answer = world.answers()[uids["a"]]
            assert (answer["code"], answer["pod_disruption_budgets"]) == (429, ("guard",))
            assert "guard" in answer["message"]
            await world.until(lambda: "1 pod on n0 is held by a disruption budget" in world.status("p")["message"])
            calls, writes = len(world.evictions()), len(world.requests())
            await asyncio.sleep(60)
            again = len(world.evictions()) - calls
            assert 10 <= again <= 12
            assert len(world.requests()) - writes == again, "nothing but the calls themselves"
            world.budget("guard", 1)
            await world.until(lambda: ready(world))

    world = play(story)
    assert (world.evicted(), world.counted()) == (["a"], (1, []))
    warned = [note for kind, reason, note in world.events() if (kind, reason) == ("Warning", "DrainBlocked")]
    assert len(warned) == 1
    assert "PodDisruptionBudget guard" in warned[0]


def test_two_budgets_on_one_pod_are_both_named_and_not_asked_in_haste():
    async def story(world: DrainWorld) -> None:
        world.budget("guard", 1)
        world.budget("guard-too", 1)
        uids = one_node(world, "a")
        async with world.operator():
            await world.until(lambda: world.answers().get(uids["a"], {}).get("reason") == "DrainBlocked")
            answer = world.answers()[uids["a"]]
            assert (answer["code"], answer["pod_disruption_budgets"]) == (500, ("guard", "guard-too"))
            calls = len(world.evictions())
            await asyncio.sleep(90)
            assert len(world.evictions()) - calls == 3
            world.ask("DELETE", f"/apis/policy/v1/namespaces/{SPACE}/poddisruptionbudgets/guard-too")
            await world.until(lambda: ready(world))

    assert play(story).evicted() == ["a"]


def test_a_pod_that_was_replaced_by_one_of_its_name_is_never_evicted_and_uses_nothing_up():
    async def story(world: DrainWorld) -> None:
        world.budget("guard", 1)
        world.add_node("n0", "7g.80gb")
        uid = world.add_pod("a", GPU0)
        world.believed["a"] = Pod(namespace=SPACE, name="a", uid=uid)
        world.kill("a")
        new = world.add_pod("a")
        world.plan("p", HALVES, disruption={**EVICT, "maxEvictions": 1})
        async with world.operator():
            await world.until(lambda: uid in world.answers())
            await asyncio.sleep(60)
            assert world.answers()[uid]["reason"] is None
            assert (world.evictions(), world.counted()) == ([], (0, []))
            assert world.pod("a")["metadata"]["uid"] == new

    play(story)


def test_a_pod_that_ends_already_is_left_to_end_and_not_counted():
    async def story(world: DrainWorld) -> None:
        world.add_node("n0", "7g.80gb")
        uid = world.add_pod("a", GPU0, terminationGracePeriodSeconds=300)
        world.ask("DELETE", f"/api/v1/namespaces/{SPACE}/pods/a")
        world.plan("p", HALVES, disruption={**EVICT, "maxEvictions": 0})
        async with world.operator():
            await world.until(lambda: uid in world.answers())
            answer = world.answers()[uid]
            assert (answer["code"], answer["reason"]) == (None, None)
            await world.until(lambda: ready(world))

    world = play(story, DrainWorld(lingers=True))
    assert (world.evictions(), world.counted()) == ([], (0, []))


def test_an_api_server_that_is_busy_is_no_block_and_is_asked_again_when_it_says():  # B33 (b)
    async def story(world: DrainWorld) -> None:
        loop, times = asyncio.get_running_loop(), list[float]()

        def busy(_request: SimRequest) -> int:
            times.append(loop.time())
            return 7 if len(times) == 1 else 0

        world.server.busy = on_evictions(busy, 0)
        uids = one_node(world, "a", "b")
        async with world.operator():
            first = min(uids.values())
            await world.until(lambda: world.answers().get(first, {}).get("reason") == "Waiting")
            assert "disruption budget" not in world.status("p")["message"]
            await world.until(lambda: ready(world))
        assert 7 <= times[1] - times[0] < 9, "nobody else was asked for meanwhile either"

    world = play(story)
    assert sorted(world.evicted()) == ["a", "b"]
    assert not [reason for _, reason, _ in world.events() if reason == "DrainBlocked"]
    assert world.counted() == (2, [])


def test_a_namespace_that_is_being_deleted_takes_its_pods_along():
    async def story(world: DrainWorld) -> None:
        metadata = {"name": SPACE}
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata, "spec": {"finalizers": ["kubernetes"]}}
        world.ask("POST", "/api/v1/namespaces", body)
        uids = one_node(world, "a")
        world.ask("DELETE", f"/api/v1/namespaces/{SPACE}")
        async with world.operator():
            await world.until(lambda: world.answers().get(uids["a"], {}).get("code") == 403)
            assert world.answers()[uids["a"]]["reason"] == "Waiting"
            world.kill("a")
            await world.until(lambda: ready(world))

    world = play(story)
    assert (world.evicted(), world.counted()) == ([], (0, []))


def test_missing_rights_are_told_and_tried_again_slowly():
    async def story(world: DrainWorld) -> None:
        world.server.policy = on_evictions(lambda _request: "not you", "")
        uids = one_node(world, "a")
        async with world.operator():
            await world.until(lambda: world.answers().get(uids["a"], {}).get("reason") == "NoPermission")
            await asyncio.sleep(60)
            assert len(world.evictions()) <= 4
            world.server.policy = lambda _request: ""
            await world.until(lambda: ready(world))

    assert play(story).evicted() == ["a"]


KEPT: dict[str, dict[str, Any]] = {
    "another node": {"node": "n1"},
    "no GPU": {"containers": [{"name": "c"}]},
    "emptyDir": {"volumes": [{"name": "v", "emptyDir": {}}]},
}


@pytest.mark.parametrize("why", KEPT)
def test_where_one_pod_may_not_go_the_others_of_its_node_are_spared_too(why: str):
    async def story(world: DrainWorld) -> None:
        world.add_node("n0", "7g.80gb")
        world.add_pod("a", GPU0)
        uid = world.add_pod("b", GPU0, **KEPT[why])
        world.plan("p", HALVES, disruption=EVICT)
        async with world.operator():
            await world.until(lambda: world.answers().get(uid, {}).get("reason") == "DrainBlocked")
            await asyncio.sleep(90)
            assert world.answers()[uid]["code"] is None
            world.kill("b")
            await world.until(lambda: ready(world))

    world = play(story)
    assert world.evictions() == [("a", 201)]


def test_more_than_may_be_evicted_are_not_evicted_at_all():
    async def story(world: DrainWorld) -> None:
        uids = one_node(world, "a", "b", maxEvictions=1)
        async with world.operator():
            await world.until(
                lambda: {a["reason"] for a in world.answers().values()} == {"EvictionBudget"} and len(uids) == 2
            )
            await asyncio.sleep(60)
            assert (world.evictions(), world.counted()) == ([], (0, []))
            world.plan("p", HALVES, disruption={**EVICT, "maxEvictions": 2})
            await world.until(lambda: ready(world))

    assert sorted(play(story).evicted()) == ["a", "b"]


STOPS: dict[str, Callable[[DrainWorld], object]] = {
    "paused": lambda w: w.plan("p", HALVES, disruption=EVICT, paused=True),
    "edited": lambda w: w.plan("p", {"profile": "1g.10gb", "count": 7}, disruption={"policy": "WaitForIdle"}),
    "deleted": lambda w: w.delete_plan("p"),
    "node held": lambda w: w.merge("/api/v1/nodes/n0", {"metadata": {"annotations": {"migd.dev/hold": "ann"}}}),
    "GPU held": lambda w: w.merge(
        f"{API}/gpupartitions/{GPU0}", {"metadata": {"annotations": {"migd.dev/hold": "ann"}}}
    ),
    "opened": lambda w: w.merge("/api/v1/nodes/n0", {"spec": {"taints": None}}),
}


@pytest.mark.parametrize("what", STOPS)
def test_once_a_drain_is_called_off_nobody_is_asked_for_any_more(what: str):
    async def story(world: DrainWorld) -> None:
        world.budget("guard", 0)
        one_node(world, "a")
        async with world.operator():
            await world.until(lambda: len(world.evictions()) >= 2)
            kept, world.kept = world.kept, set()  # its agent is slow to hear of it
            STOPS[what](world)
            await asyncio.sleep(1)
            calls = len(world.evictions())
            world.budget("guard", 1)
            await asyncio.sleep(60)
            assert len(world.evictions()) == calls
            world.kept = kept

    play(story)


@pytest.mark.parametrize("what", ["edited", "paused", "opened", "given up"])
def test_an_operator_that_has_not_heard_of_it_asks_for_nobody_either(what: str):
    """Its watches are dead, and it does not know yet: so right before it calls it looks whether all is still so."""

    async def story(world: DrainWorld) -> None:
        world.budget("guard", 0)
        one_node(world, "a")
        through = Deaf(world.server.transport("operator-a"))
        async with world.operator(transport=through):
            await world.until(lambda: len(world.evictions()) >= 2)
            world.kept, through.deaf = set(), True
            if what in STOPS and what != "opened":
                STOPS[what](world)
            else:
                phase = "Blocked" if what == "given up" else "Draining"
                one = answered(world.partitions()[0], phase)
                world.tell(remade(one, status=one.status.model_copy(update={"victims": ()})))
            calls = len(world.evictions())
            world.budget("guard", 1)
            await asyncio.sleep(30)
            assert len(world.evictions()) == calls

    play(story)


def test_an_operator_that_is_killed_anywhere_in_a_drain_evicts_nobody_twice_and_forgets_nobody():
    """Before and after each of its requests, from the first that a drain makes to the last."""
    plain = Dying(cast("Any", None), 0, after=False)

    async def undisturbed(world: DrainWorld) -> None:
        await _drained(world, plain)

    play(undisturbed, DrainWorld(lingers=True))
    first = next(n for n, asked in enumerate(plain.log) if "/pods/" in asked)
    assert sum("/eviction" in asked for asked in plain.log) == 3
    for at in range(first, len(plain.log) + 1):
        for after in (False, True):
            dying = Dying(cast("Any", None), at, after=after)

            async def story(world: DrainWorld, dying: Dying = dying) -> None:
                await _drained(world, dying)

            world = play(story, DrainWorld(lingers=at % 2 == 0))
            where = f"killed {'after' if after else 'before'} {plain.log[at - 1]}"
            assert sorted(world.evicted()) == ["a", "b", "c"], where
            assert world.counted() == (3, []), where


async def _drained(world: DrainWorld, dying: Dying) -> None:
    """A node of two GPUs and three pods, with just enough evictions; another operator goes on where the first dies."""
    dying.inner = world.server.transport("operator-a")
    world.add_node("n0", "7g.80gb", "7g.80gb")
    grace_s = 200 if world.lingers else 3  # the pods end, or are gone, when somebody else looks
    for name, gpus in (("a", (GPU0, GPU1)), ("b", (GPU0,)), ("c", (GPU1,))):
        world.add_pod(name, *gpus, terminationGracePeriodSeconds=grace_s)
    world.plan("p", HALVES, disruption={**EVICT, "maxEvictions": 3})
    async with world.operator("a", transport=dying):
        await world.until(lambda: ready(world) or dying.dead)
        if not dying.dead:
            return
        async with world.operator("b"):
            await world.until(lambda: ready(world))
            await asyncio.sleep(5)


def test_of_two_operators_that_change_places_in_the_middle_of_a_call_nobody_is_evicted_twice():
    async def story(world: DrainWorld) -> None:
        hanging = Hanging(world.server.transport("operator-a"))
        one_node(world, "a", "b", maxEvictions=2)
        async with world.operator("a", transport=hanging), world.operator("b") as second:
            await world.until(lambda: hanging.hung)
            await world.until(lambda: second.health.leader)
            await world.until(lambda: ready(world))
            hanging.free.set()
            await asyncio.sleep(60)

    world = play(story, DrainWorld(lingers=True))
    assert sorted(world.evicted()) == ["a", "b"]
    assert world.counted() == (2, [])


def test_faults_by_seed_evict_nobody_twice_and_no_more_than_may_be(first_seed: int, soak: int):
    for seed in range(first_seed, first_seed + SEEDS * soak):
        most = 3 + seed % 4

        async def story(world: DrainWorld, most: int = most) -> None:
            for k, pods in enumerate(("abc", "de")):
                world.add_node(f"n{k}", "7g.80gb", "7g.80gb")
                for at, name in enumerate(pods):
                    gpus = [gpu_name(f"n{k}", index) for index in ((0, 1) if at == 0 else (at % 2,))]
                    world.add_pod(name, *gpus, node=f"n{k}", app=name, terminationGracePeriodSeconds=20)
            world.budget("guard", 0, "b")
            world.plan("p", HALVES, disruption={**EVICT, "maxEvictions": most}, rollout={"maxUnavailable": 2})
            async with world.operator("a", seed=world.seed), world.operator("b", seed=world.seed + 1):
                for second in range(0, 600, 2):
                    if second == 200:
                        world.budget("guard", 1, "b")
                    if second == 400:
                        world.server.faults.calm()
                    _check(world, most)
                    await asyncio.sleep(2)

        world = play(story, DrainWorld(seed, Chances(request=0.08, watch=0.04), lingers=seed % 2 == 0))
        assert world.counted()[1] == [], f"seed {seed}"
        assert ready(world) or len(world.evicted()) < 5, f"seed {seed}"
        assert most < 5 or ready(world), f"seed {seed}"


def _check(world: DrainWorld, most: int) -> None:
    evicted, (counted, pending) = world.evicted(), world.counted()
    assert len(set(evicted)) == len(evicted) <= counted + len(pending) <= most, f"seed {world.seed}"


def test_an_operator_that_takes_over_with_a_late_cache_makes_no_count_smaller():
    """It has not heard of the other one's count, and would evict as many again."""

    async def story(world: DrainWorld) -> None:
        one_node(world, "a", maxEvictions=1)
        world.plan("p", HALVES, disruption={**EVICT, "maxEvictions": 1}, rollout={"maxUnavailable": 2})
        late = Deaf(world.server.transport("operator-b"), "gpupartitionplans")
        first = Dying(world.server.transport("operator-a"), 0, after=False)
        async with world.operator("a", transport=first), world.operator("b", transport=late) as second:
            await world.until(lambda: second.health.settled)
            await world.until(lambda: world.said("p", "Ready")[0] == "False")
            await asyncio.sleep(1)
            late.deaf = True
            await world.until(lambda: world.evicted() == ["a"] and world.counted() == (1, []))
            world.add_node("n1", "7g.80gb")
            uid = world.add_pod("b", gpu_name("n1", 0), node="n1")
            await world.until(lambda: any(p.status.victims for p in world.partitions()))
            first.dead = True
            await world.until(lambda: second.health.leader)
            await asyncio.sleep(200)
            late.deaf = False
            await world.until(lambda: world.answers("n1").get(uid, {}).get("reason") == "EvictionBudget", 300)

    world = play(story)
    assert (world.evicted(), world.counted()) == (["a"], (1, []))
    refused = [r for r in world.server.requests if r.resource == "gpupartitionplans/status" and r.code == 409]
    assert refused, "it was late indeed"


class Hanging(Dying):
    """A connection on which the first eviction is carried out, and then nothing that writes is answered."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, 0, after=False)
        self.hung = False
        self.free = asyncio.Event()

    async def request(self, method: str, path: str, query: Any, body: Any, content_type: str) -> Any:
        if self.hung and method != "GET":
            await self.free.wait()
        answer = await self.inner.request(method, path, query, body, content_type)
        if path.endswith("/eviction") and not self.hung:
            self.hung = True
            await self.free.wait()
        return answer
