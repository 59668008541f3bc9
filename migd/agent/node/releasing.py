"""Giving a node back what it is owed when nobody else does: its agent is dead, and the operator is away as well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from migd.kube.errors import ConflictError
from migd.kube.leases import LEASES, Expiry
from migd.kube.nodes import NODES, Node, NodeChange
from migd.kube.owed import owing, paid
from migd.kube.ports import Cluster
from migd.kube.stored import Stored

LOOKS_S: Final = 5.0
TRIES: Final = 5


class NodeMissingError(Exception):
    """The cluster has no node of this name."""


class AgentAliveError(Exception):
    """The node's agent renews its lease: it gives back by itself what it owes."""


async def release(
    cluster: Cluster, node: str, namespace: str, force: bool = False, waiting: Callable[[float], None] = lambda _s: None
) -> NodeChange | None:
    """Give a node back what it is owed; what was changed, or None where it is owed nothing.

    Whether its agent is dead is seen as the operator sees it, without comparing clocks: its lease is not renewed for
    its whole duration while we look. waiting: told once, before such a wait, how many seconds it may take. force: do
    not look. Raises NodeMissingError, AgentAliveError, KubeError; ConflictError where others keep changing the node.
    """
    if (await _looked(cluster, node))[1] is None:
        return None
    if not force:
        await _see_dead(cluster, node, namespace, waiting)
    for left in reversed(range(TRIES)):
        seen, due = await _looked(cluster, node)
        if due is None:
            return None
        try:
            await cluster.change_node(seen, due)
        except ConflictError:
            if not left:
                raise
            continue
        return due
    raise AssertionError("the last try returns or raises")


async def _see_dead(cluster: Cluster, node: str, namespace: str, waiting: Callable[[float], None]) -> None:
    """AgentAliveError as soon as the agent shows to be alive; returns once its lease has expired before our eyes."""
    clock, expiry = asyncio.get_running_loop(), Expiry()
    first = None
    while (lease := await cluster.get(LEASES, node, namespace)) is not None:
        left_s = expiry.until_s(lease.key, lease.value, clock.time()) - clock.time()
        if left_s <= 0:
            return
        said = (lease.value.holder, lease.value.renewed)
        if first is None:
            first = said
            waiting(left_s)
        elif said != first:
            raise AgentAliveError(f"the agent of node {node} is alive: {lease.value.holder} has just renewed its lease")
        await asyncio.sleep(min(LOOKS_S, left_s))


async def _looked(cluster: Cluster, name: str) -> tuple[Stored[Node], NodeChange | None]:
    """The node, and what gives it back what it is owed; None where that is nothing."""
    seen = await cluster.get(NODES, name)
    if seen is None:
        raise NodeMissingError(f"the cluster has no node {name}: see `kubectl get nodes`")
    return seen, paid(seen) if owing(seen) else None
