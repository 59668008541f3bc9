"""Evictions by the operator on a simulated API server: who is called, when, and what is counted, by its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import pytest
from fleet_worlds import API, World, played
from unit.migd_operator.fleets import answered, gpu_name, remade

from migd.kube.nodes import TAINT
from migd.kube.owed import OWED
from migd.kube.transport import Transport
from migd.plans.partitions import EvictionDoc, Pod
from migd.sim.cluster.server import SimRequest

HALVES = {"profile": "3g.40gb", "count": 2}
GPU = gpu_name("n1", 0)
PODS = "/api/v1/namespaces/team/pods"
BUDGETS = "/apis/policy/v1/namespaces/team/poddisruptionbudgets"


class Drained(World):
    """One node, n1, with one GPU, which pods hold. Its agent asks for them until they are gone.

    grace_s: so long they take to end. replaced: uids that the agent asks for still, by the name they had.
    """

    def __init__(self) -> None:
        super().__init__()
        self.grace_s = 1
        self.uids: dict[str, str] = {}
        self.replaced: dict[str, str] = {}

    def start(self, *names: str, **disruption: Any) -> None:
        """The node, these pods on it, and a plan for which they must go."""
        self.add_node("n1", "7g.80gb")
        for name in names:
            self.uids[name] = self.pod(name)
        self.plan("p", HALVES, disruption={"policy": "Evict", **disruption})

    def pod(self, name: str) -> str:
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs", "controller": True}
        container = {"name": "main", "resources": {"limits": {"nvidia.com/mig-7g.80gb": "1"}}}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "team", "labels": {"app": "serve"}, "ownerReferences": [owner]},
            "spec": {"nodeName": "n1", "containers": [container], "terminationGracePeriodSeconds": self.grace_s},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        }
        return str(self.ask("POST", PODS, body)["metadata"]["uid"])

    def budget(self, name: str, allowed: int) -> None:
        """A budget on all pods, as its controller last counted it."""
        if self.server.answer("somebody", "GET", f"{BUDGETS}/{name}", {}, None, "")[0] == 404:
            spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "serve"}}}
            kind = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget"}
            self.ask("POST", BUDGETS, {**kind, "metadata": {"name": name}, "spec": spec})
        counts = {"currentHealthy": 1 + allowed, "desiredHealthy": 1, "expectedPods": 1 + allowed}
        told = {"observedGeneration": 1, "disruptionsAllowed": allowed, **counts}
        self.merge(f"{BUDGETS}/{name}/status", {"status": told})

    def end(self, name: str) -> None:
        self.ask("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})

    # the agent and the kubelet, each second

    def obey(self, *nodes: str) -> None:
        there = {p["metadata"]["name"]: p["metadata"] for p in self.ask("GET", PODS)["items"]}
        now = self.server.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        for name, metadata in there.items():
            if metadata.get("deletionTimestamp", "z") <= now:
                self.end(name)
        wanted = {name: self.replaced.get(name, there[name]["uid"]) for name in self.uids if name in there}
        victims = tuple(Pod(namespace="team", name=name, uid=uid) for name, uid in sorted(wanted.items()))
        (one,) = self.partitions() or (None,)
        if one is None or one.spec.assignment is None or not victims:
            if one is not None and one.status.victims:
                self.tell(self._with(one, ()))
            self.merge("/api/v1/nodes/n1", {"metadata": {"annotations": {OWED: None}}, "spec": {"taints": None}})
            super().obey(*nodes)
            return
        after = self._with(answered(one, "Draining"), victims)
        if after != one:
            taints = [{"key": TAINT, "effect": "NoSchedule"}]
            owed = {"annotations": {OWED: '{"turn": "t", "labels": {}}'}}
            self.merge("/api/v1/nodes/n1", {"metadata": owed, "spec": {"taints": taints}})
            self.tell(after)

    @staticmethod
    def _with(one: Any, victims: tuple[Pod, ...]) -> Any:
        return remade(one, status=one.status.model_copy(update={"victims": victims}))

    def tell(self, one: Any) -> None:
        """Answers are not the agent's to write."""
        super().tell(remade(one, status=one.status.model_copy(update={"evictions": ()})))

    async def agents(self) -> None:
        turn = 0
        while True:
            if self.kept:
                if turn % 60 == 59:
                    self.renew("n1")
                self.obey(*self.kept)
            turn += 1
            await asyncio.sleep(1.0)

    # what there is to see

    @property
    def calls(self) -> list[tuple[str, int]]:
        """Each call for an eviction: the pod's name, and the answer."""
        return [(r.name, r.code) for r in self.server.requests if r.resource == "pods/eviction"]

    @property
    def evicted(self) -> list[str]:
        return [name for name, code in self.calls if code == 201]

    @property
    def count(self) -> tuple[int, int]:
        """What the plan counts: evicted, and how many are pending."""
        told = self.status("p").get("evictions") or {}
        return told.get("evicted", 0), len(told.get("pending") or ())

    def told(self, name: str) -> EvictionDoc | None:
        """What came of a pod."""
        found = [one for p in self.partitions() for one in p.status.evictions if one.pod_uid == self.uids[name]]
        return found[0] if found else None

    def reason(self, name: str) -> str | None:
        told = self.told(name)
        return told.reason if told is not None else None

    @property
    def done(self) -> bool:
        return self.said("p", "Ready") == ("True", "AsWished")


