"""Nodes whose GPUs are held by pods, agents that drain them, played by hand, and a kubelet that ends pods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fleet_worlds import OF_OPERATOR, World
from unit.migd_operator.fleets import answered, complete, gpu_name, remade

from migd.kube.nodes import TAINT
from migd.kube.owed import OWED
from migd.kube.transport import Transport
from migd.plans.partitions import Partition, Pod
from migd.sim.cluster.faults import NONE, Chances
from migd.sim.cluster.server import SimRequest

Json = dict[str, Any]
SPACE = "team-a"
PODS = f"/api/v1/namespaces/{SPACE}/pods"
BUDGETS = f"/apis/policy/v1/namespaces/{SPACE}/poddisruptionbudgets"


class DrainWorld(World):
    """A World whose agents close a node while pods hold what must go, and say which.

    lingers: they ask for a pod until it is gone, and not only until it goes. stuck: pods, by name, that end and do
    not come to an end. believed: pods that the agents take to be there still, by name.
    """

    def __init__(self, seed: int = 0, chances: Chances = NONE, *, lingers: bool = False) -> None:
        super().__init__(seed, chances)
        self.lingers = lingers
        self.stuck: set[str] = set()
        self.believed: dict[str, Pod] = {}
        self._holders: dict[str, list[str]] = {}

    # pods and budgets

    def add_pod(self, name: str, *gpus: str, node: str = "n0", app: str = "a", **more: Any) -> str:
        """A running pod that holds an instance on each of these GPUs; its uid."""
        metadata = {"name": name, "namespace": SPACE, "labels": {"app": app}}
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs", "controller": True}
        limits = {"nvidia.com/mig-7g.80gb": "1"}
        spec = {"nodeName": node, "containers": [{"name": "c", "resources": {"limits": limits}}], **more}
        ready = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "conditions": ready}
        body = {"metadata": {**metadata, "ownerReferences": [owner]}, "spec": spec, "status": status}
        made = self.ask("POST", PODS, {"apiVersion": "v1", "kind": "Pod", **body})
        for one in gpus:
            self._holders.setdefault(one, []).append(name)
        return str(made["metadata"]["uid"])

    def budget(self, name: str, allowed: int, app: str = "a") -> None:
        """A budget on the pods of an app, that allows so many to go; made, or as its controller counts it now."""
        body = {"metadata": {"name": name}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": app}}}}
        if self.server.answer("somebody", "GET", f"{BUDGETS}/{name}", {}, None, "")[0] == 404:
            self.ask("POST", BUDGETS, {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", **body})
        counts = {"currentHealthy": 1 + allowed, "desiredHealthy": 1, "expectedPods": 1 + allowed}
        told = {"observedGeneration": 1, "disruptionsAllowed": allowed, **counts}
        self.merge(f"{BUDGETS}/{name}/status", {"status": told})

    def pod(self, name: str) -> Json | None:
        code, _, found = self.server.answer("kubelet", "GET", f"{PODS}/{name}", {}, None, "")
        return found if code == 200 else None

    def kill(self, name: str) -> None:
        """The pod is gone at once."""
        self.ask("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})

    def kubelet(self) -> None:
        """Whatever was deleted comes to its end when its time is over."""
        now = self.server.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        for pod in self.ask("GET", PODS)["items"]:
            metadata = pod["metadata"]
            if metadata.get("deletionTimestamp", "z") <= now and metadata["name"] not in self.stuck:
                self.kill(metadata["name"])

    # agents

    def obey(self, *nodes: str) -> None:
        """As `World.obey`, but a node whose GPUs are held is closed and drained first."""
        for node in nodes:
            mine = [p for p in self.partitions() if p.spec.node_name == node]
            given = node in complete(mine) and all(p.spec.desired for p in mine if p.spec.assignment)
            held = {p.name: self._victims(p) for p in mine} if given else {}
            if given and any(there for _, there in held.values()):
                self.close(node)
                for one in mine:
                    after = answered(one, "Draining")
                    victims = held[one.name][0]
                    after = remade(after, status=after.status.model_copy(update={"victims": victims}))
                    self._tell_news(one, after)
            else:
                for one in mine:
                    if one.status.victims:
                        self._tell_news(one, remade(one, status=one.status.model_copy(update={"victims": ()})))
                self.open(node)
                super().obey(node)

    def _tell_news(self, one: Partition, after: Partition) -> None:
        if _agents(one) != _agents(after):
            self.tell(after)

    def _victims(self, one: Partition) -> tuple[tuple[Pod, ...], bool]:
        """The pods that are asked to go, and whether anybody holds the GPU."""
        victims, there = [], False
        for name in self._holders.get(one.name, ()):
            if name in self.believed:
                victims.append(self.believed[name])
                there = True
                continue
            found = self.pod(name)
            if found is not None:
                there = True
                if self.lingers or "deletionTimestamp" not in found["metadata"]:
                    victims.append(Pod(namespace=SPACE, name=name, uid=found["metadata"]["uid"]))
        return tuple(sorted(victims, key=lambda pod: pod.uid)), there

    def close(self, node: str) -> None:
        if OWED not in self.node(node)["metadata"].get("annotations", {}):
            owed = {OWED: json.dumps({"turn": "t", "labels": {}})}
            taints = [{"key": TAINT, "effect": "NoSchedule"}]
            self.merge(f"/api/v1/nodes/{node}", {"metadata": {"annotations": owed}, "spec": {"taints": taints}})

    def open(self, node: str) -> None:
        if OWED in self.node(node)["metadata"].get("annotations", {}):
            body = {"metadata": {"annotations": {OWED: None}}, "spec": {"taints": None}}
            self.merge(f"/api/v1/nodes/{node}", body)

    async def agents(self) -> None:
        """Each second they obey, each minute they renew; and so does the kubelet. Runs until cancelled."""
        turn = 0
        while True:
            for node in sorted(self.kept) if turn % 60 == 59 else ():
                self.renew(node)
            self.kubelet()
            self.obey(*sorted(self.kept))
            turn += 1
            await asyncio.sleep(1.0)

    # what was done

    def evictions(self) -> list[tuple[str, int]]:
        """The eviction calls of operators: the pod's name, and the answer."""
        found = [r for r in self.server.requests if r.resource == "pods/eviction" and r.user.startswith(OF_OPERATOR)]
        return [(r.name, r.code) for r in found]

    def evicted(self) -> list[str]:
        """The pods whose eviction was accepted, in order."""
        return [name for name, code in self.evictions() if code == 201]

    def counted(self, plan: str = "p") -> tuple[int, list[str]]:
        """What a plan counts: evicted, and pending."""
        told = self.status(plan).get("evictions") or {}
        return told.get("evicted", 0), list(told.get("pending") or ())

    def answers(self, node: str = "n0", index: int = 0) -> dict[str, Json]:
        """What is told of the victims of a GPU, by the pod's uid."""
        one = next(p for p in self.partitions() if p.name == gpu_name(node, index))
        return {e.pod_uid: e.model_dump() for e in one.status.evictions}


