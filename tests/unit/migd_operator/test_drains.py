"""When the pods of a node may be evicted at all, what a plan tells of that, and what it means for the rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from unit.migd_operator.drains import FIT, GONE, counted, held, victim
from unit.migd_operator.fleets import (
    HALVES,
    agents,
    answered,
    fleet,
    gpu,
    invalid,
    node,
    plan,
    remade,
    said,
    settled,
    started,
    turn,
    written,
)

from migd.kube.owed import OWED
from migd.plans.partitions import Partition
from migd_operator.deciding import decide
from migd_operator.facts import HOLD, Answer, Fleet

BUSY = ["7g.80gb@0"]
EVICT = {"policy": "Evict"}


def draining(*names: str, uids: str = "ab", most: int = 5, closed: bool = True, **spec: Any) -> Fleet:
    """Nodes with a busy GPU each that have their turn; the first drains: it is closed, and two pods must go."""
    names = names or ("n1",)
    spec = {"disruption": EVICT, "rollout": {"maxUnavailable": most}, **spec}
    gpus = [gpu(n, layout="7g.80gb", busy=BUSY) for n in names]
    found = turn(fleet([plan(instances=HALVES, **spec)], [node(n) for n in names], gpus))
    assert names[0] in started(found)
    return shown(found, names[0], uids, closed=closed)


def shown(found: Fleet, name: str, uids: str = "ab", phase: str = "Draining", *, closed: bool = True) -> Fleet:
    """The fleet once the agent of a node has closed it and says who must go."""
    partitions = tuple(_asking(p, uids, phase) if p.spec.node_name == name else p for p in found.partitions)
    shut = {"annotations": {OWED: "{}"}, "tainted": True} if closed else {"annotations": {}, "tainted": False}
    nodes = tuple(replace(n, **shut) if n.name == name else n for n in found.nodes)
    return replace(found, partitions=partitions, nodes=nodes)


def _asking(one: Partition, uids: str, phase: str) -> Partition:
    told = answered(one, phase)
    return remade(told, status=told.status.model_copy(update={"victims": tuple(victim(uid) for uid in uids)}))


def asked(found: Fleet, **answers: Answer) -> dict[str, bool]:
    """The pods that are asked for, and whether they are called."""
    return {ask.pod.uid: ask.call for ask in decide(replace(found, answers=answers)).asks}


def test_the_pods_of_a_closed_node_in_its_turn_are_asked_for():
    found = draining()
    assert asked(found) == {"a": False, "b": False}
    assert asked(found, a=FIT, b=FIT) == {"a": True, "b": True}
    assert not decide(replace(found, answers={"a": FIT, "b": FIT})).at_rest


def edited(found: Fleet, **more: Any) -> Fleet:
    spec = {"instances": HALVES, "disruption": EVICT, **more}
    return replace(found, plans=(replace(plan(generation=2, **spec), status=found.plans[0].status),))


def of_node(found: Fleet, **more: Any) -> Fleet:
    return replace(found, nodes=tuple(replace(n, **more) for n in found.nodes))


def of_gpus(found: Fleet, change: Callable[[Partition], Partition]) -> Fleet:
    return replace(found, partitions=tuple(change(p) for p in found.partitions))


OWING = {OWED: "{}"}
NOBODY: dict[str, Callable[[Fleet], Fleet]] = {
    "the plan is paused": lambda f: edited(f, paused=True),
    "the plan was edited": lambda f: edited(f, instances=[{"profile": "1g.10gb", "count": 7}]),
    "the plan waits now": lambda f: edited(f, disruption={"policy": "WaitForIdle"}),
    "the plan is another of its name": lambda f: replace(f, plans=(replace(f.plans[0], uid="another"),)),
    "the plan is gone": lambda f: replace(f, plans=()),
    "the plan is not valid": lambda f: replace(f, plans=(), invalid=(invalid(),)),
    "the plan is not approved": lambda f: edited(f, approval="Manual"),
    "the node is held": lambda f: of_node(f, annotations={**OWING, HOLD: "ann"}),
    "the GPU is held": lambda f: of_gpus(f, lambda p: remade(p, annotations={HOLD: "ann"})),
    "the node is open": lambda f: of_node(f, annotations={}, tainted=False),
    "the node has no taint": lambda f: of_node(f, tainted=False),
    "the taint is not of our closing": lambda f: of_node(f, annotations={}),
    "the agent is silent": lambda f: of_node(f, agent="silent"),
    "the agent was not heard yet": lambda f: of_node(f, agent="unheard"),
    "the agent answers another wish": lambda f: of_gpus(f, lambda p: remade(p, generation=p.generation + 1)),
    "the turn was taken back": lambda f: of_gpus(
        f, lambda p: remade(p, spec=p.spec.model_copy(update={"assignment": None}))
    ),
    "the node waits": lambda f: shown(f, "n1", phase="WaitingForIdle"),
    "the node changes": lambda f: shown(f, "n1", phase="Changing"),
    "the node has given up": lambda f: shown(f, "n1", phase="Blocked"),
    "nobody must go": lambda f: shown(f, "n1", ""),
}


@pytest.mark.parametrize("why", NOBODY)
def test_nobody_is_asked_for_where(why: str):
    assert asked(NOBODY[why](draining()), a=FIT, b=FIT) == {}


def test_a_plan_counts_before_it_calls_and_keeps_the_count_until_its_next_generation():
    found = replace(draining(), answers={"a": FIT, "b": FIT})
    found = written(found, decide(found))
    assert found.plans[0].status.evictions == counted(0, "a", "b")
    found = replace(found, answers={"a": GONE, "b": held()})
    found = written(found, decide(found))
    assert found.plans[0].status.evictions == counted(1, "b")
    (one,) = found.partitions
    assert {e.pod_uid: (e.code, e.reason) for e in one.status.evictions} == {
        "a": (201, None),
        "b": (429, "DrainBlocked"),
    }
    assert found.plans[0].status.history[0].evicted == 1
    after = turn(edited(found, instances=[{"profile": "1g.10gb", "count": 7}]))
    assert after.plans[0].status.evictions is None
    assert {e.generation: e.evicted for e in after.plans[0].status.history} == {1: 1, 2: 0}


def test_a_plan_tells_how_many_pods_wait_and_for_what():
    found = replace(draining(), answers={"a": GONE, "b": held()})
    progress = next(c for c in turn(found).plans[0].status.conditions if c.type == "Progressing")
    assert progress.status == "True"
    assert "1 pod on n1 is held by a disruption budget" in progress.message
    assert said(turn(found), "Stalled")[0] == "False"
    over = replace(draining(disruption={**EVICT, "maxEvictions": 1}), answers={"a": FIT, "b": FIT})
    message = turn(over).plans[0].status.message
    assert "2 pods on n1 are more than disruption.maxEvictions" in message


@pytest.mark.parametrize("reason", ["DrainTimeout", "EvictionBudget", "DrainBlocked", "InUse"])
def test_a_node_whose_drain_came_to_nothing_stops_no_other_and_is_told_once_nothing_else_goes(reason: str):
    """It is Blocked and not Failed: it was closed and opened again, and nothing went wrong on its hardware."""
    names = ("n1", "n2", "n3")
    found = fleet(
        [plan(instances=HALVES, disruption=EVICT)],
        [node(n) for n in names],
        [gpu(n, layout="7g.80gb", busy=BUSY) for n in names],
    )
    for _ in range(20):
        found = turn(found)
        ready = {p.spec.node_name for p in found.partitions if p.status.phase == "Ready"}
        assert len(started(found) - ready) <= 1
        found = agents(found, lambda n: "Blocked" if n == "n1" else "Ready")
        found = replace(found, now=found.now + timedelta(seconds=1), partitions=_with(found.partitions, reason))
    assert {p.spec.node_name for p in found.partitions if p.status.phase == "Ready"} == {"n2", "n3"}
    found = turn(found)
    assert said(found, "Stalled") == ("True", reason)
    assert decide(found).at_rest


@pytest.mark.parametrize("reason", ["DrainTimeout", "InUse"])
def test_two_nodes_whose_drains_came_to_nothing_do_not_pass_the_turn_to_and_fro(reason: str):
    names = ("n1", "n2")
    found = fleet(
        [plan(instances=HALVES, disruption=EVICT)],
        [node(n) for n in names],
        [gpu(n, layout="7g.80gb", busy=BUSY) for n in names],
    )
    for _ in range(12):
        found = agents(turn(found), lambda _: "Blocked")
        found = replace(found, now=found.now + timedelta(seconds=1), partitions=_with(found.partitions, reason))
    assert len(started(found)) == 1
    assert decide(found).at_rest


def _with(partitions: Iterable[Partition], reason: str) -> tuple[Partition, ...]:
    return tuple(
        remade(p, status=p.status.model_copy(update={"reason": reason, "message": f"{reason}: so it is"}))
        if p.status.phase == "Blocked"
        else p
        for p in partitions
    )


def test_a_node_that_only_pods_hold_starts_like_an_idle_one_and_one_that_drains_keeps_its_place():
    found = draining("n1", "n2", most=1)
    assert started(found) == {"n1"}
    assert started(turn(found)) == {"n1"}
    assert said(turn(found), "Progressing") == ("True", "Waiting")
    held_now = of_node(found, annotations={**OWING, HOLD: "ann"})
    assert started(turn(held_now)) == set(), "it is closed still, so nobody else starts"


def test_nodes_on_which_nobody_has_to_go_come_first():
    names = ("n1", "n2", "n3")
    gpus = [gpu(n, layout="7g.80gb", busy=BUSY if n != "n2" else ()) for n in names]
    found = turn(fleet([plan(instances=HALVES, disruption=EVICT)], [node(n) for n in names], gpus))
    assert started(found) == {"n2"}


def test_when_all_have_gone_the_plan_is_done_and_remembers_how_many_that_were():
    found = turn(replace(draining(), answers={"a": FIT, "b": FIT}))
    found = turn(replace(found, answers={"a": GONE, "b": GONE}))
    found = shown(replace(found, answers={}), "n1", "", "Changing", closed=False)
    done = settled(found)
    assert said(done, "Ready") == ("True", "AsWished")
    assert done.plans[0].status.evictions == counted(2)
    assert done.plans[0].status.history[0].evicted == 2
    assert all(not p.status.evictions for p in done.partitions)
