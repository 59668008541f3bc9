"""How long the operator takes to decide for a fleet: at first, in the middle of a rollout, and at rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from boards import VARIANTS, board_of, rows

from benchmarks.measuring import Times, each
from migd.mig.geometry import by_start
from migd.mig.table import table_of
from migd.plans.conditions import Condition
from migd.plans.partitions import Partition, partition_of
from migd.plans.plan import plan_of
from migd_operator.deciding import Decision, decide
from migd_operator.facts import Fleet, NodeFacts, PlanFacts

NOW: Final = datetime(2026, 3, 1, tzinfo=UTC)
GPUS: Final = 8


@dataclass(frozen=True, slots=True)
class Fleets:
    """Decisions for one fleet. writes: objects that the decision wants written."""

    what: str
    nodes: int
    gpus: int
    took: Times
    writes: int


def fleets(nodes: int, times: int) -> Iterator[Fleets]:
    """A fleet of 8 GPUs a node in many layouts, part of them in use, under three plans of which one takes priority."""
    first = _fleet(nodes)
    yield _timed("first decision", first, times)
    rolling = _written(first, decide(first))
    yield _timed("in a rollout", rolling, times)
    yield _timed("at rest", _done(first), times)


def _timed(what: str, found: Fleet, times: int) -> Fleets:
    took, decisions = each([partial(decide, found)] * times)
    one = decisions[0]
    writes = len(one.specs) + len(one.told) + len(one.statuses) + len(one.deletions)
    return Fleets(what, len(found.nodes), len(found.partitions), took, writes)


def _plan(name: str, **spec: Any) -> PlanFacts:
    document = {"apiVersion": "migd.dev/v1alpha1", "kind": "GPUPartitionPlan", "metadata": {"name": name}, "spec": spec}
    return PlanFacts(plan_of(document), f"uid-{name}", 1)


def _fleet(nodes: int) -> Fleet:
    board = board_of(rows(*VARIANTS["basic"]))
    table = table_of(board)
    narrow, wide = board.profiles[0].name, max(board.profiles, key=lambda p: p.compute_slices).name
    every: dict[str, Any] = {"nodeSelector": {}, "rollout": {"maxUnavailable": "5%"}}
    all_of = {"gpus": {"all": True}}
    plans = (
        _plan("base", **every, rules=[{**all_of, "instances": [{"profile": narrow, "count": 2}]}]),
        _plan("some", **every, priority=1, rules=[{"gpus": {"indices": [0, 1]}, "instances": [{"profile": wide}]}]),
        _plan("off", **every, priority=2, rules=[{"gpus": {"indices": [7]}, "mig": "Disabled"}]),
    )
    profiles = [
        {
            "name": p.name,
            "id": p.profile_id,
            "computeSlices": p.compute_slices,
            "memoryMiB": p.memory_mib,
            "instancesMax": p.instance_count_max,
            "placements": [{"start": place.start, "size": place.size} for place in p.placements],
        }
        for p in board.profiles
    ]
    partitions = []
    for number in range(nodes * GPUS):
        node, index = divmod(number, GPUS)
        there = by_start(table.geometry(table.sets[number * 7 % len(table.sets)].bits))
        instances = [
            {
                "profile": i.profile,
                "placement": {"start": i.placement.start, "size": i.placement.size},
                "gi": at,
                "ci": 0,
                "inUse": (number + at) % 5 == 0,
            }
            for at, i in enumerate(there)
        ]
        mode = {"current": "Enabled", "pending": "Enabled"}
        status = {
            "observedGeneration": 1,
            "phase": "Idle",
            "board": {
                "index": index,
                "uuid": f"GPU-{number:08x}",
                "model": "NVIDIA A100-SXM4-80GB",
                "migCapable": True,
                "profiles": profiles,
            },
            "observed": {"summary": "", "mig": mode, "busy": False, "instances": instances},
        }
        document = {
            "apiVersion": "migd.dev/v1alpha1",
            "kind": "GPUPartition",
            "metadata": {"name": f"gpu-{number:08x}", "generation": 1},
            "spec": {"nodeName": f"node-{node:05}", "nodeUID": f"uid-{node}"},
            "status": status,
        }
        partitions.append(partition_of(document))
    hosts = tuple(NodeFacts(f"node-{n:05}", f"uid-{n}", agent="alive") for n in range(nodes))
    return Fleet(plans, tuple(partitions), hosts, NOW)


def _written(before: Fleet, decision: Decision) -> Fleet:
    """The fleet as the API server has it once a decision is written."""
    specs = {s.partition: {"desired": s.desired, "assignment": s.assignment} for s in decision.specs}
    said = {c.partition: c.conditions for c in decision.told}
    statuses = dict(decision.statuses)
    partitions = tuple(
        _remade(p, p.spec.model_copy(update=specs.get(p.name, {})), said.get(p.name, p.status.conditions))
        for p in before.partitions
    )
    return replace(
        before,
        partitions=partitions,
        plans=tuple(replace(p, status=statuses.get(p.name, p.status)) for p in before.plans),
    )


def _remade(one: Partition, spec: Any, conditions: tuple[Condition, ...]) -> Partition:
    return one.model_copy(update={"spec": spec, "status": one.status.model_copy(update={"conditions": conditions})})


def _done(before: Fleet) -> Fleet:
    """The fleet with nothing left to write: what is decided for it is there already, for paused plans."""
    paused = tuple(
        replace(p, plan=p.plan.model_copy(update={"spec": p.plan.spec.model_copy(update={"paused": True})}))
        for p in before.plans
    )
    found = replace(before, plans=paused)
    return _written(found, decide(found))
