"""maxEvictions under everything that may happen: whatever crashes where, it is never exceeded and nobody is uncounted.

Played with the decisions and the Evictor as they are; the rest, such as turns and leases, is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from unit.migd_operator.drains import PodServer, drained, drains_of, evicts, fleet_of
from unit.migd_operator.fleets import NOW, remade

from migd.kube.errors import BudgetError, UnavailableError
from migd.plans.partitions import Partition
from migd.sim.cluster.virtual_time import run_virtually
from migd_operator.draining import Evictor
from migd_operator.evicting import Evictions, evictions_of
from migd_operator.facts import PlanFacts

NODES = ("n1", "n2", "n3")
PODS_OF = {"n1": ("a", "b", "c"), "n2": ("d", "e"), "n3": ("f",)}
EVERY = tuple(uid for pods in PODS_OF.values() for uid in pods)


class CrashError(Exception):
    """The operator's process ended here."""


class Story:
    """One plan, nodes that drain, and operators one after the other."""

    def __init__(self, data: st.DataObject, most: int | None) -> None:
        self.data = data
        self.most = most
        self.plan: PlanFacts = self._edited(1)
        self.server = PodServer(answer=self._answer, before=self._before)
        self.closed = {node: data.draw(st.booleans()) for node in NODES}
        self.lingers = data.draw(st.booleans())  # whether an agent asks for pods until they are gone, or until they go
        self.held: set[str] = set(data.draw(st.sets(st.sampled_from(EVERY))))  # by a budget
        self.crashes = 0
        self.lost = False  # whether answers get lost, once
        self.of_generation: list[tuple[int, str]] = []
        for node, pods in PODS_OF.items():
            for uid in pods:
                self.server.add(uid, node)
        self.gpus: dict[str, Partition] = {}
        self.look_on()
        self.evictor = self._started()

    def _edited(self, generation: int) -> PlanFacts:
        return (
            evicts(generation=generation)
            if self.most is None
            else evicts(generation=generation, maxEvictions=self.most)
        )

    def _started(self) -> Evictor:
        cluster: Any = self.server
        return Evictor(cluster, lambda: NOW)

    def _answer(self, pod: Any) -> None:
        if pod.uid in self.held:
            raise BudgetError("POST", 429, "no", several=False, cause="no")

    def _before(self, request: str) -> None:
        if request == "after":
            self.of_generation.append((self.plan.generation, self.server.accepted[-1]))
            if self.lost:
                self.lost = False
                raise UnavailableError("POST", 0, "connection reset")
        self.perhaps_crash()

    def perhaps_crash(self) -> None:
        """The process may end here, as far as this story has crashes left."""
        if self.crashes and self.data.draw(st.booleans()):
            self.crashes -= 1
            raise CrashError

    def look_on(self) -> None:
        """The agents write who must go still."""
        for node, pods in PODS_OF.items():
            for index in (0, 1):  # the first of each node's pods is on both GPUs
                mine = pods if index == 0 else pods[:1]
                asked = [u for u in mine if self.server.there(u) and (self.lingers or not self.server.going(u))]
                before = self.gpus.get(f"{node}-{index}")
                told = before.status.evictions if before is not None else ()
                self.gpus[f"{node}-{index}"] = drained(node, index, asked if self.closed[node] else (), told)

    async def turn(self) -> None:
        """One pass of the operator: what is counted is written before anybody is called, and told after that."""
        try:
            found = evictions_of(
                drains_of(self.gpus.values(), self.plan),
                fleet_of(
                    self.gpus.values(),
                    self.plan,
                    answers=self.evictor.answers,
                    at_s=asyncio.get_running_loop().time(),
                ),
            )
            self.perhaps_crash()
            self._write(found)
            self.check()
            self.perhaps_crash()
            for ask in found.asks:
                assert not ask.call or ask.pod.uid in self.pending
                await self.evictor.ask(ask)
                self.check()
            for one in list(self.gpus.values()):
                self.perhaps_crash()
                told = one.status.model_copy(update={"evictions": found.told.get(one.name, ())})
                self.gpus[f"{one.spec.node_name}-{one.gpu.index if one.gpu else 0}"] = remade(one, status=told)
        except CrashError:
            self.evictor = self._started()

    def _write(self, found: Evictions) -> None:
        status = self.plan.status.model_copy(update={"evictions": found.counts[self.plan.uid]})
        self.plan = replace(self.plan, status=status)

    @property
    def pending(self) -> tuple[str, ...]:
        told = self.plan.status.evictions
        return told.pending if told is not None and told.generation == self.plan.generation else ()

    @property
    def count(self) -> int:
        """What the plan counts for its generation."""
        told = self.plan.status.evictions
        if told is None or told.generation != self.plan.generation:
            return 0
        return told.evicted + len(told.pending)

    def check(self) -> None:
        """What must hold at any time."""
        accepted = self.server.accepted
        assert len(accepted) == len(set(accepted)), "a pod was evicted twice"
        mine = [uid for generation, uid in self.of_generation if generation == self.plan.generation]
        assert len(mine) <= self.count, f"{mine} were evicted and {self.count} are counted"
        assert self.most is None or self.count <= self.most

    def edit(self) -> None:
        """The plan gets another generation; its status stays for now."""
        edited = self._edited(self.plan.generation + 1)
        self.plan = replace(edited, status=self.plan.status)


