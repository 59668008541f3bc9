"""Pods that come while a node is closed, nodes that are never idle, and admins who cordon, on a real API server.

A pod bound to a node whose device plugin is being stopped, and not admitted yet, would end in UnexpectedAdmissionError.
It is provoked at every closing of many nodes: pods are bound to the node once its taint is there, as the scheduler does
for a moment, and the kubelets take up to seven seconds to admit them. Left out: volumes that bind later still.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from controlplane.audit import Request
from controlplane.clusters import Cluster
from integration.acting import (
    HALF,
    PODS,
    SMALL,
    TAINT,
    WHOLE,
    apply,
    closed,
    condition,
    edit,
    end_pod,
    eventually,
    instances,
    partitions,
    phases,
    plan,
    quiet,
    ready,
    run_pod,
    runs,
    taints,
)
from integration.crowds import at_once
from integration.promises import Promise
from integration.witnesses import switched

from migd.sim.faults import Fault

RACERS: Final = 25
ROUNDS: Final = 8
TRIES: Final = 4
"""So often rounds are added where the harness was too slow for a race in each of them."""
ADMIT_AFTER_S: Final = (0.0, 6.0, 0.4, 5.5, 1.5, 7.0)
"""How long a kubelet takes to admit a pod, round by round: also longer than the agent lets things settle."""
SETTLE_S: Final = 5.0
FEW: Final = instances(_1g_10gb=3)
MORE: Final = instances(_1g_10gb=3, _2g_20gb=1)
"""The pods' instances stay: nothing keeps a change from beginning but what is tried here."""
LATE_S: Final = 3.0
"""A pod that our own harness bound later than this after the taint is no scheduler's any more, and not counted."""


@dataclass(frozen=True)
class Thrown:
    """A pod thrown at a node in one round. bound: to the node by hand once it was closed, or left to the scheduler.

    end: how it ended, its reason with it; "" where it found no node within its round.
    """

    node: str
    round: int
    name: str
    bound: bool
    end: str


class Closings:
    """Tells at once when a node is closed: one watch for all nodes."""

    def __init__(self, cluster: Cluster, nodes: Sequence[str]) -> None:
        self._closed = {name: threading.Event() for name in nodes}
        self._watching = cluster.plane.admin.watch("/api/v1/nodes", 600)
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, node: str) -> None:
        """Until the node is closed."""
        assert self._closed[node].wait(120.0), f"{node} was not closed"

    def close(self) -> None:
        """Look no longer."""
        self._watching.close()

    def _run(self) -> None:
        for event in self._watching:
            found: dict[str, Any] = event["object"]
            told = self._closed.get(found["metadata"]["name"])
            if told is not None:
                keys = [one["key"] for one in found["spec"].get("taints") or ()]
                (told.set if TAINT in keys else told.clear)()


def race(cluster: Cluster, closings: Closings, node: str, rounds: range) -> list[Thrown]:
    """Rounds of one node: a change, one pod for the scheduler before it, and two bound to it once it is closed."""
    thrown: list[Thrown] = []
    if not rounds.start:
        apply(cluster, plan(node, [node], FEW))
        ready(cluster, node)
    for n in rounds:
        cluster.nodes[node].kubelet.pods.admit_after_s = ADMIT_AFTER_S[(n + int(node[1:])) % len(ADMIT_AFTER_S)]
        promise = Promise(cluster, node, [node])
        generation = edit(cluster, node, rules=[MORE if n % 2 == 0 else FEW])
        names = [f"{node}-{n}-{word}" for word in ("free", "bound", "too")]
        throw(cluster, names[0], node, bound=False)
        closings.wait(node)
        for name in names[1:]:
            throw(cluster, name, node, bound=True)
        promise.said(generation)
        ready(cluster, node)
        promise.kept()
        quiet(cluster, node)
        thrown += [Thrown(node, n, name, name != names[0], end_of(cluster, name)) for name in names]
    return thrown