def _agents(one: Partition) -> object:
    """The agent's part of a status, as far as it is played here."""
    ready = one.says("Ready")
    status = one.status
    return (
        status.phase,
        status.observed_generation,
        status.victims,
        status.observed,
        ready and ready.observed_generation,
    )


class Dying(Transport):
    """The connection of a process that is killed at its request of this number, before it is made or after.

    Only what tells of the drain is counted: not leases, events and watches. log: what was asked.
    """

    def __init__(self, inner: Transport, at: int, *, after: bool) -> None:
        self.inner = inner
        self.at = at
        self.after = after
        self.dead = False
        self.log: list[str] = []

    async def request(self, method: str, path: str, query: Mapping[str, str], body: Any, content_type: str) -> Any:
        counts = not any(part in path for part in ("/leases", "/events")) and not self.dead
        if counts:
            self.log.append(f"{method} {path}")
        dies = counts and len(self.log) == self.at
        self.dead |= dies and not self.after
        if self.dead:
            raise ConnectionRefusedError("the process is gone")
        answer = await self.inner.request(method, path, query, body, content_type)
        if dies:
            self.dead = True
            raise ConnectionResetError("the process is gone")
        return answer

    @asynccontextmanager
    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[AsyncIterator[Json]]:
        if self.dead:
            raise ConnectionRefusedError("the process is gone")
        async with self.inner.watch(path, query) as events:
            yield self._while_alive(events)

    async def _while_alive(self, events: AsyncIterator[Json]) -> AsyncIterator[Json]:
        async for event in events:
            if self.dead:
                raise ConnectionResetError("the process is gone")
            yield event


class Deaf(Dying):
    """A connection whose watches of some kind go dead when told to, and say nothing of that."""

    def __init__(self, inner: Any, kind: str = "") -> None:
        super().__init__(inner, 0, after=False)
        self.kind = kind
        self.deaf = False

    @asynccontextmanager
    async def watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[AsyncIterator[Json]]:
        async with self.inner.watch(path, query) as events:
            yield self._while_heard(events, path)

    async def _while_heard(self, events: AsyncIterator[Json], path: str) -> AsyncIterator[Json]:
        async for event in events:
            if self.deaf and self.kind in path:
                await asyncio.Event().wait()
            yield event


def on_evictions(holds: Callable[[SimRequest], Any], otherwise: Any) -> Callable[[SimRequest], Any]:
    """A policy of the API server's that is about evictions only."""
    return lambda request: holds(request) if request.resource == "pods/eviction" else otherwise
