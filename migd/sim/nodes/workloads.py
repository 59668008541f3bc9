"""Workloads on a simulated cluster: what keeps pods there, and what sends jobs one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from migd.sim.cluster.entries import Happened
from migd.sim.cluster.fields import Json
from migd.sim.nodes import documents
from migd.sim.nodes.acting import Actor, Stage

_API: Final = {"ReplicaSet": ("apps/v1", "replicasets"), "Job": ("batch/v1", "jobs")}


@dataclass(frozen=True, slots=True)
class Workload:
    """Pods of one kind, by a controller that makes another one for each that ends.

    limits: what each asks for, as {"nvidia.com/mig-1g.10gb": 1}. pods: so many at a time. lasts_s: between these two
    each ends by itself; None: never. pause_s: between the end of one and the next. idle: it holds its devices and
    computes nothing. stops_in_s: how long it takes to stop, at most its grace; None: up to a second. crashes_after_s:
    its containers end badly so long after each start. hangs: it does not end, not even when it is killed. finalizers:
    of each pod. spec: more of the pods' spec, such as tolerations or terminationGracePeriodSeconds.
    """

    name: str
    limits: Mapping[str, int]
    pods: int = 1
    lasts_s: tuple[float, float] | None = None
    pause_s: tuple[float, float] = (0.1, 1.0)
    namespace: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict)
    idle: bool = False
    stops_in_s: float | None = None
    crashes_after_s: float | None = None
    hangs: bool = False
    finalizers: tuple[str, ...] = ()
    spec: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What owns its pods: a Job where they end by themselves, else a ReplicaSet."""
        return "ReplicaSet" if self.lasts_s is None else "Job"


class Workloads(Actor):
    """The controllers of workloads."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "workloads", "system:serviceaccount:kube-system:replicaset-controller")
        self._owners: dict[str, tuple[Json, Workload]] = {}  # uid -> the owner and what it keeps
        self._alive: dict[str, set[str]] = {}  # uid of the owner -> uids of pods that have not ended
        self._coming: dict[str, int] = {}  # uid of the owner -> pods about to be made
        self._made = 0
        stage.hear("pods", self._pod_changed)

    def run(self, workload: Workload) -> None:
        """Keep this workload running from now on."""
        version, plural = _API[workload.kind]
        metadata = {"name": workload.name, "namespace": workload.namespace}
        spec = {"replicas": workload.pods} if workload.kind == "ReplicaSet" else {}
        owner = self.create(plural, {"apiVersion": version, "kind": workload.kind, "metadata": metadata, "spec": spec})
        assert owner is not None, f"there is a {workload.kind} {workload.name} already"
        uid = owner["metadata"]["uid"]
        self._owners[uid] = (owner, workload)
        self._alive[uid] = set()
        self._coming[uid] = 0
        self._fill(uid, (0.01, 0.2))

    def stop(self, name: str) -> None:
        """End a workload; its pods go with it."""
        for uid, (owner, workload) in list(self._owners.items()):
            if workload.name == name:
                del self._owners[uid]
                self.delete(_API[workload.kind][1], owner)

    def _fill(self, uid: str, within_s: tuple[float, float]) -> None:
        workload = self._owners[uid][1]
        while len(self._alive[uid]) + self._coming[uid] < workload.pods:
            self._coming[uid] += 1
            self.later(*within_s, lambda: self._make(uid))

    def _make(self, uid: str) -> None:
        if uid not in self._owners:
            return
        self._coming[uid] -= 1
        owner, workload = self._owners[uid]
        annotations: dict[str, object] = {documents.PROGRAM: "idle"} if workload.idle else {}
        if workload.lasts_s is not None:
            annotations[documents.LASTS_S] = f"{self.dice.uniform(*workload.lasts_s):.3f}"
        if workload.stops_in_s is not None:
            annotations[documents.STOPS_IN_S] = workload.stops_in_s
        if workload.crashes_after_s is not None:
            annotations[documents.CRASHES_AFTER_S] = workload.crashes_after_s
        if workload.hangs:
            annotations[documents.HANGS] = "true"
        self._made += 1
        pod = documents.pod_document(
            f"{workload.name}-{self._made}",
            workload.limits,
            namespace=workload.namespace,
            labels={"app": workload.name, **workload.labels},
            annotations=annotations,
            **workload.spec,
        )
        pod["metadata"]["ownerReferences"] = [documents.owner_of(owner)]
        if workload.finalizers:
            pod["metadata"]["finalizers"] = list(workload.finalizers)
        self.create("pods", pod)

    def _pod_changed(self, happened: Happened) -> None:
        pod = happened.after.document
        owner = documents.owner_uid(pod)
        if owner not in self._owners:
            return
        alive, uid = self._alive[owner], pod["metadata"]["uid"]
        ended = happened.deleted or documents.terminal(pod) or "deletionTimestamp" in pod["metadata"]
        if not ended:
            alive.add(uid)
        elif uid in alive:
            alive.discard(uid)
            workload = self._owners[owner][1]
            self._fill(owner, workload.pause_s)
