"""The rollout: never more nodes than each plan allows, and never stuck behind a node that is not to be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from unit.migd_operator.fleets import (
    HALVES,
    NOW,
    agents,
    answered,
    assigned,
    fleet,
    gpu,
    node,
    plan,
    remade,
    said,
    settled,
    started,
    turn,
)

from migd.plans.partitions import LastTransition, Partition
from migd_operator.deciding import decide
from migd_operator.facts import Fleet
from migd_operator.turns import limit_of

NODES = [f"n{k}" for k in range(10)]


def ten(**rollout: Any) -> Fleet:
    return fleet([plan(rollout=rollout)], [node(n) for n in NODES], [gpu(n, layout="7g.80gb") for n in NODES])


@pytest.mark.parametrize(
    ("most", "nodes", "limit"), [(1, 10, 1), ("25%", 10, 2), ("5%", 10, 1), (0, 10, 0), ("0%", 10, 0), ("100%", 3, 3)]
)
def test_a_percentage_is_one_node_at_least_unless_it_is_none(most: int | str, nodes: int, limit: int):
    assert limit_of(most, nodes) == limit


@pytest.mark.parametrize(("most", "limit"), [(1, 1), ("25%", 2), ("5%", 1), (0, 0), (3, 3)])
def test_never_more_nodes_than_allowed_are_at_it_and_all_are_done_in_the_end(most: int | str, limit: int):
    found = ten(maxUnavailable=most)
    for _ in range(30):
        found = turn(found)
        ready = {p.spec.node_name for p in found.partitions if p.status.phase == "Ready"}
        assert len(started(found) - ready) <= limit
        found = agents(found)
    assert said(turn(found), "Ready")[0] == ("True" if limit else "False")


def test_nodes_with_nothing_to_do_need_no_room():
    found = fleet([plan(instances=HALVES)], [node(n) for n in NODES], [gpu(n, layout="3g.40gb 3g.40gb") for n in NODES])
    assert started(turn(found)) == set(NODES)


def test_the_smallest_limit_of_a_nodes_plans_rules():
    plans = [
        plan("a", gpus={"indices": [0]}, rollout={"maxUnavailable": 5}),
        plan("b", HALVES, gpus={"indices": [1]}, rollout={"maxUnavailable": 2}),
    ]
    gpus = [gpu(n, k, layout="7g.80gb") for n in NODES for k in (0, 1)]
    assert len(started(turn(fleet(plans, [node(n) for n in NODES], gpus)))) == 2


@pytest.mark.parametrize(
    ("away", "reason"),
    [
        ({"unschedulable": True}, "Waiting"),
        ({"ready": False}, "Waiting"),
        ({"agent": "silent"}, "AgentSilent"),
        ({"labels": {"nvidia.com/gpu-driver-upgrade-state": "drain-required"}}, "DriverUpgrade"),
        ({"owners": ("DAS",)}, "ForeignOwner"),
    ],
)
def test_a_node_that_is_not_to_be_had_is_skipped_listed_and_done_when_it_returns(away: dict[str, Any], reason: str):
    nodes = [node("n0", **away), node("n1"), node("n2")]
    found = settled(fleet([plan()], nodes, [gpu(n.name, layout="7g.80gb") for n in nodes]))
    assert started(found) == {"n1", "n2"}
    assert assigned(found)["gpu-n0-0"] == ("False", reason)
    told = next(c for c in found.plans[0].status.conditions if c.type == "Progressing")
    assert "n0" in told.message
    back = settled(replace(found, nodes=(node("n0"), *found.nodes[1:])))
    assert started(back) == {"n0", "n1", "n2"}
    assert said(back, "Ready") == ("True", "AsWished")


@pytest.mark.parametrize(("pauses", "others"), [(True, 0), (False, 1)])
def test_a_failure_stops_the_rest_if_so_wished_and_keeps_its_place_either_way(pauses: bool, others: int):
    found = turn(ten(maxUnavailable=2, pauseOnFailure=pauses))
    first, second = sorted(started(found))
    found = agents(found, lambda n: "Failed" if n == first else "Ready")
    found = turn(found)
    assert len(started(found) - {first, second}) == others
    assert said(found, "Stalled")[0] == ("True" if pauses else "False")


def test_a_failure_stops_the_rest_also_once_the_agent_of_that_node_is_silent():
    found = turn(ten(maxUnavailable=2))
    first, second = sorted(started(found))
    found = agents(found, lambda n: "Failed" if n == first else "Ready")
    silent = tuple(replace(n, agent="silent") if n.name == first else n for n in found.nodes)
    found = turn(replace(found, nodes=silent))
    assert started(found) == {first, second}


def ended(found: Fleet, name: str, phase: str, result: str) -> Fleet:
    """The fleet after the change of a node's GPUs ended so, for the plan that they carry, and its agent told of it."""
    after = agents(found, lambda _: phase, only=name)
    partitions = []
    for one in after.partitions:
        if one.spec.node_name == name and one.spec.desired is not None:
            last = LastTransition(id="x", generation=one.spec.desired.plan.generation, started_at=NOW, result=result)
            one = remade(one, status=one.status.model_copy(update={"last_transition": last}))
        partitions.append(one)
    return replace(after, partitions=tuple(partitions))


