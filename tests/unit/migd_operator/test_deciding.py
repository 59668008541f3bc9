"""The fleet's decision, situation by situation."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from unit.migd_operator.fleets import (
    HALVES,
    NOW,
    ONES,
    agents,
    answered,
    assigned,
    fleet,
    gpu,
    gpu_name,
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

from migd_operator.deciding import PLAN_LABEL, decide
from migd_operator.facts import HOLD


def test_a_node_gets_its_turn_and_the_plan_is_ready_once_its_agent_says_so():
    before = fleet([plan()], [node()], [gpu(index=0), gpu(index=1)])
    after = turn(before)
    assert {p.spec.assignment.gpus for p in after.partitions if p.spec.assignment} == {2}
    assert len({p.spec.assignment.id for p in after.partitions if p.spec.assignment}) == 1
    assert said(after, "Ready") == ("False", "Waiting")
    done = settled(before)
    assert said(done, "Ready") == ("True", "AsWished")
    assert said(done, "Progressing") == ("False", "AsWished")
    assert done.plans[0].status.gpus.summary == "2/2"
    assert done.plans[0].status.nodes.summary == "1/1"
    assert [(e.generation, e.result) for e in done.plans[0].status.history] == [(1, "Succeeded")]


def test_at_rest_nothing_is_written_by_an_operator_that_starts_anew():
    done = settled(fleet([plan()], [node()], [gpu()]))
    assert decide(done).at_rest
    assert decide(replace(done, now=NOW + timedelta(seconds=100))).at_rest


def test_ready_is_not_said_of_the_old_generation_right_after_an_edit():
    done = settled(fleet([plan()], [node()], [gpu()]))
    edited = replace(done, plans=(replace(plan(instances=HALVES, generation=2), status=done.plans[0].status),))
    after = turn(edited)
    ready = next(c for c in after.plans[0].status.conditions if c.type == "Ready")
    assert (ready.status, ready.observed_generation) == ("False", 2)


def test_ready_is_not_said_either_where_the_edit_leaves_the_hardware_as_it_is():
    done = settled(fleet([plan()], [node()], [gpu()]))
    edited = replace(done, plans=(replace(plan(generation=2, drift="Observe"), status=done.plans[0].status),))
    after = turn(edited)
    assert said(after, "Ready")[0] == "False"
    assert said(settled(after), "Ready") == ("True", "AsWished")


def test_the_higher_priority_wins_a_gpu_and_a_tie_moves_neither():
    low, high = plan("low"), plan("high", HALVES, {"indices": [0]}, priority=5)
    done = settled(fleet([low, high], [node()], [gpu(index=0), gpu(index=1)]))
    assert {p.name: p.spec.desired.plan.name for p in done.partitions if p.spec.desired} == {
        gpu_name("n1", 0): "high",
        gpu_name("n1", 1): "low",
    }
    tie = settled(fleet([low, plan("tie", HALVES, {"indices": [0]})], [node()], [gpu(index=0), gpu(index=1)]))
    assert assigned(tie) == {gpu_name("n1", 0): ("False", "Conflict"), gpu_name("n1", 1): ("True", "Assigned")}
    assert tie.partitions[0].spec.desired is None
    assert said(tie, "Accepted", 0) == said(tie, "Accepted", 1) == ("False", "Conflict")
    assert said(tie, "Stalled", 1) == ("True", "Conflict")


def test_a_gpu_that_no_rule_matches_is_left_alone():
    done = settled(fleet([plan(gpus={"indices": [1]})], [node()], [gpu(index=0), gpu(index=1)]))
    assert assigned(done)[gpu_name("n1", 0)] == ("False", "NotNeeded")
    assert done.partitions[0].spec.desired is None
    assert done.plans[0].status.gpus.matched == 1


@pytest.mark.parametrize(
    ("instances", "reason", "words"),
    [
        ([{"profile": "3g.40gb", "count": 3}], "Infeasible", "2×3g.40gb"),
        ([{"profile": "1g.5gb", "count": 7}], "UnknownProfile", "1g.10gb"),
    ],
)
def test_what_can_never_be_is_refused_with_the_nearest_that_fits(instances, reason, words):
    done = settled(fleet([plan(instances=instances)], [node()], [gpu()]))
    assert assigned(done) == {gpu_name("n1", 0): ("False", reason)}
    assert said(done, "Accepted") == ("False", reason)
    assert said(done, "Stalled") == ("True", reason)
    assert words in done.plans[0].status.message
    assert done.plans[0].status.preview.totals.refused == 1


def test_a_paused_plan_has_a_preview_and_starts_nothing():
    done = settled(fleet([plan(paused=True)], [node()], [gpu(layout="7g.80gb")]))
    assert not started(done)
    assert assigned(done) == {gpu_name("n1", 0): ("False", "Paused")}
    assert said(done, "Progressing") == ("False", "Paused")
    totals = done.plans[0].status.preview.totals
    assert (totals.destroy, totals.create, totals.gpus) == (1, 7, 1)


@pytest.mark.parametrize(
    ("phase", "stays"),
    [("WaitingForIdle", False), ("Draining", False), ("Changing", True), ("Verifying", True), ("RollingBack", True)],
)
def test_a_pause_takes_a_turn_back_before_the_first_effect_only(phase, stays):
    moving = agents(turn(fleet([plan()], [node()], [gpu()])), lambda _: phase)
    paused = replace(moving, plans=(replace(plan(generation=2, paused=True), status=moving.plans[0].status),))
    assert bool(started(turn(paused))) is stays


@pytest.mark.parametrize(("phase", "stays"), [("WaitingForIdle", False), ("Changing", True)])
def test_a_deleted_plan_releases_its_gpus_once_a_change_under_way_is_finished(phase, stays):
    moving = agents(turn(fleet([plan()], [node()], [gpu()])), lambda _: phase)
    gone = turn(replace(moving, plans=()))
    assert (gone.partitions[0].spec.desired is not None) is stays
    after = turn(agents(gone))
    assert after.partitions[0].spec.desired is None
    assert after.partitions[0].spec.assignment is None


def test_approval_is_waited_for_and_covers_a_rollout_as_it_shrinks_but_not_as_it_grows():
    nodes = [node(f"n{k}") for k in range(3)]
    gpus = [gpu(f"n{k}", layout="7g.80gb") for k in range(3)]
    waiting = settled(fleet([plan(approval="Manual")], nodes, gpus))
    assert not started(waiting)
    assert said(waiting, "Progressing") == ("False", "AwaitingApproval")
    digest = waiting.plans[0].status.preview.digest
    approved = replace(waiting.plans[0], annotations={"migd.dev/approved": digest})
    done = settled(replace(waiting, plans=(approved,)))
    assert said(done, "Ready") == ("True", "AsWished")
    grown = replace(
        waiting,
        plans=(approved,),
        nodes=(*nodes, node("n9")),
        partitions=(*waiting.partitions, gpu("n9", layout="7g.80gb")),
    )
    assert not started(turn(grown))
    other = replace(plan(instances=HALVES, approval="Manual", generation=2), annotations=approved.annotations)
    assert not started(turn(replace(waiting, plans=(other,))))


def test_a_plan_that_waits_for_approval_says_the_command_that_approves_it_and_its_gpus_do_not():
    """Copied at night it has to be right; and a digest changes with the fleet, which is no news of each GPU."""
    found = turn(fleet([plan("asked", approval="Manual")], [node()], [gpu(layout="7g.80gb")]))
    command, _, approval = found.plans[0].status.message.partition("kubectl ")[2].rpartition("=")
    assert command == "annotate gpp asked migd.dev/approved"
    digest, _, more = approval.partition(" ")
    assert more == "--overwrite"
    approved = replace(found.plans[0], annotations={"migd.dev/approved": digest})
    assert started(turn(replace(found, plans=(approved,))))
    told = found.partitions[0].says("Assigned")
    assert told is not None
    assert told.reason == "AwaitingApproval"
    assert digest not in told.message


def test_a_hold_on_a_gpu_leaves_it_out_and_one_on_a_node_leaves_all_out():
    held = gpu(index=0, annotations={HOLD: "me"})
    one = settled(fleet([plan()], [node()], [held, gpu(index=1)]))
    assert assigned(one) == {gpu_name("n1", 0): ("False", "Held"), gpu_name("n1", 1): ("True", "Assigned")}
    assert one.partitions[1].spec.assignment.gpus == 1
    every = settled(fleet([plan()], [node(annotations={HOLD: "me"})], [gpu()]))
    assert assigned(every) == {gpu_name("n1", 0): ("False", "Held")}


def test_a_lost_gpu_and_a_duplicate_are_left_out_and_a_moved_one_is_deleted():
    lost, fine, twice = gpu(index=0, phase="Lost"), gpu(index=1), gpu(index=2)
    there = fleet([plan()], [node(), node("n2", duplicates=frozenset({twice.name}))], [lost, fine, twice])
    after = turn(there)
    assert assigned(after)[lost.name] == ("False", "GPUUnhealthy")
    assert assigned(after)[twice.name] == ("False", "DuplicateGPU")
    assert after.partitions[1].spec.assignment.gpus == 1
    moved = fleet([plan()], [node(), node("n2", duplicates=frozenset({lost.name}))], [lost])
    assert decide(moved).deletions == (lost.name,)


def test_partitions_of_a_node_that_is_gone_are_deleted_and_a_new_gpu_joins_the_wish():
    done = settled(fleet([plan()], [node()], [gpu()]))
    assert decide(replace(done, nodes=())).deletions == (gpu_name("n1", 0),)
    assert decide(replace(done, nodes=(node(uid="another"),))).deletions == (gpu_name("n1", 0),)
    more = settled(replace(done, partitions=(*done.partitions, gpu(index=1))))
    assert {p.spec.assignment.gpus for p in more.partitions if p.spec.assignment} == {2}


def test_a_label_that_arrives_later_brings_the_node_into_the_plan():
    wanted = plan(nodeSelector={"matchLabels": {"gpu": "yes"}})
    before = settled(fleet([wanted], [node()], [gpu()]))
    assert said(before, "Ready") == ("False", "Waiting")
    labelled = replace(before, nodes=(node(labels={"gpu": "yes"}),))
    assert said(settled(labelled), "Ready") == ("True", "AsWished")


def test_strategy_single_takes_one_profile_on_all_gpus_and_nothing_else():
    single = node(labels={"nvidia.com/mig.strategy": "single"})
    both = [gpu(index=0), gpu(index=1)]
    assert said(settled(fleet([plan()], [single], both)), "Ready") == ("True", "AsWished")
    part = settled(fleet([plan(gpus={"indices": [0]})], [single], both))
    assert said(part, "Accepted") == ("False", "Infeasible")
    with_lost = turn(fleet([plan()], [single], [*both, gpu(index=2, phase="Lost")]))
    assert assigned(with_lost)[gpu_name("n1", 0)] == ("True", "Assigned")
    mixed = [{"profile": "3g.40gb"}, {"profile": "1g.10gb"}]
    assert said(settled(fleet([plan(instances=mixed)], [single], both)), "Accepted") == ("False", "Infeasible")


def test_an_owner_of_mig_is_refused_and_mig_manager_only_without_take_over():
    manager = node(labels={"nvidia.com/gpu.deploy.mig-manager": "true"})
    assert assigned(turn(fleet([plan()], [manager], [gpu()])))[gpu_name("n1", 0)] == ("False", "ForeignOwner")
    assert started(turn(fleet([plan(owner="TakeOver")], [manager], [gpu()]))) == {"n1"}
    das = node(owners=("DAS (NodeAccelerator)",))
    assert not started(turn(fleet([plan(owner="TakeOver")], [das], [gpu()])))


def test_a_silent_agent_is_said_and_never_starts():
    silent = node(agent="silent")
    found = fleet([plan()], [silent], [gpu()])
    decision = decide(found)
    assert decision.silent == ("n1",)
    after = turn(found)
    assert not started(after)
    alive = after.partitions[0].says("AgentAlive")
    assert (alive.status, alive.reason) == ("False", "AgentSilent")
    assert assigned(after)[gpu_name("n1", 0)] == ("False", "AgentSilent")
    assert after.plans[0].status.nodes.unknown == 1


@pytest.mark.parametrize("before", ["alive", "silent"])
def test_an_agent_that_was_not_heard_yet_starts_nothing_and_is_what_it_was_said_to_be(before):
    found = turn(fleet([plan()], [node(agent=before, unschedulable=True)], [gpu()]))
    anew = replace(found, nodes=(node(agent="unheard"),), now=NOW + timedelta(seconds=100))
    decision = decide(anew)
    assert (decision.specs, decision.told) == ((), ())
    heard = turn(replace(anew, nodes=(node(),)))
    assert started(heard) == {"n1"}


def test_a_node_taken_from_mig_manager_is_given_back_once_no_plan_keeps_it():
    key = "nvidia.com/gpu.deploy.mig-manager"
    found = fleet([plan(owner="TakeOver", paused=True)], [node(labels={key: "true"})], [gpu(layout="7g.80gb")])
    assert decide(found).taken_over == ()  # nothing of it before anything else may happen
    going = replace(found, plans=(plan(owner="TakeOver"),))
    assert decide(going).taken_over == ("n1",)
    done = settled(going)
    assert done.nodes[0].labels[key] == "false"
    assert decide(replace(done, nodes=(replace(done.nodes[0], labels={key: "true"}),))).taken_over == ("n1",)
    withdrawn = turn(replace(done, plans=()))
    assert withdrawn.nodes == done.nodes, "its agent may be at it still"
    assert decide(agents(withdrawn, only="another")).released == ()
    assert decide(replace(withdrawn, nodes=(replace(done.nodes[0], agent="silent"),))).released == ("n1",)
    out = agents(withdrawn)
    gone = decide(out)
    assert gone.released == ("n1",)
    assert written(out, gone).nodes[0] == going.nodes[0]
    assert decide(replace(done, partitions=())).released == ("n1",)


def test_the_plan_of_a_gpu_is_its_label_unless_its_name_is_too_long_for_one():
    done = settled(fleet([plan("p")], [node()], [gpu()]))
    assert done.partitions[0].labels[PLAN_LABEL] == "p"
    meddled = replace(done, partitions=(remade(done.partitions[0], labels={}),))
    assert [s.label for s in decide(meddled).specs] == ["p"]
    assert PLAN_LABEL not in settled(fleet([plan("p" * 64)], [node()], [gpu()])).partitions[0].labels
    assert PLAN_LABEL not in settled(replace(done, plans=())).partitions[0].labels


def test_a_plan_that_became_invalid_is_told_so_and_its_gpus_are_left_alone():
    done = settled(fleet([plan()], [node()], [gpu(layout="7g.80gb")]))
    broken = replace(done, plans=(), invalid=(replace(invalid(), status=done.plans[0].status),))
    after = turn(broken)
    assert [p.spec for p in after.partitions] == [p.spec for p in done.partitions]
    assert decide(after).at_rest
    status = after.invalid[0].status
    assert {(c.type, c.status, c.reason, c.observed_generation) for c in status.conditions} == {
        ("Accepted", "False", "Invalid", 2),
        ("Progressing", "False", "Invalid", 2),
        ("Ready", "False", "Invalid", 2),
        ("Stalled", "True", "Invalid", 2),
    }
    assert "spec.rules: must not be empty" in status.message
    assert (status.preview, status.history) == (done.plans[0].status.preview, done.plans[0].status.history)
    released = turn(replace(after, invalid=()))
    assert [p.spec.desired for p in released.partitions] == [None]  # it was deleted


def test_no_other_plan_gets_a_gpu_of_a_plan_that_became_invalid_nor_changes_its_node():
    both = [plan("a", gpus={"indices": [0]}), plan("b", gpus={"indices": [1]}, priority=-1)]
    done = settled(fleet(both, [node()], [gpu(index=0), gpu(index=1)]))
    others = (plan("b", HALVES, generation=2, priority=-1),)
    broken = replace(done, plans=others, invalid=(invalid("a"),))
    after = turn(turn(broken))
    assert [p.spec for p in after.partitions] == [p.spec for p in done.partitions]
    assert assigned(after) == {gpu_name("n1", k): ("False", "Invalid") for k in (0, 1)}
    assert said(after, "Stalled") == ("True", "Invalid")
    mended = settled(replace(after, plans=(both[0], *others), invalid=()))
    assert [p.spec.desired.plan.name for p in mended.partitions] == ["a", "b"]


def test_the_other_gpus_of_a_node_stay_ready_beside_a_plan_that_became_invalid():
    both = [plan("a", gpus={"indices": [0]}), plan("b", gpus={"indices": [1]})]
    done = settled(fleet(both, [node()], [gpu(index=0), gpu(index=1)]))
    after = turn(replace(done, plans=done.plans[1:], invalid=(invalid("a"),)))
    assert said(after, "Ready") == ("True", "AsWished")
    assert assigned(after)[gpu_name("n1", 1)] == ("True", "Assigned")


def test_the_status_of_a_plan_that_nobody_can_read_is_not_written():
    done = settled(fleet([plan()], [node()], [gpu()]))
    broken = replace(done, plans=(), invalid=(replace(invalid(), status=None),))
    assert decide(broken).statuses == ()
    assert decide(broken).specs == ()


def test_history_keeps_ten_and_marks_what_an_edit_overtook():
    found = fleet([plan()], [node()], [gpu()])
    for generation in range(2, 15):
        found = turn(found)
        edited = plan(instances=HALVES if generation % 2 == 0 else ONES, generation=generation)
        found = replace(found, plans=(replace(edited, status=found.plans[0].status),))
    found = turn(found)
    history = found.plans[0].status.history
    assert [e.generation for e in history] == list(range(14, 4, -1))
    assert {e.result for e in history[1:]} == {"Superseded"}
    assert history[0].result == "Running"


def test_a_failed_change_is_told_with_the_agents_reason():
    failed = agents(turn(fleet([plan()], [node()], [gpu()])), lambda _: "Failed")
    bad = remade(
        failed.partitions[0],
        status=failed.partitions[0].status.model_copy(update={"reason": "NVMLError", "message": "it broke"}),
    )
    after = turn(replace(failed, partitions=(bad,)))
    assert said(after, "Ready") == ("False", "NVMLError")
    assert said(after, "Stalled") == ("True", "NVMLError")
    assert after.plans[0].status.history[0].result == "Failed"
    edited = replace(after, plans=(replace(plan(instances=HALVES, generation=2), status=after.plans[0].status),))
    assert said(settled(edited), "Ready") == ("True", "AsWished")


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.data())
def test_equal_fleets_give_equal_decisions_in_whatever_order_their_parts_come(dice: random.Random, data: st.DataObject):
    layouts = st.sampled_from([None, "", "7g.80gb", "3g.40gb 3g.40gb", "1g.10gb 1g.10gb"])
    names = [f"n{k}" for k in range(4)]
    gpus = [gpu(n, k, data.draw(layouts)) for n in names for k in range(2)]
    plans = [
        plan("a"),
        plan("b", HALVES, {"indices": [0]}, priority=data.draw(st.integers(0, 1))),
        plan("c", None, {"indices": [1]}),
    ]
    one = turn(fleet(plans, [node(n) for n in names], gpus))
    first = decide(one)
    shuffled = [list(one.plans), list(one.nodes), list(one.partitions)]
    for part in shuffled:
        dice.shuffle(part)
    assert decide(fleet(*shuffled)) == first
    assert repr(decide(fleet(*shuffled))) == repr(first)


def test_a_gpu_that_answers_for_an_older_generation_is_not_counted_as_ready():
    done = settled(fleet([plan()], [node()], [gpu()]))
    later = replace(done, partitions=(remade(done.partitions[0], generation=99),))
    after = turn(later)
    assert said(after, "Ready")[0] == "False"
    assert after.plans[0].status.gpus.pending == 1
    back = replace(later, partitions=(answered(later.partitions[0], "Ready"),))
    assert said(turn(back), "Ready") == ("True", "AsWished")


def test_an_edit_waits_for_a_node_whose_hardware_is_being_changed_and_a_hold_does_too():
    changing = agents(turn(fleet([plan()], [node()], [gpu(index=0), gpu(index=1)])), lambda _: "Changing")
    edited = replace(changing, plans=(replace(plan(instances=HALVES, generation=2), status=changing.plans[0].status),))
    held = replace(changing, nodes=(node(annotations={HOLD: "me"}),))
    for found in (edited, held):
        assert decide(found).specs == ()
    assert said(settled(edited), "Ready") == ("True", "AsWished")
    assert not started(turn(agents(held)))


PHASES = ["Idle", "Pending", "WaitingForIdle", "Draining", "Changing", "Blocked", "RebootRequired", "Failed", "Ready"]


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_without_an_answer_from_anybody_writing_comes_to_an_end(data: st.DataObject):
    names = [f"n{k}" for k in range(4)]
    layouts = st.sampled_from([None, "", "7g.80gb", "3g.40gb 3g.40gb"])
    gpus = [gpu(n, k, data.draw(layouts)) for n in names for k in range(2)]
    spec = {"rollout": {"maxUnavailable": data.draw(st.integers(0, 3))}, "paused": data.draw(st.booleans())}
    plans = [plan("a", **spec), plan("b", HALVES, {"indices": [0]}, priority=data.draw(st.integers(0, 1)))]
    found = fleet(plans, [node(n) for n in names], gpus)
    for _ in range(3):
        answers = {n: data.draw(st.sampled_from(PHASES)) for n in names}
        found = agents(turn(found), answers.__getitem__)
        for _ in range(4):
            found = turn(found)
        assert decide(found).at_rest
        generation = found.plans[0].generation + 1
        spec["paused"] = data.draw(st.booleans())
        edited = replace(plan("a", generation=generation, **spec), status=found.plans[0].status)
        found = replace(found, plans=(edited, *found.plans[1:]))


def test_a_plan_that_waits_for_what_is_in_use_says_on_which_nodes():
    nodes = [node(f"n{k}") for k in range(8)]
    begun = turn(fleet([plan(rollout={"maxUnavailable": 7})], nodes, [gpu(f"n{k}") for k in range(8)]))
    waiting = agents(begun, lambda name: "Draining" if name == "n0" else "WaitingForIdle")
    after = turn(waiting)
    progressing = next(c for c in after.plans[0].status.conditions if c.type == "Progressing")
    assert (progressing.status, progressing.reason) == ("True", "Waiting")
    assert "in use on n1, n2, n3, n4, n5 and 1 more: kubectl get gpart -o wide says by whom" in progressing.message
    assert "in use on" not in next(c.message for c in settled(after).plans[0].status.conditions if c.type == "Ready")


def test_a_plan_whose_node_went_silent_in_its_turn_says_so():
    begun = agents(turn(fleet([plan()], [node("n1"), node("n2")], [gpu("n1"), gpu("n2")])), lambda name: "Changing")
    silent = turn(replace(begun, nodes=(node("n1", agent="silent"), node("n2"))))
    assert said(silent, "Ready") == ("False", "AgentSilent")
    assert said(silent, "Progressing") == ("False", "AgentSilent")
    assert said(silent, "Stalled") == ("True", "AgentSilent")
    assert "node n1" in silent.plans[0].status.message
    back = settled(replace(silent, nodes=(node("n1"), node("n2"))))
    assert said(back, "Ready") == ("True", "AsWished")
