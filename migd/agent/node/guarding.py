"""What keeps a node's transaction from beginning although it is the node's turn: other owners, upgrades, holds.

Looked at again before each effect up to the first one on hardware. Source: the contract with NVIDIA's stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from migd.agent.node.advertising import STRATEGY
from migd.agent.node.holding import Held
from migd.agent.node.seeing import NodeSeen
from migd.agent.node.turning import HOLD, Turn
from migd.agent.records import Cause
from migd.kube.nodes import HAMI, LABELS_OF_OTHERS, SAFE_LOAD, Node, NodeChange
from migd.kube.owed import PAUSED, owed_of
from migd.kube.stored import Stored
from migd.mig.geometry import Layout, counts_of
from migd.mig.observed import SeenGpu
from migd.plans.preview import GpuPreview

_MANAGER: Final = "nvidia.com/gpu.deploy.mig-manager"
_STATE: Final = "nvidia.com/mig.config.state"
_AT_WORK: Final = frozenset({"pending", "rebooting"})
_UPGRADE: Final = "nvidia.com/gpu-driver-upgrade-state"
_DEPLOY: Final = "nvidia.com/gpu.deploy."


def guard(seen: NodeSeen) -> Cause | None:
    """Why nothing may begin on this node now; None where it may."""
    if HOLD in seen.node.annotations:
        return Cause("Held", f"node {seen.node.name}'s annotation {HOLD} says hands off")
    for reason, message in (
        ("DriverUpgrade", _upgrade(seen.node.value)),
        ("ForeignOwner", _owner(seen)),
        ("MPSInUse", _mps(seen)),
    ):
        if message:
            return Cause(reason, message)
    return None


def wedged(seen: NodeSeen) -> tuple[str, ...]:
    """Labels that say a tool is at work here which is not: paused clients that nobody is owed, or a change pending.

    Empty where mig-manager runs, or would: then it is at work indeed.
    """
    labels = seen.node.value.labels
    if _manager_here(seen) or labels.get(_MANAGER) == "true":
        return ()
    owed = owed_of(seen.node)
    known = owed.labels if owed else {}
    stuck = [key for key in sorted(LABELS_OF_OTHERS) if key.startswith(_DEPLOY) and labels.get(key) == PAUSED]
    stuck = [key for key in stuck if key not in known]
    return (*stuck, *((_STATE,) if labels.get(_STATE) in _AT_WORK else ()))


def unwedging(keys: tuple[str, ...]) -> NodeChange:
    """Clients run again, as they did before: NVIDIA's tools pause only those that say true; and the change failed."""
    return NodeChange(labels={key: "failed" if key == _STATE else "true" for key in keys})


def misfit(node: Stored[Node], held: Held, plans: Mapping[str, GpuPreview], turn: Turn) -> Cause | None:
    """Why the device plugin could not run on what this turn would leave; None where it could."""
    after = {gpu.uuid: _after(gpu, plans.get(gpu.uuid)) for gpu in held.gpus if not gpu.out_of_reach}
    index = {gpu.uuid: gpu.index for gpu in held.gpus}
    on = {uuid for uuid, layout in after.items() if layout is not None and layout.mig}
    strategy = node.value.labels.get(STRATEGY)
    wished_on = {uuid for uuid, desired in turn.desired.items() if desired.mig == "Enabled"} & set(plans)
    if strategy == "none" and wished_on:
        return Cause(
            "Infeasible", "the device plugin's MIG strategy is none: a GPU in MIG mode is of no use; set mixed"
        )
    if strategy == "single" and on:
        profiles = {name for layout in after.values() if layout is not None for name, _ in counts_of(layout.instances)}
        empty = [uuid for uuid in on if _is_empty(after[uuid])]
        if len(on) < len(after) or len(profiles) > 1 or empty:
            return Cause(
                "Infeasible",
                "the device plugin's MIG strategy is single: it takes one profile on all GPUs of the node and nothing "
                "else; wish that, or set the strategy to mixed",
            )
    allowed = {uuid for uuid, desired in turn.desired.items() if desired.allow_empty}
    bare = sorted(index[uuid] for uuid in on - allowed if _is_empty(after[uuid]))
    if bare:
        names = ", ".join(map(str, bare))
        return Cause(
            "Infeasible",
            f"GPU {names} would be in MIG mode with no instance when the device plugin starts, which may fail on it: "
            "wish instances there, mig: Disabled, or allowEmpty: true",
        )
    return None


def _is_empty(layout: Layout | None) -> bool:
    return layout is not None and layout.mig and not layout.instances


def _after(gpu: SeenGpu, plan: GpuPreview | None) -> Layout | None:
    """How a GPU will be; None where that is known only once MIG is on."""
    return gpu.layout if plan is None or plan.refused is not None else plan.target


def _upgrade(node: Node) -> str:
    state = node.labels.get(_UPGRADE, "")
    if state not in ("", "upgrade-done"):
        return f"a driver upgrade is under way on this node: {_UPGRADE} says {state}"
    return "the driver waits to be loaded safely" if SAFE_LOAD in node.others else ""


def _manager_here(seen: NodeSeen) -> bool:
    return any(p.value.labels.get("app") == "nvidia-mig-manager" and not p.value.terminal for p in seen.pods)


def _owner(seen: NodeSeen) -> str:
    labels = seen.node.value.labels
    if labels.get(_MANAGER) == "true":
        return f"NVIDIA's mig-manager owns MIG on this node ({_MANAGER} is true); owner: TakeOver takes it over"
    if _manager_here(seen):
        return "NVIDIA's mig-manager still runs on this node"
    stuck = wedged(seen)
    if stuck:
        return f"another tool seems to be changing GPUs here: {', '.join(f'{k} is {labels[k]}' for k in stuck)}"
    if '"mode":"mig"' in seen.node.value.others.get(HAMI, "").replace(" ", ""):
        return "HAMi owns MIG on this node: it runs in mig mode"
    if "nos.nebuly.com/gpu-partitioning" in labels:
        return "nos owns MIG on this node: it has the label nos.nebuly.com/gpu-partitioning"
    if labels.get("nvidia.com/gpu.workload.config", "container") != "container":
        return "this node's GPUs are for virtual machines: nvidia.com/gpu.workload.config is not container"
    if "nvidia.com/vgpu.host-driver-version" in labels:
        return "this node has virtual GPUs: MIG is the hypervisor's to set"
    return ""


def _mps(seen: NodeSeen) -> str:
    """Pausing the plugin stops MPS for its clients on every GPU of the node."""
    labels = seen.node.value.labels
    if labels.get("nvidia.com/mps.capable") != "true":
        return ""
    for pod in seen.pods:
        if not pod.value.terminal and any(_shared(resource, labels) for resource, _ in pod.value.gpus):
            return f"pod {pod.key} shares a GPU by MPS, which pausing the device plugin would stop"
    return ""


def _shared(resource: str, labels: Mapping[str, str]) -> bool:
    replicas = labels.get(f"{resource}.replicas", "")
    return resource.endswith(".shared") or (replicas.isdecimal() and int(replicas) > 1)