def throw(cluster: Cluster, name: str, node: str, bound: bool) -> None:
    """A pod that works for half a second on one instance. bound: nobody is asked where it may run."""
    where: dict[str, Any] = {"nodeName": node} if bound else {"nodeSelector": {"kubernetes.io/hostname": node}}
    container = {"name": "main", "image": "train", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
    notes = {"sim.migd.dev/lasts-s": "0.5"}
    spec = {**where, "restartPolicy": "Never", "containers": [container]}
    cluster.plane.admin.create(PODS, {"metadata": {"name": name, "annotations": notes}, "spec": spec}).object()


def end_of(cluster: Cluster, name: str) -> str:
    """How a pod ended; it is deleted then."""
    path = f"{PODS}/{name}"

    def over() -> bool:
        found = cluster.plane.admin.get(path).object()
        return "nodeName" not in found["spec"] or found["status"]["phase"] in ("Succeeded", "Failed")

    eventually(over, True)
    status = cluster.plane.admin.get(path).object()["status"]
    cluster.plane.admin.delete(path, gracePeriodSeconds="1")
    ended = status["phase"] in ("Succeeded", "Failed")
    return f"{status['phase']} {status.get('reason', '')} {status.get('message', '')}".strip() if ended else ""


@at_once(nodes=RACERS)
def test_no_pod_bound_at_the_moment_of_the_taint_fails_its_admission(cluster: Cluster, *nodes: str):
    closings, thrown = Closings(cluster, nodes), []
    rounds = dict.fromkeys(nodes, range(ROUNDS))
    try:
        for _ in range(TRIES):
            with ThreadPoolExecutor(len(nodes)) as pool:
                rows = pool.map(lambda due: race(cluster, closings, *due), rounds.items())
                thrown += [one for row in rows for one in row]
            requests = cluster.plane.audit.requests()
            closed_s = closings_of(requests, [one for one in thrown if one.bound])
            bound_s = {name: at_s - closed_s[name] for name, at_s in made(requests).items() if name in closed_s}
            raced = {(one.node, one.round) for one in thrown if one.bound and bound_s[one.name] <= LATE_S}
            counted = Counter(node for node, _ in raced)
            rounds = {
                node: range(done.stop, done.stop + ROUNDS - counted[node])
                for node, done in rounds.items()
                if counted[node] < ROUNDS
            }
            if not rounds:
                break
    finally:
        closings.close()
    failed = [one for one in thrown if one.end not in ("", "Succeeded") and bound_s.get(one.name, 0.0) <= LATE_S]
    assert failed == []
    assert len(raced) >= RACERS * ROUNDS, "the machine is too slow for a race in each round"
    late = [name for name, at_s in admitted(requests).items() if name in closed_s and at_s - closed_s[name] > SETTLE_S]
    assert len(late) >= RACERS, "so many were admitted only when the agent had let things settle"


def made(requests: Sequence[Request]) -> dict[str, float]:
    """When each pod was made."""
    return {
        request.body["metadata"]["name"]: request.at_s
        for request in requests
        if (request.verb, request.resource, request.namespace) == ("create", "pods", "default") and request.body
    }


def closings_of(requests: Sequence[Request], thrown: Sequence[Thrown]) -> dict[str, float]:
    """When the node of each pod was closed, the last time before the pod was made."""
    closings: dict[str, list[float]] = {one.node: [] for one in thrown}
    for switch in switched(requests, *closings):
        if switch.closed:
            closings[switch.node].append(requests[switch.at].at_s)
    at_s = made(requests)
    return {one.name: max(s for s in closings[one.node] if s <= at_s[one.name]) for one in thrown}


def admitted(requests: Sequence[Request]) -> dict[str, float]:
    """When pods were first told to run or to have ended well."""
    found: dict[str, float] = {}
    for request in requests:
        if request.resource == "pods/status" and (request.body or {}).get("status", {}).get("phase") != "Pending":
            found.setdefault(request.name, request.at_s)
    return found


def busy_wish(cluster: Cluster, name: str, node: str) -> tuple[Promise, int]:
    """A node in seven parts, one of them in use, and then a wish that needs all of it; before it can come true."""
    first = Promise(cluster, name, [node])
    first.said(apply(cluster, plan(name, [node], SMALL)))
    ready(cluster, name)
    first.kept()
    run_pod(cluster, f"{name}-0", node, mig_1g_10gb=1)
    runs(cluster, f"{name}-0")
    promise = Promise(cluster, name, [node])
    generation = edit(cluster, name, rules=[WHOLE])
    promise.said(generation)
    eventually(lambda: phases(cluster, node), ["WaitingForIdle"])
    return promise, generation


@at_once()
def test_a_node_that_is_never_idle_is_never_closed(cluster: Cluster, node: str):
    promise, _ = busy_wish(cluster, "chain", node)
    before = len(cluster.plane.audit.requests())
    for number in range(1, 6):  # each begins before the one before it ends
        run_pod(cluster, f"chain-{number}", node, mig_1g_10gb=1)
        runs(cluster, f"chain-{number}")
        end_pod(cluster, f"chain-{number - 1}")
    eventually(lambda: phases(cluster, node), ["WaitingForIdle"])
    assert switched(cluster.plane.audit.requests()[before:], node) == []
    promise.nothing_happened()
    end_pod(cluster, "chain-5")
    ready(cluster, "chain")
    promise.kept()
    assert [one.closed for one in switched(cluster.plane.audit.requests()[before:], node)] == [True, False]
    quiet(cluster, node)


def cordon(cluster: Cluster, node: str) -> None:
    """What `kubectl cordon` does, with a taint of the admin's own besides."""
    assert cluster.kubectl("cordon", node).returncode == 0
    assert cluster.kubectl("taint", "node", node, "example.com/mine=x:PreferNoSchedule").returncode == 0


def still_cordoned(cluster: Cluster, node: str) -> None:
    """The admin's marks are as they were, and ours are gone."""
    found = cluster.node(node)["spec"]
    assert found["unschedulable"] is True
    keys = {(one["key"], one.get("value"), one["effect"]) for one in found["taints"]}
    assert keys == {
        ("node.kubernetes.io/unschedulable", None, "NoSchedule"),
        ("example.com/mine", "x", "PreferNoSchedule"),
        ("nvidia.com/gpu", "present", "NoSchedule"),
    }


@at_once()
def test_a_cordon_survives_a_change_that_succeeds_and_one_whose_agent_is_killed(cluster: Cluster, node: str):
    assert cluster.kubectl("taint", "node", node, "nvidia.com/gpu=present:NoSchedule").returncode == 0
    promise = Promise(cluster, "cordoned", [node])
    promise.said(apply(cluster, plan("cordoned", [node], SMALL)))
    closed(cluster, node)
    cordon(cluster, node)
    eventually(lambda: TAINT in taints(cluster, node), False)
    eventually(lambda: phases(cluster, node), ["Ready"])
    still_cordoned(cluster, node)
    promise.kept()
    assert cluster.kubectl("uncordon", node).returncode == 0

    promise = Promise(cluster, "cordoned", [node])
    promise.said(edit(cluster, "cordoned", rules=[HALF]))
    closed(cluster, node)
    assert cluster.kubectl("cordon", node).returncode == 0
    cluster.agent(node).kill()
    eventually(lambda: TAINT in taints(cluster, node), False)
    eventually(lambda: partitions(cluster, node)[0]["status"]["observed"]["summary"], "3g.40gb 3×1g.10gb")
    eventually(lambda: phases(cluster, node), ["Ready"])
    still_cordoned(cluster, node)
    promise.kept(deaths=1)


@at_once()
def test_a_cordon_survives_a_change_that_fails_and_is_rolled_back(cluster: Cluster, node: str):
    assert cluster.kubectl("taint", "node", node, "nvidia.com/gpu=present:NoSchedule").returncode == 0
    promise = Promise(cluster, "failing", [node])
    promise.said(apply(cluster, plan("failing", [node], SMALL)))
    ready(cluster, "failing")
    promise.kept()
    machine = cluster.nodes[node].machine()
    machine.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", nth=1, times=3))
    promise = Promise(cluster, "failing", [node])
    promise.said(edit(cluster, "failing", rules=[HALF]))
    closed(cluster, node)
    cordon(cluster, node)
    eventually(lambda: (TAINT in taints(cluster, node), phases(cluster, node)), (False, ["Failed"]))
    still_cordoned(cluster, node)
    (gpu,) = partitions(cluster, node)
    assert gpu["status"]["observed"]["summary"] == "7×1g.10gb", "rolled back"
    assert gpu["status"]["lastTransition"]["result"] == "RolledBack"
    assert condition(cluster, "failing", "Ready")[0] == "False"
    assert cluster.allocatable(node) == {"nvidia.com/gpu": 0, "nvidia.com/mig-1g.10gb": 7}
    quiet(cluster, node)
