"""Who is looked at, who is counted, who is called, and what is told: one decision at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from unit.migd_operator.drains import (
    FIT,
    GONE,
    counted,
    drained,
    drains_of,
    evicts,
    fleet_of,
    held,
    kept,
    victim,
)
from unit.migd_operator.fleets import NOW

from migd.kube.pods import PODS, Pod
from migd.kube.stored import Interner, Stored
from migd.plans.partitions import EvictionDoc, Partition
from migd.plans.plan import Disruption
from migd_operator.evicting import Ask, Evictions, concerned, evictions_of, verdict
from migd_operator.facts import Answer, PlanFacts


def decided(
    gpus: Iterable[Partition], *plans: PlanFacts, answers: Mapping[str, Answer] | None = None, at_s: float = 0.0
) -> Evictions:
    gpus = tuple(gpus)
    return evictions_of(drains_of(gpus, *plans), fleet_of(gpus, *plans, answers=answers, at_s=at_s))


def asked(found: Evictions) -> dict[str, bool]:
    """The pods that are asked for, and whether they are called."""
    return {ask.pod.uid: ask.call for ask in found.asks}


def reasons(found: Evictions, gpu: str = "gpu-n1-0") -> dict[str, str | None]:
    return {one.pod_uid: one.reason for one in found.told.get(gpu, ())}


def test_every_pod_of_a_node_is_looked_at_before_one_is_counted_or_called():
    first = decided([drained(victims="ab")], evicts())
    assert (asked(first), first.counts["uid-plan"]) == ({"a": False, "b": False}, None)
    second = decided([drained(victims="ab")], evicts(), answers={"a": FIT})
    assert (asked(second), second.counts["uid-plan"]) == ({"b": False}, None)
    third = decided([drained(victims="ab")], evicts(), answers={"a": FIT, "b": FIT})
    assert (asked(third), third.counts["uid-plan"]) == ({"a": True, "b": True}, counted(0, "a", "b"))


def test_where_one_of_a_node_may_not_go_nobody_of_it_is_called():
    gpus = [drained(victims="ab"), drained("n2", victims="c")]
    found = decided(gpus, evicts(), answers={"a": FIT, "b": kept(), "c": FIT})
    assert (asked(found), found.counts["uid-plan"]) == ({"c": True}, counted(0, "c"))
    assert reasons(found) == {"b": "DrainBlocked"}
    later = decided(gpus, evicts(), answers={"a": FIT, "b": kept(30.0), "c": GONE}, at_s=30.0)
    assert asked(later) == {"b": False}, "it is looked at again"


def test_a_pod_on_several_gpus_is_asked_for_and_counted_once_and_told_on_each():
    gpus = [drained(index=k, victims="a") for k in range(3)]
    found = decided(gpus, evicts(), answers={"a": FIT})
    assert (asked(found), found.counts["uid-plan"]) == ({"a": True}, counted(0, "a"))
    told = decided(gpus, evicts(counted=counted(0, "a")), answers={"a": held()})
    assert [reasons(told, f"gpu-n1-{k}") for k in range(3)] == [{"a": "DrainBlocked"}] * 3


def test_a_pod_of_two_plans_needs_a_place_in_both_and_the_gentler_grace():
    plans = [evicts("p", maxEvictions=1, gracePeriodSeconds=30), evicts("q", maxEvictions=0)]
    gpus = [drained(index=0, victims="a"), drained(index=1, victims="a")]
    found = decided(gpus, *plans, answers={"a": FIT})
    assert (asked(found), reasons(found)) == ({}, {"a": "EvictionBudget"})
    plans[1] = evicts("q", gracePeriodSeconds=90)
    found = decided(gpus, *plans, answers={"a": FIT})
    assert found.counts == {"uid-p": counted(0, "a"), "uid-q": counted(0, "a")}
    (ask,) = found.asks
    assert (ask.plans, ask.grace_s) == (("p", "q"), 90)
    own = decided(gpus, plans[0], evicts("q"), answers={"a": FIT}).asks[0]
    assert own.grace_s is None, "the pod's own is the gentlest that is known of"


def test_no_eviction_is_no_budget_at_all():
    found = decided([drained(victims="a")], evicts(maxEvictions=0), answers={"a": FIT})
    assert (asked(found), found.counts["uid-plan"], reasons(found)) == ({}, None, {"a": "EvictionBudget"})
    (told,) = found.told["gpu-n1-0"]
    assert "maxEvictions" in told.message
    assert told.code is None


def test_a_node_that_needs_more_than_is_left_evicts_nobody_and_others_that_need_less_do():
    gpus = [drained(victims="abc"), drained("n2", victims="d")]
    found = decided(gpus, evicts(maxEvictions=2, counted=counted(1)), answers=dict.fromkeys("abcd", FIT))
    assert (asked(found), found.counts["uid-plan"]) == ({"d": True}, counted(1, "d"))
    assert reasons(found) == dict.fromkeys("abc", "EvictionBudget")
    assert reasons(found, "gpu-n2-0") == {}


def test_what_is_only_promised_to_others_is_waited_for_and_not_refused():
    gpus = [drained(victims="ab"), drained("n2", victims="cd")]
    found = decided(gpus, evicts(maxEvictions=3), answers=dict.fromkeys("abcd", FIT))
    assert (asked(found), reasons(found, "gpu-n2-0")) == ({"a": True, "b": True}, {})
    after = {"a": GONE, "b": GONE, "c": FIT, "d": FIT}
    later = decided(gpus, evicts(maxEvictions=3, counted=counted(0, "a", "b")), answers=after)
    assert later.counts["uid-plan"] == counted(2)
    assert reasons(later, "gpu-n2-0") == {"c": "EvictionBudget", "d": "EvictionBudget"}


def test_a_pod_that_a_budget_holds_gives_its_place_to_one_that_needs_it_and_to_nobody_else():
    gpus = [drained(victims="a"), drained("n2", victims="b")]
    before = evicts(maxEvictions=1, counted=counted(0, "a"))
    alone = decided(gpus[:1], before, answers={"a": held()})
    assert (asked(alone), alone.counts["uid-plan"]) == ({}, counted(0, "a"))
    both = decided(gpus, before, answers={"a": held(), "b": FIT})
    assert (asked(both), both.counts["uid-plan"]) == ({"b": True}, counted(0, "b"))
    due = decided(gpus, before, answers={"a": held(5.0), "b": FIT}, at_s=5.0)
    assert (asked(due), due.counts["uid-plan"]) == ({"a": True}, counted(0, "a")), "its own turn comes first"
    unknown = decided(gpus, before, answers={"b": FIT})
    assert (asked(unknown), unknown.counts["uid-plan"]) == ({"a": False}, counted(0, "a")), "it may be evicted already"


def test_no_more_are_pending_than_the_definition_takes():
    uids = [f"u{k:03}" for k in range(256)]
    gpus = [drained(victims=uids), drained(index=1, victims=["v"])]
    found = decided(gpus, evicts(), answers=dict.fromkeys([*uids, "v"], FIT))
    counts = found.counts["uid-plan"]
    assert counts is not None
    assert len(counts.pending) == len(asked(found)) == 256
    rest = decided(gpus, evicts(counted=counts), answers={**dict.fromkeys(uids, GONE), "v": FIT})
    assert (asked(rest), rest.counts["uid-plan"]) == ({"v": True}, counted(256, "v"))


@pytest.mark.parametrize(
    ("answer", "there", "after"),
    [
        (GONE, True, counted(1)),
        (GONE, False, counted(1)),
        (replace(GONE, spent=False, code=None), True, None),  # it ended by itself
        (held(), True, counted(0, "a")),
        (held(), False, None),
        (FIT, True, counted(0, "a")),
        (FIT, False, None),
        (Answer(NOW, fit=True, code=503, reason="Waiting", spent=True, again_s=9.0), True, counted(0, "a")),
        (Answer(NOW, fit=True, code=503, reason="Waiting", spent=True, again_s=9.0), False, counted(1)),
        (None, True, counted(0, "a")),
        (None, False, counted(1)),
    ],
)
def test_a_pending_pod_counts_unless_it_is_known_that_nobody_evicted_it(answer: Any, there: bool, after: Any):
    gpus = [drained(victims="a" if there else "")]
    found = decided(gpus, evicts(counted=counted(0, "a")), answers={"a": answer} if answer else {})
    assert found.counts["uid-plan"] == after


def test_what_was_told_to_be_going_is_not_asked_for_again_and_counts_where_it_was_pending():
    told = [EvictionDoc(pod_uid="a", code=201, at=NOW)]
    found = decided([drained(victims="a", told=told)], evicts(counted=counted(0, "a")))
    assert (asked(found), found.counts["uid-plan"]) == ({}, counted(1))
    assert found.told["gpu-n1-0"] == tuple(told)
    again = decided([drained(victims="a", told=told)], evicts(counted=counted(1)))
    assert again.counts["uid-plan"] == counted(1)


def test_where_a_plan_does_not_drain_any_more_its_known_places_are_given_back():
    gpus = (drained(victims="ab"),)
    plan = evicts(counted=counted(1, "a", "b"))
    found = evictions_of((), fleet_of(gpus, plan, answers={"a": held()}))
    assert found.counts["uid-plan"] == counted(1, "b"), "of b nothing is known"
    assert found.asks == ()
    assert reasons(found) == {"a": "DrainBlocked"}


def test_another_generation_starts_anew_and_closes_the_one_before():
    gpus = [drained(victims="abc")]
    plan = evicts(generation=2, maxEvictions=3, counted=counted(3, "a", "b", "c", generation=1))
    found = decided(gpus, plan, answers={"a": held(), "b": GONE})
    assert found.closed == {"uid-plan": counted(5, generation=1)}
    assert found.counts["uid-plan"] is None
    assert asked(found) == {"c": False}


def test_an_answer_stays_as_it_was_told_until_there_is_another():
    told = EvictionDoc(pod_uid="a", code=429, reason="DrainBlocked", at=NOW.replace(hour=1))
    restarted = decided([drained(victims="a", told=[told])], evicts())
    assert restarted.told["gpu-n1-0"] == (told,)
    looked = decided([drained(victims="a", told=[told])], evicts(), answers={"a": FIT})
    assert looked.told["gpu-n1-0"] == (told,)
    same = held()
    first = decided([drained(victims="a")], evicts(), answers={"a": same}).told["gpu-n1-0"]
    later = decided([drained(victims="a", told=first)], evicts(), answers={"a": replace(same, at=NOW.replace(hour=23))})
    assert later.told["gpu-n1-0"] == first, "the same again is no news"
    no_victim = decided([drained(victims="b", told=[told])], evicts())
    assert no_victim.told["gpu-n1-0"] == ()


def test_a_budget_that_has_become_large_enough_is_not_told_to_be_used_up_any_more():
    told = EvictionDoc(pod_uid="a", reason="EvictionBudget", message="used up", at=NOW)
    found = decided([drained(victims="a", told=[told])], evicts(generation=2), answers={"a": FIT})
    assert (asked(found), found.told["gpu-n1-0"]) == ({"a": True}, ())


def test_a_pod_that_may_go_after_all_is_not_told_to_be_kept_any_more():
    told = EvictionDoc(pod_uid="a", reason="DrainBlocked", message="it asks for no GPU", at=NOW)
    assert decided([drained(victims="a", told=[told])], evicts(), answers={"a": FIT}).told["gpu-n1-0"] == ()
    assert decided([drained(victims="a", told=[told])], evicts()).told["gpu-n1-0"] == (told,)


def test_answers_are_of_use_for_victims_and_for_what_is_pending():
    gpus = [drained(victims="a"), drained("n2")]
    assert concerned(fleet_of(gpus, evicts(counted=counted(1, "b")))) == {"a", "b"}


def pod(uid: str = "u", node: str = "n1", *, deleting: bool = False, **more: Any) -> Stored[Pod]:
    limits = more.pop("limits", {"nvidia.com/mig-1g.10gb": "1"})
    labels = more.pop("labels", {})
    owners = [{"kind": more.pop("owner", "ReplicaSet"), "uid": "o", "controller": True}]
    document = {
        "metadata": {"name": "pod-u", "labels": labels, "ownerReferences": owners},
        "spec": {"nodeName": node, "containers": [{"name": "c", "resources": {"limits": limits}}], **more},
    }
    return Stored("pod-u", "team-a", uid, "1", 0, deleting, {}, {}, PODS.parse(document, Interner()))


PROTECT = {"matchLabels": {"tier": "gold"}}


@pytest.mark.parametrize(
    ("found", "going", "why"),
    [
        (None, True, "it is gone"),
        (pod("other"), True, "another pod has its name"),
        (pod(deleting=True), True, "ending already"),
        (pod(node="n2"), False, "not on node n1"),
        (pod(limits={"cpu": "1"}), False, "asks for no GPU"),
        (pod(owner="DaemonSet"), False, "DaemonSet"),
        (pod(labels={"tier": "gold"}), False, "protect"),
        (pod(volumes=[{"name": "v", "emptyDir": {}}]), False, "EmptyDir"),
        (pod(limits={}, resourceClaims=[{"name": "gpu"}]), False, ""),
        (pod(), False, ""),
    ],
)
def test_a_pod_is_only_called_where_it_is_the_one_that_was_meant_and_may_go(found: Any, going: bool, why: str):
    rules = (Disruption(policy="Evict"), Disruption(policy="Evict", protect=PROTECT))  # type: ignore[arg-type]
    ask = Ask(victim("u"), "n1", ("p", "q"), rules)
    said = verdict(ask, found)
    assert said[0] is going
    assert why in said[1]
    assert bool(said[1]) == bool(why)
