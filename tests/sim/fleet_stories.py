"""Stories of whole simulated clusters, watched throughout, and what tests ask of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from fleet import Fleet, plan
from whole.truth import counts_of, truth
from whole.watching import Watching, ours_left

from migd.plans.partitions import BlockerDoc
from migd.sim.cluster.faults import Faults, Trouble, WatchTrouble
from migd.sim.cluster.server import SimRequest
from migd.sim.cluster.virtual_time import run_virtually
from migd.sim.nodes import documents
from migd.sim.nodes.world import NodeSpec, Workload

Json = dict[str, Any]
DEPLOY = "nvidia.com/gpu.deploy."
SETTLED_S = 20.0
"""After this, who holds what is known to all."""


def node(name: str = "node-a", gpus: str = "a30", style: str = "helm", **more: Any) -> NodeSpec:
    """A node, of one A30 where nothing else is said."""
    return NodeSpec(name, gpus, style, **more)


def play(
    story: Callable[[Fleet], Awaitable[None]], *nodes: NodeSpec, faults: Faults | None = None, **more: Any
) -> Fleet:
    """A story on these nodes; what must always hold is watched."""
    logging.disable(logging.CRITICAL)
    watching = Watching()

    async def main() -> Fleet:
        fleet = Fleet(
            nodes or (node(),), 1, faults, refit=watching.refit, policy=watching.policy, **{"leases": False, **more}
        )
        watching.begin(fleet)
        async with fleet:
            await story(fleet)
        return fleet

    try:
        fleet = run_virtually(main())
    finally:
        logging.disable(logging.NOTSET)
    assert watching.wrong == []
    return fleet


def labels(fleet: Fleet, name: str = "node-a") -> dict[str, str]:
    return dict(fleet.cluster.get("nodes", name)["metadata"].get("labels") or {})


def deployed(fleet: Fleet, name: str = "node-a") -> dict[str, str]:
    return {key: value for key, value in labels(fleet, name).items() if key.startswith(DEPLOY)}


def layouts(fleet: Fleet, name: str = "node-a") -> list[dict[str, int]]:
    return [counts_of(gpu.layout) for gpu in truth(fleet.cluster.node(name)).values()]


def clean(fleet: Fleet) -> bool:
    return not any(ours_left(one) for one in fleet.cluster.all("nodes"))


class Scripted(Faults):
    """Troubles in the order given, for those who ask."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Trouble] = []
        self.watches: list[WatchTrouble] = []

    def of_request(self) -> Trouble | None:
        return self.requests.pop(0) if self.requests else None

    def of_watch(self) -> WatchTrouble | None:
        return self.watches.pop(0) if self.watches else None


# ---- pods and their evictions


def drain(
    name: str, *instances: Json, allow: Collection[str] = (), more: Json | None = None, **disruption: Any
) -> Json:
    """A plan that evicts, and takes over what others have cut. disruption: more of that field. more: of the spec."""
    said = {"policy": "Evict", "allow": [*allow], **disruption}
    return plan(name, *instances, **{"foreignInstances": "Adopt", "disruption": said, **(more or {})})


def budget(name: str, app: str, namespace: str = "default", **spec: Any) -> Json:
    """A PodDisruptionBudget for the pods of a workload; minAvailable 1 where nothing else is given."""
    metadata = {"name": name, "namespace": namespace}
    spec = {"selector": {"matchLabels": {"app": app}}, **(spec or {"minAvailable": 1})}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec}


async def run(fleet: Fleet, *workloads: Workload) -> None:
    """Have workloads running, and all of that known."""
    for one in workloads:
        fleet.cluster.run(one)
    await fleet.until(lambda: all(len(running(fleet, one.name)) == one.pods for one in workloads))
    await asyncio.sleep(SETTLED_S)


def running(fleet: Fleet, app: str) -> list[Json]:
    """The running pods of a workload."""
    return [pod for pod in fleet.cluster.pods(app=app) if documents.running(pod)]


