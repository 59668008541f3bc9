"""Whole simulated nodes with NVIDIA's stack, pods and kubelet, and agents on them that come, go and crash."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from agent_nodes import AGENT, AT, IDLE, NAMESPACE, Switched
from kube_contract.objects import desired
from worlds import PIDS_FROM, MemoryStore

from migd.agent.node.looking import AgentPorts
from migd.agent.node.metrics import Metrics
from migd.agent.node.running import Identified, Probes, api_cluster, run_agent
from migd.agent.node.simulated import SimPodResources, SimPodSignals, simulated_agent_ports
from migd.sim.cluster.faults import NONE, Chances
from migd.sim.cluster.virtual_time import run_virtually
from migd.sim.errors import SimulatedCrash
from migd.sim.nodes.world import NodeSpec, SimulatedCluster

Json = dict[str, Any]
Change = Callable[[AgentPorts], AgentPorts]


def _same(ports: AgentPorts) -> AgentPorts:
    return ports


class Station:
    """One node's agent through its lives. crashes: how often it died and was started anew."""

    def __init__(self, world: SimulatedCluster, name: str) -> None:
        self.world = world
        self.name = name
        self.node = world.node(name)
        self.store = MemoryStore()
        self.metrics = Metrics()
        self.probes = Probes()
        self.lives = 0
        self.crashes = 0
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    def start(self, change: Change = _same) -> None:
        """The DaemonSet's pod starts; one that crashes is started anew after a moment."""
        self._stop = asyncio.Event()
        self._task = asyncio.ensure_future(self._live(change))

    async def _live(self, change: Change) -> None:
        while True:
            try:
                await self._life(change)
            except SimulatedCrash:
                self.crashes += 1
                await asyncio.sleep(2)
                continue
            return

    async def _life(self, change: Change) -> None:
        host, kubelet = self.node.host, self.node.kubelet
        host.close_sessions(PIDS_FROM + self.lives)
        self.lives += 1
        dice = random.Random(f"{self.name} {self.lives}")
        transport = self.world.cluster.transport(AGENT)
        async with api_cluster(transport, f"agent-{self.name}", self.world.cluster.now, dice) as cluster:
            ports = simulated_agent_ports(
                host,
                SimPodResources(kubelet),
                self.store,
                cluster,
                self.world.cluster.now,
                signals=SimPodSignals(kubelet),
                pid=PIDS_FROM + self.lives,
            )
            me = Identified(self.name, NAMESPACE, f"agent-{self.name}")
            await run_agent(change(ports), me, self._stop, self.metrics, self.probes, dice)

    async def end(self) -> None:
        """SIGTERM."""
        assert self._task is not None
        self._stop.set()
        await asyncio.wait([self._task], timeout=600)
        self._task.result()

    def ended_by(self, error: type[Exception]) -> bool:
        """Whether the agent's process ended with this error."""
        assert self._task is not None
        return self._task.done() and isinstance(self._task.exception(), error)

    def check(self) -> None:
        """Raises what the agent ended with, if it did."""
        if self._task is not None and self._task.done():
            self._task.result()

    # --- what is there

    @property
    def partitions(self) -> list[Json]:
        """This node's, by the index of their GPUs."""
        order = [uuid.lower() for uuid in self.node.host.gpu_uuids()]
        found = {p["metadata"]["name"]: p for p in self.world.all("gpupartitions")}
        return [found[name] for name in order if name in found]

    def status(self, gpu: int = 0) -> Json:
        """The status of a GPU's partition; {} where there is none yet."""
        found = self.partitions
        return dict(found[gpu].get("status") or {}) if gpu < len(found) else {}

    def phases(self) -> list[str]:
        return [str((p.get("status") or {}).get("phase")) for p in self.partitions]

    def wish(self, turn: str, *wishes: Json) -> None:
        """What the operator would write: a wish for each GPU in turn, {} for none."""
        given = [w for w in wishes if w]
        for partition, fields in zip(self.partitions, wishes, strict=True):
            body: Json = {
                "apiVersion": "migd.dev/v1alpha1",
                "kind": "GPUPartition",
                "metadata": {"name": partition["metadata"]["name"]},
                "spec": {"desired": {**desired(), **IDLE, **fields}, "assignment": {"id": turn, "gpus": len(given)}}
                if fields
                else {},
            }
            path = f"{AT}/{partition['metadata']['name']}"
            query = {"fieldManager": "migd-operator", "force": "true"}
            code, _headers, found = self.world.cluster.answer(
                "operator", "PATCH", path, query, body, "application/apply-patch+yaml"
            )
            assert code < 300, found

    @property
    def labels(self) -> dict[str, str]:
        node = self.world.get("nodes", self.name)
        return dict(node["metadata"].get("labels") or {}) if node else {}

    def advertised(self) -> dict[str, int]:
        return {name: number for name, number in self.world.allocatable(self.name).items() if number}

    def ready(self) -> bool:
        """The node says so, and so does every GPU with a wish, of its present generation."""
        self.check()
        return self.labels.get("migd.dev/state") == "ready" and all(
            (p.get("status") or {}).get("phase") == "Ready"
            and p["status"].get("observedGeneration") == p["metadata"]["generation"]
            for p in self.partitions
            if "desired" in p["spec"]
        )

    def writes(self, since: int) -> list[tuple[str, str, str]]:
        return [
            (r.verb, r.resource, r.name)
            for r in self.world.cluster.requests[since:]
            if r.user == AGENT and r.writes and r.resource != "leases"
        ]

    def in_order(self) -> None:
        """Nothing of ours is left on the node."""
        node = self.world.get("nodes", self.name)
        assert node is not None
        assert not [t for t in node["spec"].get("taints") or () if t["key"].startswith("migd.dev")]
        assert "migd.dev/owed" not in (node["metadata"].get("annotations") or {})
        assert "paused-for-mig-change" not in (node["metadata"].get("labels") or {}).values()


