"""What a node is committed to counts in the plans that it had its turn from until its agent is out, come what may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from unit.migd_operator.fleets import (
    HALVES,
    ONES,
    agents,
    answered,
    board_of_a100,
    complete,
    fleet,
    gpu,
    node,
    observed,
    plan,
    remade,
    started,
    turn,
)

from migd.kube.owed import OWED
from migd.mig.geometry import counts
from migd.mig.transition import fit
from migd.plans.partitions import Partition
from migd_operator.deciding import decide
from migd_operator.facts import HOLD, Fleet, NodeFacts, PlanFacts

Event = Callable[[Fleet], Fleet]


def of_node(found: Fleet, name: str, change: Callable[[NodeFacts], NodeFacts]) -> Fleet:
    return replace(found, nodes=tuple(change(n) if n.name == name else n for n in found.nodes))


def of_gpu(found: Fleet, name: str, change: Callable[[Partition], Partition]) -> Fleet:
    after = tuple(change(p) if p.spec.node_name == name else p for p in found.partitions)
    return replace(found, partitions=after)


def annotated(one: NodeFacts, key: str, there: bool) -> NodeFacts:
    others = {k: v for k, v in one.annotations.items() if k != key}
    return replace(one, annotations={**others, key: "x"} if there else others)


def edited(found: Fleet, *plans: PlanFacts) -> Fleet:
    """The fleet with plans made or edited; what was said of them before stays."""
    before = {p.name: p for p in found.plans}
    after = {p.name: replace(p, status=before[p.name].status) if p.name in before else p for p in plans}
    return replace(found, plans=tuple((before | after).values()))


def node_held(found: Fleet) -> Fleet:
    return of_node(found, "n1", lambda n: annotated(n, HOLD, True))


def gpu_held(found: Fleet) -> Fleet:
    return of_gpu(found, "n1", lambda p: remade(p, annotations={HOLD: "x"}))


def conflict(found: Fleet) -> Fleet:
    return edited(found, plan("tie", HALVES, nodeSelector={"matchLabels": {"name": "n1"}}))


def overruled(found: Fleet) -> Fleet:
    return edited(found, plan("high", HALVES, priority=5, nodeSelector={"matchLabels": {"name": "n1"}}))


def overruled_as_it_is(found: Fleet) -> Fleet:
    as_it_is = [{"profile": "7g.80gb", "count": 1}]
    return edited(found, plan("high", as_it_is, priority=5, nodeSelector={"matchLabels": {"name": "n1"}}))


def lost(found: Fleet) -> Fleet:
    closed = of_node(found, "n1", lambda n: annotated(n, OWED, True))
    return of_gpu(closed, "n1", lambda p: answered(p, "Lost"))


def not_selected(found: Fleet) -> Fleet:
    return of_node(found, "n1", lambda n: replace(n, labels={"name": "n1"}))


def no_rule(found: Fleet) -> Fleet:
    uuids = [p.status.board.uuid for p in found.partitions if p.spec.node_name == "n2" and p.status.board]
    return edited(found, plan(gpus={"uuids": uuids}, generation=2, **SELECT))


def deleted_with_another(found: Fleet) -> Fleet:
    return replace(edited(found, plan("low", HALVES, priority=-1)), plans=(plan("low", HALVES, priority=-1),))


def deleted_with_another_and_held(found: Fleet) -> Fleet:
    return deleted_with_another(node_held(found))


SELECT = {"nodeSelector": {"matchLabels": {"pool": "a"}}}
EVENTS: list[Event] = [
    node_held, gpu_held, conflict, overruled, overruled_as_it_is, lost, not_selected, no_rule,
    deleted_with_another, deleted_with_another_and_held,
]  # fmt: skip


def two(phase: str) -> Fleet:
    """Node n1 has its turn, and its agent says so; "": not yet. n2 waits for it."""
    nodes = [node(n, labels=labels_of(n)) for n in ("n1", "n2")]
    found = turn(fleet([plan(**SELECT)], nodes, [gpu(n.name, layout="7g.80gb") for n in nodes]))
    assert started(found) == {"n1"}
    return agents(found, lambda _: phase, only="n1") if phase else found


@pytest.mark.parametrize("happens", EVENTS, ids=lambda e: e.__name__)
@pytest.mark.parametrize("phase", ["", "WaitingForIdle", "Draining", "Changing", "Verifying", "RollingBack"])
def test_no_other_node_gets_its_turn_before_the_agent_of_the_first_is_out(phase: str, happens: Event):
    found = happens(two(phase))
    if phase == "Draining":
        found = of_node(found, "n1", lambda n: annotated(n, OWED, True))
    for _ in range(4):
        found = turn(found)
        assert "n2" not in started(found)
    found = of_node(found, "n1", lambda n: annotated(n, OWED, False))
    for _ in range(6):
        end = "Lost" if happens is lost else "Ready"
        found = turn(agents(found, lambda _, end=end: end, only="n1"))  # type: ignore[misc]
    assert "n2" in started(found)


def test_a_closed_node_whose_status_tells_nothing_of_it_counts_until_it_is_open():
    found = of_node(node_held(two("Draining")), "n1", lambda n: annotated(n, OWED, True))
    found = agents(turn(found), only="n1")
    assert {p.status.phase for p in found.partitions if p.spec.node_name == "n1"} == {"Idle"}
    assert "n2" not in started(turn(found))
    assert "n2" in started(turn(of_node(found, "n1", lambda n: annotated(n, OWED, False))))


def test_an_agent_that_is_silent_and_had_not_begun_is_not_waited_for():
    found = turn(node_held(two("")))
    assert "n2" in started(turn(of_node(found, "n1", lambda n: replace(n, agent="silent"))))


class Fleets:
    """Agents that close, change and open, and tell of it later; what they last read may be withdrawn meanwhile."""

    def __init__(self, found: Fleet) -> None:
        self.found = found
        self.read: dict[str, int] = {}  # by GPU, the generation that its agent last acted on
        self.phase: dict[str, str] = {}
        self.turn: dict[str, str] = {}  # by node that is closed, the turn for which
        self.plans: dict[str, set[str]] = {}  # by node that is closed, the plans of that turn
        self.cut: dict[str, str] = {}

    def act(self, name: str) -> None:
        """One step of a node's agent, by what the API server has now."""
        mine = [p for p in self.found.partitions if p.spec.node_name == name]
        self.read |= {p.name: p.generation for p in mine}
        whole = name in complete(mine) and {p.spec.assignment.id for p in mine if p.spec.assignment}
        given = min(whole) if whole else ""
        carrying = [p for p in mine if p.spec.assignment is not None and p.spec.desired is not None]
        phase = self.phase.get(name, "Idle")
        if phase == "Draining":
            phase = "Changing" if given == self.turn[name] else "Idle"
            if phase == "Idle":
                self._open(name)
        elif phase in ("Changing", "Verifying"):
            phase = "Verifying" if phase == "Changing" else "Ready"
            if phase == "Ready":
                self._open(name)
        elif given and self.turn.get(name) != given and self._differs(carrying):
            phase = "Draining"
            self.turn[name] = given
            self.plans[name] = {p.spec.desired.plan.name for p in carrying if p.spec.desired}
            self.cut |= {p.name: p.spec.desired.summary for p in carrying if p.spec.desired}
        else:
            phase = "Ready" if given else "Idle"
        self.phase[name] = phase

    def _open(self, name: str) -> None:
        self.turn.pop(name)
        self.plans.pop(name)

    def _differs(self, carrying: list[Partition]) -> bool:
        return any(p.spec.desired and self.cut.get(p.name) != p.spec.desired.summary for p in carrying)

    def tell(self, name: str) -> None:
        """The node's agent says how it stood when it last acted."""
        self.found = of_node(self.found, name, lambda n: annotated(n, OWED, name in self.turn))
        self.found = of_gpu(self.found, name, self._told)

    def _told(self, one: Partition) -> Partition:
        phase = self.phase.get(one.spec.node_name, "Idle")
        if one.status.phase == "Lost":
            phase = "Lost"
        seen = None
        desired = one.spec.desired
        if phase == "Ready" and desired is not None and self.cut.get(one.name) == desired.summary:
            there = fit(board_of_a100(), counts({i.profile or "": i.count for i in desired.instances}))
            assert isinstance(there, frozenset)
            seen = observed(True, there, set())
        read = self.read.get(one.name, one.status.observed_generation)
        after = answered(remade(one, generation=read), phase, seen)
        return remade(after, generation=one.generation)


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_whatever_happens_no_plan_has_more_nodes_closed_than_it_allows(data: st.DataObject):
    names = ["n1", "n2", "n3"]
    nodes = [node(n, labels=labels_of(n)) for n in names]
    first = plan(gpus={"indices": [0]}, **SELECT)
    other = plan("other", HALVES, gpus={"indices": [1]})
    world = Fleets(fleet([first, other], nodes, [gpu(n, k, layout="7g.80gb") for n in names for k in (0, 1)]))
    generation = 1
    for _ in range(data.draw(st.integers(10, 40))):
        name = data.draw(st.sampled_from(names))
        kind = data.draw(st.sampled_from(["decide", "decide", "act", "act", "tell", "tell", "happen"]))
        if kind == "decide":
            world.found = turn(replace(world.found, now=world.found.now + timedelta(seconds=1)))
        elif kind == "act":
            world.act(name)
        elif kind == "tell":
            world.tell(name)
        else:
            generation += 1
            world.found = data.draw(st.sampled_from(happenings(name, generation)))(world.found)
        here = {p.name for p in world.found.plans}
        for one in here:
            closed = {n for n, plans in world.plans.items() if one in plans}
            assert len(closed) <= 1, (one, closed)
    calm = edited(world.found, *(replace(p, generation=99) for p in (first, other)))
    nodes = tuple(annotated(replace(n, labels=labels_of(n.name)), HOLD, False) for n in calm.nodes)
    world.found = replace(calm, plans=tuple(p for p in calm.plans if p.name in ("plan", "other")), nodes=nodes)
    for name in names:
        world.found = of_gpu(world.found, name, lambda p: remade(p, annotations={}))
    for _ in range(60):
        world.found = turn(replace(world.found, now=world.found.now + timedelta(seconds=1)))
        for name in names:
            world.act(name)
            world.tell(name)
        if {p.status.phase for p in world.found.partitions} == {"Ready"} and decide(world.found).at_rest:
            break
    assert {p.status.phase for p in world.found.partitions} == {"Ready"}
    assert decide(world.found).at_rest


