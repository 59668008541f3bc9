"""`python dying.py agent …`: the agent of a node, which kills itself with SIGKILL at a point that a test has named.

It is put together of the same parts as `migd agent`, with each port that changes something behind a gate. Beside the
record lies a folder: `point` names where to die, and is taken away before; `passed` gets a line for each gate passed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from migd.agent.locking import exclusive
from migd.agent.node.logs import set_up
from migd.agent.node.looking import AgentPorts
from migd.agent.node.metrics import Metrics
from migd.agent.node.offloading import OneThread
from migd.agent.node.running import MANAGER, Identified, Probes, api_cluster, run_agent
from migd.agent.node.serving import application, served
from migd.agent.ports import Gpus, Reset, Store
from migd.agent.records import Record
from migd.agent.simulated import SimStore
from migd.agent.store import FileStore
from migd.kube.connecting import HttpTransport
from migd.kube.nodes import NodeChange, operations
from migd.kubelet.podresources import KubeletPodResources
from migd.mig.observed import SeenGpu
from migd.mig.operations import Operation, ResetGpu, SetMode
from migd.sim.host import SimHost

T = TypeVar("T")
FOLDER: Final = "dying"
BEFORE: Final = "before"
AFTER: Final = "after"


@dataclass(frozen=True)
class Point:
    """Where to die. at: the gate; when: before or after what it guards.

    reset: the driver takes a change of the mode, and leaves the reset that it needs to others.
    """

    at: str
    when: str
    reset: bool = False


class Gate:
    """Every change of the world goes through here. folder: see above."""

    def __init__(self, folder: Path, host: SimHost) -> None:
        self._folder = folder
        self._host = host
        self._stage = "Rest"
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, at: str, work: Callable[[], T]) -> T:
        """Do something, and die before or after it where that was named."""
        self._here(at, BEFORE)
        done = work()
        self._here(at, AFTER)
        return done

    async def wait(self, at: str, work: Awaitable[T]) -> T:
        """The same for what is waited for."""
        self._here(at, BEFORE)
        done = await work
        self._here(at, AFTER)
        return done

    def perform(self, gpus: Gpus, operation: Operation) -> None:
        """One operation on the hardware."""
        point = self._point()
        if point is None or not point.reset or not isinstance(operation, SetMode):
            return self.run(type(operation).__name__, lambda: gpus.perform(operation))
        self._host.switch("vm", True)
        try:
            return gpus.perform(operation)
        finally:
            self._host.switch("vm", False)

    def _here(self, at: str, when: str) -> None:
        with (self._folder / "passed").open("a") as passed:
            passed.write(f"{when} {at}\n")
        point = self._point()
        if point is not None and (point.at, point.when) == (at, when):
            os.replace(self._folder / "point", self._folder / "died")
            os.kill(os.getpid(), signal.SIGKILL)

    def _point(self) -> Point | None:
        try:
            return Point(**json.loads((self._folder / "point").read_text()))
        except FileNotFoundError:
            return None


@dataclass(frozen=True)
class GatedGpus:
    """Operations on the GPUs."""

    gate: Gate
    inner: Gpus

    def look(self) -> tuple[SeenGpu, ...]:
        return self.inner.look()

    def look_at(self, gpu_uuid: str) -> SeenGpu | None:
        return self.inner.look_at(gpu_uuid)

    def perform(self, operation: Operation) -> None:
        self.gate.perform(self.inner, operation)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class GatedReset:
    """GPU resets."""

    gate: Gate
    inner: Reset

    def reset(self, gpu_uuid: str) -> None:
        self.gate.run(ResetGpu.__name__, lambda: self.inner.reset(gpu_uuid))


@dataclass(frozen=True)
class GatedStore:
    """Saves of the record, by the stage that is saved."""

    gate: Gate
    inner: Store

    def load(self) -> Record | None:
        return self.inner.load()

    def save(self, record: Record) -> None:
        stage = record.node.stage if record.node is not None else "Rest"
        self.gate.run(f"save {stage}", lambda: self.inner.save(record))


@dataclass(frozen=True)
class GatedSignals:
    """SIGHUP to the device plugin."""

    gate: Gate
    inner: Any

    def hang_up(self, pod_uids: Collection[str]) -> int:
        return int(self.gate.run("HangUp", lambda: self.inner.hang_up(pod_uids)))


@dataclass(frozen=True)
class GatedDevices:
    """Device nodes."""

    gate: Gate
    inner: Any

    def refresh(self) -> None:
        self.gate.run("RefreshDevices", self.inner.refresh)


class GatedCluster:
    """What is written to the API server; all else goes straight through."""

    def __init__(self, gate: Gate, inner: Any) -> None:
        self._gate = gate
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def apply(self, kind: Any, name: str, body: Any, seen: Any, subresource: str = "", **more: Any) -> Any:
        phase = (body.get("status") or {}).get("phase") if subresource else None
        work = self._inner.apply(kind, name, body, seen, subresource, **more)
        if phase is None or seen is None or phase == seen.value.status.phase:
            return await work
        return await self._gate.wait(f"tell {phase}", work)

    async def change_node(self, seen: Any, change: NodeChange) -> Any:
        work = self._inner.change_node(seen, change)
        return await (self._gate.wait(f"ChangeNode {word_of(change)}", work) if operations(seen, change) else work)

    async def delete(self, kind: Any, seen: Any, dry_run: bool = False) -> None:
        work = self._inner.delete(kind, seen, dry_run)
        await (work if dry_run else self._gate.wait("StopPlugin", work))  # a death there would change nothing

    async def without_annotation(self, kind: Any, seen: Any, key: str) -> Any:
        return await self._gate.wait("ForgetRetry", self._inner.without_annotation(kind, seen, key))


def word_of(change: NodeChange) -> str:
    """What a change of the node is for."""
    if change.closed is None:
        return "label"
    others = any(not key.startswith("migd.dev/") for key in change.labels)
    return "open" if not change.closed else "pause" if others else "close"


async def _program(options: argparse.Namespace, host: SimHost) -> None:
    stop, metrics, probes, off_loop = asyncio.Event(), Metrics(), Probes(), OneThread()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    gate = Gate(options.state_dir / FOLDER, host)
    async with AsyncExitStack() as stack:
        address, _, port = options.listen.rpartition(":")
        app = application(metrics, lambda: probes.alive(), lambda: probes.ready())
        await stack.enter_async_context(served(app, address, int(port)))
        transport = await stack.enter_async_context(await HttpTransport.connect(MANAGER, options.kubeconfig))
        cluster = await stack.enter_async_context(api_cluster(transport, options.pod, _now))
        ports = _ports(options, host, gate, GatedCluster(gate, cluster), off_loop)
        await run_agent(ports, Identified(options.node, options.namespace, options.pod), stop, metrics, probes)


def _ports(options: argparse.Namespace, host: SimHost, gate: Gate, cluster: Any, off_loop: OneThread) -> AgentPorts:
    from migd.agent.node.simulated import simulated_agent_ports

    store = FileStore(options.state_dir)
    resources = KubeletPodResources(options.kubelet_dir)
    ports = simulated_agent_ports(host, resources, store, cluster, _now, off_loop)
    machine = replace(
        ports.machine,
        gpus=GatedGpus(gate, ports.machine.gpus),
        reset=GatedReset(gate, ports.machine.reset),
        store=GatedStore(gate, SimStore(host, store)),
    )
    signals, devices = GatedSignals(gate, ports.signals), GatedDevices(gate, ports.devices)
    return replace(ports, machine=machine, signals=signals, devices=devices)


def _now() -> datetime:
    return datetime.now(UTC)


def main(words: list[str]) -> None:
    """Run it until SIGTERM, or until it dies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["agent"])
    for name in ("node", "pod", "namespace", "listen", "simulate"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("state-dir", "kubelet-dir", "state"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--kubeconfig", type=Path)  # none as a pod
    options = parser.parse_args(words)
    set_up(options.node)
    with exclusive(options.state_dir):
        asyncio.run(_program(options, SimHost.open(options.state, options.simulate)))


if __name__ == "__main__":
    main(sys.argv[1:])
