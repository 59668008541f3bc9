"""What a decision about a node looks at: the node, its partitions and pods, who holds what, and its GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from migd.kube.nodes import Node
from migd.kube.pods import Pod
from migd.kube.stored import Stored
from migd.kubelet.ports import PodDevices
from migd.mig.observed import SeenGpu
from migd.plans.partitions import Partition


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """All that a decision looks at.

    boot_id: another text after every boot. now_s: a clock that only moves forward within one boot; wall: for people.
    partitions: this node's, by name. pods: all bound to this node, by key: from the cache, or, where `needs_list` says
    so of the record, from a consistent LIST. pods_listed_at_s: on the clock, when that LIST was *sent*, so that it
    shows all that was bound before; None for the cache. devices: who holds what, asked of the kubelet *after* the pods
    were listed; None where it could not be asked, and kubelet_trouble says why. gpus: looked at last.
    driver: the driver's version, "" where not known.
    """

    boot_id: str
    now_s: float
    wall: datetime
    node: Stored[Node]
    partitions: tuple[Stored[Partition], ...]
    pods: tuple[Stored[Pod], ...]
    pods_listed_at_s: float | None
    devices: tuple[PodDevices, ...] | None
    kubelet_trouble: str
    gpus: tuple[SeenGpu, ...]
    driver: str = ""

    def gpu(self, uuid: str) -> SeenGpu | None:
        """This GPU, or None where NVML does not show it. uuid: in any case, as names of partitions are lower-case."""
        return next((gpu for gpu in self.gpus if gpu.uuid.lower() == uuid.lower()), None)
