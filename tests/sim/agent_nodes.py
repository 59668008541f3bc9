"""One simulated node for the agent's loop: an API server, a machine, a kubelet driven by hand, agents in turn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from kube_contract.objects import desired
from worlds import PIDS_FROM, MemoryStore

from migd.agent.node.looking import AgentPorts
from migd.agent.node.looping import MIND, Mind
from migd.agent.node.metrics import Metrics
from migd.agent.node.running import Identified, Probes, api_cluster, run_agent
from migd.agent.node.simulated import InStep, SimSignals, simulated_agent_ports
from migd.kubelet.ports import KubeletError, PodDevices
from migd.sim.cluster.faults import NONE, Chances, Faults, Trouble
from migd.sim.cluster.server import SimCluster
from migd.sim.host import SimHost

NODE, NAMESPACE = "node-a", "migd-system"
AGENT = "agent"
AT = "/apis/migd.dev/v1alpha1/gpupartitions"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{NODE}"
Json = dict[str, Any]
IDLE: Json = {"disruption": {"policy": "WaitForIdle", "timeout": "30m"}}


class Switched(Faults):
    """Faults by seed, and an API server that can be away."""

    def __init__(self, seed: int = 0, chances: Chances = NONE) -> None:
        super().__init__(seed, chances)
        self.away: Trouble | None = None

    def of_request(self) -> Trouble | None:
        return self.away or super().of_request()


class HandKubelet:
    """The kubelet's pod-resources, as a test says."""

    def __init__(self) -> None:
        self.devices: tuple[PodDevices, ...] = ()
        self.trouble = ""

    async def held(self) -> tuple[PodDevices, ...]:
        if self.trouble:
            raise KubeletError(self.trouble)
        return self.devices


class Node:
    """A node and its agents, each a process of its own. To be made and used within one virtual loop."""

    def __init__(self, spec: str = "a100-80gb", seed: int = 0, chances: Chances = NONE) -> None:
        self.faults = Switched(seed, chances)
        self.server = SimCluster(seed, self.faults)
        self.host = SimHost.fresh(spec, seed=str(seed))
        self.in_step = InStep(self.host)
        self.store = MemoryStore()
        self.kubelet = HandKubelet()
        self.metrics = Metrics()
        self.probes = Probes()
        self.hung_up: list[int] = []
        self.lives = 0
        self.seed = seed
        self.make_node(NODE)

    # --- what an admin does

    def admin(self, method: str, path: str, body: Any = None, kind: str = "application/json", **query: str) -> Json:
        code, _headers, found = self.server.answer("admin", method, path, query, body, kind)
        assert code < 300, (method, path, code, found)
        return found

    def merge(self, path: str, body: Json) -> Json:
        return self.admin("PATCH", path, body, "application/merge-patch+json")

    def make_node(self, name: str) -> Json:
        status = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"nvidia.com/gpu": "1"}}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status}
        return self.admin("POST", "/api/v1/nodes", body)

    def wish(self, name: str, turn: str = "0123456789abcdef", gpus: int = 1, **fields: Any) -> None:
        """What the operator would write."""
        spec = {"desired": {**desired(), **IDLE, **fields}, "assignment": {"id": turn, "gpus": gpus}}
        body = {"apiVersion": "migd.dev/v1alpha1", "kind": "GPUPartition", "metadata": {"name": name}, "spec": spec}
        self.admin(
            "PATCH", f"{AT}/{name}", body, "application/apply-patch+yaml", fieldManager="migd-operator", force="true"
        )

    def get(self, path: str) -> Json | None:
        code, _headers, found = self.server.answer("admin", "GET", path, {}, None, "application/json")
        return found if code == 200 else None

    def node(self) -> Json:
        found = self.get(f"/api/v1/nodes/{NODE}")
        assert found is not None
        return found

    def partitions(self) -> dict[str, Json]:
        return {one["metadata"]["name"]: one for one in self.admin("GET", AT)["items"]}

    def events(self) -> list[Json]:
        return list(self.admin("GET", "/apis/events.k8s.io/v1/namespaces/default/events")["items"])

    def writes(self, since: int = 0, leases: bool = False) -> list[tuple[str, str, str]]:
        """What agents wrote: (verb, resource, name), without their leases."""
        return [
            (r.verb, r.resource, r.name)
            for r in self.server.requests[since:]
            if r.user == AGENT and r.writes and (leases or r.resource != "leases")
        ]

    # --- agents

    @property
    def uuid(self) -> str:
        return self.host.gpu_uuids()[0]

    @property
    def name(self) -> str:
        """The partition of the first GPU."""
        return self.uuid.lower()

    @asynccontextmanager
    async def ports(self) -> AsyncIterator[AgentPorts]:
        """The ports of a new process: memory is lost, the machine and the record stay."""
        self.host.close_sessions(PIDS_FROM + self.lives)
        self.lives += 1
        dice = random.Random(f"{self.seed} {self.lives}")
        async with api_cluster(self.server.transport(AGENT), "pod-a", self.server.now, dice) as cluster:
            yield simulated_agent_ports(
                self.host,
                self.kubelet,
                self.store,
                cluster,
                self.server.now,
                off_loop=self.in_step,
                signals=SimSignals(self.host, self.hung_up.append),
                pid=PIDS_FROM + self.lives,
            )

    @asynccontextmanager
    async def agent(
        self,
        mind: Mind = MIND,
        holder: str = "pod-a",
        change: Callable[[AgentPorts], AgentPorts] = lambda ports: ports,
    ) -> AsyncIterator[Running]:
        """An agent that runs while within, and is stopped by SIGTERM at the end."""
        async with self.ports() as ports:
            stop = asyncio.Event()
            dice = random.Random(self.seed)
            me = Identified(NODE, NAMESPACE, holder)
            work = run_agent(change(ports), me, stop, self.metrics, self.probes, dice, mind)
            running = Running(asyncio.ensure_future(work), stop)
            try:
                yield running
            finally:
                stop.set()
                if not running.task.done():
                    await asyncio.wait([running.task], timeout=600)
                assert running.task.done(), "it does not end"
                if not running.task.cancelled() and not running.expected:
                    running.task.result()


class Running:
    """An agent under way. expected: that it ends with an error is what the test is about."""

    def __init__(self, task: asyncio.Task[None], stop: asyncio.Event) -> None:
        self.task = task
        self.stop = stop
        self.expected = False

    async def ends(self, within_s: float = 600) -> BaseException | None:
        """Wait for its end; what it ended with."""
        self.expected = True
        await asyncio.wait([self.task], timeout=within_s)
        assert self.task.done(), "it goes on"
        return self.task.exception()


async def until(holds: Callable[[], object], within_s: float = 120, step_s: float = 0.5) -> None:
    """Virtual time until something holds."""
    end_s = asyncio.get_running_loop().time() + within_s
    while not holds():
        assert asyncio.get_running_loop().time() < end_s, "it never came to be"
        await asyncio.sleep(step_s)


def with_machine(ports: AgentPorts, **parts: Any) -> AgentPorts:
    """Ports with parts of the machine replaced."""
    return replace(ports, machine=replace(ports.machine, **parts))