def the_pod(fleet: Fleet, app: str) -> Json:
    """The one running pod of a workload."""
    (found,) = running(fleet, app)
    return found


def uids(pods: Collection[Json]) -> set[str]:
    """Their uids."""
    return {pod["metadata"]["uid"] for pod in pods}


def calls(fleet: Fleet) -> list[SimRequest]:
    """The eviction calls that were made, in order, as an audit log has them."""
    return [r for r in fleet.cluster.cluster.requests if r.resource == "pods/eviction"]


def evicted(fleet: Fleet) -> list[str]:
    """The pods whose eviction was accepted, by name, in order."""
    return [r.name for r in calls(fleet) if r.code == 201]


def deleted(fleet: Fleet, app: str) -> list[SimRequest]:
    """The plain deletions of pods of a workload by migd: there should be none, ever."""
    return [
        r
        for r in fleet.cluster.cluster.requests
        if (r.resource, r.verb) == ("pods", "delete") and r.user.startswith("migd") and r.name.startswith(f"{app}-")
    ]


def serials(fleet: Fleet, name: str = "node-a") -> set[tuple[str, int]]:
    """The GPU instances of a node, by what no two of them share: another set means that NVML has written."""
    return {(gpu.uuid, one.serial) for gpu in truth(fleet.cluster.node(name)).values() for one in gpu.there}


def held(fleet: Fleet, name: str = "node-a") -> dict[str, set[tuple[int, str]]]:
    """By pod, as namespace/name, the index of the GPU and the instance that it holds."""
    found: dict[str, set[tuple[int, str]]] = {}
    for gpu in truth(fleet.cluster.node(name)).values():
        for one in gpu.there:
            for who in one.held:
                if not who.startswith("pid "):
                    found.setdefault(who, set()).add((gpu.index, str(one.instance)))
    return found


def at_rest(fleet: Fleet, name: str = "node-a") -> Json:
    """What of a node must be as before once all is over: labels not of migd, taints, cordon, what it offers."""
    found = fleet.cluster.get("nodes", name)
    others = {key: value for key, value in labels(fleet, name).items() if not key.startswith("migd.dev/")}
    taints, cordoned = found["spec"].get("taints") or [], found["spec"].get("unschedulable", False)
    offers = {r: n for r, n in fleet.cluster.allocatable(name).items() if n}
    clients = sorted(filter(None, (_client(pod) for pod in fleet.cluster.pods(name))))
    return {"labels": others, "taints": taints, "cordoned": cordoned, "offers": offers, "clients": clients}


def _client(pod: Json) -> str:
    """The DaemonSet of a pod that runs; "" where it is of none."""
    owners = pod["metadata"].get("ownerReferences") or [{"kind": "", "name": ""}]
    return str(owners[0]["name"]) if owners[0]["kind"] == "DaemonSet" and documents.running(pod) else ""


def reason(fleet: Fleet, node: str = "node-a") -> tuple[str, str]:
    """Phase and reason of the first GPU of a node."""
    one = fleet.partitions(node)[0].status
    return one.phase or "", one.reason or ""


def drained(fleet: Fleet, node: str = "node-a") -> tuple[str, str, str]:
    """Status, reason and message of the condition Drained of the first GPU of a node."""
    said = fleet.partitions(node)[0].says("Drained")
    return ("", "", "") if said is None else (said.status, said.reason, said.message)


def blockers(fleet: Fleet) -> list[BlockerDoc]:
    """What is in the way, on all GPUs."""
    return [one for p in fleet.partitions() for one in p.status.blockers]


def events(fleet: Fleet, reason: str) -> list[str]:
    """What was told by events of a name."""
    return [
        str(one.get("note") or one.get("message", "")) for one in fleet.cluster.all("events") if one["reason"] == reason
    ]


def retry(fleet: Fleet) -> None:
    """As `kubectl annotate gpart … migd.dev/retry=`, on the first GPU."""
    body = {"metadata": {"annotations": {"migd.dev/retry": "now"}}}
    fleet.cluster.admin.merge("gpupartitions", fleet.partitions()[0].name, body)
