"""A whole simulated cluster with migd on it, in one process and in virtual time: hours take seconds.

    async def story():
        async with Fleet([NodeSpec("node-a", "2xa100-80gb")]) as fleet:
            fleet.apply(plan("small", {"profile": "1g.10gb", "count": 7}))
            await fleet.ready("small")
            print(fleet.cluster.allocatable("node-a"))

    run_virtually(story())

Simulated are the API server, NVIDIA's stack, kubelets, scheduler, pods and GPUs (`migd.sim`); operator and agents are
the real ones, each a process of its own: it can be killed at any moment, and of what it knows only its record is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, Self, TypeVar

from processes import AGENT, OPERATOR, Life, Program

from migd.agent.node.looking import AgentPorts
from migd.agent.node.running import Identified, api_cluster, run_agent
from migd.agent.node.simulated import simulated_agent_ports
from migd.agent.records import Record
from migd.agent.store import decode, encode
from migd.kube.cluster import ApiCluster, Identity
from migd.kube.errors import Json
from migd.kube.holding import Pace
from migd.kubelet.ports import KubeletError, PodDevices
from migd.plans.partitions import Partition, partition_of
from migd.sim.cluster.faults import Faults
from migd.sim.errors import SimulatedCrash
from migd.sim.nodes.kubelet import Kubelet, KubeletDownError
from migd.sim.nodes.plugin import device_of
from migd.sim.nodes.world import NodeSpec, OverdueError, SimNode, SimulatedCluster
from migd_operator.reconciling import NAMESPACE, Operator, Setup

T = TypeVar("T")
_PID: Final = 900_000
_SETTLES_S: Final = 30.0
_PACE: Final = Pace(renew_s=7.0, margin_s=4.0)
"""Of the operator's lease; slower than the real one's, since hours pass here."""

Strikes = Callable[[str, str], bool]
"""Whether a process dies here. Told: its name, as "migd-agent node-a", and where it is, as "after PATCH /api/…"."""
Refit = Callable[[SimNode, AgentPorts], AgentPorts]
"""Changes what an agent is given of the world, such as to watch what it does there."""


def plan(name: str, *instances: Mapping[str, Any], **spec: Any) -> Json:
    """A GPUPartitionPlan for all GPUs of all nodes; what else is given goes into its spec."""
    rules = [{"gpus": {"all": True}, "instances": [dict(one) for one in instances]}]
    return {
        "apiVersion": "migd.dev/v1alpha1",
        "kind": "GPUPartitionPlan",
        "metadata": {"name": name},
        "spec": {"nodeSelector": {}, "rules": rules, **spec},
    }


class Fleet(AbstractAsyncContextManager["Fleet"]):
    """Nodes, an operator, and an agent on each node; enter it inside a virtual loop.

    cluster: all that is not migd, see `SimulatedCluster`. strikes: where processes of migd die by themselves; they are
    started again, as their pods would be. refit: see `Refit`. without: nodes that join later, by `cluster.power_on`.
    A bug in a program ends the story at the next wait.
    """

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        seed: int = 0,
        faults: Faults | None = None,
        strikes: Strikes = lambda _who, _where: False,
        refit: Refit = lambda _node, ports: ports,
        without: Collection[str] = (),
        **more: Any,
    ) -> None:
        self.seed = seed
        self.refit = refit
        self._without = frozenset(without)
        self.cluster = SimulatedCluster(seed, nodes, faults, **more)
        self.strikes = strikes
        self._agents = {node.name: Program(f"{AGENT} {node.name}", self, _Agent(self, node).run) for node in self.nodes}
        self._operators = [Program(OPERATOR, self, self._operate)]
        self._identities = 0
        self.cluster.on_power(self._powered)

    @property
    def nodes(self) -> tuple[SimNode, ...]:
        """All nodes."""
        return self.cluster.nodes

    async def __aenter__(self) -> Self:
        self.cluster.start(self._without)
        with suppress(OverdueError):  # where no device plugin runs, there is nothing to wait for
            await self.cluster.settled(_SETTLES_S)
        self.operator.start()
        for name, agent in self._agents.items():
            if name not in self._without:
                agent.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await asyncio.gather(*(one.end() for one in (*self._agents.values(), *self._operators)))
        self.cluster.stop()
        if kind is None:
            self.check()

    # ---- programs of migd

    @property
    def programs(self) -> tuple[Program, ...]:
        """The operators, and the agents by node."""
        return (*self._operators, *self._agents.values())

    def agent(self, node: str) -> Program:
        """The agent of a node: `kill`, `start`, `end`."""
        return self._agents[node]

    @property
    def operator(self) -> Program:
        """The operator: `kill`, `start`, `end`."""
        return self._operators[0]

    def another_operator(self) -> Program:
        """One more operator, as during a rolling update; it is not started yet."""
        self._operators.append(Program(f"{OPERATOR} {len(self._operators) + 1}", self, self._operate))
        return self._operators[-1]

    async def _operate(self, life: Life) -> None:
        self._identities += 1
        identity = f"{OPERATOR}-{self._identities}"
        life.line.call_itself(identity)
        known = Identity(OPERATOR, "migd.dev/operator", identity)
        async with ApiCluster(life.line, known, self.cluster.cluster.now, dice=life.dice) as cluster:
            await Operator(cluster, Setup(identity, pace=_PACE), self.cluster.cluster.now).run()

    def _powered(self, name: str, on: bool) -> None:
        agent = self._agents[name]
        if on:
            self.cluster.stage.later(3.0, agent.start)
        else:
            agent.kill(again=False)

    # ---- what is said and wished

    def apply(self, document: Json) -> Json:
        """As `kubectl apply`; ValueError where it is refused."""
        return self.cluster.apply(document)

    def edit(self, name: str, **spec: Any) -> None:
        """Change fields of a plan's spec; None removes one."""
        self.cluster.admin.merge("gpupartitionplans", name, {"spec": spec})

    def plan(self, name: str) -> Json:
        """A plan as the API server has it; {} where there is none."""
        return self.cluster.get("gpupartitionplans", name) or {}

    def condition(self, name: str, kind: str) -> tuple[str, str, str]:
        """Status, reason and message of a plan's condition, as of its present spec; ("", "", "") where it has none."""
        found = self.plan(name)
        for one in (found.get("status") or {}).get("conditions") or ():
            if one["type"] == kind and one.get("observedGeneration") == found["metadata"]["generation"]:
                return one["status"], one["reason"], one.get("message", "")
        return "", "", ""

    def partitions(self, node: str = "") -> tuple[Partition, ...]:
        """What is said of each GPU, or of each of one node, by node and index."""
        found = (partition_of(document) for document in self.cluster.all("gpupartitions"))
        mine = (one for one in found if node in ("", one.spec.node_name))
        return tuple(
            sorted(mine, key=lambda one: (one.spec.node_name, one.status.board.index if one.status.board else 0))
        )

    # ---- waiting

    async def until(self, holds: Callable[[], object], within_s: float = 600.0) -> None:
        """Wait until something holds; OverdueError where it does not in time, or what a program failed on."""

        def looked() -> object:
            self.check()
            return holds()

        await self.cluster.until(looked, within_s)

    async def ready(self, name: str, within_s: float = 1800.0) -> None:
        """Wait until a plan is Ready."""
        await self.until(lambda: self.condition(name, "Ready")[0] == "True", within_s)

    def check(self) -> None:
        """Raise what a program of migd, or an actor of the cluster, failed on."""
        for one in self.programs:
            if one.failed is not None:
                raise one.failed
        self.cluster.stage.check()


