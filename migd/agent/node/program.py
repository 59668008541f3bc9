"""The agent as a program: on this machine, or a simulated one, with its log, its figures and its signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from migd.agent.host import HostBoot, HostClock, NvidiaSmiReset
from migd.agent.locking import exclusive
from migd.agent.node.devices import HostDeviceFiles
from migd.agent.node.logs import logger, set_up
from migd.agent.node.looking import AgentPorts
from migd.agent.node.looping import HungAgentError, LibraryReplacedError
from migd.agent.node.metrics import Metrics
from migd.agent.node.offloading import OneThread
from migd.agent.node.running import MANAGER, Identified, Probes, api_cluster, run_agent
from migd.agent.node.serving import application, served
from migd.agent.node.signals import ProcSignals
from migd.agent.processes import ProcProcesses
from migd.agent.running import Machine
from migd.agent.store import FileStore
from migd.kube.connecting import HttpTransport
from migd.kube.ports import Cluster
from migd.kubelet.podresources import KubeletPodResources
from migd.nvml.gpus import NvmlGpus

if TYPE_CHECKING:
    from migd.sim.host import SimHost

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """What `migd agent` was told. kubeconfig: None as a pod of the cluster. listen: host and port, None for nowhere."""

    me: Identified
    state_dir: Path
    kubelet_dir: Path
    kubeconfig: Path | None = None
    listen: tuple[str, int] | None = None


Change = Callable[[AgentPorts], AgentPorts]


def run_program(options: Options, host: SimHost | None = None, change: Change = lambda ports: ports) -> int:
    """Run the agent in this process until SIGTERM or SIGINT; its exit code: 0, or 1 where another process must go on.

    So it is after the hardware hung, and after the driver was upgraded.
    host: a simulated machine in place of this one. change: of the ports before they are used, as a trial that kills
    this process at one of their calls needs. LockHeldError where another migd works on this machine's GPUs;
    StateDirError, RecordError, ConnectError, NoNodeError, ListenError.
    """
    set_up(options.me.node)
    with exclusive(options.state_dir):
        try:
            asyncio.run(_program(options, host, change))
        except HungAgentError as error:
            _log.error("the hardware hangs; the next process goes on", error=str(error))
            return 1
        except LibraryReplacedError as error:
            _log.warning("the driver was upgraded; the next process loads its library", error=str(error))
            return 1
    return 0


async def _program(options: Options, host: SimHost | None, change: Change) -> None:
    stop, metrics, probes = asyncio.Event(), Metrics(), Probes()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        if options.listen is not None:
            app = application(metrics, lambda: probes.alive(), lambda: probes.ready())
            port = await stack.enter_async_context(served(app, *options.listen))
            _log.info("listening", address=options.listen[0], port=port)
        transport = await stack.enter_async_context(await HttpTransport.connect(MANAGER, options.kubeconfig))
        cluster = await stack.enter_async_context(api_cluster(transport, options.me.holder, _now))
        await run_agent(change(_ports(options, host, cluster)), options.me, stop, metrics, probes)


def _ports(options: Options, host: SimHost | None, cluster: Cluster) -> AgentPorts:
    """The ports on this machine, or on a simulated one beside a real API server and a real kubelet's socket."""
    store, off_loop = FileStore(options.state_dir), OneThread()
    resources = KubeletPodResources(options.kubelet_dir)
    if host is not None:
        from migd.agent.node.simulated import simulated_agent_ports  # here: a real machine needs no simulator

        return simulated_agent_ports(host, resources, store, cluster, _now, off_loop)
    gpus = NvmlGpus()
    machine = Machine(gpus, NvidiaSmiReset(), ProcProcesses(), HostClock(), HostBoot(), store)
    return AgentPorts(
        cluster=cluster,
        machine=machine,
        resources=resources,
        signals=ProcSignals(),
        devices=HostDeviceFiles(),
        off_loop=off_loop,
        driver=gpus.driver_version,
        wall=_now,
    )


def _now() -> datetime:
    return datetime.now(UTC)