def approve(found: Fleet) -> Fleet:
    digest = found.plans[0].status.preview.digest
    return replace(found, plans=(replace(found.plans[0], annotations={"migd.dev/approved": digest}),))


def of_asking(names: list[str], **more: Any) -> Fleet:
    """Nodes of a plan that was approved, after its first turns were given."""
    asking = plan(approval="Manual", **more)
    found = turn(fleet([asking], [node(n) for n in names], [gpu(n, layout="7g.80gb") for n in names]))
    return turn(approve(found))


def joined(found: Fleet, name: str) -> Fleet:
    nodes, gpus = (*found.nodes, node(name)), (*found.partitions, gpu(name, layout="7g.80gb"))
    return replace(found, nodes=nodes, partitions=gpus)


def test_what_failed_is_not_tried_again_once_its_approval_has_lapsed_and_its_plan_still_knows_that_it_failed():
    """Seen: its agent closed it again by itself, though nobody approved of what the plan would do by then."""
    found = of_asking(NODES[:2], rollout={"maxUnavailable": 2})
    assert started(found) == {"n0", "n1"}
    found = agents(ended(found, "n0", "Failed", "RolledBack"), only="n1")
    found = turn(joined(joined(found, "n8"), "n9"))
    assert started(found) == {"n1"}
    assert assigned(found)["gpu-n0-0"] == ("False", "AwaitingApproval")
    found = turn(agents(found, lambda _: "Pending", only="n0"))
    counts = found.plans[0].status.nodes
    assert counts is not None
    assert (counts.failed, counts.ready, counts.waiting) == (1, 1, 2)
    found = turn(approve(found))
    assert started(found) == {"n0", "n1"}, "it goes first, and the others are stopped by its failure"
    assert started(turn(ended(found, "n0", "Ready", "Succeeded"))) == {"n0", "n1", "n8", "n9"}


def test_what_is_held_after_a_failure_begins_nothing_and_keeps_its_turn_when_an_approval_lapses():
    """It waits for somebody to look at it; a turn given back later would change it before."""
    found = ended(of_asking(NODES[:1], onFailure="Hold"), "n0", "Held", "Held")
    assert started(turn(joined(found, "n9"))) == {"n0"}


@pytest.mark.parametrize("pauses", [True, False])
def test_a_node_that_is_held_while_it_changes_and_then_fails_stops_the_rest_as_any_other(pauses: bool):
    found = turn(ten(maxUnavailable=1, pauseOnFailure=pauses))
    hold = {"annotations": {"migd.dev/hold": "ann"}}
    nodes = tuple(node("n0", **hold) if n.name == "n0" else n for n in found.nodes)
    found = turn(replace(agents(found, lambda _: "Changing", only="n0"), nodes=nodes))
    for phase in ("Failed", "Blocked"):  # the last, once its turn is gone
        found = turn(ended(found, "n0", phase, "RolledBack"))
    assert started(found) == (set() if pauses else {"n1"})
    assert said(found, "Stalled") == (("True", "Held") if pauses else ("False", "Waiting"))
    if pauses:
        freed = turn(replace(found, nodes=tuple(node(n) for n in NODES)))
        assert started(freed) == {"n0"}, "without the hold it is tried again before any other"


def test_a_failed_node_comes_first_at_the_next_generation():
    found = agents(turn(ten(maxUnavailable=1)), lambda _: "Failed")
    (failed,) = started(found)
    edited = replace(plan(instances=HALVES, generation=2), status=found.plans[0].status)
    after = turn(replace(found, plans=(edited,)))
    assert started(after) == {failed}
    assert said(settled(after), "Ready") == ("True", "AsWished")


