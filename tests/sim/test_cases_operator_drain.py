"""Situations of operators from the field (§8), in the middle of a drain: watches, refusals, replicas, calls that hang.

Each names its case; without evictions they are in test_cases_cluster.
"""

from __future__ import annotations

import asyncio

import pytest
from fleet import Fleet
from fleet_stories import (
    Scripted,
    budget,
    clean,
    drain,
    drained,
    evicted,
    layouts,
    node,
    play,
    reason,
    run,
    running,
    the_pod,
    uids,
)

from migd.sim.cluster.faults import Trouble, WatchTrouble
from migd.sim.nodes.world import Workload

HALVES_CUT = {0: ["2g.12gb", "2g.12gb"]}
SMALL = {"profile": "1g.6gb", "count": 4}
HALF = {"nvidia.com/mig-2g.12gb": 1}
NEVER = (1e6, 1e6)


def test_b91_victims_behind_watches_that_died_in_silence_are_evicted_within_minutes():
    faults = Scripted()

    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("w", HALF))
        faults.watches = [WatchTrouble.SILENT] * 12
        fleet.apply(drain("p", SMALL))
        await fleet.ready("p", 900)
        assert len(evicted(fleet)) == 1

    play(story, node(layout=HALVES_CUT), faults=faults)


@pytest.mark.parametrize(
    "trouble", [Trouble.UNWELL, Trouble.TOO_MANY, Trouble.LOST_ANSWER, Trouble.REFUSED, Trouble.HANGS]
)
def test_b93_an_eviction_call_that_is_not_answered_well_is_counted_once_and_made_until_it_is(trouble: Trouble):
    faults = Scripted()
    times = []

    def strikes(who: str, where: str) -> bool:
        if who == "migd-operator" and where.startswith("before POST") and where.endswith("/eviction"):
            times.append(where)
            faults.requests = [trouble] if len(times) == 1 else []
        return False

    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("w", HALF, pause_s=NEVER))
        name = the_pod(fleet, "w")["metadata"]["name"]
        fleet.apply(drain("p", SMALL, maxEvictions=1))
        await fleet.ready("p", 900)
        assert evicted(fleet) == [name]
        assert fleet.plan("p")["status"]["evictions"] == {"generation": 1, "evicted": 1}
        assert (len(times) > 1) == (trouble is not Trouble.LOST_ANSWER)

    play(story, node(layout=HALVES_CUT), faults=faults, strikes=strikes)


def test_b93_a_burst_of_refusals_in_the_middle_of_a_drain_evicts_nobody_twice():
    faults = Scripted()

    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("w", HALF, pods=2))
        fleet.apply(drain("p", SMALL))
        await fleet.until(lambda: reason(fleet)[0] == "Draining")
        faults.requests = [Trouble.UNWELL, *[Trouble.TOO_MANY] * 10]
        await fleet.ready("p")
        assert not faults.requests
        assert sorted(evicted(fleet)) == ["w-1", "w-2"]
        assert fleet.plan("p")["status"]["evictions"] == {"generation": 1, "evicted": 2}

    play(story, node(layout=HALVES_CUT), faults=faults)


def test_b95_a_plan_that_is_deleted_during_its_drain_while_the_operator_is_away_frees_its_node_and_no_pod_goes():
    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("w", HALF))
        fleet.cluster.apply(budget("keep-one", "w"))
        pod = the_pod(fleet, "w")
        fleet.apply(drain("p", SMALL))
        await fleet.until(lambda: drained(fleet)[1] == "DrainBlocked")
        fleet.operator.kill(again=False)
        fleet.cluster.delete("gpupartitionplans", "p")
        assert fleet.plan("p") == {}, "no finalizer of ours keeps it"
        fleet.cluster.delete("poddisruptionbudgets", "keep-one", "default")
        await asyncio.sleep(30)
        fleet.operator.start()
        await fleet.until(lambda: clean(fleet))
        await asyncio.sleep(300)
        assert uids(running(fleet, "w")) == uids([pod])
        assert evicted(fleet) == []
        assert layouts(fleet) == [{"2g.12gb": 2}]

    play(story, node(layout=HALVES_CUT))


