"""A node that drains, story by story, in the small world: who is asked to go, who never is, what a failure leaves."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from toy_node import DEPLOY, Crash, ToyNode, made

from migd.agent.node.bounds import CLOSED_MAX_S
from migd.agent.node.turning import RETRY
from migd.agent.node.victims import CAME_BACK
from migd.agent.records import Cause
from migd.mig.geometry import Layout
from migd.mig.operations import CreateGpuInstance

EVICT: dict[str, Any] = {"disruption": {"policy": "Evict", "timeout": "10m"}}
TIMEOUT_S = 600.0
ONE, TWO, FOUR = "mig-1g.6gb", "mig-2g.12gb", "mig-4g.24gb"


def ready(gpus: int = 1, wish: list[str] | None = None, install: str = "Helm") -> ToyNode:
    """A node whose GPUs are cut as wished, and idle."""
    node = ToyNode([None] * gpus, install)
    node.wish("aaaaaaaa", dict.fromkeys(range(gpus), wish or ["4x1g.6gb"]))
    assert node.run(600)
    assert node.phases() == ["Ready"] * gpus
    node.effects.clear()
    node.longest_closed = 0.0
    node.operations.clear()
    return node


def edit(node: ToyNode, turn: str, wishes: dict[int, list[str] | None], generation: int = 2, **more: Any) -> None:
    plan = {"plan": {"name": "p", "uid": "uid-p", "generation": generation}}
    node.wish(turn, wishes, **EVICT | plan | more)


def status(node: ToyNode, gpu: int = 0) -> Any:
    return node.partitions[f"gpu-{gpu}"].value.status


def condition(node: ToyNode, kind: str) -> Any:
    return next(c for c in status(node).conditions if c.type == kind)


def until(node: ToyNode, holds: Any, within_s: float = 2000.0) -> None:
    end_s = node.now_s + within_s
    while not holds():
        assert node.now_s < end_s, "it never came to be"
        node.step() or node.pass_time(5.0, wake=True)


# --- who goes ---


def test_only_pods_on_instances_that_go_are_asked_and_the_kept_one_runs_on() -> None:
    node = ready()
    for at in range(4):
        node.run_pod(f"p{at}", ONE, 0, f"1g@{at}")
    kept = dict(node.gpus[0].made)
    edit(node, "bbbbbbbb", {0: ["1x2g.12gb", "2x1g.6gb"]})
    assert node.run(900)
    assert node.phases() == ["Ready"]
    assert len(node.evicted) == 2
    assert {"p0", "p1", "p2", "p3"} - set(node.evicted) == {name for name in node.pods if name.startswith("p")}
    stays = {i for i, serial in node.gpus[0].made.items() if kept.get(i) == serial}
    assert len(stays) == 2
    assert node.wrong == []
    assert node.untouched()
    assert status(node).victims == ()
    assert status(node).last_transition.steps[2].name == "Drain"


def test_where_a_layout_leaves_all_pods_alone_nobody_is_asked() -> None:
    node = ready(wish=["2x1g.6gb"])
    node.run_pod("p", ONE, 0, str(next(iter(node.gpus[0].made))).replace(".6gb", ""))
    edit(node, "bbbbbbbb", {0: ["1x2g.12gb", "1x1g.6gb"]})
    assert node.run(900)
    assert node.phases() == ["Ready"]
    assert node.evicted == []


def test_of_several_gpus_a_pod_that_holds_two_is_cheaper_than_two_pods() -> None:
    """One instance of each GPU goes; the two that one pod holds."""
    node = ready(2)
    for gpu in (0, 1):
        for at in (0, 1, 2):
            node.run_pod(f"g{gpu}p{at}", ONE, gpu, f"1g@{at}")
    both = node.run_pod("both", ONE, 0, "1g@3")
    twin = node.run_pod("twin", ONE, 1, "1g@3")
    twin.name = "both"  # the same pod to the kubelet: one of two devices
    del node.pods["twin"]
    node.pods["both/1"] = twin
    twin.uid = both.uid
    edit(node, "bbbbbbbb", {0: ["3x1g.6gb"], 1: ["3x1g.6gb"]})
    until(node, lambda: status(node).victims)
    assert [v.uid for gpu in (0, 1) for v in status(node, gpu).victims] == ["both", "both"]


def test_nobody_is_asked_while_another_gpu_of_the_node_could_not_go_on() -> None:
    node = ready(2)
    node.run_pod("p", ONE, 0, "1g@0")
    node.run_pod("safe", ONE, 1, "1g@0", owner="")
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"], 1: ["2x2g.12gb"]})
    node.run(1200)
    assert node.evicted == []
    assert not node.closed
    assert set(node.reasons()) == {"DrainBlocked"}
    assert "safe" in status(node).message
    node.finish("safe")
    node.run(1200)
    assert node.evicted == ["p"]
    assert node.phases() == ["Ready", "Ready"]


@pytest.mark.parametrize(
    ("pod", "disruption", "says"),
    [
        ({"owner": ""}, {}, "Unmanaged"),
        ({"owner": "DaemonSet"}, {}, "DaemonSet"),
        ({"empty_dir": True}, {}, "EmptyDir"),
        ({"resource": ""}, {}, "without asking"),
        ({"labels": {"keep": "yes"}}, {"protect": {"matchLabels": {"keep": "yes"}}}, "protect"),
    ],
)
def test_who_may_not_go_is_waited_for_with_the_node_open(pod: dict[str, Any], disruption: Any, says: str) -> None:
    node = ready()
    node.run_pod("p", ONE, 0, "1g@0", **{key: value for key, value in pod.items() if key != "resource"})
    node.pods["p"].resource = pod.get("resource", node.pods["p"].resource)
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]}, disruption={**EVICT["disruption"], **disruption})
    node.run(3600)
    assert not node.effects or not node.closed
    assert node.longest_closed < 10
    assert (node.phases(), node.reasons()) == (["Blocked"], ["DrainBlocked"])
    assert says in status(node).message
    assert condition(node, "Drained").reason == "DrainBlocked"
    assert status(node).blockers[0].pod.name == "p"
    assert node.evicted == []
    node.finish("p")
    node.run(900)
    assert node.phases() == ["Ready"]


@pytest.mark.parametrize("allow", [["Unmanaged"], ["EmptyDir", "Unmanaged"]])
def test_what_the_plan_allows_goes(allow: list[str]) -> None:
    node = ready()
    node.run_pod("p", ONE, 0, "1g@0", owner="", empty_dir="EmptyDir" in allow)
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]}, disruption={**EVICT["disruption"], "allow": allow})
    assert node.run(900)
    assert (node.evicted, node.phases()) == (["p"], ["Ready"])


def test_a_process_of_no_pod_is_waited_for_with_the_node_open() -> None:
    node = ready()
    node.run_pod("p", ONE, 0, "1g@0")
    node.gpus[0].used.add(next(iter(made("1g@1"))))
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]})
    node.run(1200)
    assert node.evicted == []
    assert node.longest_closed < 10
    assert node.reasons() == ["NeverIdle"]
    assert any(b.pid == 4242 for b in status(node).blockers)


def test_a_pod_that_ends_already_is_waited_for_and_not_asked() -> None:
    node = ready()
    pod = node.run_pod("p", ONE, 0, "1g@0", grace_s=40.0)
    node.delete(pod)
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]})
    until(node, lambda: status(node).phase == "Draining" and "ending: ml/p" in status(node).message)
    assert node.run(900)
    assert (node.evicted, node.phases()) == ([], ["Ready"])


def test_a_mode_change_takes_every_pod_of_the_gpu() -> None:
    node = ready()
    node.run_pod("a", ONE, 0, "1g@0")
    node.run_pod("b", ONE, 0, "1g@3")
    edit(node, "bbbbbbbb", {0: None})
    assert node.run(900)
    assert sorted(node.evicted) == ["a", "b"]
    assert node.phases() == ["Ready"]
    node.run_pod("whole", "gpu", 0)
    edit(node, "cccccccc", {0: ["4x1g.6gb"]}, generation=3)
    assert node.run(900)
    assert sorted(node.evicted) == ["a", "b", "whole"]
    assert node.layouts()[0] == Layout(True, made("1g@0 1g@1 1g@2 1g@3"))


# --- what holds it up ---


def blocked_by_a_budget(grace_s: float | None = 2.0) -> ToyNode:
    node = ready()
    node.run_pod("p", ONE, 0, "1g@0", budget="keep-two", grace_s=grace_s)
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]})
    until(node, lambda: status(node).reason == "DrainBlocked")
    return node


def test_a_budget_that_does_not_allow_it_is_named_and_then_waited_for() -> None:
    node = blocked_by_a_budget()
    assert status(node).phase == "Draining"
    assert (condition(node, "Drained").status, condition(node, "Drained").reason) == ("False", "DrainBlocked")
    blocker = status(node).blockers[0]
    assert (blocker.reason, blocker.pod.name, blocker.pod_disruption_budgets) == ("DrainBlocked", "p", ("keep-two",))
    assert "keep-two" in status(node).message
    node.pods["p"].budget = ""
    node.after(5.0, node.operate)
    assert node.run(900)
    assert (node.evicted, node.phases()) == (["p"], ["Ready"])


def test_at_the_timeout_all_is_given_back_and_nobody_is_asked_again_until_somebody_says_so() -> None:
    node = blocked_by_a_budget()
    before = {k: v for k, v in node.labels.items() if not k.startswith("migd.dev/")}
    until(node, lambda: status(node).phase == "Blocked")
    assert node.untouched()
    assert {k: v for k, v in node.labels.items() if not k.startswith("migd.dev/")} == before
    assert TIMEOUT_S <= node.longest_closed < TIMEOUT_S + 60
    assert node.reasons() == ["DrainTimeout"]
    assert all(word in status(node).message for word in ("10m", "ml/p", "keep-two", "migd.dev/retry"))
    assert node.operations == []
    node.pods["p"].budget = ""
    node.run(20_000)
    assert (node.evicted, node.closed) == ([], False)
    node.annotate(0, RETRY)
    node.run(900)
    assert (node.evicted, node.phases()) == (["p"], ["Ready"])


def test_an_edit_of_the_plan_makes_a_new_drain() -> None:
    node = blocked_by_a_budget()
    until(node, lambda: status(node).phase == "Blocked")
    node.pods["p"].budget = ""
    edit(node, "cccccccc", {0: ["2x2g.12gb"]}, generation=3)
    node.run(900)
    assert (node.evicted, node.phases()) == (["p"], ["Ready"])


def half_drained() -> ToyNode:
    """A node of which one pod has gone, and the other is held by a budget."""
    node = ready()
    node.run_pod("held", ONE, 0, "1g@0", budget="keep-two")
    node.run_pod("gone", ONE, 0, "1g@2")
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]})
    until(node, lambda: node.evicted == ["gone"] and not node.pods.get("gone"))
    node.step()
    return node


def test_an_edit_in_the_middle_of_a_drain_makes_a_new_one() -> None:
    node = half_drained()
    edit(node, "cccccccc", {0: ["1x4g.24gb"]}, generation=3)
    node.pods["held"].budget = ""
    node.run(900)
    assert (node.evicted, node.phases()) == (["gone", "held"], ["Ready"])


def test_a_turn_that_is_taken_back_in_the_middle_of_a_drain_and_given_again_makes_none() -> None:
    node = half_drained()
    node.withdraw()
    node.pods["held"].budget = ""
    node.run(60)
    edit(node, "cccccccc", {0: ["2x2g.12gb"]})
    node.run(5000)
    assert (node.evicted, node.reasons(), node.closed) == (["gone"], ["EvictionBudget"], False)


def test_another_turn_of_the_same_generation_makes_none() -> None:
    node = blocked_by_a_budget()
    until(node, lambda: status(node).phase == "Blocked")
    node.pods["p"].budget = ""
    node.withdraw()
    node.run(60)
    edit(node, "cccccccc", {0: ["2x2g.12gb"]})
    node.run(5000)
    assert (node.evicted, node.reasons()) == ([], ["DrainTimeout"])


def test_what_leaves_by_itself_after_a_drain_in_vain_lets_the_change_go_on() -> None:
    node = blocked_by_a_budget()
    until(node, lambda: status(node).phase == "Blocked")
    node.finish("p")
    node.run(2000)
    assert (node.evicted, node.phases()) == ([], ["Ready"])


def test_a_pod_that_does_not_end_is_named_at_the_timeout() -> None:
    node = ready()
    node.run_pod("stuck", ONE, 0, "1g@0", grace_s=None)
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]})
    until(node, lambda: status(node).phase == "Blocked")
    assert (node.evicted, node.reasons()) == (["stuck"], ["DrainTimeout"])
    assert "ml/stuck" in status(node).message
    assert node.operations == []
    assert node.untouched()


def test_evictions_that_are_used_up_end_it_at_once() -> None:
    node = ready()
    node.run_pod("a", ONE, 0, "1g@0")
    node.run_pod("b", ONE, 0, "1g@1")
    node.evictions_left = 1
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]})
    until(node, lambda: status(node).phase == "Blocked")
    assert node.longest_closed < 60
    assert node.reasons() == ["EvictionBudget"]
    assert "maxEvictions" in status(node).message
    assert node.untouched()
    node.run(20_000)
    assert len(node.evicted) == 1


def test_an_operator_that_is_away_costs_the_node_its_timeout_and_no_more() -> None:
    node = ready()
    node.run_pod("p", ONE, 0, "1g@0")
    node.operate = lambda: None  # type: ignore[method-assign]  # nobody answers
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]})
    until(node, lambda: status(node).phase == "Blocked")
    assert (node.evicted, node.reasons()) == ([], ["DrainTimeout"])
    assert node.untouched()


# --- who comes back, and who slips in ---


def test_a_pod_that_tolerates_everything_and_comes_back_is_not_evicted_again() -> None:
    node = ready()
    node.run_pod("p", ONE, 0, "1g@0", tolerates=True, again=True)
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]})
    until(node, lambda: status(node).phase == "Blocked")
    assert node.evicted == ["p"]
    assert node.longest_closed < CLOSED_MAX_S + 120
    assert CAME_BACK in status(node).message
    assert node.operations == []
    node.run(20_000)
    assert node.evicted == ["p"]
    assert node.untouched()


def test_a_controllers_new_pod_waits_elsewhere_and_is_not_evicted() -> None:
    node = ready()
    node.run_pod("p", ONE, 0, "1g@0", again=True)
    edit(node, "bbbbbbbb", {0: ["1x2g.12gb", "2x1g.6gb"]})
    node.run(900)
    assert (node.phases(), node.evicted) == (["Ready"], [])
    edit(node, "cccccccc", {0: ["2x2g.12gb"]}, generation=3)
    node.run(900)
    assert (node.phases(), node.evicted) == (["Ready"], ["p"])
    assert not node.pods["p+"].bound
    assert node.wrong == []


@pytest.mark.parametrize("stage", ["Settling", "Pausing"])
def test_a_pod_that_slips_in_is_never_killed(stage: str) -> None:
    """Bound before the taint, and admitted late: before the clients pause it is asked to go too, after that not."""
    node = ready()
    node.run_pod("p", ONE, 0, "1g@0")
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]})
    until(node, lambda: node.record.node is not None and node.record.node.stage == stage)
    node.run_pod("late", ONE, 0, "1g@1")
    node.run(30_000)
    assert node.wrong == []
    assert node.untouched()
    if stage == "Settling":
        assert (node.evicted, node.phases()) == (["p", "late"], ["Ready"])
    else:
        assert (node.evicted, node.reasons()) == (["p"], ["EvictionBudget"])
        assert "late" in node.pods


def test_a_job_that_comes_to_an_instance_that_goes_is_waited_for_two_minutes_at_most() -> None:
    node = ready()
    node.run_pod("p", ONE, 0, "1g@0", grace_s=20.0)
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]})
    until(node, lambda: node.evicted)
    node.run_pod("safe", ONE, 0, "1g@1", owner="")
    until(node, lambda: status(node).phase == "Blocked")
    assert node.longest_closed < CLOSED_MAX_S + 60
    assert node.untouched()
    assert "safe" in status(node).message or node.reasons() == ["EvictionBudget"]


# --- after a failure ---


def test_a_failure_after_a_drain_evicts_nobody_again_by_itself() -> None:
    node = ready()
    node.run_pod("p", ONE, 0, "1g@0")
    node.gpus[0].refuses[CreateGpuInstance] = Cause("NVMLError", "refused")
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]})
    until(node, lambda: node.phases() == ["RollingBack"])
    node.gpus[0].refuses.clear()
    until(node, lambda: node.phases() == ["Failed"])
    assert node.layouts()[0] == Layout(True, made("1g@0 1g@1 1g@2 1g@3"))
    node.run_pod("q", ONE, 0, "1g@2")
    node.run(20_000)
    assert (node.phases(), node.reasons()) == (["Blocked"], ["EvictionBudget"])
    assert "it could not go on: refused" in status(node).message
    assert node.evicted == ["p"]
    node.annotate(0, RETRY)
    node.run(900)
    assert (node.evicted, node.phases()) == (["p", "q"], ["Ready"])


def test_success_makes_the_next_drain_of_the_same_generation_possible() -> None:
    node = ready()
    node.run_pod("p", ONE, 0, "1g@0")
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"]})
    node.run(900)
    assert node.record.node is not None
    assert (node.phases(), node.record.node.spent) == (["Ready"], ())


# --- crashes ---


@pytest.mark.parametrize("install", ["Operator", "Helm"])
def test_an_agent_that_dies_anywhere_in_a_drain_asks_nobody_twice_and_comes_to_its_end(install: str, soak: int) -> None:
    for seed in range(60 * soak):
        random = Random(f"{install} {seed}")
        node = ready(2, install=install)
        pods = {}
        for gpu in (0, 1):
            for at in range(4):
                if random.random() < 0.6:
                    name = f"g{gpu}p{at}"
                    pods[name] = node.run_pod(name, ONE, gpu, f"1g@{at}", again=random.random() < 0.5,
                                              grace_s=random.choice((0.5, 5.0, 30.0)))  # fmt: skip
        wish = random.choice((["2x2g.12gb"], ["1x2g.12gb", "2x1g.6gb"], ["1x4g.24gb"], None))
        edit(node, "bbbbbbbb", {0: wish, 1: wish})
        end_s = node.now_s + 3000

        def crash(where: str, random: Random = random) -> None:
            if random.random() < 0.02:
                raise Crash(where)

        while node.now_s < end_s:
            try:
                if node.run(end_s - node.now_s, crash):
                    break
            except Crash:
                node.pass_time(random.choice((0.0, 1.0, 20.0)))
                node.restart()
        where = f"{install}, seed {seed}"
        assert node.wrong == [], where
        assert node.untouched(), where
        gave_up = any("was accepted 3 times" in status(node, gpu).message for gpu in (0, 1))  # it died there each time
        assert node.phases() == ["Ready", "Ready"] or gave_up, (where, node.reasons(), status(node).message)
        assert len(node.evicted) == len(set(node.evicted)), where
        halves = [[sum(f"g{gpu}p{at}" in pods for at in half) for half in ((0, 1), (2, 3))] for gpu in (0, 1)]
        mixed = wish is not None and len(wish) == 2  # one half goes, the other stays
        least = sum(min(two) if mixed else sum(two) for two in halves)
        assert len(node.evicted) == least, where
        assert not any(label for label in node.labels if label.startswith(DEPLOY) and node.labels[label] != "true")


def test_an_edit_in_the_middle_of_a_drain_leaves_no_success_that_never_was() -> None:
    """On the first GPU nothing is to be done any more; that the change there was backed out is told late."""
    node = ready(2)
    for gpu in (0, 1):
        node.run_pod(f"p{gpu}", ONE, gpu, "1g@0", grace_s=30.0)
    edit(node, "bbbbbbbb", {0: ["2x2g.12gb"], 1: ["2x2g.12gb"]})
    until(node, lambda: node.evicted)
    edit(node, "cccccccc", {0: ["4x1g.6gb"], 1: ["2x2g.12gb"]}, generation=3)
    tell, node._tell = node._tell, lambda now: None  # type: ignore[method-assign]  # the API server is away
    until(node, lambda: node.record.node is not None and node.record.node.turn == "cccccccc")
    node._tell = tell  # type: ignore[method-assign]
    node.run(900)
    assert node.phases() == ["Ready", "Ready"]
    assert [status(node, gpu).last_transition.result for gpu in (0, 1)] == ["BackedOut", "Succeeded"]
