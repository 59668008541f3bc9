"""The DaemonSet controller: one pod on each node that takes it, made anew when it goes, unless a taint keeps it away.

Measured on 1.37.2: a pod deleted under an untolerated taint stays away, and is back in < 0.4 s after the taint goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from migd.sim.cluster.entries import Happened
from migd.sim.cluster.fields import Json, copied
from migd.sim.nodes import documents
from migd.sim.nodes.acting import Actor, Stage

ONLY_ON: Final = "sim.migd.dev/nodes"
"""Names of nodes, joined by commas: the others do not count for this DaemonSet. Stands for affinities."""
_OWN: Final = [
    {"key": f"node.kubernetes.io/{what}", "operator": "Exists"}
    for what in ("not-ready", "unreachable", "disk-pressure", "memory-pressure", "pid-pressure", "unschedulable")
]


class DaemonSets(Actor):
    """The controller. It binds its pods itself: for a pod that fits one node only it is all the same who does."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "daemonsets", "system:serviceaccount:kube-system:daemon-set-controller")
        self._due: set[tuple[str, str]] = set()  # (uid of the DaemonSet, node)
        self._pods: dict[tuple[str, str], dict[str, Json]] = {}  # the same -> its pods by uid
        self._made = 0
        stage.hear("daemonsets", self._set_changed)
        stage.hear("nodes", self._node_changed)
        stage.hear("pods", self._pod_changed)

    def _set_changed(self, happened: Happened) -> None:
        if happened.before is None:
            for node in self.all("nodes"):
                self._look(happened.after.document["metadata"]["uid"], node["metadata"]["name"])

    def _node_changed(self, happened: Happened) -> None:
        before, after = happened.before, happened.after.document
        if before is not None and not happened.deleted and _said(before.document) == _said(after):
            return
        for each in self.all("daemonsets"):
            self._look(each["metadata"]["uid"], after["metadata"]["name"])

    def _pod_changed(self, happened: Happened) -> None:
        pod = happened.after.document
        owner = next((o for o in pod["metadata"].get("ownerReferences") or () if o["kind"] == "DaemonSet"), None)
        if owner is None:
            return
        key = (owner["uid"], documents.node_of(pod))
        mine = self._pods.setdefault(key, {})
        if happened.deleted:
            mine.pop(pod["metadata"]["uid"], None)
        else:
            mine[pod["metadata"]["uid"]] = pod
        if happened.deleted or documents.terminal(pod):
            self._look(*key)

    def _look(self, uid: str, node: str, least_s: float = 0.02, most_s: float = 0.3) -> None:
        """Look at one DaemonSet on one node soon; once, however often it is asked for."""
        if (uid, node) not in self._due:
            self._due.add((uid, node))
            self.later(least_s, most_s, lambda: self._sync(uid, node))

    def _sync(self, uid: str, node_name: str) -> None:
        self._due.discard((uid, node_name))
        each = next((d for d in self.all("daemonsets") if d["metadata"]["uid"] == uid), None)
        node = self.read("nodes", node_name)
        pods = list(self._pods.get((uid, node_name), {}).values())
        if each is None or node is None:
            return
        template = each["spec"]["template"]
        wanted = _runs_on(each, template, node)
        for pod in pods:
            if (not wanted or documents.terminal(pod)) and "deletionTimestamp" not in pod["metadata"]:
                self.delete("pods", pod)
        if pods or not wanted:
            return  # also one that is still ending: its successor comes after it
        tolerations = [*(template["spec"].get("tolerations") or ()), *_OWN]
        if not documents.tolerated(node["spec"].get("taints") or (), tolerations):
            return
        self._made += 1
        name = f"{each['metadata']['name']}-{self.dice.getrandbits(25):05x}"
        pod = copied(template)
        pod |= {"apiVersion": "v1", "kind": "Pod"}
        pod["metadata"] |= {"name": name, "namespace": each["metadata"]["namespace"]}
        pod["metadata"]["ownerReferences"] = [documents.owner_of(each)]
        pod["spec"] |= {"nodeName": node_name, "tolerations": tolerations}
        self.say(f"makes {name} on {node_name}")
        self.create("pods", pod)


def _said(node: Json) -> tuple[object, ...]:
    """What of a node decides about DaemonSets."""
    return documents.labels_of(node), node["spec"].get("taints"), node["metadata"]["uid"]


def _runs_on(each: Json, template: Json, node: Json) -> bool:
    only = documents.annotation(each, ONLY_ON)
    if only and node["metadata"]["name"] not in only.split(","):
        return False
    return documents.selected(template["spec"].get("nodeSelector"), documents.labels_of(node))


def daemonset(
    name: str,
    namespace: str,
    labels: dict[str, str],
    container: str,
    program: str,
    *,
    tolerations: Iterator[Json] | list[Json] | tuple[Json, ...] = (),
    selector: dict[str, str] | None = None,
    only_on: tuple[str, ...] = (),
) -> Json:
    """A DaemonSet of one container that runs one of `programs`."""
    spec: Json = {"containers": [{"name": container, "image": "none"}], "tolerations": list(tolerations)}
    if selector:
        spec["nodeSelector"] = selector
    metadata: Json = {"name": name, "namespace": namespace, "labels": labels}
    if only_on:
        metadata["annotations"] = {ONLY_ON: ",".join(only_on)}
    template = {"metadata": {"labels": labels, "annotations": {documents.PROGRAM: program}}, "spec": spec}
    inside = {"selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": inside}
