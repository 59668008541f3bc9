"""Drains on a real API server: who is evicted, by the audit log; real budgets; and what a drain in vain gives back.

Pods are a Deployment's, so that the real controllers make another one for each that goes, and count them for budgets.
Left out: agents and operators that die in the middle of it, which test_e2e_kills has.
"""

from __future__ import annotations

from typing import Any

from controlplane.clusters import Cluster
from controlplane.processes import until
from integration.acting import (
    BUDGETS,
    EVERY_S,
    HALF,
    PARTITIONS,
    SMALL,
    WHOLE,
    WITHIN_S,
    annotate,
    apply,
    budget,
    deploy,
    edit,
    eventually,
    partitions,
    plan,
    pod,
    pods_of,
    quiet,
    ready,
    row,
    run_pod,
    running,
    runs,
    status,
    taints,
)
from integration.crowds import at_once
from integration.deployed import OPERATOR
from integration.promises import Machines, Promise
from integration.witnesses import evicted, switched, writes

EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"
Json = dict[str, Any]
EVICT: Json = {"policy": "Evict", "timeout": "5m"}


def full(cluster: Cluster, name: str, node: str, replicas: int, grace_s: int = 1) -> None:
    """A node cut in seven, with so many pods on it, and told to be so."""
    apply(cluster, plan(name, [node], SMALL))
    ready(cluster, name)
    deploy(cluster, name, node, replicas, grace_s, mig_1g_10gb=1)
    eventually(lambda: len(running(cluster, name)), replicas)
    eventually(lambda: row(cluster, node)["IN-USE"], f"{replicas}/7")


def devices(cluster: Cluster, node: str) -> dict[str, str]:
    """By pod, the MIG device that it holds, as the kubelet has it."""
    held = cluster.nodes[node].kubelet.held()
    return {one.pod: device.split("::")[0] for one in held for device in one.device_ids}


def starts(cluster: Cluster, node: str) -> dict[str, int]:
    """By MIG device, the memory slice that it begins at."""
    gpus = cluster.nodes[node].machine().snapshot().gpus
    return {compute.uuid: one.start for gpu in gpus for one in gpu.instances for compute in one.compute}


def asked(cluster: Cluster, since: int, names: list[str]) -> list[Any]:
    """The evictions asked for; by nobody but the operator, each of one very pod, and none of them a delete."""
    requests = cluster.plane.audit.requests()[since:]
    found = evicted(requests, *names)
    assert {one.user for one in found} <= {OPERATOR}
    assert all(one.uid for one in found)
    assert [r.verb for r in writes(requests, *names) if r.resource == "pods"] == []
    return found


@at_once()
def test_only_pods_on_instances_that_go_are_evicted_and_the_others_do_not_notice(cluster: Cluster, node: str):
    full(cluster, "web", node, 5)
    deploy(cluster, "wide", node, 1, mig_3g_40gb=1)
    before = {one["metadata"]["name"]: one for one in running(cluster, "web")}
    held, at = devices(cluster, node), starts(cluster, node)
    places = [at[held[name]] for name in before]
    low, high = sum(start < 4 for start in places), sum(start >= 4 for start in places)
    least = min(low, high + max(0, low - 3))  # 3g.40gb lies at 0 or at 4, and three small ones stay in the other half
    since = len(cluster.plane.audit.requests())
    promise = Promise(cluster, "web", [node])
    generation = edit(cluster, "web", rules=[HALF], disruption=EVICT)
    assert promise.said(generation)["totals"]["evict"] == least
    ready(cluster, "web")
    promise.kept()
    quiet(cluster, node)
    found = asked(cluster, since, list(before))
    assert [one.code for one in found] == [201] * least
    gone = {one.pod for one in found}
    assert {one.pod: one.uid for one in found} == {name: before[name]["metadata"]["uid"] for name in gone}
    notes = [one["note"] for one in cluster.plane.admin.get(EVENTS).object()["items"] if one.get("action") == "Evict"]
    assert {name for name in before if any(f"default/{name} " in note for note in notes)} == gone
    now = devices(cluster, node)
    for name in before.keys() - gone:
        after = pod(cluster, name)
        assert after["metadata"]["uid"] == before[name]["metadata"]["uid"]
        assert after["status"]["containerStatuses"] == before[name]["status"]["containerStatuses"]
        assert now[name] == held[name]
    assert status(cluster, "web")["evictions"] == {"generation": generation, "evicted": least}
    eventually(lambda: (len(running(cluster, "web")), len(running(cluster, "wide"))), (3, 1))
    assert len(pods_of(cluster, "web")) == 5, "its controller has made others for those that went"
    assert all(not one["status"].get("victims") for one in partitions(cluster, node))


@at_once()
def test_a_budget_holds_a_drain_up_by_name_until_it_allows_it(cluster: Cluster, node: str):
    full(cluster, "guarded", node, 2)
    budget(cluster, "guard", "guarded", 2)
    names = [one["metadata"]["name"] for one in running(cluster, "guarded")]
    since = len(cluster.plane.audit.requests())
    edit(cluster, "guarded", rules=[WHOLE], disruption=EVICT)
    eventually(lambda: (row(cluster, node)["PHASE"], row(cluster, node)["REASON"]), ("Draining", "DrainBlocked"))
    told = partitions(cluster, node)[0]["status"]
    assert {(b["reason"], b["pod"]["name"], *b["podDisruptionBudgets"]) for b in told["blockers"]} == {
        ("DrainBlocked", name, "guard") for name in names
    }
    assert "guard" in told["message"]
    assert {one.code for one in asked(cluster, since, names)} == {429}
    budget(cluster, "guard", "guarded", 0)
    ready(cluster, "guarded")
    quiet(cluster, node)
    codes = [one.code for one in asked(cluster, since, names)]
    assert (codes.count(201), set(codes)) == (2, {201, 429})


