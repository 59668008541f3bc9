"""Fleets for the tests: nodes of A100s, an API server that takes a decision's writes, and agents that obey."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from migd.mig.boards import Board
from migd.mig.geometry import Geometry, Layout, by_start, counts, summary
from migd.mig.transition import fit
from migd.plans.conditions import Said, following
from migd.plans.partitions import Partition, partition_document, partition_of
from migd.plans.plan import plan_of
from migd.plans.statuses import PlanStatus
from migd_operator.deciding import PLAN_LABEL, Decision, decide
from migd_operator.facts import TAKEN_OVER, Fleet, InvalidPlan, NodeFacts, PlanFacts

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NAME = "NVIDIA A100-SXM4-80GB"
_PLACES = {
    "1g.10gb": (19, 9984, 7, [(k, 1) for k in range(7)], {"copy": 1}),
    "2g.20gb": (14, 19968, 3, [(0, 2), (2, 2), (4, 2)], {"copy": 2, "decoder": 1}),
    "3g.40gb": (9, 40448, 2, [(0, 4), (4, 4)], {"copy": 3, "decoder": 2}),
    "4g.40gb": (5, 40448, 1, [(0, 4)], {"copy": 4, "decoder": 2}),
    "7g.80gb": (0, 80896, 1, [(0, 8)], {"copy": 7, "decoder": 5, "jpeg": 1, "ofa": 1}),
}
PROFILES = [
    {
        "name": name,
        "id": number,
        "computeSlices": int(name[0]),
        "memoryMiB": memory,
        "instancesMax": most,
        "engines": engines,
        "placements": [{"start": start, "size": size} for start, size in places],
    }
    for name, (number, memory, most, places, engines) in sorted(_PLACES.items())
]


def gpu_name(node: str, index: int) -> str:
    return f"gpu-{node}-{index}"


def gpu(
    node: str = "n1",
    index: int = 0,
    layout: str | None = "",
    *,
    busy: Iterable[str] = (),
    phase: str = "Idle",
    foreign: bool = False,
    **more: Any,
) -> Partition:
    """A partition as its agent first wrote it. layout: None is MIG off, else its instances, as "3g.40gb 2g.20gb"."""
    board = board_of_a100()
    wanted: dict[str, int] = {}
    for profile in (layout or "").split():
        wanted[profile] = wanted.get(profile, 0) + 1
    there = fit(board, counts(wanted))
    assert isinstance(there, frozenset)
    return partition_of(
        {
            "apiVersion": "migd.dev/v1alpha1",
            "kind": "GPUPartition",
            "metadata": {"name": gpu_name(node, index), "uid": f"uid-{node}-{index}", "generation": 1, **more},
            "spec": {"nodeName": node, "nodeUID": f"uid-{node}"},
            "status": {
                "observedGeneration": 1,
                "phase": phase,
                "board": {
                    "index": index,
                    "uuid": gpu_name(node, index).replace("gpu", "GPU", 1),
                    "model": NAME,
                    "pciDeviceId": "0x20B210DE",
                    "memoryMiB": 81920,
                    "migCapable": True,
                    "modeChangeResets": True,
                    "profiles": PROFILES,
                },
                "observed": observed(layout is not None, there, set(busy), foreign),
            },
        }
    )


def board_of_a100() -> Board:
    document = {
        "apiVersion": "migd.dev/v1alpha1",
        "kind": "GPUPartition",
        "metadata": {"name": "gpu-board"},
        "spec": {"nodeName": "n", "nodeUID": "n"},
        "status": {
            "board": {"index": 0, "uuid": "GPU-board", "model": NAME, "migCapable": True, "profiles": PROFILES},
            "observed": {"summary": "", "mig": {"current": "Enabled", "pending": "Enabled"}},
        },
    }
    found = partition_of(document).gpu
    assert found is not None
    assert found.board is not None
    return found.board


def observed(mig: bool, there: Geometry, busy: set[str] | frozenset[str], foreign: bool = False) -> dict[str, Any]:
    """What an agent writes. busy: instances as "3g.40gb@4"."""
    mode = "Enabled" if mig else "Disabled"
    return {
        "summary": summary(there) or str(Layout(mig)),
        "inUse": f"{len(busy)}/{len(there)}",
        "mig": {"current": mode, "pending": mode},
        "busy": False,
        "instances": [
            {
                "profile": i.profile,
                "placement": {"start": i.placement.start, "size": i.placement.size},
                "gi": at,
                "ci": 0,
                "migUUID": f"MIG-{at}",
                "inUse": str(i) in busy,
                "foreign": foreign,
            }
            for at, i in enumerate(by_start(there))
        ],
    }


def node(name: str = "n1", **more: Any) -> NodeFacts:
    return replace(NodeFacts(name, f"uid-{name}", {"pool": "a"}), **more)


ONES = [{"profile": "1g.10gb", "count": 7}]
HALVES = [{"profile": "3g.40gb", "count": 2}]


def plan(
    name: str = "plan",
    instances: Any = ONES,
    gpus: Mapping[str, Any] | None = None,
    generation: int = 1,
    annotations: Mapping[str, str] | None = None,
    **spec: Any,
) -> PlanFacts:
    rule = {"gpus": dict(gpus or {"all": True})} | (
        {"mig": "Disabled"} if instances is None else {"instances": instances}
    )
    document = {
        "apiVersion": "migd.dev/v1alpha1",
        "kind": "GPUPartitionPlan",
        "metadata": {"name": name},
        "spec": {"nodeSelector": {}, "rules": [rule], **spec},
    }
    return PlanFacts(plan_of(document), f"uid-{name}", generation, annotations or {})


def invalid(name: str = "plan", generation: int = 2, why: str = "spec.rules: must not be empty") -> InvalidPlan:
    """The plan of that name after somebody stored what no version of ours can read."""
    return InvalidPlan(name, f"uid-{name}", generation, why, PlanStatus())


def fleet(plans: Iterable[PlanFacts], nodes: Iterable[NodeFacts], partitions: Iterable[Partition]) -> Fleet:
    return Fleet(tuple(plans), tuple(partitions), tuple(nodes), NOW)


def written(before: Fleet, decision: Decision) -> Fleet:
    """The fleet after the decision's writes; a change of spec is a new generation of the object."""
    specs = {s.partition: s for s in decision.specs}
    said = {write.partition: write for write in decision.told}
    statuses = dict(decision.statuses)
    partitions = []
    for one in before.partitions:
        if one.name in decision.deletions:
            continue
        status = one.status
        if one.name in said:
            kept = tuple(c for c in status.conditions if c.type not in ("Assigned", "AgentAlive"))
            told = {"conditions": kept + said[one.name].conditions, "evictions": said[one.name].evictions}
            status = status.model_copy(update=told)
        spec, generation, labels = one.spec, one.generation, one.labels
        if one.name in specs:
            wanted = specs[one.name]
            spec = spec.model_copy(update={"desired": wanted.desired, "assignment": wanted.assignment})
            generation += 1
            labels = {k: v for k, v in labels.items() if k != PLAN_LABEL}
            labels |= {PLAN_LABEL: wanted.label} if wanted.label else {}
        partitions.append(remade(one, spec=spec, status=status, generation=generation, labels=labels))
    plans = tuple(replace(p, status=statuses.get(p.name, p.status)) for p in before.plans)
    invalid = tuple(replace(p, status=statuses.get(p.name, p.status)) for p in before.invalid)
    nodes = tuple(_taken(n, decision) for n in before.nodes)
    return replace(before, partitions=tuple(partitions), plans=plans, invalid=invalid, nodes=nodes)


