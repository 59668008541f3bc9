"""Node lifecycle and pod garbage collection: silent nodes, cordons as taints, pods whose node is gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from migd.sim.cluster.entries import Happened
from migd.sim.cluster.fields import Json
from migd.sim.nodes import documents
from migd.sim.nodes.acting import Actor, Stage
from migd.sim.nodes.kubelet import Kubelet

SILENT_S: Final = 40.0
"""A node whose kubelet was not heard of for so long is told to be unreachable."""
EVICTED_S: Final = 300.0
"""Its pods are deleted so long after that, if they do not tolerate it."""
ENDED_S: Final = 60.0
"""So long after its end a pod is collected here; a real cluster keeps thousands."""
CORDONED: Final = "node.kubernetes.io/unschedulable"
UNREACHABLE: Final = "node.kubernetes.io/unreachable"
_OURS: Final = (CORDONED, UNREACHABLE)


class Lifecycle(Actor):
    """The controller. It looks at kubelets themselves: their heartbeats every 10 s say nothing more."""

    def __init__(self, stage: Stage, kubelets: Mapping[str, Kubelet]) -> None:
        super().__init__(stage, "lifecycle", "system:serviceaccount:kube-system:node-controller")
        self._kubelets = kubelets
        self._silent: set[str] = set()
        self._ended: set[str] = set()
        stage.hear("nodes", self._node_changed)
        stage.hear("pods", self._pod_changed)

    def gone_silent(self, name: str) -> None:
        """A kubelet went down: see later whether it is back."""
        since = self._kubelets[name].down_since_s

        def look() -> None:
            kubelet = self._kubelets[name]
            node = self.read("nodes", name)
            if kubelet.up or kubelet.down_since_s != since or node is None:
                return
            self._silent.add(name)
            self.say(f"{name} is not ready")
            body = {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]}
            self.merge("nodes", name, {"status": body}, sub="status")
            self.stage.later(EVICTED_S, lambda: self._evict(name) if name in self._silent else None)

        self.later(SILENT_S, SILENT_S + 10.0, look)

    def _node_changed(self, happened: Happened) -> None:
        node = happened.after.document
        name = node["metadata"]["name"]
        if happened.deleted:
            self.later(1.0, 3.0, lambda: self._collect(name))
        elif _wanted(node) != {t["key"] for t in node["spec"].get("taints") or () if t["key"] in _OURS}:
            self.later(0.01, 0.1, lambda: self._taint(name))

    def _taint(self, name: str) -> None:
        node = self.read("nodes", name)
        if node is None:
            return
        if documents.ready(node):
            self._silent.discard(name)
        wanted = _wanted(node)
        taints = node["spec"].get("taints") or []
        kept = [t for t in taints if t["key"] not in _OURS or t["key"] in wanted]
        there = {t["key"] for t in kept}
        kept += [{"key": key, "effect": "NoSchedule"} for key in sorted(wanted - there)]
        if kept != taints:
            self.merge("nodes", name, {"spec": {"taints": kept or None}})

    def _evict(self, name: str) -> None:
        for pod in self._bound(name):
            tolerations = pod["spec"].get("tolerations") or ()
            taint = {"key": UNREACHABLE, "effect": "NoExecute"}
            if "deletionTimestamp" not in pod["metadata"] and not documents.tolerated([taint], tolerations):
                self.delete("pods", pod)

    def _collect(self, name: str) -> None:
        if self.read("nodes", name) is None:
            for pod in self._bound(name):
                self.delete("pods", pod, 0)

    def _bound(self, name: str) -> list[Json]:
        return [pod for pod in self.all("pods") if documents.node_of(pod) == name]

    def _pod_changed(self, happened: Happened) -> None:
        pod = happened.after.document
        metadata = pod["metadata"]
        uid, name, namespace = metadata["uid"], metadata["name"], metadata["namespace"]
        if happened.deleted:
            self._ended.discard(uid)
        elif documents.terminal(pod) and uid not in self._ended:
            self._ended.add(uid)
            self.stage.later(ENDED_S, lambda: self._remove(uid, name, namespace))

    def _remove(self, uid: str, name: str, namespace: str) -> None:
        pod = self.read("pods", name, namespace)
        if pod is not None and pod["metadata"]["uid"] == uid:
            self.delete("pods", pod, 0)


def _wanted(node: Json) -> set[str]:
    conditions = (node.get("status") or {}).get("conditions") or ()
    silent = any(c["type"] == "Ready" and c["status"] == "Unknown" for c in conditions)
    return {key for key, holds in ((CORDONED, node["spec"].get("unschedulable")), (UNREACHABLE, silent)) if holds}