class _Agent:
    """What stays of a node's agent over its lives: the record, and the machine it runs on."""

    def __init__(self, fleet: Fleet, node: SimNode) -> None:
        self._fleet = fleet
        self._node = node
        self._store = _Store()
        self._pid = _PID

    async def run(self, life: Life) -> None:
        """One life."""
        host, now, name = self._node.host, self._fleet.cluster.cluster.now, self._node.name
        self._pid += 1
        pid = self._pid
        life.at_death = lambda: host.close_sessions(pid)
        holder = f"{AGENT}-{name}"
        async with api_cluster(life.line, holder, now, life.dice) as cluster:
            ports = simulated_agent_ports(
                *(host, _Resources(self._node.kubelet), self._store, cluster, now),
                off_loop=_Blocking(life),
                signals=_Signals(self._node.kubelet, life),
                pid=pid,
            )
            try:
                ports = self._fleet.refit(self._node, ports)
                await run_agent(ports, Identified(name, NAMESPACE, holder), life.stop, dice=life.dice)
            finally:
                life.at_death()


class _Blocking:
    """What blocks, done in place; where the machine says that the process dies in it, it does."""

    def __init__(self, life: Life) -> None:
        self._life = life

    async def __call__(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(0)
        self._life.passes("before a call")
        try:
            answer = work()
        except SimulatedCrash:
            self._life.dies()
        self._life.passes("after a call")
        return answer


class _Store:
    """The record, as the text a file would hold."""

    def __init__(self) -> None:
        self._text: str | None = None

    def load(self) -> Record | None:
        """See `Store`."""
        return None if self._text is None else decode(self._text)

    def save(self, record: Record) -> None:
        """See `Store`."""
        self._text = encode(record)


class _Resources:
    """The kubelet's pod-resources."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    async def held(self) -> tuple[PodDevices, ...]:
        """See `PodResources`."""
        await asyncio.sleep(0)
        try:
            found = self._kubelet.pod_resources()
        except KubeletDownError as error:
            raise KubeletError(str(error)) from error
        return tuple(
            sorted(
                PodDevices(one.namespace, one.pod, one.resource, tuple(sorted({device_of(i) for i in one.device_ids})))
                for one in found
            )
        )


class _Signals:
    """SIGHUP to the programs in pods."""

    def __init__(self, kubelet: Kubelet, life: Life) -> None:
        self._kubelet = kubelet
        self._life = life

    def hang_up(self, pod_uids: Collection[str]) -> int:
        """See `Signals`."""
        return sum(self._kubelet.hang_up(uid) for uid in sorted(pod_uids))
