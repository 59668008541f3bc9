"""What the operator knows when it decides: plans, nodes and partitions as frozen values, and the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from migd.plans.partitions import Partition
from migd.plans.plan import LabelSelector, Plan
from migd.plans.statuses import PlanStatus

AGENT_EXPIRES: Final = timedelta(seconds=180)
HOLD: Final = "migd.dev/hold"
APPROVED: Final = "migd.dev/approved"
_UPGRADE: Final = "nvidia.com/gpu-driver-upgrade-state"
_STRATEGY: Final = "nvidia.com/mig.strategy"
_MANAGER_DEPLOY: Final = "nvidia.com/gpu.deploy.mig-manager"
_HAMI: Final = "hami.io/node-nvidia-register"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node. agent_renewed: when its agent last renewed its lease, None where it never did.

    duplicates: partitions that its agent claims although another node's has them, by name.
    owners: others that own MIG there and show elsewhere than on the node, for people: "DAS (NodeAccelerator)".
    """

    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    ready: bool = True
    unschedulable: bool = False
    agent_renewed: datetime | None = None
    duplicates: frozenset[str] = frozenset()
    owners: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        """Somebody says hands off."""
        return HOLD in self.annotations

    @property
    def single_strategy(self) -> bool:
        """The device plugin takes one profile only on the whole node."""
        return self.labels.get(_STRATEGY) == "single"

    @property
    def upgrade_state(self) -> str:
        """The driver upgrade under way, "" where none is."""
        state = self.labels.get(_UPGRADE, "")
        return "" if state == "upgrade-done" else state

    @property
    def mig_manager(self) -> bool:
        """NVIDIA's mig-manager runs here; plans may take over from it."""
        return self.labels.get(_MANAGER_DEPLOY) == "true"

    @property
    def other_owners(self) -> tuple[str, ...]:
        """Owners of MIG on this node from which no plan may take over."""
        hami = self.annotations.get(_HAMI, "")
        return (*sorted(self.owners), *(("HAMi in mig mode",) if '"mode":"mig"' in hami.replace(" ", "") else ()))

    def silent(self, now: datetime) -> bool:
        """Whether the agent's lease has expired, or there never was one."""
        return self.agent_renewed is None or now - self.agent_renewed > AGENT_EXPIRES


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
class Fleet:
    """All there is, in whatever order, and the time with its zone."""

    plans: tuple[PlanFacts, ...]
    partitions: tuple[Partition, ...]
    nodes: tuple[NodeFacts, ...]
    now: datetime


def selects_node(selector: LabelSelector, labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches, as Kubernetes has it: NotIn also matches where the label is absent."""
    if any(labels.get(key) != value for key, value in selector.match_labels.items()):
        return False
    for need in selector.match_expressions:
        there = need.key in labels
        listed = there and labels[need.key] in need.values
        holds = {"In": listed, "NotIn": not listed, "Exists": there, "DoesNotExist": not there}[need.operator]
        if not holds:
            return False
    return True
