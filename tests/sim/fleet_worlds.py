"""A simulated API server with nodes, GPUs and plans, operators that run on it, and agents that are played by hand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from unit.migd_operator.fleets import answered, board_of_a100, complete, gpu, gpu_name, observed

from migd.kube.cluster import ApiCluster, Identity
from migd.kube.following import TIMING, Timing
from migd.kube.leases import DUPLICATES, micro_time
from migd.kube.transport import Transport
from migd.mig.geometry import counts
from migd.mig.transition import fit
from migd.plans.partitions import Partition, partition_document, partition_of
from migd.sim.cluster.faults import NONE, Chances, Faults
from migd.sim.cluster.server import SimCluster, SimRequest
from migd.sim.cluster.virtual_time import run_virtually
from migd_operator.reconciling import NAMESPACE, Operator, Setup

Json = dict[str, Any]
API = "/apis/migd.dev/v1alpha1"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
OF_OPERATOR = "operator"
OPERATORS_OWN = ("Assigned", "AgentAlive")


class Cable:
    """A connection that can be cut: then nobody answers, and watches are silent."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.whole = asyncio.Event()
        self.whole.set()

    async def request(self, method: str, path: str, query: Mapping[str, str], body: Any, content_type: str) -> Any:
        if not self.whole.is_set():
            raise ConnectionRefusedError("connection refused")
        return await self.inner.request(method, path, query, body, content_type)

    @asynccontextmanager
    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[AsyncIterator[Json]]:
        if not self.whole.is_set():
            raise ConnectionRefusedError("connection refused")
        async with self.inner.watch(path, query) as events:
            yield self._through(events)

    async def _through(self, events: AsyncIterator[Json]) -> AsyncIterator[Json]:
        async for event in events:
            await self.whole.wait()
            yield event


