"""The agent as a program: its ports, its lease, its log and its figures put round the loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from migd.agent.host import HostBoot, HostClock, NvidiaSmiReset
from migd.agent.locking import exclusive
from migd.agent.node.devices import HostDeviceFiles
from migd.agent.node.leasing import LEASE_S, PACE, NodeLease
from migd.agent.node.logs import logger, set_up
from migd.agent.node.looking import AgentPorts, follow
from migd.agent.node.metrics import Metrics
from migd.agent.node.offloading import OneThread
from migd.agent.node.reporting import Reporter
from migd.agent.node.running import HungAgentError, Loop
from migd.agent.node.serving import application, served
from migd.agent.node.signals import ProcSignals
from migd.agent.processes import ProcProcesses
from migd.agent.running import Machine
from migd.agent.store import FileStore
from migd.kube.cluster import ApiCluster, Identity
from migd.kube.connecting import HttpTransport
from migd.kube.holding import Holding
from migd.kube.leases import Claim
from migd.kube.ports import Cluster
from migd.kube.transport import Transport
from migd.kubelet.podresources import KubeletPodResources
from migd.nvml.gpus import NvmlGpus

if TYPE_CHECKING:
    from migd.sim.host import SimHost

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
) -> None:
    """Run one node's agent until `stop` is set; the caller holds the lock of its state folder.

    Time is the running loop's, and every port is the caller's, so that many agents run in one loop in virtual time.
    NoNodeError where the cluster has no such node. HungAgentError where the hardware no longer answers: the process is
    to end, and the next one goes on. RecordError where the record cannot be read.
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
    reporter = Reporter(ports.cluster, caches, metrics, wake.set)
    loop = Loop(ports, caches, reporter, metrics, wake, stop, lambda: holding.held)
    lease = NodeLease(ports.cluster, lambda: loop.health.duplicates, lambda: stop.is_set() and loop.health.at_rest)
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


# --- on a real machine -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """What `migd agent` was told. kubeconfig: None as a pod of the cluster. listen: host and port, None for nowhere."""

    me: Identified
    state_dir: Path
    kubelet_dir: Path
    kubeconfig: Path | None = None
    listen: tuple[str, int] | None = None


def run_program(options: Options, host: SimHost | None = None) -> int:
    """Run the agent in this process until SIGTERM or SIGINT; its exit code: 0, or 1 after the hardware hung.

    host: a simulated machine in place of this one. LockHeldError where another migd works on this machine's GPUs;
    StateDirError, RecordError, ConnectError, NoNodeError, ListenError.
    """
    set_up(options.me.node)
    with exclusive(options.state_dir):
        try:
            asyncio.run(_program(options, host))
        except HungAgentError as error:
            _log.error("the hardware hangs; the next process goes on", error=str(error))
            return 1
    return 0


async def _program(options: Options, host: SimHost | None) -> None:
    stop, metrics, probes = asyncio.Event(), Metrics(), Probes()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        if options.listen is not None:
            app = application(metrics, lambda: probes.alive(), lambda: probes.ready())
            port = await stack.enter_async_context(served(app, *options.listen))
            _log.info("listening", address=options.listen[0], port=port)
        transport = await stack.enter_async_context(await HttpTransport.connect(MANAGER, options.kubeconfig))
        cluster = await stack.enter_async_context(api_cluster(transport, options.me.holder))
        ports = await stack.enter_async_context(_ports(options, host, cluster))
        await run_agent(ports, options.me, stop, metrics, probes)


def api_cluster(transport: Transport, holder: str, wall: Callable[[], datetime] = lambda: datetime.now(UTC)) -> ApiCluster:
    """The agent's client of the API server, over this transport. holder: who reports events, as the pod's name."""
    return ApiCluster(transport, Identity(MANAGER, "migd.dev/agent", holder), wall)


@asynccontextmanager
async def _ports(options: Options, host: SimHost | None, cluster: Cluster) -> AsyncIterator[AgentPorts]:
    """The ports on this machine, or on a simulated one beside a real API server and a real kubelet's socket."""
    store, off_loop = FileStore(options.state_dir), OneThread()
    async with KubeletPodResources(options.kubelet_dir / "pod-resources" / "kubelet.sock") as resources:
        if host is not None:
            from migd.agent.node.simulated import simulated_agent_ports  # here: a real machine needs no simulator

            yield simulated_agent_ports(host, resources, store, cluster, lambda: datetime.now(UTC), off_loop)
            return
        gpus = NvmlGpus()
        machine = Machine(gpus, NvidiaSmiReset(), ProcProcesses(), HostClock(), HostBoot(), store)
        yield AgentPorts(
            cluster=cluster,
            machine=machine,
            resources=resources,
            signals=ProcSignals(),
            devices=HostDeviceFiles(),
            off_loop=off_loop,
            driver=gpus.driver_version,
            wall=lambda: datetime.now(UTC),
        )