@at_once()
def test_two_budgets_on_one_pod_are_both_named(cluster: Cluster, node: str):
    full(cluster, "twice", node, 1)
    budget(cluster, "twice-a", "twice", 0)
    budget(cluster, "twice-b", "twice", 0)
    (name,) = [one["metadata"]["name"] for one in running(cluster, "twice")]
    since = len(cluster.plane.audit.requests())
    edit(cluster, "twice", rules=[WHOLE], disruption=EVICT)
    eventually(lambda: row(cluster, node)["REASON"], "DrainBlocked")
    (blocker,) = partitions(cluster, node)[0]["status"]["blockers"]
    assert blocker["podDisruptionBudgets"] == ["twice-a", "twice-b"]
    assert {one.code for one in asked(cluster, since, [name])} == {500}
    cluster.plane.admin.delete(f"{BUDGETS}/twice-b").object()
    ready(cluster, "twice")
    assert asked(cluster, since, [name])[-1].code == 201


@at_once()
def test_the_timeout_gives_all_back_and_only_a_retry_evicts_again(cluster: Cluster, node: str):
    full(cluster, "late", node, 2)
    budget(cluster, "late", "late", 2)
    before = {one["metadata"]["name"]: one["metadata"]["uid"] for one in running(cluster, "late")}
    found = cluster.node(node)
    labels, offered = found["metadata"]["labels"], cluster.allocatable(node)
    machines, since = Machines.seen(cluster, [node]), len(cluster.plane.audit.requests())
    edit(cluster, "late", rules=[WHOLE], disruption={"policy": "Evict", "timeout": "10s"})
    eventually(lambda: (row(cluster, node)["PHASE"], row(cluster, node)["REASON"]), ("Blocked", "DrainTimeout"))
    quiet(cluster, node)
    assert Machines.seen(cluster, [node]) == machines
    assert cluster.allocatable(node) == offered
    state = {"migd.dev/state": "blocked"}
    eventually(lambda: cluster.node(node)["metadata"]["labels"], {**labels, **state})
    assert {one["metadata"]["name"]: one["metadata"]["uid"] for one in running(cluster, "late")} == before
    assert "late" in partitions(cluster, node)[0]["status"]["message"]
    budget(cluster, "late", "late", 0)
    looks = cluster.nodes[node].object.looks
    assert until(lambda: cluster.nodes[node].object.looks > looks + 3, WITHIN_S, EVERY_S)
    requests = cluster.plane.audit.requests()[since:]
    assert {one.code for one in evicted(requests, *before)} == {429}
    assert [one.closed for one in switched(requests, node)] == [True, False]
    annotate(cluster, f"{PARTITIONS}/{partitions(cluster, node)[0]['metadata']['name']}", retry="now")
    ready(cluster, "late")
    quiet(cluster, node)
    assert [one.code for one in asked(cluster, since, list(before))].count(201) == 2


@at_once(nodes=2)
def test_evictions_are_counted_over_nodes_and_end_with_what_the_plan_allows(cluster: Cluster, *nodes: str):
    apply(cluster, plan("counted", nodes, SMALL, rollout={"maxUnavailable": 2}))
    ready(cluster, "counted")
    apps = [f"counted-{node}" for node in nodes]
    for app, node in zip(apps, nodes, strict=True):
        deploy(cluster, app, node, 2, mig_1g_10gb=1)
    for app, node in zip(apps, nodes, strict=True):
        eventually(lambda app=app: len(running(cluster, app)), 2)
        eventually(lambda node=node: row(cluster, node)["IN-USE"], "2/7")
    names = [one["metadata"]["name"] for app in apps for one in running(cluster, app)]
    since = len(cluster.plane.audit.requests())
    generation = edit(cluster, "counted", rules=[WHOLE], disruption={**EVICT, "maxEvictions": 3})
    eventually(lambda: "EvictionBudget" in {row(cluster, node)["REASON"] for node in nodes}, True)
    found = asked(cluster, since, names)
    assert sum(one.code == 201 for one in found) <= 3
    eventually(lambda: sorted(taints(cluster, nodes[0]) + taints(cluster, nodes[1])), [])
    told = status(cluster, "counted")["evictions"]
    assert told == {"generation": generation, "evicted": sum(one.code == 201 for one in found)}
    edit(cluster, "counted", disruption={**EVICT, "maxEvictions": 4})
    ready(cluster, "counted")
    assert len({one.uid for one in asked(cluster, since, names) if one.code == 201}) == 4


@at_once()
def test_a_pod_that_nobody_would_make_again_keeps_the_node_open_until_the_plan_allows_it(cluster: Cluster, node: str):
    apply(cluster, plan("bare", [node], SMALL))
    ready(cluster, "bare")
    run_pod(cluster, "alone", node, mig_1g_10gb=1)
    runs(cluster, "alone")
    eventually(lambda: row(cluster, node)["IN-USE"], "1/7")
    since = len(cluster.plane.audit.requests())
    edit(cluster, "bare", rules=[WHOLE], disruption=EVICT)
    eventually(lambda: (row(cluster, node)["PHASE"], row(cluster, node)["REASON"]), ("Blocked", "DrainBlocked"))
    assert "allow: [Unmanaged]" in partitions(cluster, node)[0]["status"]["message"]
    assert switched(cluster.plane.audit.requests()[since:], node) == []
    edit(cluster, "bare", disruption={**EVICT, "allow": ["Unmanaged"]})
    ready(cluster, "bare")
    assert [one.code for one in asked(cluster, since, ["alone"])] == [201]
