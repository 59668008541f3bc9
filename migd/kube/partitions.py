"""GPUPartition and GPUPartitionPlan objects as values; their definitions are crds/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from migd.kube.errors import Json
from migd.kube.stored import NOTHING, Interner, Kind
from migd.mig.boards import Board
from migd.mig.geometry import GpuInstance
from migd.mig.observed import MigMode, SeenComputeInstance, SeenGpu, SeenInstance
from migd.mig.profiles import Engines, Placement, Profile
from migd.plans.plan import API_VERSION, Plan, plan_of
from migd.plans.problems import BadInput


@dataclass(frozen=True, slots=True)
class PlanObject:
    """A GPUPartitionPlan. plan: None where the stored one cannot be read, and problem says why.

    status: as it is stored, not to be changed: there are few plans, and only the operator reads it.
    """

    plan: Plan | None
    problem: str
    status: Json


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition. observed_generation: the generation that it answers. since: RFC 3339, when status last changed."""

    type: str
    status: str
    reason: str
    message: str
    observed_generation: int
    since: str


@dataclass(frozen=True, slots=True)
class WishedInstance:
    """How many of one kind of instance: by profile name, or by need in whole GB with at least so many slices."""

    profile: str = ""
    memory_gb: int = 0
    compute_slices: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Desired:
    """The operator's wish for one GPU, and whose it is.

    timeout: a duration as 30m. grace_period_s: how long an evicted pod may take to end; None for the pod's own time.
    """

    summary: str
    mig: bool
    allow_empty: bool
    instances: tuple[WishedInstance, ...]
    plan_name: str
    plan_uid: str
    plan_generation: int
    policy: str
    timeout: str
    grace_period_s: int | None
    on_failure: str
    drift: str
    foreign_instances: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """The node's turn: a hash of its whole wish, and how many of its GPUs are in it."""

    id: str
    gpus: int


@dataclass(frozen=True, slots=True, order=True)
class PodRef:
    """A pod by namespace, name and uid."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Eviction:
    """The last answer to the eviction of one pod in one transaction. code: HTTP status. budgets: who holds it."""

    pod_uid: str
    transaction: str
    code: int
    budgets: tuple[str, ...]
    message: str
    at: str


@dataclass(frozen=True, slots=True)
class Partition:
    """A GPUPartition. gpu: as the agent last saw it, holders left out; None before it first said so.

    phase: "" before. observed_generation: the generation that the agent answers, 0 before. blockers: how many are in
    the way, those left out counted too. transition: id of the last change, "" before; result: "" while under way.
    """

    node_name: str
    node_uid: str
    desired: Desired | None = None
    assignment: Assignment | None = None
    gpu: SeenGpu | None = None
    driver: str = ""
    phase: str = ""
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    foreign: frozenset[GpuInstance] = frozenset()
    blockers: int = 0
    victims: tuple[PodRef, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    transition: str = ""
    result: str = ""

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type; None where nobody set it."""
        return next((c for c in self.conditions if c.type == kind), None)


def _plan(document: Json, _: Interner) -> PlanObject:
    status: Json = document.get("status") or {}
    try:
        return PlanObject(plan_of(document, document["metadata"]["name"]), "", status)
    except BadInput as bad:
        return PlanObject(None, str(bad), status)


def _partition(document: Json, same: Interner) -> Partition:
    spec: Json = document["spec"]
    status: Mapping[str, Any] = document.get("status") or NOTHING
    transition: Json = status.get("lastTransition") or {}
    gpu = _gpu(status, same)
    desired, assignment = spec.get("desired"), spec.get("assignment")
    return Partition(
        node_name=same(spec["nodeName"]),
        node_uid=same(spec["nodeUID"]),
        desired=same(_desired(desired)) if desired else None,
        assignment=same(Assignment(assignment["id"], assignment["gpus"])) if assignment else None,
        gpu=gpu,
        driver=same((status.get("board") or {}).get("driver", "")),
        phase=same(status.get("phase", "")),
        reason=same(status.get("reason", "")),
        message=status.get("message", ""),
        observed_generation=status.get("observedGeneration", 0),
        conditions=same(tuple(_condition(c) for c in status.get("conditions") or ())),
        foreign=same(_foreign(status)),
        blockers=len(status.get("blockers") or ()) + status.get("blockersLeftOut", 0),
        victims=tuple(PodRef(p["namespace"], p["name"], p["uid"]) for p in status.get("victims") or ()),
        evictions=tuple(_eviction(e) for e in status.get("evictions") or ()),
        transition=transition.get("id", ""),
        result=transition.get("result", ""),
    )


