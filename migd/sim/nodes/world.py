"""A whole simulated cluster in virtual time: API server, controllers, and nodes with simulated GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from migd.sim.cluster.faults import Faults
from migd.sim.cluster.fields import Json
from migd.sim.cluster.kinds import KINDS
from migd.sim.cluster.server import Policy, SimCluster
from migd.sim.cluster.virtual_time import VirtualLoop
from migd.sim.host import SimHost
from migd.sim.nodes import documents
from migd.sim.nodes.acting import Actor, Stage
from migd.sim.nodes.carving import carve
from migd.sim.nodes.daemonsets import DaemonSets
from migd.sim.nodes.disruptions import Disruptions, Namespaces
from migd.sim.nodes.kubelet import Kubelet
from migd.sim.nodes.lifecycle import Lifecycle
from migd.sim.nodes.plugin import PluginConfig
from migd.sim.nodes.scheduler import Scheduler
from migd.sim.nodes.stacks import STYLES, stack
from migd.sim.nodes.strangers import Admin, GpuOperator
from migd.sim.nodes.workloads import Workload, Workloads

_HEARTBEATS: Final = ("nodes/status", "leases")


class OverdueError(Exception):
    """What was waited for did not come about in time; the text has the last lines of the log."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node. gpus: a machine as SimHost takes it. style: see stacks.STYLES. strategy: of its device plugin.

    layout: GPU index -> instances it starts with, as "3g.40gb" or "3g.40gb@4"; an empty list: MIG on. replicas,
    empty_mig_fails: see PluginConfig. mig_manager: it runs too, and where the style is operator, with the label
    `all-disabled` that is the default there. switches: of the machine. labels: of the node.
    """

    name: str
    gpus: str = "8xa100-80gb"
    style: str = "helm"
    strategy: str = "mixed"
    layout: Mapping[int, Sequence[str]] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)
    empty_mig_fails: bool = False
    mig_manager: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"node {self.name}: a style is one of {', '.join(STYLES)}, not {self.style!r}")


@dataclass(frozen=True, slots=True)
class SimNode:
    """A node of a simulated cluster: its machine and its kubelet, which is its power switch too."""

    name: str
    spec: NodeSpec
    host: SimHost
    kubelet: Kubelet


class SimulatedCluster:
    """Everything there is but migd itself. Make it within the loop whose time it goes by; nothing moves before `start`.

    cluster: its API server. log: what happened, a line each; equal seeds have equal logs, to the byte. leases: kubelets
    renew theirs, 360 writes an hour and node. faults: of connections to the API server made by `cluster.transport`.
    """

    def __init__(
        self,
        seed: int = 0,
        nodes: Sequence[NodeSpec] = (),
        faults: Faults | None = None,
        *,
        policy: Policy = lambda _request: "",
        leases: bool = True,
    ) -> None:
        self.cluster = SimCluster(seed, faults, policy)
        self.stage = Stage(self.cluster, seed)
        self.admin = Admin(self.stage)
        self.workloads = Workloads(self.stage)
        self.scheduler = Scheduler(self.stage)
        self.daemonsets = DaemonSets(self.stage)
        self.disruptions = Disruptions(self.stage)
        self.namespaces = Namespaces(self.stage)
        self._nodes = {spec.name: self._node(spec, leases) for spec in nodes}
        self._kubelets = {name: node.kubelet for name, node in self._nodes.items()}
        self.lifecycle = Lifecycle(self.stage, self._kubelets)
        operated = {spec.name: spec.mig_manager for spec in nodes if spec.style == "operator"}
        self.gpu_operator = GpuOperator(self.stage, operated)
        self._power: list[Callable[[str, bool], None]] = []

    def _node(self, spec: NodeSpec, leases: bool) -> SimNode:
        host = SimHost.fresh(spec.gpus, seed=spec.name, **spec.switches)
        host.log_calls(False)
        for index, layout in spec.layout.items():
            carve(host, index, layout)
        assert isinstance(self.stage.loop, VirtualLoop), "a simulated cluster lives in virtual time: run_virtually"
        host.follow_time(self.stage.loop)
        config = PluginConfig(spec.strategy, spec.replicas, empty_mig_fails=spec.empty_mig_fails)
        return SimNode(spec.name, spec, host, Kubelet(self.stage, spec.name, host, config, spec.labels, leases))

    # ---- looking

    @property
    def log(self) -> list[str]:
        """What happened so far."""
        return self.stage.log

    def node(self, name: str) -> SimNode:
        """A node; KeyError for a name that was not given."""
        return self._nodes[name]

    @property
    def nodes(self) -> tuple[SimNode, ...]:
        """All nodes, as they were given."""
        return tuple(self._nodes.values())

    def get(self, plural: str, name: str, namespace: str = "") -> Json | None:
        """An object as the API server has it, not to be changed; None where there is none."""
        return self.admin.read(plural, name, namespace)

    def all(self, plural: str) -> list[Json]:
        """All objects of a kind, not to be changed."""
        return list(self.admin.all(plural))

    def pods(self, node: str = "", **labels: str) -> list[Json]:
        """The pods on a node, or all, with these labels; in label names `_` stands for `-`."""
        wanted = {name.replace("_", "-"): value for name, value in labels.items()}
        return [
            pod
            for pod in self.all("pods")
            if node in ("", documents.node_of(pod)) and documents.selected(wanted, documents.labels_of(pod))
        ]

    def allocatable(self, node: str) -> dict[str, int]:
        """What the node tells of its extended resources."""
        found = self.get("nodes", node)
        return documents.resources_in(((found or {}).get("status") or {}).get("allocatable"))

    # ---- acting

    def start(self, without: Collection[str] = ()) -> None:
        """Machines on: kubelets register, DaemonSets roll out. without: nodes that join later, by `power_on`."""
        for document in stack([node.spec for node in self.nodes]):
            self.admin.create("daemonsets", document)
        for node in self.nodes:
            if node.name not in without:
                node.kubelet.begin()

    def stop(self) -> None:
        """Nobody acts any more."""
        self.stage.end()

    def apply(self, document: Json) -> Json:
        """Make an object, or replace what it says of one, as `kubectl apply` does for an admin; the object after it."""
        kind = next(k for k in KINDS if (k.api_version, k.kind) == (document["apiVersion"], document["kind"]))
        metadata = document["metadata"]
        namespace = metadata.get("namespace", "")
        where = f"/namespaces/{namespace}" if namespace else ""
        path = f"{kind.root}{where}/{kind.plural}/{metadata['name']}"
        query = {"fieldManager": "kubectl", "force": "true"}
        code, _headers, found = self.cluster.answer(
            "admin", "PATCH", path, query, document, "application/apply-patch+yaml"
        )
        if code >= 300:
            raise ValueError(f"{document['kind']} {metadata['name']} is refused: {found.get('message', '')}")
        return found

    def delete(self, plural: str, name: str, namespace: str = "") -> None:
        """Delete an object as an admin; nothing where there is none."""
        found = self.get(plural, name, namespace)
        if found is not None:
            self.admin.delete(plural, found)

    def run(self, workload: Workload) -> None:
        """Keep a workload running."""
        self.workloads.run(workload)

    def on_power(self, heard: Callable[[str, bool], None]) -> None:
        """Tell when a node's machine goes off and comes back, so that programs on it can end and start."""
        self._power.append(heard)

    def reboot(self, name: str, away_s: float = 40.0) -> None:
        """A node's machine is off for so long: processes die, instances vanish, its pods are admitted anew after it."""
        self.power_off(name)
        self.stage.later(away_s, lambda: self.power_on(name))

    def power_off(self, name: str) -> None:
        """A node's machine is off."""
        self._nodes[name].kubelet.power_off()
        self.lifecycle.gone_silent(name)
        self._tell(name, False)

    def power_on(self, name: str) -> None:
        """A node's machine is on again."""
        self._nodes[name].kubelet.power_on()
        self._tell(name, True)

    def restart_kubelet(self, name: str, away_s: float = 2.0) -> None:
        """A kubelet restarts; containers go on."""
        self._nodes[name].kubelet.restart(away_s)
        self.lifecycle.gone_silent(name)

    def raise_xid(self, name: str, gpu: int, xid: int, start: int | None = None) -> None:
        """An Xid on a GPU of a node; its device plugin hears of it."""
        self._nodes[name].host.raise_xid(gpu, xid, start)
        self._nodes[name].kubelet.look()

    def crash_loop(self, uid: str, node: str, times: int, every_s: float = 5.0) -> None:
        """The container of a pod ends badly so often, each time after it ran for so long."""
        if times:
            self._nodes[node].kubelet.crash(uid)
            self.stage.later(every_s, lambda: self.crash_loop(uid, node, times - 1, every_s))

    def let_go(self, name: str, namespace: str = "default") -> None:
        """What keeps a pod that was asked to end is gone: its process that hung, and all finalizers."""
        body = {"annotations": {documents.HANGS: None}, "finalizers": None}
        self.admin.merge("pods", name, {"metadata": body}, namespace)

    def _tell(self, name: str, on: bool) -> None:
        for heard in self._power:
            heard(name, on)

    # ---- waiting

    async def until(self, holds: Callable[[], object], within_s: float = 60.0) -> None:
        """Wait until something holds, looking at every change and every second; OverdueError where it is too late."""
        ends_s = self.stage.now_s() + within_s
        while not holds():
            self.stage.check()
            left_s = ends_s - self.stage.now_s()
            if left_s <= 0:
                raise OverdueError(f"not within {within_s:g} s; the last of the log:\n" + "\n".join(self.log[-30:]))
            await self._stirs(min(1.0, left_s))
        self.stage.check()

    async def quiet(self, for_s: float = 5.0, within_s: float = 600.0) -> None:
        """Wait until nothing has happened for so long but heartbeats; OverdueError where that never is."""
        requests = self.cluster.requests
        seen, lines, since_s = len(requests), len(self.log), self.stage.now_s()

        def holds() -> bool:
            nonlocal seen, lines, since_s
            if lines != len(self.log) or any(r.writes and r.resource not in _HEARTBEATS for r in requests[seen:]):
                since_s = self.stage.now_s()
            seen, lines = len(requests), len(self.log)
            return self.stage.now_s() - since_s >= for_s

        await self.until(holds, within_s)

    async def settled(self, within_s: float = 120.0) -> None:
        """Wait until every node that is up tells of what its device plugin offers."""

        def holds() -> bool:
            there = [node for node in self.nodes if node.kubelet.up and STYLES[node.spec.style].plugin]
            return all(any(self.allocatable(node.name).values()) for node in there)

        await self.until(holds, within_s)

    async def _stirs(self, within_s: float) -> None:
        self.stage.stirred.clear()
        try:
            async with asyncio.timeout(within_s):
                await self.stage.stirred.wait()
        except TimeoutError:
            return


def actor(world: SimulatedCluster, name: str, user: str) -> Actor:
    """Somebody else who acts on this cluster, with dice and a name of their own."""
    return Actor(world.stage, name, user)
