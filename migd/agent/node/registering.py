"""The objects of this node's GPUs: one GPUPartition for each, made by its agent and gone with its node."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from migd.kube.caches import Cache
from migd.kube.errors import ConflictError, Json, MissingError
from migd.kube.nodes import NODES, Node
from migd.kube.partitions import PARTITIONS
from migd.kube.ports import Cluster
from migd.kube.stored import Stored
from migd.mig.observed import SeenGpu
from migd.plans.partitions import Partition

LABEL: Final = "migd.dev/node"
LABEL_MAX: Final = 63
"""Characters of a label's value; a node's name may have 253. Source: apimachinery, validation.LabelValueMaxLength."""
_HASH: Final = 16


def partition_name(gpu_uuid: str) -> str:
    """The name of a GPU's object: its UUID in lower case."""
    return gpu_uuid.lower()


def node_label(node_name: str) -> str:
    """A node's name as a label's value: itself where that is short enough, else its beginning and a hash of it."""
    if len(node_name) <= LABEL_MAX:
        return node_name
    digest = hashlib.sha256(node_name.encode()).hexdigest()[:_HASH]
    return f"{node_name[: LABEL_MAX - _HASH - 1]}-{digest}"


def document(node_name: str, node_uid: str) -> Json:
    """All of a GPUPartition that is its agent's outside status: where it is, and that it goes with the node."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node_name, "uid": node_uid}
    return {
        "metadata": {"labels": {LABEL: node_label(node_name)}, "ownerReferences": [owner]},
        "spec": {"nodeName": node_name, "nodeUID": node_uid},
    }


class Registering:
    """Makes and keeps the objects of one node's GPUs."""

    def __init__(self, cluster: Cluster, partitions: Cache[Partition]) -> None:
        self._cluster = cluster
        self._partitions = partitions
        self._right: dict[str, str] = {}  # uid -> resource version that was found as it should be

    async def register(self, node: Stored[Node], gpus: Iterable[SeenGpu]) -> tuple[str, ...]:
        """Make the object of each GPU that has none, and put right what is ours in those that are there.

        Returns the names of partitions that are another node's although the GPU is here, in order. Writes nothing where
        all is right. KubeError where the API server cannot be asked; what was done stays done, and is not done again.
        A GPU that fell off the bus before it told its UUID has no name: its object, if there is one, stays as it is.
        """
        duplicates = []
        for gpu in gpus:
            if ":" in gpu.uuid:
                continue
            name = partition_name(gpu.uuid)
            known = self._partitions.get(name)
            try:
                if known is None:
                    duplicates += [] if await self._make(node, name) else [name]
                elif known.value.spec.node_uid == node.uid and not known.deleting:
                    await self._put_right(node, known)
            except (ConflictError, MissingError):
                continue  # somebody was faster: the caches will tell
        return tuple(sorted(duplicates))

    async def _put_right(self, node: Stored[Node], known: Stored[Partition]) -> None:
        if self._right.get(known.uid) == known.resource_version:
            return  # to find out that nothing differs takes longer than to remember it
        stored = await self._cluster.apply(PARTITIONS, known.name, document(node.name, node.uid), known)
        self._right[known.uid] = stored.resource_version

    async def _make(self, node: Stored[Node], name: str) -> bool:
        """Make an object; False where another node has one of that name.

        The node's uid is read anew: with a stale one in its ownerReference the object would be collected at once. An
        object of an earlier node of this name is waited out: the API server collects it.
        """
        other = await self._cluster.get(PARTITIONS, name)
        if other is not None:
            return other.value.spec.node_name == node.name
        fresh = await self._cluster.get(NODES, node.name)
        if fresh is not None and fresh.uid == node.uid:
            await self._cluster.apply(PARTITIONS, name, document(node.name, node.uid), None)
        return True
