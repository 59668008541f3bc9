"""The scheduler: binds pods to nodes by what it has heard of them, which is a little old.

Measured on 1.37.2: in a quarter of all runs a pod was still bound up to 0.12 s after a taint was written, once
many within 1.5 s. So it hears of a node with a lag, and a binding takes a moment after it was decided on.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from migd.sim.cluster.entries import Happened
from migd.sim.cluster.fields import Json
from migd.sim.nodes import documents
from migd.sim.nodes.acting import Actor, Stage

LAGS: Final = ((0.8, 0.003), (0.97, 0.12), (1.0, 1.5))
"""How often, added up, hearing of a node takes up to so many seconds."""


class Scheduler(Actor):
    """The default scheduler. It fits by nvidia.com/ resources, taints, nodeSelector and unschedulable."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "scheduler", "system:kube-scheduler")
        self._nodes: dict[str, Json] = {}  # as it has heard of them
        self._heard_s: dict[str, float] = {}
        self._unheard: dict[str, deque[Json | None]] = {}
        self._waiting: dict[str, Json] = {}  # uid -> pod
        self._placed: dict[str, tuple[str, dict[str, int]]] = {}  # uid -> node and what it asks for there
        self._told: set[str] = set()
        self._due = False
        stage.hear("nodes", self._node_changed)
        stage.hear("pods", self._pod_changed)

    def _node_changed(self, happened: Happened) -> None:
        node = happened.after.document
        name = node["metadata"]["name"]
        before = happened.before
        if before is not None and not happened.deleted and _said(before.document) == _said(node):
            return
        drawn = self.dice.random()
        lag = self.dice.random() * next(most_s for share, most_s in LAGS if drawn <= share)
        at_s = max(self._heard_s.get(name, 0.0), self.stage.now_s() + lag)
        self._heard_s[name] = at_s
        self._unheard.setdefault(name, deque()).append(None if happened.deleted else node)
        self.stage.later(at_s - self.stage.now_s(), lambda: self._hears(name))

    def _hears(self, name: str) -> None:
        node = self._unheard[name].popleft()  # what came first is heard of first, also at one moment
        if node is None:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = node
        self._wake()

    def _pod_changed(self, happened: Happened) -> None:
        pod = happened.after.document
        uid = pod["metadata"]["uid"]
        if happened.deleted or documents.terminal(pod):
            self._waiting.pop(uid, None)
            self._told.discard(uid)
            if self._placed.pop(uid, None) is not None:
                self._wake()
        elif documents.node_of(pod):
            self._waiting.pop(uid, None)
            wanted = {name: number for name, number in documents.requested(pod).items() if number}
            self._placed[uid] = (documents.node_of(pod), wanted)
        elif "deletionTimestamp" not in pod["metadata"]:
            new = uid not in self._waiting
            self._waiting[uid] = pod
            if new:
                self._wake()

    def _wake(self) -> None:
        if self._waiting and not self._due:
            self._due = True
            self.later(0.001, 0.005, self._schedule)

    def _schedule(self) -> None:
        self._due = False
        for uid, pod in list(self._waiting.items()):
            if uid in self._placed:
                continue
            fits = [name for name, node in sorted(self._nodes.items()) if self._fits(pod, node)]
            if not fits:
                self._unschedulable(pod)
                continue
            node = self.dice.choice(fits)
            self._placed[uid] = (node, documents.requested(pod))
            self._bind_later(pod, node)

    def _bind_later(self, pod: Json, node: str) -> None:
        def bind() -> None:
            uid = pod["metadata"]["uid"]
            if uid not in self._waiting:
                return  # gone, or bound by somebody else
            self.say(f"binds {pod['metadata']['namespace']}/{pod['metadata']['name']} to {node}")
            if self.bind(pod, node) is None:
                self._placed.pop(uid, None)

        self.later(0.001, 0.006, bind)

    def _fits(self, pod: Json, node: Json) -> bool:
        spec, asked = node["spec"], pod["spec"]
        tolerations = asked.get("tolerations") or ()
        if spec.get("unschedulable") or not documents.ready(node):
            return False
        if not documents.tolerated(spec.get("taints") or (), tolerations):
            return False
        if not documents.selected(asked.get("nodeSelector"), documents.labels_of(node)):
            return False
        wanted = documents.requested(pod)
        if not wanted:
            return True
        free = documents.resources_in((node.get("status") or {}).get("allocatable"))
        for where, taken in self._placed.values():
            if where == node["metadata"]["name"]:
                for name, number in taken.items():
                    free[name] = free.get(name, 0) - number
        return all(free.get(name, 0) >= number for name, number in wanted.items())

    def _unschedulable(self, pod: Json) -> None:
        metadata = pod["metadata"]
        if metadata["uid"] in self._told:
            return
        self._told.add(metadata["uid"])
        why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        body = {"status": {"phase": "Pending", "conditions": [why]}}
        self.merge("pods", metadata["name"], body, metadata["namespace"], "status")


def _said(node: Json) -> tuple[object, ...]:
    """What of a node decides about scheduling."""
    told = (node.get("status") or {}).get("allocatable")
    spec = node["spec"]
    return documents.labels_of(node), spec.get("taints"), spec.get("unschedulable"), told, documents.ready(node)
