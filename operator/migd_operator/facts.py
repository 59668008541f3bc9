"""What the operator knows when it decides: plans, nodes and partitions as frozen values, and the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Final, Literal

from migd.kube.owed import OWED
from migd.plans.partitions import NotGoing, Partition
from migd.plans.plan import Plan
from migd.plans.statuses import PlanStatus

HOLD: Final = "migd.dev/hold"
APPROVED: Final = "migd.dev/approved"
_UPGRADE: Final = "nvidia.com/gpu-driver-upgrade-state"
_STRATEGY: Final = "nvidia.com/mig.strategy"
MANAGER_DEPLOY: Final = "nvidia.com/gpu.deploy.mig-manager"
_SAFE_LOAD: Final = "nvidia.com/gpu-driver-upgrade.driver-wait-for-safe-load"
_HAMI: Final = "hami.io/node-nvidia-register"
_NOS: Final = "nos.nebuly.com/gpu-partitioning"
_WORKLOAD: Final = "nvidia.com/gpu.workload.config"
_VGPU_HOST: Final = "nvidia.com/vgpu.host-driver-version"
TAKEN_OVER: Final = "migd.dev/taken-over"
"""What the label that deploys mig-manager said before a plan took the node over."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node.

    agent: "silent" where its agent's lease has expired or is not there; "unheard" where the operator has not seen it
    renewed yet, and it is too early to say that it has expired: what was said of it before still holds.
    annotations: ours, and those of others that are read. tainted: our taint keeps new pods away.
    duplicates: partitions that its agent claims although another node's has them, by name.
    owners: others that own MIG there and show elsewhere than on the node, for people: "DAS (NodeAccelerator)".
    """

    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    ready: bool = True
    unschedulable: bool = False
    tainted: bool = False
    agent: Literal["alive", "unheard", "silent"] = "alive"
    duplicates: frozenset[str] = frozenset()
    owners: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        """Somebody says hands off."""
        return HOLD in self.annotations

    @property
    def closed(self) -> bool:
        """Its agent has closed it, or has not yet given back all of what that changed."""
        return OWED in self.annotations

    @property
    def single_strategy(self) -> bool:
        """The device plugin takes one profile only on the whole node."""
        return self.labels.get(_STRATEGY) == "single"

    @property
    def upgrade_state(self) -> str:
        """The driver upgrade under way, "" where none is."""
        state = self.labels.get(_UPGRADE, "")
        if state in ("", "upgrade-done"):
            return "its driver waits for a safe load" if _SAFE_LOAD in self.annotations else ""
        return state

    @property
    def mig_manager(self) -> bool:
        """NVIDIA's mig-manager runs here; plans may take over from it."""
        return self.labels.get(MANAGER_DEPLOY) == "true"

    @property
    def other_owners(self) -> tuple[str, ...]:
        """Owners of MIG on this node from which no plan may take over."""
        hami = self.annotations.get(_HAMI, "")
        workload = self.labels.get(_WORKLOAD, "container")
        shown = (
            ("HAMi in mig mode", '"mode":"mig"' in hami.replace(" ", "")),
            ("nos", _NOS in self.labels),
            (f"the workload {workload}", workload not in ("", "container")),
            ("a vGPU host driver", _VGPU_HOST in self.labels),
        )
        return (*sorted(self.owners), *(owner for owner, there in shown if there))

    @property
    def silent(self) -> bool:
        """Whether the agent's lease has expired, or there never was one."""
        return self.agent == "silent"


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """One plan as the API server has it, with the status written last. A deleted plan is simply not there."""

    plan: Plan
    uid: str
    generation: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    status: PlanStatus = field(default_factory=PlanStatus)

    @property
    def name(self) -> str:
        """The plan's name."""
        return self.plan.name


@dataclass(frozen=True, slots=True)
class InvalidPlan:
    """A plan that is stored but no plan of this version; why is for people.

    status: None where that cannot be read either, so that nothing may be written into it.
    """

    name: str
    uid: str
    generation: int
    why: str
    status: PlanStatus | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What this process knows of one pod that must go; it dies with the process, and with the lease.

    fit: it was looked at, and nothing of ours is in the way of its eviction. going: it ends, or is gone.
    code, reason, budgets, message: as they are told in an EvictionDoc; reason is None where it is fit or going.
    spent: its eviction was accepted, or may have been.
    again_s: when to ask again, by the clock of `Fleet.at_s`; None for at any time, or never where it is going.
    """

    at: datetime
    fit: bool = False
    going: bool = False
    code: int | None = None
    reason: NotGoing | None = None
    budgets: tuple[str, ...] = ()
    message: str = ""
    spent: bool = False
    again_s: float | None = None

    def due(self, at_s: float) -> bool:
        """Whether it may be asked for again at this time."""
        return not self.going and (self.again_s is None or self.again_s <= at_s)


NO_ANSWERS: Final[Mapping[str, Answer]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Fleet:
    """All there is, in whatever order, and the time with its zone.

    answers: what is known of pods that must go, by uid. at_s: the time by the clock that never jumps, in seconds.
    """

    plans: tuple[PlanFacts, ...]
    partitions: tuple[Partition, ...]
    nodes: tuple[NodeFacts, ...]
    now: datetime
    invalid: tuple[InvalidPlan, ...] = ()
    answers: Mapping[str, Answer] = field(default_factory=lambda: NO_ANSWERS)
    at_s: float = 0.0