def labels_of(name: str) -> dict[str, str]:
    return {"pool": "a", "name": name}


def happenings(name: str, generation: int) -> list[Event]:
    """What may befall a node and its plans, and be undone."""
    here = {"nodeSelector": {"matchLabels": {"name": name}}}
    labels = labels_of(name)
    return [
        lambda f: of_node(f, name, lambda n: annotated(n, HOLD, not n.held)),
        lambda f: of_gpu(f, name, lambda p: remade(p, annotations={} if HOLD in p.annotations else {HOLD: "x"})),
        lambda f: of_node(f, name, lambda n: replace(n, labels={"name": name} if "pool" in n.labels else labels)),
        lambda f: edited(f, plan("tie", HALVES, gpus={"indices": [0]}, generation=generation, **here)),
        lambda f: edited(f, plan("high", HALVES, priority=5, generation=generation, **here)),
        lambda f: edited(f, plan("plan", HALVES, {"indices": [0]}, generation, **SELECT)),
        lambda f: edited(f, plan("plan", ONES, {"indices": [1]}, generation, **SELECT)),
        lambda f: edited(f, plan("other", ONES, {"all": True}, generation)),
        lambda f: replace(f, plans=tuple(p for p in f.plans if p.name not in ("tie", "high"))),
        lambda f: replace(f, plans=tuple(p for p in f.plans if p.name != "plan")),
    ]