class Cut(Transport):
    """A connection that breaks for good at the first request that `at` picks: before it is made, or after."""

    def __init__(self, world: World, user: str, at: Callable[[str, str, Any], bool], *, after: bool) -> None:
        self._inner = world.server.transport(user)
        self._at = at
        self._after = after
        self.broken = False

    async def request(self, method: str, path: str, query: Mapping[str, str], body: Any, content_type: str) -> Any:
        hit = not self.broken and self._at(method, path, body)
        if self.broken or (hit and not self._after):
            self.broken = True
            raise ConnectionResetError("connection reset")
        answer = await self._inner.request(method, path, query, body, content_type)
        if hit:
            self.broken = True
            raise ConnectionResetError("connection reset")
        return answer

    def watch(self, path: str, query: Mapping[str, str]) -> Any:
        if self.broken:
            raise ConnectionResetError("connection reset")
        return self._inner.watch(path, query)


def play(story: Callable[[Drained], Awaitable[None]]) -> Drained:
    world = Drained()
    return cast("Drained", played(cast("Any", story), world))


def test_a_budget_holds_a_pod_until_it_allows_it_and_is_named_meanwhile():
    async def story(world: Drained) -> None:
        world.budget("serve", 0)
        world.start("a", maxEvictions=1)
        async with world.operator():
            await world.until(lambda: world.reason("a") == "DrainBlocked")
            told = world.told("a")
            assert told is not None
            assert (told.code, told.pod_disruption_budgets) == (429, ("serve",))
            assert world.count == (0, 1), "its place is kept while it is asked for"
            world.budget("serve", 1)
            took_s = await world.until(lambda: world.evicted)
            assert took_s <= 6
            await world.until(lambda: world.done)

    world = play(story)
    assert (world.evicted, world.count) == (["a"], (1, 0))


def test_two_budgets_on_one_pod_are_told_by_both_their_names_and_asked_every_half_minute():
    async def story(world: Drained) -> None:
        world.budget("one", 1)
        world.budget("two", 1)
        world.start("a")
        async with world.operator():
            await world.until(lambda: world.reason("a") == "DrainBlocked")
            told = world.told("a")
            assert told is not None
            assert (told.code, told.pod_disruption_budgets) == (500, ("one", "two"))
            before = len(world.calls)
            await asyncio.sleep(61)
            assert len(world.calls) - before == 2

    assert play(story).evicted == []


def test_another_pod_of_the_name_is_never_called():
    async def story(world: Drained) -> None:
        world.start("a", maxEvictions=5)
        world.replaced["a"] = world.uids["a"]
        world.end("a")
        world.pod("a")
        async with world.operator():
            await world.until(lambda: world.told("a") is not None)
            await asyncio.sleep(60)
            told = world.told("a")
            assert told is not None
            assert (told.code, told.reason) == (None, None)
            assert "another pod has its name" in told.message

    world = play(story)
    assert (world.calls, world.count) == ([], (0, 0))


def test_a_pod_that_ends_already_is_not_called():
    async def story(world: Drained) -> None:
        world.grace_s = 120
        world.start("a", maxEvictions=0)
        world.ask("DELETE", f"{PODS}/a")
        async with world.operator():
            await world.until(lambda: world.told("a") is not None)
            assert world.reason("a") is None, "it goes"
            await world.until(lambda: world.done)

    world = play(story)
    assert (world.calls, world.count) == ([], (0, 0))


def test_a_throttled_call_waits_as_long_as_it_is_told_and_blames_no_budget():  # B33
    times: list[float] = []

    def busy(request: SimRequest) -> int:
        if request.resource != "pods/eviction":
            return 0
        times.append(asyncio.get_running_loop().time())
        return 7 if len(times) == 1 else 0

    async def story(world: Drained) -> None:
        world.budget("serve", 2)
        world.server.busy = busy
        world.start("a", "b")
        async with world.operator():
            await world.until(lambda: "Waiting" in (world.reason("a"), world.reason("b")))
            assert "DrainBlocked" not in (world.reason("a"), world.reason("b"))
            assert all(not one.pod_disruption_budgets for p in world.partitions() for one in p.status.evictions)
            await world.until(lambda: world.done)

    world = play(story)
    assert 7 <= times[1] - times[0] <= 8.5
    assert (sorted(world.evicted), world.count) == (["a", "b"], (2, 0))