def play(
    story: Callable[[Station], Awaitable[None]],
    spec: NodeSpec,
    seed: int = 0,
    chances: Chances = NONE,
    change: Change = _same,
) -> None:
    """Run a story on one node whose agent has started and registered its GPUs."""

    async def main() -> None:
        faults = Switched(seed, chances)
        world = SimulatedCluster(seed, [spec], faults, leases=False)
        world.start()
        await world.settled()
        station = Station(world, spec.name)
        station.start(change)
        gpus = len(station.node.host.gpu_uuids())
        await world.until(lambda: len([p for p in station.partitions if p.get("status")]) == gpus, 600)
        await story(station)
        await station.end()
        world.stage.check()
        world.stop()

    run_virtually(asyncio.wait_for(main(), 48 * 3600))


@asynccontextmanager
async def away(station: Station, trouble: Any) -> AsyncIterator[None]:
    """The API server does not answer the agent meanwhile."""
    faults = station.world.cluster.faults
    assert isinstance(faults, Switched)
    faults.away = trouble
    try:
        yield
    finally:
        faults.away = None


class Crashing:
    """Ports whose nth call is the process's end, once: before the call, or after it. calls: those counted, in order.

    instead: done at the nth call in place of a crash.
    """

    def __init__(self, nth: int = 0, after: bool = False, instead: Callable[[], None] | None = None) -> None:
        self.nth, self.after, self.instead = nth, after, instead
        self.calls: list[str] = []

    def __call__(self, ports: AgentPorts) -> AgentPorts:
        machine = replace(
            ports.machine,
            gpus=_Face(self, "gpus", ports.machine.gpus, ("perform",)),
            reset=_Face(self, "reset", ports.machine.reset, ("reset",)),
            store=_Face(self, "store", ports.machine.store, ("save",)),
        )
        return replace(
            ports,
            machine=machine,
            cluster=_Face(self, "cluster", ports.cluster, ("change_node", "delete", "apply", "without_annotation")),
            signals=_Face(self, "signals", ports.signals, ("hang_up",)),
            devices=_Face(self, "devices", ports.devices, ("refresh",)),
        )

    def point(self, name: str) -> bool:
        """Count a call; whether it is the one to crash at."""
        self.calls.append(name)
        if len(self.calls) != self.nth:
            return False
        if self.instead is not None:
            self.instead()
        return self.instead is None


class _Face:
    """A port some calls of which are counted; the others go through."""

    def __init__(self, crashing: Crashing, name: str, port: Any, counted: tuple[str, ...]) -> None:
        self._crashing, self._name, self._port, self._counted = crashing, name, port, counted

    def __getattr__(self, call: str) -> Any:
        inner = getattr(self._port, call)
        if call not in self._counted:
            return inner
        if asyncio.iscoroutinefunction(inner):

            async def waits(*args: Any, **kwargs: Any) -> Any:
                due = self._crashing.point(f"{self._name}.{call}")
                if due and not self._crashing.after:
                    raise SimulatedCrash
                answer = await inner(*args, **kwargs)
                if due:
                    raise SimulatedCrash
                return answer

            return waits

        def acts(*args: Any, **kwargs: Any) -> Any:
            due = self._crashing.point(f"{self._name}.{call}")
            if due and not self._crashing.after:
                raise SimulatedCrash
            answer = inner(*args, **kwargs)
            if due:
                raise SimulatedCrash
            return answer

        return acts