def _condition(c: Json) -> Condition:
    return Condition(
        c["type"], c["status"], c["reason"], c["message"], c["observedGeneration"], c["lastTransitionTime"]
    )


def _desired(d: Json) -> Desired:
    wished = tuple(
        WishedInstance(i.get("profile", ""), i.get("memoryGB", 0), i.get("computeSlices", 0), i.get("count", 1))
        for i in d.get("instances") or ()
    )
    plan, disruption = d["plan"], d["disruption"]
    return Desired(
        summary=d["summary"],
        mig=d["mig"] == "Enabled",
        allow_empty=d.get("allowEmpty", False),
        instances=wished,
        plan_name=plan["name"],
        plan_uid=plan["uid"],
        plan_generation=plan["generation"],
        policy=disruption["policy"],
        timeout=disruption["timeout"],
        grace_period_s=disruption.get("gracePeriodSeconds"),
        on_failure=d.get("onFailure", "Rollback"),
        drift=d.get("drift", "Correct"),
        foreign_instances=d.get("foreignInstances", "Refuse"),
    )


def _eviction(e: Json) -> Eviction:
    budgets = tuple(e.get("podDisruptionBudgets") or ())
    return Eviction(e["podUID"], e["transaction"], e["code"], budgets, e.get("message", ""), e["at"])


def _gpu(status: Mapping[str, Any], same: Interner) -> SeenGpu | None:
    board: Json = status.get("board") or {}
    if not board:
        return None
    observed: Json = status.get("observed") or {}
    mode = observed.get("mig")
    return SeenGpu(
        uuid=board["uuid"],
        index=board["index"],
        model=same(board["model"]),
        pci_device_id=same(board.get("pciDeviceId", "")),
        memory_mib=board.get("memoryMiB", 0),
        mode=same(MigMode(mode["current"] == "Enabled", mode["pending"] == "Enabled")) if mode else None,
        resetless=not board.get("modeChangeResets", False),
        board=_board(board.get("profiles"), same),
        instances=tuple(_instance(i, same) for i in observed.get("instances") or ()),
        in_use=observed.get("busy", False),
        trouble=same(board.get("trouble", "")),
        lost=status.get("phase") == "Lost",
    )


def _board(profiles: list[Json] | None, same: Interner) -> Board | None:
    if not profiles:
        return None
    return same(
        Board.of(
            Profile(
                p["name"],
                p["id"],
                p["computeSlices"],
                p["memoryMiB"],
                Engines(**(p.get("engines") or {})),
                p.get("instancesMax", 0),
                tuple(Placement(place["start"], place["size"]) for place in p["placements"]),
            )
            for p in profiles
        )
    )


def _instance(i: Json, same: Interner) -> SeenInstance:
    ci = (SeenComputeInstance(i["ci"], True, i.get("migUUID")),) if "ci" in i else ()
    return SeenInstance(same(_place(i)), i["gi"], ci, i.get("inUse", False))


def _place(i: Json) -> GpuInstance:
    return GpuInstance(i["profile"], Placement(i["placement"]["start"], i["placement"]["size"]))


def _foreign(status: Mapping[str, Any]) -> frozenset[GpuInstance]:
    observed: Json = status.get("observed") or {}
    return frozenset(_place(i) for i in observed.get("instances") or () if i.get("foreign"))


PLANS: Final = Kind(
    API_VERSION,
    "GPUPartitionPlan",
    "gpupartitionplans",
    _plan,
    list_maps={("status", "conditions"): ("type",)},
)
PARTITIONS: Final = Kind(
    API_VERSION,
    "GPUPartition",
    "gpupartitions",
    _partition,
    list_maps={
        ("status", "conditions"): ("type",),
        ("status", "victims"): ("uid",),
        ("status", "evictions"): ("podUID", "transaction"),
        ("status", "board", "profiles"): ("name",),
    },
)
