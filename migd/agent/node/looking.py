"""One look at a node: the API server's caches, then the kubelet, then the GPUs, in this order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from migd.agent.node.devices import DeviceFiles
from migd.agent.node.offloading import OffLoop
from migd.agent.node.seeing import NodeSeen
from migd.agent.node.signals import Signals
from migd.agent.running import Machine, look, named
from migd.kube.caches import Change
from migd.kube.errors import KubeError
from migd.kube.nodes import NODES, Node
from migd.kube.partitions import PARTITIONS
from migd.kube.pods import PODS, Pod, on_node
from migd.kube.ports import Cluster, Following
from migd.kube.stored import Stored, Where
from migd.kubelet.ports import KubeletError, PodDevices, PodResources
from migd.mig.observed import SeenGpu
from migd.plans.partitions import Partition

ANSWER_S: Final = 10.0
"""How long the kubelet, and a LIST of the node's pods, may take; after that they count as not answering."""


@dataclass(frozen=True, slots=True)
class AgentPorts:
    """All that the agent of a cluster's node needs of the world.

    off_loop: runs what blocks: everything of machine, signals, devices and driver. driver: its version, "" where not
    known; GpuError. wall: UTC, shown to people only; what is waited for is measured by the running loop's clock.
    """

    cluster: Cluster
    machine: Machine
    resources: PodResources
    signals: Signals
    devices: DeviceFiles
    off_loop: OffLoop
    driver: Callable[[], str]
    wall: Callable[[], datetime]


@dataclass(frozen=True, slots=True)
class Caches:
    """What of the cluster is about one node, kept up to date."""

    name: str
    nodes: Following[Node]
    partitions: Following[Partition]
    pods: Following[Pod]

    @property
    def node(self) -> Stored[Node] | None:
        """The node, or None where it is not there."""
        return self.nodes.cache.get(self.name)

    async def wait_synced(self) -> None:
        """Returns once all of it was listed."""
        for following in (self.nodes, self.partitions, self.pods):
            await following.wait_synced()


def follow(cluster: Cluster, node_name: str, changed: Callable[[], None]) -> Caches:
    """Follow what is about this node; changed is called at every change that a decision may turn on."""

    def wake(_: object) -> None:
        changed()

    def wished(change: Change[Partition]) -> None:
        if not _status_only(change):
            changed()

    return Caches(
        node_name,
        cluster.follow(NODES, wake, where=Where(fields=f"metadata.name={node_name}")),
        cluster.follow(PARTITIONS, wished, where=Where(fields=f"spec.nodeName={node_name}")),
        cluster.follow(PODS, wake, where=on_node(node_name)),
    )


def _status_only(change: Change[Partition]) -> bool:
    """A status is written by us and by the operator: no reason to look, but for what becomes of evictions.

    What others do to ours the next look mends.
    """
    before, after = change.before, change.after
    if before is None or after is None:
        return False
    return _decided_on(before) == _decided_on(after)


def _decided_on(partition: Stored[Partition]) -> object:
    return partition.value.spec, partition.annotations, partition.deleting, partition.value.status.evictions


class Looking:
    """Looks at one node."""

    def __init__(self, ports: AgentPorts, caches: Caches) -> None:
        self._ports = ports
        self._caches = caches
        self._gpus: tuple[SeenGpu, ...] = ()
        self._driver = ""

    async def look(self, node: Stored[Node], listing: bool, needed: Collection[str] = (), only: str = "") -> NodeSeen:
        """The node as it is now. Raises GpuError where the GPUs cannot be read.

        listing: LIST the pods, consistently, and ask for the node itself, since a watch may be silent. needed: UUIDs of
        GPUs that must be readable, else GpuError. only: UUID of a GPU; of the others nothing has changed since the last
        look. Neither an API server nor a kubelet that is away ends a look: it says so in what it returns.
        """
        pods, listed_at_s = await self._pods(listing)
        asked = await self._asked() if listing else None
        devices, trouble = await self._devices()
        boot_id, gpus = await self._ports.off_loop(lambda: self._machine(needed, only))
        caches = self._caches
        return NodeSeen(
            boot_id=boot_id,
            now_s=asyncio.get_running_loop().time(),
            wall=self._ports.wall(),
            node=asked or caches.node or node,
            partitions=tuple(sorted(caches.partitions.cache, key=lambda stored: stored.name)),
            pods=pods if listed_at_s is not None else tuple(sorted(caches.pods.cache, key=lambda stored: stored.key)),
            pods_listed_at_s=listed_at_s,
            devices=devices,
            kubelet_trouble=trouble,
            gpus=gpus,
            driver=self._driver,
        )

    async def _pods(self, listing: bool) -> tuple[tuple[Stored[Pod], ...], float | None]:
        if not listing:
            return (), None
        sent_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._ports.cluster.list(PODS, on_node(self._caches.name)), sent_s
        except (KubeError, TimeoutError):
            return (), None  # what is under way does not end for it; what needs the list waits for it

    async def _asked(self) -> Stored[Node] | None:
        """The node, as it is; None where the API server does not say."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._ports.cluster.get(NODES, self._caches.name)
        except (KubeError, TimeoutError):
            return None

    async def _devices(self) -> tuple[tuple[PodDevices, ...] | None, str]:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._ports.resources.held(), ""
        except TimeoutError:
            return None, f"the kubelet did not say within {ANSWER_S:g} s which pod holds which device"
        except KubeletError as error:
            return None, str(error)

    def _machine(self, needed: Collection[str], only: str) -> tuple[str, tuple[SeenGpu, ...]]:
        """The boot id and the GPUs; blocks."""
        machine = self._ports.machine
        boot_id = machine.boot.boot_id()
        one = machine.gpus.look_at(only) if only else None
        if one is not None:
            now = named(one, machine.processes)
            self._gpus = tuple(now if gpu.uuid == now.uuid else gpu for gpu in self._gpus)
        else:
            self._gpus = look(machine, None, needed).gpus
            self._driver = self._ports.driver()
        return boot_id, self._gpus