def _taken(one: NodeFacts, decision: Decision) -> NodeFacts:
    """The node after it was taken from mig-manager, or given back."""
    key = "nvidia.com/gpu.deploy.mig-manager"
    if one.name in decision.taken_over:
        return replace(
            one, labels={**one.labels, key: "false"}, annotations={**one.annotations, TAKEN_OVER: one.labels[key]}
        )
    if one.name in decision.released:
        kept = {k: v for k, v in one.annotations.items() if k != TAKEN_OVER}
        return replace(one, labels={**one.labels, key: one.annotations[TAKEN_OVER]}, annotations=kept)
    return one


def remade(one: Partition, **update: Any) -> Partition:
    """A partition with something changed, read anew from its document as a watch would bring it."""
    return partition_of(partition_document(one.model_copy(update=update)))


def answered(one: Partition, phase: str, seen: dict[str, Any] | None = None) -> Partition:
    """A partition whose agent answers what it carries now."""
    status = {"True": "AsWished"} if phase == "Ready" else {"False": "Waiting"}
    ((value, reason),) = status.items()
    ready = following(
        one.status.conditions,
        [Said("Ready", value, reason, phase)],
        one.generation,
        NOW,  # type: ignore[arg-type]
    )
    others = tuple(c for c in one.status.conditions if c.type != "Ready")
    document = partition_document(
        one.model_copy(update={"status": one.status.model_copy(update={"conditions": others + ready})})
    )
    document["status"] |= {"phase": phase, "observedGeneration": one.generation}
    if seen is not None:
        document["status"]["observed"] = seen
    return partition_of(document)