STEPS: list[tuple[str, Callable[[Story, st.DataObject], None]]] = [
    ("time", lambda story, data: None),
    ("close", lambda story, data: story.closed.update({data.draw(st.sampled_from(NODES)): data.draw(st.booleans())})),
    ("hold", lambda story, data: story.held.symmetric_difference_update({data.draw(st.sampled_from(EVERY))})),
    ("gone", lambda story, data: story.server.goes(data.draw(st.sampled_from(EVERY)))),
    ("crash", lambda story, data: setattr(story, "crashes", story.crashes + 1)),
    ("lose", lambda story, data: setattr(story, "lost", True)),
    ("edit", lambda story, data: story.edit()),
    ("look", lambda story, data: story.look_on()),
    ("turn", lambda story, data: None),
]


@settings(max_examples=300, deadline=None, phases=[Phase.explicit, Phase.generate, Phase.shrink])
@given(st.data(), st.sampled_from([None, 0, 1, 2, 3, 4]))
def test_no_more_are_evicted_than_may_be_nobody_twice_and_all_are_counted(data: st.DataObject, most: int | None):
    async def play() -> None:
        story = Story(data, most)
        for _ in range(data.draw(st.integers(5, 25))):
            name, step = data.draw(st.sampled_from(STEPS))
            step(story, data)
            if name in ("time", "turn", "crash"):
                await asyncio.sleep(data.draw(st.sampled_from([1, 6, 31])))
                await story.turn()
            story.check() if name != "edit" else None

    run_virtually(play())


@settings(max_examples=100, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.data(), st.sampled_from([None, 3, 6, 10]))
def test_without_crashes_exactly_those_are_counted_that_were_evicted(data: st.DataObject, most: int | None):
    async def play() -> None:
        story = Story(data, most)
        story.closed = dict.fromkeys(NODES, True)
        were_held = bool(story.held)
        for _ in range(30):
            story.look_on()
            await story.turn()
            await asyncio.sleep(2)
            for uid in EVERY:
                if story.server.going(uid) and data.draw(st.booleans()):
                    story.server.goes(uid)
        story.held = set()
        for _ in range(30):
            story.look_on()
            await story.turn()
            await asyncio.sleep(6)
            for uid in story.server.accepted:
                story.server.goes(uid)
        evicted = set(story.server.accepted)
        assert (story.count, story.pending) == (len(evicted), ())
        if most == 3 and not were_held:
            whole = [node for node in NODES if evicted >= set(PODS_OF[node])]
            assert evicted == {uid for node in whole for uid in PODS_OF[node]}, "all pods of a node go, or none"
        assert len(evicted) == 6 if most != 3 else 0 < len(evicted) <= 3

    run_virtually(play())