@pytest.mark.parametrize("at_s", [2.0, 4.0, 8.0])
def test_b97_two_operators_in_the_middle_of_drains_evict_each_pod_once(at_s: float):
    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("w", HALF, pods=4, pause_s=NEVER))
        fleet.another_operator().start()
        fleet.apply(drain("p", SMALL, more={"rollout": {"maxUnavailable": 2}}))
        await asyncio.sleep(at_s)
        fleet.operator.kill(again=False)
        await fleet.ready("p")
        assert sorted(evicted(fleet)) == ["w-1", "w-2", "w-3", "w-4"]
        assert fleet.plan("p")["status"]["evictions"] == {"generation": 1, "evicted": 4}

    play(story, node("node-a", layout=HALVES_CUT), node("node-b", layout=HALVES_CUT))


def test_b100_a_call_that_never_returns_holds_up_its_own_node_which_says_so_and_no_other():
    """The eviction call for node-a's pod hangs whenever it is made, as behind a webhook that is gone."""
    faults = Scripted()
    hangs = []

    def strikes(who: str, where: str) -> bool:
        if who == "migd-operator" and where.startswith("before POST") and where.endswith("/eviction"):
            faults.requests = [Trouble.HANGS] if where.split("/")[-2] in hangs else []
        return False

    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("w", HALF, pods=2, spec={"terminationGracePeriodSeconds": 5}))
        on_a = {p["metadata"]["name"] for p in fleet.cluster.pods("node-a", app="w")}
        hangs.extend(on_a or {"none"})
        rollout = {"rollout": {"maxUnavailable": 2, "pauseOnFailure": False}}
        fleet.apply(drain("p", SMALL, timeout="3m", more=rollout))
        await fleet.until(lambda: {p.status.phase for p in fleet.partitions("node-b")} == {"Ready"}, 600)
        await fleet.until(lambda: reason(fleet, "node-a") == ("Blocked", "DrainTimeout"), 600)
        assert set(evicted(fleet)).isdisjoint(on_a)
        assert "no answer within" in drained(fleet, "node-a")[2]
        await fleet.until(lambda: clean(fleet))
        assert layouts(fleet, "node-a") == [{"2g.12gb": 1}]

    cut = {0: ["2g.12gb"]}
    play(story, node("node-a", layout=cut), node("node-b", layout=cut), faults=faults, strikes=strikes)


def test_b104_we_put_a_finalizer_on_nothing_and_take_away_no_others():
    """There is none of ours to take away by its place in a list, so the race cannot be."""

    async def story(fleet: Fleet) -> None:
        await run(fleet, Workload("w", HALF))
        theirs = {"metadata": {"finalizers": ["example.com/a", "example.com/b"]}}
        fleet.apply(drain("p", SMALL))
        fleet.cluster.admin.merge("gpupartitionplans", "p", theirs)
        await fleet.ready("p")
        kinds = ("gpupartitionplans", "gpupartitions", "nodes", "pods", "leases")
        found = {
            f for kind in kinds for one in fleet.cluster.all(kind) for f in one["metadata"].get("finalizers") or ()
        }
        assert found == {"example.com/a", "example.com/b"}
        fleet.cluster.delete("gpupartitionplans", "p")
        await asyncio.sleep(300)
        metadata = fleet.plan("p")["metadata"]
        assert metadata["finalizers"] == ["example.com/a", "example.com/b"], "it stays for as long as they want it"
        assert "deletionTimestamp" in metadata
        one_less = {"metadata": {"finalizers": ["example.com/b"]}}
        fleet.cluster.admin.merge("gpupartitionplans", "p", one_less)
        await asyncio.sleep(60)
        fleet.cluster.admin.merge("gpupartitionplans", "p", {"metadata": {"finalizers": None}})
        await fleet.until(lambda: fleet.plan("p") == {})
        await fleet.until(lambda: {p.status.phase for p in fleet.partitions()} == {"Idle"})

    play(story, node(layout=HALVES_CUT))
