"""Controllers of PodDisruptionBudgets and namespaces: what budgets allow, counted a moment late; namespaces emptied."""

from __future__ import annotations

from typing import Final

from migd.sim.cluster.budgets import budgets_of, counted
from migd.sim.cluster.entries import Happened
from migd.sim.cluster.fields import Json
from migd.sim.nodes.acting import Actor, Stage

LAG_S: Final = (0.01, 0.2)
"""So long after a change a budget is counted again; 0.03 s was seen where little happened."""
_EMPTIED: Final = ("replicasets", "jobs", "daemonsets", "pods", "poddisruptionbudgets", "leases", "events")


class Disruptions(Actor):
    """The disruption controller: it writes what each budget allows, a moment after what it counts has changed."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "disruptions", "system:serviceaccount:kube-system:disruption-controller")
        self._due: set[tuple[str, str]] = set()
        stage.hear("poddisruptionbudgets", self._budget_changed)
        stage.hear("pods", self._pod_changed)

    def _budget_changed(self, happened: Happened) -> None:
        if not happened.deleted:
            self._look(happened.after.document)

    def _pod_changed(self, happened: Happened) -> None:
        budgets = list(self.all("poddisruptionbudgets"))
        for entry in (happened.before, happened.after):
            for budget in budgets_of(entry.document, budgets) if entry else ():
                self._look(budget)

    def _look(self, budget: Json) -> None:
        """Count a budget soon; once, however much has changed."""
        key = (budget["metadata"]["namespace"], budget["metadata"]["name"])
        if key not in self._due:
            self._due.add(key)
            self.later(*LAG_S, lambda: self._count(*key))

    def _count(self, namespace: str, name: str) -> None:
        self._due.discard((namespace, name))
        budget = self.read("poddisruptionbudgets", name, namespace)
        if budget is None:
            return
        pods = [pod for pod in self.all("pods") if budgets_of(pod, [budget])]
        status, again_s = counted(budget, pods, lambda owner: self._scale(namespace, owner), self.stage.cluster.now())
        before = budget.get("status") or {}
        if status != before:
            gone = dict.fromkeys(before.get("disruptedPods") or {}) | status.get("disruptedPods", {})
            body = {**status, "disruptedPods": gone} if gone else status
            self.merge("poddisruptionbudgets", name, {"status": body}, namespace, "status")
        if again_s is not None:
            self.stage.later(again_s, lambda: self._again(namespace, name))

    def _again(self, namespace: str, name: str) -> None:
        budget = self.read("poddisruptionbudgets", name, namespace)
        if budget is not None:
            self._look(budget)

    def _scale(self, namespace: str, owner: Json) -> int | None:
        """How many pods a ReplicaSet wants; nobody asks a Job, nor a DaemonSet."""
        found = self.read("replicasets", owner["name"], namespace) if owner["kind"] == "ReplicaSet" else None
        if found is None or found["metadata"]["uid"] != owner["uid"]:
            return None
        return int(found["spec"].get("replicas", 1))


class Namespaces(Actor):
    """The namespace controller: it deletes what is in a namespace that is being deleted, then the namespace."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "namespaces", "system:serviceaccount:kube-system:namespace-controller")
        stage.hear("namespaces", self._changed)

    def _changed(self, happened: Happened) -> None:
        metadata = happened.after.document["metadata"]
        if "deletionTimestamp" in metadata and not happened.deleted:
            name, uid = metadata["name"], metadata["uid"]
            self.later(0.05, 0.5, lambda: self._empty(name, uid))

    def _empty(self, name: str, uid: str) -> None:
        namespace = self.read("namespaces", name)
        if namespace is None or namespace["metadata"]["uid"] != uid:
            return
        left = [(k, d) for k in _EMPTIED for d in self.all(k) if d["metadata"].get("namespace") == name]
        for plural, document in left:
            if "deletionTimestamp" not in document["metadata"]:
                self.delete(plural, document)
        if left:
            self.later(1.0, 2.0, lambda: self._empty(name, uid))
        else:
            self.merge("namespaces", name, {"spec": {"finalizers": None}}, sub="finalize")