def test_a_node_that_is_never_idle_stops_no_rollout_and_never_closes_beside_another():
    found = ten(maxUnavailable=1)
    stuck = "n0"
    for _ in range(60):
        found = turn(found)
        ready = {p.spec.node_name for p in found.partitions if p.status.phase == "Ready"}
        assert len(started(found) - ready) <= 1
        found = agents(found, lambda n: "Blocked" if n == stuck else "Ready")
        found = replace(found, now=found.now + timedelta(seconds=1))
    ready = {p.spec.node_name for p in found.partitions if p.status.phase == "Ready"}
    assert ready == set(NODES) - {stuck}


def test_two_nodes_that_are_both_in_use_do_not_pass_the_turn_to_and_fro():
    names = NODES[:2]
    gpus = [gpu(n, layout="7g.80gb", busy=["7g.80gb@0"]) for n in names]
    found = fleet([plan(rollout={"maxUnavailable": 1})], [node(n) for n in names], gpus)
    found = turn(agents(turn(found), lambda _: "Blocked"))
    (first,) = started(found)
    for _ in range(5):
        found = turn(agents(found, lambda _: "Blocked"))
        assert started(found) == {first}
    before = found
    assert turn(found) == before, "and rest"


@pytest.mark.parametrize("phase", ["Changing", "Verifying", "RollingBack"])
@pytest.mark.parametrize("held", ["node", "gpu"])
def test_a_node_that_is_held_while_it_changes_keeps_its_place_until_it_is_out(phase: str, held: str):
    names = NODES[:2]
    nodes, gpus = [node(n) for n in names], [gpu(n, layout="7g.80gb") for n in names]
    found = turn(fleet([plan(rollout={"maxUnavailable": 1})], nodes, gpus))
    (first,) = started(found)
    found = agents(found, lambda _: phase)
    hold = {"annotations": {"migd.dev/hold": "ann"}}
    if held == "node":
        found = replace(found, nodes=tuple(node(n, **hold) if n == first else node(n) for n in names))
    else:
        found = replace(
            found,
            partitions=tuple(p.model_copy(update=hold) if p.spec.node_name == first else p for p in found.partitions),
        )
    assert started(turn(found)) == {first}
    out = turn(agents(turn(found), lambda n: "Blocked" if n == first else "Ready"))
    assert started(turn(agents(out, lambda _: "Blocked"))) == set(names) - {first}


def held_up(name: str, why: str | None) -> Partition:
    """A GPU of a node, and what is in its way: nothing, what its status shows, or what no status shows."""
    busy = ("7g.80gb@0",) if why == "InUse" else ()
    return gpu(name, layout="7g.80gb", busy=busy, foreign=why == "ForeignInstances")


def blocking(found: Fleet, why: Mapping[str, str | None]) -> Fleet:
    """The fleet after each agent has acted once: those in whose way something is say Blocked, and what it is."""
    after = agents(found, lambda name: "Blocked" if why[name] else "Ready")
    partitions = []
    for one in after.partitions:
        cause = why[one.spec.node_name] or ""
        cause = cause if one.status.phase == "Blocked" else ""
        said = one.status.model_copy(update={"reason": cause, "message": cause and f"{cause} is in the way"})
        partitions.append(remade(one, status=said))
    return replace(after, partitions=tuple(partitions))


def at_rest(found: Fleet, why: Mapping[str, str | None], limit: int, rounds: int = 60) -> Fleet:
    """The fleet once neither decisions nor agents change anything; never more at it than allowed on the way."""
    for _ in range(rounds):
        after = turn(found)
        ready = {p.spec.node_name for p in after.partitions if p.status.phase == "Ready"}
        assert len(started(after) - ready) <= limit
        after = blocking(after, why)
        if decide(after).at_rest:
            return after
        found = replace(after, now=after.now + timedelta(seconds=1))
    raise AssertionError("it does not come to rest")


def done(found: Fleet) -> set[str]:
    return {p.spec.node_name for p in found.partitions if p.status.phase == "Ready"}


WHY = ["ForeignInstances", "InUse", "MPSInUse"]


@pytest.mark.parametrize("first", WHY)
@pytest.mark.parametrize("second", WHY)
def test_two_nodes_that_are_both_in_the_way_come_to_rest(first: str, second: str):
    why: dict[str, str | None] = {"a": first, "b": second}
    found = at_rest(fleet([plan()], [node(n) for n in why], [held_up(n, why[n]) for n in why]), why, 1)
    assert len(started(found)) == 1
    later = replace(found, now=found.now + timedelta(minutes=5))
    assert decide(later).at_rest