def counts_it(method: str, path: str, body: Any) -> bool:
    """The request that writes the first pod into pending."""
    status = (body or {}).get("status", {}) if method == "PATCH" and path.endswith("/p/status") else {}
    return bool((status.get("evictions") or {}).get("pending"))


def calls_it(_method: str, path: str, _body: Any) -> bool:
    return path.endswith("/eviction")


@pytest.mark.parametrize("grace_s", [1, 200], ids=["pods are gone by then", "pods still end"])
@pytest.mark.parametrize(
    ("at", "after"),
    [(counts_it, False), (counts_it, True), (calls_it, False), (calls_it, True)],
    ids=["before the count", "between count and call", "at the call", "between call and answer"],
)
def test_one_that_is_killed_leaves_a_count_that_the_next_one_goes_on_with(at: Any, after: bool, grace_s: int):
    async def story(world: Drained) -> None:
        world.grace_s = grace_s
        world.start("a", "b", maxEvictions=2)
        first = Cut(world, "operator-a", at, after=after)
        async with world.operator("a", transport=first):
            await world.until(lambda: first.broken)
            assert sum(world.count) >= len(world.evicted)
            async with world.operator("b"):
                await world.until(lambda: world.done)

    world = play(story)
    assert (sorted(world.evicted), world.count) == (["a", "b"], (2, 0))


class Slow(Cut):
    """A connection on which the first call for an eviction is carried out at once, and answered after 20 s.

    Meanwhile no renewal of a lease gets through, and nor does it after that.
    """

    def __init__(self, world: World, user: str) -> None:
        super().__init__(world, user, lambda *_: False, after=False)
        self.called = 0

    async def request(self, method: str, path: str, query: Mapping[str, str], body: Any, content_type: str) -> Any:
        if self.called and path.endswith("/leases/migd-operator"):
            await asyncio.Event().wait()
        answer = await super().request(method, path, query, body, content_type)
        if path.endswith("/eviction"):
            self.called += 1
            await asyncio.sleep(20)
        return answer


def test_one_that_loses_the_lease_in_the_middle_of_its_calls_makes_no_further_one():
    async def story(world: Drained) -> None:
        world.start("a", "b", "c", maxEvictions=3)
        slow = Slow(world, "operator-a")
        async with world.operator("a", transport=slow):
            await world.until(lambda: slow.called)
            await asyncio.sleep(60)
            assert len(world.calls) == 1
            assert world.count[0] + world.count[1] == 3
            async with world.operator("b"):
                await world.until(lambda: world.done)
            assert slow.called == 1

    world = play(story)
    assert (sorted(world.evicted), world.count) == (["a", "b", "c"], (3, 0))


STOPS: dict[str, Callable[[Drained], object]] = {
    "deleted": lambda w: w.delete_plan("p"),
    "paused": lambda w: w.merge(f"{API}/gpupartitionplans/p", {"spec": {"paused": True}}),
    "edited": lambda w: w.merge(f"{API}/gpupartitionplans/p", {"spec": {"disruption": {"timeout": "5m"}}}),
    "node held": lambda w: w.merge("/api/v1/nodes/n1", {"metadata": {"annotations": {"migd.dev/hold": "me"}}}),
}


@pytest.mark.parametrize("what", STOPS)
def test_nobody_is_called_any_more_once_the_drain_is_called_off_though_the_agent_has_not_heard_of_it(what: str):
    async def story(world: Drained) -> None:
        world.budget("serve", 0)
        world.start("a", maxEvictions=1)
        async with world.operator():
            await world.until(lambda: world.reason("a") == "DrainBlocked")
            world.kept.clear()
            STOPS[what](world)
            await asyncio.sleep(1)
            before = len(world.calls)
            world.budget("serve", 1)
            await asyncio.sleep(30)
            assert len(world.calls) == before
            assert what == "deleted" or world.count == (0, 0), "a call that was refused counts for nothing"

    assert play(story).evicted == []


def test_who_was_evicted_for_one_generation_stands_in_the_history_and_not_in_the_count_of_the_next():
    async def story(world: Drained) -> None:
        world.start("a", maxEvictions=1)
        async with world.operator():
            await world.until(lambda: world.done)
            world.merge(f"{API}/gpupartitionplans/p", {"spec": {"disruption": {"timeout": "5m"}}})
            await world.until(lambda: world.status("p")["observedGeneration"] == 2 and world.done)
            assert world.count == (0, 0)
            assert [(e["generation"], e["evicted"]) for e in world.status("p")["history"]] == [(1, 1)]

    play(story)
