"""One node's agent: its caches, its lease and its reports put round the loop. Every port is the caller's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from migd.agent.node.leasing import LEASE_S, PACE, NodeLease
from migd.agent.node.logs import logger
from migd.agent.node.looking import AgentPorts, follow
from migd.agent.node.looping import MIND, Loop, Mind
from migd.agent.node.metrics import Metrics
from migd.agent.node.reporting import Reporter
from migd.kube.cluster import ApiCluster, Identity
from migd.kube.holding import Holding
from migd.kube.leases import Claim
from migd.kube.transport import Transport

MANAGER: Final = "migd-agent"
SILENT_S: Final = 600.0
"""A loop that made no turn for so long is stuck. Longer than all deadlines of one look and one operation together."""
_log = logger(__name__)


class NoNodeError(Exception):
    """The cluster has no node of this name."""


@dataclass(frozen=True, slots=True)
class Identified:
    """Which agent this is: of which node, in which namespace its lease lies, and who holds it, as the pod's name."""

    node: str
    namespace: str
    holder: str


@dataclass(slots=True)
class Probes:
    """What is wrong with the agent, for /healthz and /readyz, in a sentence each; "" for nothing."""

    alive: Callable[[], str] = lambda: ""
    ready: Callable[[], str] = lambda: "the API server was not heard of yet"


async def run_agent(
    ports: AgentPorts,
    me: Identified,
    stop: asyncio.Event,
    metrics: Metrics | None = None,
    probes: Probes | None = None,
    dice: random.Random | None = None,
    mind: Mind = MIND,
) -> None:
    """Run one node's agent until `stop` is set; the caller holds the lock of its state folder.

    Time is the running loop's, and every port is the caller's, so that many agents run in one loop in virtual time.
    NoNodeError where the cluster has no such node. HungAgentError where the hardware no longer answers,
    LibraryReplacedError where the driver was upgraded: the process is to end, and the next one goes on. RecordError
    where the record cannot be read. dice: for jitter only. mind: what decides.
    """
    metrics, probes = metrics or Metrics(), probes or Probes()
    wake = asyncio.Event()
    caches = follow(ports.cluster, me.node, wake.set)
    await _first(caches.wait_synced(), stop.wait())
    if stop.is_set():
        return
    node = caches.node
    if node is None:
        raise NoNodeError(f"the cluster has no node {me.node}: see `kubectl get nodes`")
    reporter = Reporter(ports.cluster, caches, metrics, wake.set, dice)
    loop = Loop(ports, caches, reporter, metrics, wake, stop, lambda: holding.held, mind)
    lease = NodeLease(
        ports.cluster,
        lambda: loop.health.duplicates,
        lambda: (me.node, found.uid) if (found := caches.node) is not None else None,
        lambda: stop.is_set() and loop.health.at_rest,
    )
    claim = Claim(me.node, me.namespace, me.holder, LEASE_S, (me.node, node.uid))

    def held(is_so: bool) -> None:
        metrics.lease(is_so)
        wake.set()

    holding = Holding(lease, claim, PACE, held)
    clock = asyncio.get_running_loop()
    probes.alive = lambda: _stuck(clock.time() - loop.health.turned_at_s)
    probes.ready = lambda: loop.health.trouble or ("" if holding.held else "the lease is not ours")
    _log.info("started", uid=node.uid)
    await _first(loop.run(), holding.run(), reporter.run())
    _log.info("ended", at_rest=loop.health.at_rest)


def _stuck(silent_s: float) -> str:
    return f"no turn was made for {silent_s:.0f} s" if silent_s > SILENT_S else ""


async def _first(*works: Coroutine[Any, Any, object]) -> None:
    """Run several until the first of them ends, and end the others; what any of them raised first is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done:
            task.result()


def api_cluster(
    transport: Transport, holder: str, wall: Callable[[], datetime], dice: random.Random | None = None
) -> ApiCluster:
    """The agent's client of the API server, over this transport. holder: who reports events, as the pod's name."""
    return ApiCluster(transport, Identity(MANAGER, "migd.dev/agent", holder), wall, dice=dice)