@pytest.mark.parametrize("first", WHY)
@pytest.mark.parametrize("second", ["ForeignInstances", "InUse"])
def test_a_cause_that_goes_on_a_waiting_node_gives_it_the_turn_of_a_blocked_one(first: str, second: str):
    why: dict[str, str | None] = {"a": first, "b": second, "c": second}
    found = at_rest(fleet([plan()], [node(n) for n in why], [held_up(n, why[n]) for n in why]), why, 1)
    (waiting, *_) = sorted(set(why) - started(found))
    free = tuple(
        remade(p, status=p.status.model_copy(update={"observed": held_up(waiting, None).status.observed}))
        if p.spec.node_name == waiting
        else p
        for p in found.partitions
    )
    assert done(at_rest(replace(found, partitions=free), why | {waiting: None}, 1)) == {waiting}


def test_what_no_status_shows_is_said_while_the_node_waits_and_tried_again_after_half_an_hour():
    why: dict[str, str | None] = {"a": "MPSInUse", "b": "MPSInUse"}
    found = at_rest(fleet([plan()], [node(n) for n in why], [held_up(n, None) for n in why]), why, 1)
    (waiting,) = set(why) - started(found)
    (said,) = [p.says("Assigned") for p in found.partitions if p.spec.node_name == waiting]
    assert said is not None
    assert "MPSInUse is in the way" in said.message
    why[waiting] = None
    later = replace(found, now=found.now + timedelta(minutes=31))
    assert done(at_rest(later, why, 1)) == {waiting}


def test_an_edit_is_a_new_chance_for_a_node_that_was_in_the_way():
    why: dict[str, str | None] = {"a": "MPSInUse", "b": "MPSInUse"}
    found = at_rest(fleet([plan()], [node(n) for n in why], [held_up(n, None) for n in why]), why, 1)
    why["a"] = why["b"] = None
    edited = replace(plan(instances=HALVES, generation=2), status=found.plans[0].status)
    assert done(at_rest(replace(found, plans=(edited,)), why, 1)) == {"a", "b"}


def test_a_turn_that_was_taken_back_is_not_given_back_while_its_agent_is_slow():
    why: dict[str, str | None] = {"a": "ForeignInstances", "b": "ForeignInstances"}
    found = at_rest(fleet([plan()], [node(n) for n in why], [held_up(n, why[n]) for n in why]), why, 1)
    assert len(started(found)) == 1
    more = replace(found, nodes=(*found.nodes, node("c")), partitions=(*found.partitions, gpu("c", layout="7g.80gb")))
    for _ in range(4):
        more = turn(more)
        assert started(more) == set()
    assert started(turn(blocking(more, why | {"c": None}))) == {"c"}


def test_a_node_that_needs_the_room_of_two_plans_gets_both_or_disturbs_neither():
    plans = [plan("p", gpus={"indices": [0]}), plan("q", HALVES, gpus={"indices": [1]})]
    held = [gpu("a", 0, "7g.80gb", foreign=True), gpu("b", 1, "7g.80gb", foreign=True)]
    why: dict[str, str | None] = {"a": "ForeignInstances", "b": "ForeignInstances", "c": None}
    found = at_rest(fleet(plans, [node("a"), node("b")], held), why, 2)
    assert started(found) == {"a", "b"}
    both = [gpu("c", k, "7g.80gb") for k in (0, 1)]
    joined = replace(found, nodes=(*found.nodes, node("c")), partitions=(*found.partitions, *both))
    assert done(at_rest(joined, why, 2)) == {"c"}
    busy = replace(
        joined,
        partitions=tuple(answered(p, "WaitingForIdle") if p.spec.node_name == "b" else p for p in joined.partitions),
    )
    assert started(turn(turn(busy))) == {"a", "b"}
    assert decide(turn(busy)).at_rest


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_whatever_is_in_the_way_it_comes_to_rest_and_every_node_that_can_go_has_gone(data: st.DataObject):
    names = NODES[: data.draw(st.integers(2, 6))]
    why = {name: data.draw(st.sampled_from([None, *WHY])) for name in names}
    pools = {name: data.draw(st.sampled_from(["p", "q", "pq"])) for name in names}
    most = data.draw(st.integers(1, 2))
    rollout = {"maxUnavailable": most}
    plans = [
        plan("p", gpus={"indices": [0]}, rollout=rollout),
        plan("q", HALVES, gpus={"indices": [1]}, rollout=rollout),
    ]
    gpus = [
        remade(one, name=f"{one.name}-{k}", status=one.status.model_copy(update={"board": board}))
        for name in names
        for k in (0, 1)
        if "pq"[k] in pools[name]
        for one in [held_up(name, why[name])]
        for board in [one.status.board.model_copy(update={"index": k})]  # type: ignore[union-attr]
    ]
    found = at_rest(fleet(plans, [node(n) for n in names], gpus), why, 2 * most, 100)
    assert done(found) == {name for name in names if why[name] is None}
    assert decide(replace(found, now=found.now + timedelta(minutes=5))).at_rest
    gone = data.draw(st.sampled_from(names))
    shown = tuple(
        remade(p, status=p.status.model_copy(update={"observed": held_up(gone, None).status.observed}))
        if p.spec.node_name == gone and why[gone] in ("InUse", "ForeignInstances")
        else p
        for p in found.partitions
    )
    why[gone] = None
    later = blocking(replace(found, partitions=shown, now=found.now + timedelta(minutes=31)), why)
    assert done(at_rest(later, why, 2 * most, 100)) == {name for name in names if why[name] is None}


