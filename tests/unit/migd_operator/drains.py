"""Drains for the tests: GPUs that ask for pods to go, plans that evict, and a small API server that has the pods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unit.migd_operator.fleets import HALVES, NOW, gpu, plan, remade

from migd.kube.budgets import BUDGETS
from migd.kube.errors import MissingError
from migd.kube.pods import PODS
from migd.kube.stored import Interner, Stored
from migd.plans.partitions import EvictionDoc, Partition, Pod
from migd.plans.statuses import PlanEvictions, PlanStatus
from migd_operator.evicting import Drain
from migd_operator.facts import Answer, Fleet, PlanFacts

SPACE = "team-a"


def evicts(
    name: str = "plan", counted: PlanEvictions | None = None, generation: int = 1, **disruption: Any
) -> PlanFacts:
    """A plan that evicts; counted: as its status says."""
    found = plan(name, HALVES, generation=generation, disruption={"policy": "Evict", **disruption})
    return replace(found, status=PlanStatus(evictions=counted))


def counted(evicted: int = 0, *pending: str, generation: int = 1) -> PlanEvictions:
    return PlanEvictions(generation=generation, evicted=evicted, pending=pending)


def victim(uid: str) -> Pod:
    return Pod(namespace=SPACE, name=f"pod-{uid}", uid=uid)


def drained(
    node: str = "n1", index: int = 0, victims: Iterable[str] = (), told: Iterable[EvictionDoc] = ()
) -> Partition:
    """A GPU whose agent wants these pods, by uid, to go."""
    one = gpu(node, index, "7g.80gb", phase="Draining")
    status = {"victims": tuple(victim(uid) for uid in victims), "evictions": tuple(told)}
    return remade(one, status=one.status.model_copy(update=status))


def drains_of(partitions: Iterable[Partition], *plans: PlanFacts) -> tuple[Drain, ...]:
    """All nodes, each GPU wished by the only plan, or by the one at its index."""
    nodes: dict[str, list[tuple[Partition, PlanFacts]]] = {}
    for one in partitions:
        index = one.gpu.index if one.gpu is not None else 0
        if one.status.victims:
            nodes.setdefault(one.spec.node_name, []).append((one, plans[min(index, len(plans) - 1)]))
    return tuple(Drain(node, tuple(gpus)) for node, gpus in nodes.items())


def fleet_of(
    partitions: Iterable[Partition], *plans: PlanFacts, answers: Mapping[str, Answer] | None = None, at_s: float = 0.0
) -> Fleet:
    return Fleet(plans, tuple(partitions), (), NOW, answers=answers or {}, at_s=at_s)


FIT = Answer(NOW, fit=True)
GONE = Answer(NOW, fit=True, going=True, code=201, spent=True)


def held(again_s: float = 5.0, code: int = 429) -> Answer:
    """A budget refused, and may be asked again at this time."""
    return Answer(NOW, fit=True, code=code, reason="DrainBlocked", budgets=("pdb",), message="no", again_s=again_s)


def kept(again_s: float = 30.0) -> Answer:
    """The pod may not be evicted."""
    return Answer(NOW, reason="DrainBlocked", message="it asks for no GPU", again_s=again_s)


@dataclass(slots=True)
class PodServer:
    """What of a cluster an Evictor asks: pods by name, and what becomes of an eviction.

    answer: raises for one that is not accepted. before: called before each request, and may raise. calls: the uids of
    the pods whose eviction was asked for, accepted or not; accepted: only those.
    """

    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    budgets: dict[str, dict[str, str]] = field(default_factory=dict)
    answer: Callable[[Stored[Any]], None] = lambda _pod: None
    before: Callable[[str], None] = lambda _request: None
    calls: list[tuple[str, int | None]] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def add(self, uid: str, node: str = "n1", name: str = "", owner: str = "ReplicaSet", **spec: Any) -> None:
        """A pod on a node that asks for an instance."""
        name = name or f"pod-{uid}"
        owners = [{"kind": owner, "uid": "o", "controller": True}] if owner else []
        metadata = {"name": name, "namespace": SPACE, "uid": uid, "resourceVersion": "1", "labels": {"app": "a"}}
        limits = spec.pop("limits", {"nvidia.com/mig-1g.10gb": "1"})
        self.pods[name] = {
            "metadata": {**metadata, "ownerReferences": owners},
            "spec": {"nodeName": node, "containers": [{"name": "c", "resources": {"limits": limits}}], **spec},
            "status": {"phase": "Running"},
        }

    def ends(self, uid: str) -> None:
        """The pod begins to end."""
        self._by(uid)["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"

    def goes(self, uid: str) -> None:
        """The pod is gone."""
        self.pods = {name: pod for name, pod in self.pods.items() if pod["metadata"]["uid"] != uid}

    def going(self, uid: str) -> bool:
        """Whether a pod ends, or is gone."""
        return not self.there(uid) or "deletionTimestamp" in self._by(uid)["metadata"]

    def there(self, uid: str) -> bool:
        """Whether a pod is there still."""
        return any(pod["metadata"]["uid"] == uid for pod in self.pods.values())

    def _by(self, uid: str) -> dict[str, Any]:
        return next(pod for pod in self.pods.values() if pod["metadata"]["uid"] == uid)

    async def get(self, kind: Any, name: str, namespace: str = "") -> Stored[Any] | None:
        assert (kind, namespace) == (PODS, SPACE)
        self._asked(f"get {name}")
        document = self.pods.get(name)
        if document is None:
            return None
        metadata = document["metadata"]
        value = PODS.parse(document, Interner())
        return Stored(name, SPACE, metadata["uid"], "1", 0, "deletionTimestamp" in metadata, {}, {}, value)

    async def list(self, kind: Any, where: Any) -> tuple[Stored[Any], ...]:
        assert (kind, where.namespace) == (BUDGETS, SPACE)
        self._asked("list budgets")
        found = {
            name: BUDGETS.parse({"metadata": {"name": name}, "spec": {"selector": {"matchLabels": labels}}}, Interner())
            for name, labels in sorted(self.budgets.items())
        }
        return tuple(Stored(name, SPACE, name, "1", 0, False, {}, {}, value) for name, value in found.items())

    async def evict(self, pod: Stored[Any], grace_s: int | None) -> None:
        self._asked(f"evict {pod.name}")
        self.calls.append((pod.uid, grace_s))
        if not self.there(pod.uid):
            raise MissingError("POST eviction", 404, "not found")
        if not self.going(pod.uid):
            self.answer(pod)
            self.ends(pod.uid)
        self.accepted.append(pod.uid)
        self.before("after")

    def _asked(self, request: str) -> None:
        self.requests.append(request)
        self.before(request)