class World:
    """One API server. All that a test does to it goes past its faults; operators have them."""

    def __init__(self, seed: int = 0, chances: Chances = NONE) -> None:
        self.seed = seed
        self.server = SimCluster(seed, Faults(seed, chances))
        self.kept: set[str] = set()  # nodes whose agent renews its lease and obeys
        self._changes = 0
        self._seen = 0
        self._read: list[Partition] = []
        self.phase: Callable[[str], str] = lambda node: "Ready"

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json", **query: str) -> Json:
        """One request of somebody else's, which must go well."""
        code, _, found = self.server.answer("somebody", method, path, query, body, kind)
        assert code < 300, (method, path, code, found)
        return found

    def merge(self, path: str, body: Json) -> Json:
        return self.ask("PATCH", path, body, "application/merge-patch+json")

    # nodes, GPUs, plans

    def add_node(self, name: str, *layouts: str | None, agent: bool = True, **metadata: Any) -> None:
        """A node with so many GPUs, cut as said; its agent made their objects, and goes on unless told otherwise."""
        labels = {"pool": "a", **metadata.pop("labels", {})}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels, **metadata}}
        self.ask("POST", "/api/v1/nodes", body)
        self.heartbeat(name)
        for index, layout in enumerate(layouts):
            self.add_gpu(name, index, layout)
        self.renew(name)
        if agent:
            self.kept.add(name)

    def add_gpu(self, node: str, index: int, layout: str | None, **more: Any) -> None:
        document = partition_document(gpu(node, index, layout, **more))
        uid = self.node(node)["metadata"]["uid"]
        owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
        metadata = {"name": gpu_name(node, index), "labels": {"migd.dev/node": node}, "ownerReferences": [owner]}
        spec = {"nodeName": node, "nodeUID": uid}
        kind = {"apiVersion": "migd.dev/v1alpha1", "kind": "GPUPartition"}
        self.ask("POST", f"{API}/gpupartitions", {**kind, "metadata": metadata, "spec": spec})
        self.tell(partition_of({**document, "metadata": {"name": gpu_name(node, index)}, "spec": spec}))

    def node(self, name: str) -> Json:
        return self.ask("GET", f"/api/v1/nodes/{name}")

    def heartbeat(self, name: str, ready: bool = True) -> None:
        at = self.server.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": "Ready", "status": str(ready), "lastHeartbeatTime": at}
        self.merge(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [condition]}})

    def plan(self, name: str, *instances: Json, **spec: Any) -> None:
        """A plan for every GPU, made or edited."""
        rules = spec.pop("rules", [{"gpus": {"all": True}, "instances": list(instances)}])
        body = {"spec": {"nodeSelector": {}, "rules": rules, **spec}}
        kind = {"apiVersion": "migd.dev/v1alpha1", "kind": "GPUPartitionPlan", "metadata": {"name": name}}
        path = f"{API}/gpupartitionplans"
        if self.server.answer("somebody", "GET", f"{path}/{name}", {}, None, "")[0] == 404:
            self.ask("POST", path, {**kind, **body})
        else:
            self.merge(f"{path}/{name}", body)

    def delete_plan(self, name: str) -> None:
        self.ask("DELETE", f"{API}/gpupartitionplans/{name}", {})

    def status(self, name: str) -> Json:
        return dict(self.ask("GET", f"{API}/gpupartitionplans/{name}").get("status") or {})

    def said(self, name: str, kind: str) -> tuple[str, str]:
        """Status and reason of a condition of a plan; ("", "") where nothing was said."""
        found = [c for c in self.status(name).get("conditions") or () if c["type"] == kind]
        return (found[0]["status"], found[0]["reason"]) if found else ("", "")

    def partitions(self) -> list[Partition]:
        if self._changed():
            self._read = [partition_of(document) for document in self.ask("GET", f"{API}/gpupartitions")["items"]]
        return self._read

    def assigned(self) -> dict[str, tuple[str, str]]:
        """Status and reason of each GPU's Assigned."""
        return {p.name: (c.status, c.reason) for p in self.partitions() if (c := p.says("Assigned")) is not None}

    def started(self) -> set[str]:
        return {p.spec.node_name for p in self.partitions() if p.spec.assignment is not None}

    # agents, played by hand

    def tell(self, one: Partition) -> None:
        """Write the agent's part of a GPU's status."""
        status = partition_document(one)["status"]
        status["conditions"] = [c for c in status.get("conditions", ()) if c["type"] not in OPERATORS_OWN]
        status.pop("evictions", None)
        kind = {"apiVersion": "migd.dev/v1alpha1", "kind": "GPUPartition"}
        body = {**kind, "metadata": {"name": one.name}, "status": status}
        path = f"{API}/gpupartitions/{one.name}/status"
        self.ask("PATCH", path, body, "application/apply-patch+yaml", fieldManager="migd-agent", force="true")

    def renew(self, node: str, duplicates: str = "") -> None:
        """The node's agent renews its lease."""
        spec = {"holderIdentity": node, "leaseDurationSeconds": 180, "renewTime": micro_time(self.server.now())}
        metadata = {"name": node, "annotations": {DUPLICATES: duplicates}}
        if self.server.answer("agent", "GET", f"{LEASES}/{node}", {}, None, "")[0] == 404:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
            self.ask("POST", LEASES, body)
        else:
            self.merge(f"{LEASES}/{node}", {"metadata": {"annotations": metadata["annotations"]}, "spec": spec})

    def obey(self, *nodes: str) -> None:
        """The nodes' agents answer what their GPUs carry; what is assigned is carried out where the phase is Ready."""
        every = self.partitions()
        turns = complete(every)
        for one in (p for p in every if p.spec.node_name in nodes):
            node = one.spec.node_name
            if one.status.phase == "Lost" or one.status.board is None:
                continue
            if node not in turns or one.spec.assignment is None or one.spec.desired is None:
                after = answered(one, "Held" if one.status.phase == "Held" else "Idle")
            elif self.phase(node) == "Ready":
                wish = {i.profile or "": i.count for i in one.spec.desired.instances}
                there = fit(board_of_a100(), counts(wish)) if wish else frozenset()
                assert isinstance(there, frozenset)
                after = answered(one, "Ready", observed(one.spec.desired.mig == "Enabled", there, set()))
            else:
                after = answered(one, self.phase(node))
            if _told(after) != _told(one):
                self.tell(after)

    async def agents(self) -> None:
        """The agents of all kept nodes: each second they obey, each minute they renew. Runs until cancelled."""
        turn, seen = 0, None
        while True:
            self.partitions()
            for node in sorted(self.kept) if turn % 60 == 59 else ():
                self.renew(node)
            if seen != (seen := (self._changes, self.phase, len(self.kept))):
                self.obey(*sorted(self.kept))
            turn += 1
            await asyncio.sleep(1.0)

    def _changed(self) -> bool:
        """Whether GPUPartitions may be others than those last read; leases are renewed all the time."""
        unseen = self.server.requests[self._seen :]
        self._seen += len(unseen)
        changes = sum(r.writes and r.resource.split("/")[0] in ("gpupartitions", "nodes") for r in unseen)
        self._changes += changes
        return bool(changes)

    # operators

    @asynccontextmanager
    async def operator(
        self, identity: str = "a", transport: Transport | None = None, seed: int = 1, timing: Timing = TIMING
    ) -> AsyncIterator[Operator]:
        """An operator that runs; leaving ends it as SIGTERM would. A bug of its own fails the test."""
        user = f"{OF_OPERATOR}-{identity}"
        through = transport or self.server.transport(user)
        known = Identity("migd-operator", "migd.dev/operator", identity)
        async with ApiCluster(through, known, self.server.now, timing, random.Random(seed)) as cluster:
            one = Operator(cluster, Setup(identity), self.server.now)
            task = asyncio.create_task(one.run())
            try:
                yield one
                assert not task.done() or task.result() is None
            finally:
                task.cancel()
                (ended,) = await asyncio.gather(task, return_exceptions=True)
                if not isinstance(ended, asyncio.CancelledError):
                    raise AssertionError("the operator ended by itself") from ended

    def requests(self, identity: str = "", leases: bool = False) -> list[SimRequest]:
        """What operators asked to be changed, leases and events left out."""
        left_out = {"events"} | (set() if leases else {"leases"})
        return [
            r
            for r in self.server.requests
            if r.writes and r.user.startswith(f"{OF_OPERATOR}-{identity}") and r.resource not in left_out
        ]

    def events(self) -> list[tuple[str, str, str]]:
        """Who was told what: type, reason, note, in order of time."""
        found = self.ask("GET", "/apis/events.k8s.io/v1/events")["items"]
        return [(e["type"], e["reason"], e["note"]) for e in sorted(found, key=lambda e: e["eventTime"])]

    async def until(self, holds: Callable[[], object], within_s: float = 600.0) -> float:
        """Wait until something holds, and say how long that took; AssertionError where it does not in time."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not holds():
            assert loop.time() - began < within_s, f"seed {self.seed}: not within {within_s} s"
            await asyncio.sleep(0.5)
        return loop.time() - began


def _told(one: Partition) -> Json:
    """The agent's part of a status, whatever the order of its conditions, and whenever they were first so."""
    status = partition_document(one)["status"]
    mine = {c["type"]: (c["status"], c["observedGeneration"]) for c in status.get("conditions", ())}
    return {**status, "conditions": {kind: said for kind, said in mine.items() if kind not in OPERATORS_OWN}}


def played(story: Callable[[World], Awaitable[None]], world: World | None = None) -> World:
    """Play a story in virtual time, with the agents of all nodes that are kept; the world afterwards."""
    found = world or World()

    async def main() -> None:
        agents = asyncio.create_task(found.agents())
        try:
            await asyncio.wait_for(story(found), 24 * 3600)
            assert not agents.done(), agents
        finally:
            agents.cancel()
            await asyncio.gather(agents, return_exceptions=True)

    run_virtually(main())
    return found