def test_an_edit_leaves_the_turns_of_nodes_that_wait_as_they_are():
    done = settled(ten(maxUnavailable=1))
    edited = replace(plan(instances=HALVES, generation=2), status=done.plans[0].status)
    after = turn(replace(done, plans=(edited,)))
    changed = [p for p, q in zip(after.partitions, done.partitions, strict=True) if p.spec != q.spec]
    assert [p.spec.node_name for p in changed] == ["n0"]


def edit(before: Fleet, generation: int, instances: Any) -> Fleet:
    """The fleet after somebody edited its plan, a second later."""
    edited = plan(instances=instances, generation=generation, rollout={"maxUnavailable": 1})
    plans = (replace(edited, status=before.plans[0].status),)
    return replace(before, plans=plans, now=before.now + timedelta(seconds=1))


@pytest.mark.parametrize("phase", ["Ready", "Idle"])
def test_a_node_that_has_not_answered_yet_may_be_closing_though_it_was_at_rest_before(phase: str):
    """Its agent may have read the turn that an edit takes back from it."""
    nodes = [node(n) for n in NODES[:2]]
    found = fleet([plan(rollout={"maxUnavailable": 1})], nodes, [gpu(n.name, layout="7g.80gb") for n in nodes])
    found = turn(edit(settled(found), 2, HALVES)) if phase == "Ready" else turn(found)
    (first,) = {p.spec.node_name for p in found.partitions if p.status.observed_generation != p.generation}
    found = turn(edit(found, 3, [{"profile": "2g.20gb", "count": 3}]))
    given = {p.spec.node_name for p in found.partitions if p.spec.desired and p.spec.desired.plan.generation == 3}
    assert given <= {first}
    assert said(settled(found), "Ready") == ("True", "AsWished")


PHASES = ["Idle", "WaitingForIdle", "Draining", "Changing", "Verifying", "RollingBack", "Blocked", "Failed", "Ready"]


def at_it(found: Fleet) -> set[str]:
    """The nodes that have a turn and something still to do."""
    return {
        p.spec.node_name
        for p in found.partitions
        if p.spec.assignment is not None
        and (p.status.phase != "Ready" or p.status.observed_generation != p.generation)
        and p.spec.desired is not None
        and p.status.observed is not None
        and p.spec.desired.summary.replace(" ", "") != p.status.observed.summary.replace(" ", "")
    }


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.data(), st.integers(0, 3))
def test_whatever_agents_answer_and_plans_become_no_more_nodes_are_given_a_turn_than_allowed(
    data: st.DataObject, most: int
):
    names = NODES[:5]
    found = fleet(
        [plan(rollout={"maxUnavailable": most, "pauseOnFailure": data.draw(st.booleans())})],
        [node(n) for n in names],
        [gpu(n, k, layout="7g.80gb") for n in names for k in range(2)],
    )
    for step in range(2, 8):
        before = at_it(found)
        found = turn(found)
        assert len(at_it(found)) <= max(most, len(before))
        answers = {n: data.draw(st.sampled_from(PHASES)) for n in names}
        found = agents(found, answers.__getitem__, only=data.draw(st.sampled_from([None, *names])))
        spec: dict[str, Any] = {"rollout": {"maxUnavailable": most}, "paused": data.draw(st.booleans())}
        instances = data.draw(st.sampled_from([HALVES, [{"profile": "1g.10gb", "count": 7}]]))
        if data.draw(st.booleans()):
            found = replace(
                found,
                plans=(replace(plan(instances=instances, generation=step, **spec), status=found.plans[0].status),),
            )
