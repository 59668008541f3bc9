"""The cluster agent's ports on a simulated machine, in virtual time or beside a real API server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection
from datetime import datetime
from typing import TypeVar

from migd.agent.node.devices import DevicesError
from migd.agent.node.looking import AgentPorts
from migd.agent.node.offloading import OffLoop
from migd.agent.node.signals import COMMANDS, SignalError, Signals
from migd.agent.ports import Store
from migd.agent.running import Machine
from migd.agent.simulated import SimProcesses, SimReset, SimStore
from migd.kube.ports import Cluster
from migd.kubelet.ports import KubeletError, PodDevices, PodResources
from migd.nvml.gpus import NvmlGpus
from migd.sim.host import SimHost
from migd.sim.nodes.kubelet import Kubelet, KubeletDownError

T = TypeVar("T")


def _really(pid: int) -> None:
    os.kill(pid, signal.SIGHUP)


class SimSignals:
    """SIGHUP on the simulated machine: its NVML clients, by command and container.

    A container is named by, or has in its name, the uid of its pod. send: delivers to a process by its pid; where the
    device plugin is a process of its own, as beside a real API server, that is the kernel.
    """

    def __init__(self, host: SimHost, send: Callable[[int], None] = _really) -> None:
        self._host = host
        self._send = send

    def hang_up(self, pod_uids: Collection[str]) -> int:
        """See `Signals`."""
        clients = self._host.snapshot().clients.values()
        found = {
            client.pid
            for client in clients
            if client.command in COMMANDS and any(uid in client.container for uid in pod_uids)
        }
        for pid in sorted(found):
            try:
                self._host.touch("signal.hang_up", lambda pid=pid: self._send(pid))  # type: ignore[misc]
            except OSError as error:
                raise SignalError(f"cannot send SIGHUP to process {pid}: {error}") from error
        return len(found)


class SimPodResources:
    """The pod-resources API of a simulated kubelet, without a socket."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    async def held(self) -> tuple[PodDevices, ...]:
        """See `PodResources`."""
        await asyncio.sleep(0)
        found: dict[tuple[str, str, str], set[str]] = {}
        try:
            for held in self._kubelet.pod_resources():
                ids = {device.partition("::")[0] for device in held.device_ids}
                found.setdefault((held.namespace, held.pod, held.resource), set()).update(ids)
        except KubeletDownError as error:
            raise KubeletError(str(error)) from error
        return tuple(PodDevices(*key, tuple(sorted(ids))) for key, ids in sorted(found.items()))


class SimPodSignals:
    """SIGHUP to the containers of a simulated kubelet."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    def hang_up(self, pod_uids: Collection[str]) -> int:
        """See `Signals`."""
        return sum(self._kubelet.hang_up(uid) for uid in sorted(pod_uids))


class SimDeviceFiles:
    """Device nodes on the simulated machine: none are needed, but making them may fail.

    A fault of the machine's at "devices.refresh" is a program that fails. done: how often it went well.
    """

    def __init__(self, host: SimHost) -> None:
        self._host = host
        self.done = 0

    def refresh(self) -> None:
        """See `DeviceFiles`."""
        try:
            self._host.touch("devices.refresh", self._refresh)
        except OSError as error:
            raise DevicesError(f"`nvidia-smi -L` ended with 1: {error}") from error

    def _refresh(self) -> None:
        self.done += 1


class InStep:
    """Runs what blocks inline, and keeps the simulated machine's clock and the running loop's together.

    So what a call to the hardware takes passes for everybody on the loop, and what is waited for on the loop passes on
    the machine. One for each machine, however many processes use it one after the other.
    """

    def __init__(self, host: SimHost) -> None:
        self._clock = host.clock
        self._ahead_s: float | None = None  # of the loop's clock, from the beginning

    async def __call__(self, work: Callable[[], T]) -> T:
        """See `OffLoop`."""
        await asyncio.sleep(0)
        if self._ahead_s is None:
            self._ahead_s = self._gap_s()
        behind_s = self._ahead_s - self._gap_s()
        if behind_s > 0:
            self._clock.sleep(behind_s)
        try:
            answer = work()
        except Exception:
            await self._pass()
            raise
        await self._pass()
        return answer

    async def _pass(self) -> None:
        assert self._ahead_s is not None, "it was set before the work"
        took_s = self._gap_s() - self._ahead_s
        if took_s > 0:
            await asyncio.sleep(took_s)

    def _gap_s(self) -> float:
        return self._clock.now_s() - asyncio.get_running_loop().time()


def simulated_agent_ports(
    host: SimHost,
    resources: PodResources,
    store: Store,
    cluster: Cluster,
    wall: Callable[[], datetime],
    off_loop: OffLoop | None = None,
    signals: Signals | None = None,
    pid: int | None = None,
) -> AgentPorts:
    """The ports of an agent on a simulated machine; called again after a simulated crash it is another process.

    off_loop: by default `InStep`, for virtual time; a thread where time is real. signals: by default to processes of
    their own, as beside a real API server. pid: of the agent's process there, this one where not given.
    """
    ours = os.getpid() if pid is None else pid
    gpus = NvmlGpus(host.nvml(pid=ours), host.caller)
    machine = Machine(gpus, SimReset(host), SimProcesses(host, ours), host.clock, host, SimStore(host, store))
    return AgentPorts(
        cluster=cluster,
        machine=machine,
        resources=resources,
        signals=signals or SimSignals(host),
        devices=SimDeviceFiles(host),
        off_loop=off_loop or InStep(host),
        driver=gpus.driver_version,
        wall=wall,
    )