def complete(partitions: Iterable[Partition]) -> set[str]:
    """The nodes whose GPUs carry one id as often as it says."""
    turns: dict[tuple[str, str, int], int] = {}
    for one in partitions:
        if one.spec.assignment is not None:
            key = (one.spec.node_name, one.spec.assignment.id, one.spec.assignment.gpus)
            turns[key] = turns.get(key, 0) + 1
    return {node for (node, _, gpus), found in turns.items() if found == gpus}


def agents(before: Fleet, phase: Callable[[str], str] = lambda node: "Ready", only: str | None = None) -> Fleet:
    """The fleet after each agent has acted once: what is assigned and answered "Ready" is cut as wished."""
    turns = complete(before.partitions)
    board = board_of_a100()
    after = []
    for one in before.partitions:
        name = one.spec.node_name
        if only not in (None, name):
            after.append(one)
        elif name not in turns or one.spec.assignment is None or one.spec.desired is None:
            after.append(answered(one, one.status.phase if one.status.phase == "Held" else "Idle"))
        elif phase(name) == "Ready":
            wish = {i.profile or "": i.count for i in one.spec.desired.instances}
            there = fit(board, counts(wish)) if wish else frozenset()
            assert isinstance(there, frozenset)
            after.append(answered(one, "Ready", observed(one.spec.desired.mig == "Enabled", there, set())))
        else:
            after.append(answered(one, phase(name)))
    return replace(before, partitions=tuple(after))


def turn(before: Fleet) -> Fleet:
    """One decision, written."""
    return written(before, decide(before))


def settled(before: Fleet, rounds: int = 60) -> Fleet:
    """Decisions and agents in turns until nothing is written any more."""
    for _ in range(rounds):
        after = agents(turn(before))
        if decide(after).at_rest:
            return after
        before = replace(after, now=after.now + timedelta(seconds=1))
    raise AssertionError("it does not come to rest")


def started(found: Fleet) -> set[str]:
    """The nodes that have a turn."""
    return {p.spec.node_name for p in found.partitions if p.spec.assignment is not None}


def said(found: Fleet, kind: str, index: int = 0) -> tuple[str, str]:
    """Status and reason of a condition of a plan."""
    condition = next(c for c in found.plans[index].status.conditions if c.type == kind)
    return condition.status, condition.reason


def assigned(found: Fleet) -> dict[str, tuple[str, str]]:
    """Status and reason of each partition's Assigned."""
    return {p.name: (c.status, c.reason) for p in found.partitions if (c := p.says("Assigned")) is not None}
