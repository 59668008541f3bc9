"""The agent killed with SIGKILL at each step of a transaction on a real API server; the next one ends what it began.

Where to die is enumerated from the product's own lists: each stage of a node's transaction as it is saved, each
operation on hardware, each other effect, and each phase as it is told. A gate passed that no point names fails the
suite, and so does a point at which nobody died. Left out: two crashes in a row, which the simulation plays.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

import pytest
from controlplane.nodes_styles import OPERATOR, TOLERANT
from controlplane.nursery import Nursery
from controlplane.processes import until
from integration.acting import EVERY_S, HALF, SMALL, WITHIN_S, apply, edit, plan, quiet, ready, status
from integration.deaths import EVICT, Case, Mortal, in_the_way, mortal_nodes
from integration.dying import AFTER, BEFORE, Point
from integration.promises import Promise
from integration.witnesses import most_closed, switched

from migd.agent.node.effects import Acting
from migd.agent.records import Stage
from migd.mig.operations import Operation

OPERATIONS: Final = {one.__name__ for one in get_args(Operation)}
OTHERS: Final = {one.__name__ for one in get_args(Acting)} - OPERATIONS - {"ChangeNode"}
CHANGES: Final = {f"ChangeNode {word}" for word in ("close", "pause", "open", "label")}
SAVES: Final = {f"save {stage}" for stage in get_args(Stage)}
TOLD: Final = {f"tell {phase}" for phase in ("Draining", "Changing", "Verifying", "Ready")}
GATES: Final = sorted(OPERATIONS | OTHERS | CHANGES | SAVES | TOLD)
"""Every gate of a transaction."""
OUTSIDE: Final = {f"tell {phase}" for phase in ("Idle", "Pending", "WaitingForIdle", "Blocked")}
"""What is told before one begins, or after it was given up: there is nothing to end then."""
ONLY: Final = {
    "SetMode": ("on", "off"),
    "ResetGpu": ("on",),
    "CreateGpuInstance": ("on", "cut"),
    "CreateComputeInstance": ("on", "cut"),
    "DestroyComputeInstances": ("cut", "off"),
    "DestroyGpuInstance": ("cut", "off"),
    "save Draining": ("cut", "off"),
}
"""Gates that not every change passes; all others are in each."""
STYLED: Final = {"ChangeNode pause": OPERATOR.name, "HangUp": TOLERANT.name}
"""Gates that are there only where the device plugin is installed in another way than by its Helm chart."""
NODES: Final = 17


def cases() -> list[Case]:
    """Every gate, before and after, spread over nodes and over changes, which each node goes through in one order."""
    points = [Point(at, when, reset=at == "ResetGpu") for at in GATES for when in (BEFORE, AFTER)]
    slots = {(node, n): change for n in range(4) for node in range(NODES) for change in [("on", "cut", "off")[n % 3]]}
    found = [Case(STYLED[point.at], 0, i, "cut", point) for i, point in enumerate(points) if point.at in STYLED]
    for point in sorted((p for p in points if p.at not in STYLED), key=lambda p: p.at not in ONLY):
        slot = next(one for one, change in slots.items() if change in ONLY.get(point.at, (change,)))
        found.append(Case("", *slot, slots.pop(slot), point))
    return found


CASES: Final = cases()


@pytest.fixture(scope="module")
def mortals(bare_programs: Path, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mortal]:
    with mortal_nodes(CASES, NODES, tmp_path_factory.mktemp("kills"), bare_programs, nursery) as under_way:
        yield under_way


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_killed_agent_began_is_ended_and_nothing_is_left(mortals: Mortal, case: Case):
    mortals.end_of(case)


def test_no_step_of_a_transaction_is_without_a_place_to_die(mortals: Mortal):
    for case in CASES:
        mortals.end_of(case)
    passed = mortals.passed()
    assert set(GATES) <= passed
    assert passed <= set(GATES) | OUTSIDE
    assert {(case.point.at, case.point.when) for case in CASES} == {
        (at, when) for at in GATES for when in (BEFORE, AFTER)
    }


def test_a_rollout_goes_on_however_often_its_operator_is_killed(mortals: Mortal):
    cluster, nodes = mortals.cluster, mortals.free()[:8]
    apply(cluster, plan("rollout", nodes, HALF, rollout={"maxUnavailable": len(nodes)}, disruption=EVICT))
    ready(cluster, "rollout")
    assert [in_the_way(cluster, name, SMALL) for name in nodes] == [1] * len(nodes), "the pod on the wide instance"
    promise = Promise(cluster, "rollout", nodes)
    begun = len(cluster.plane.audit.requests())
    operator = cluster.operator()
    generation = edit(cluster, "rollout", rules=[SMALL], rollout={"maxUnavailable": 3})
    promise.said(generation)

    def closed() -> int:
        return len({one.node for one in switched(cluster.plane.audit.requests()[begun:], *nodes)})

    for number, restarts in ((1, 0), (4, 1), (6, 2)):
        assert until(lambda number=number: closed() >= number, WITHIN_S, EVERY_S)
        operator.kill()
        assert until(lambda restarts=restarts: operator.restarts > restarts, WITHIN_S, EVERY_S)
    ready(cluster, "rollout")
    promise.kept()
    quiet(cluster, *nodes)
    requests = cluster.plane.audit.requests()[begun:]
    assert most_closed(requests, *nodes) <= 3
    accepted = [r.name for r in requests if r.resource == "pods/eviction" and r.code == 201]
    assert len(accepted) == len(set(accepted)) == len(nodes), "whoever was counted is not evicted again"
    assert status(cluster, "rollout")["evictions"] == {"generation": generation, "evicted": len(nodes)}
