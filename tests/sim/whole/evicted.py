"""What must hold of evictions all the time: who asks for them, of whom, on which node, and how often.

What a process does may be a moment behind the world: a watch tells late and a request takes seconds. So a pod may
still be asked to go for a while after that has become wrong, and much longer where watches were in trouble.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fleet import Fleet

from migd.kube.nodes import TAINT
from migd.kube.owed import OWED
from migd.plans.partitions import Partition
from migd.plans.wishes import Wish, resolve
from migd.sim.cluster.budgets import budgets_of
from migd.sim.cluster.entries import Happened
from migd.sim.cluster.server import SimRequest
from migd.sim.nodes.documents import node_of, terminal
from whole.truth import GpuTruth, as_wished, astray, rule_of, truth

LATE_S: Final = 12.0
"""So long after it has become wrong a call may arrive that was right when it was decided: a slow request takes 10 s."""
UNHEARD_S: Final = 150.0
"""The same where watches are in trouble: a silent one is noticed after 75 s."""
DRAINED_S: Final = 55.0
"""A node that was closed for so long was drained in vain, or nearly: the shortest timeout of a story is a minute."""
OURS: Final = "migd-"
Key = tuple[str, int]
"""A plan by uid, and a generation of it."""


@dataclass
class Evictions:
    """Watches the evictions of one story. says: told what is wrong. met: told what was met. troubled: of watches.

    accepted: by uid, for which plans' generations. nodes: by uid, where the pod was.
    """

    fleet: Fleet
    says: Callable[[str], None]
    met: Callable[[str], None]
    troubled: Callable[[], bool]
    accepted: dict[str, frozenset[Key]] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    spent: dict[str, set[Key]] = field(default_factory=dict)  # node -> for what it may evict nobody any more
    _asked_for: dict[str, frozenset[Key]] = field(default_factory=dict)  # uid of a victim -> for which wishes
    _names: dict[str, str] = field(default_factory=dict)  # uid of a victim -> its name
    _wrong_since: dict[str, float] = field(default_factory=dict)  # uid of a victim -> since when it should not go
    _was_right: set[str] = field(default_factory=set)  # uids of victims that could be asked to go at some time
    _most: dict[Key, int | None] = field(default_factory=dict)  # maxEvictions of each generation
    _closure: dict[str, set[Key]] = field(default_factory=dict)  # node that is closed -> for what it evicted
    _closed_s: dict[str, float] = field(default_factory=dict)  # node -> when it was closed last
    _longest_s: dict[str, float] = field(default_factory=dict)  # node -> how long it was closed, at most

    # ---- requests

    def asked(self, request: SimRequest) -> None:
        """Somebody asks for something; before it is carried out."""
        if not request.user.startswith(OURS):
            return
        if request.resource == "pods" and request.verb == "delete":
            self._deleted(request)
        if request.resource != "pods/eviction":
            return
        self.met("eviction asked")
        if not request.user.startswith("migd-operator"):
            self.says(f"{request.user} evicts {request.name}")
        uid = ((request.body.get("deleteOptions") or {}).get("preconditions") or {}).get("uid")
        if not uid:
            self.says(f"{request.name} is evicted whoever it is by now")
            return
        if uid not in self._asked_for:
            self.says(f"{request.name} is evicted and never was a victim")
            return
        self.look()
        since_s = self._wrong_since.get(uid)
        if since_s is not None and uid not in self._was_right:
            self.says(f"{request.name} is evicted though {self._why(uid)}")
            return
        late_s = UNHEARD_S if self.troubled() else LATE_S
        if since_s is not None and self._now_s() - since_s > late_s:
            self.says(f"{request.name} is evicted though for {self._now_s() - since_s:.1f} s {self._why(uid)}")

    def _deleted(self, request: SimRequest) -> None:
        pod = self.fleet.cluster.get("pods", request.name, "default")
        if pod is not None:
            self.says(f"{request.user} deletes {request.name}, a pod of somebody's")

    # ---- changes

    def look(self) -> None:
        """Since when each victim should not go any more."""
        for uid in self._asked_for:
            if self._why(uid):
                self._wrong_since.setdefault(uid, self._now_s())
            else:
                self._wrong_since.pop(uid, None)
                self._was_right.add(uid)

    def partition(self, happened: Happened) -> None:
        """A partition has changed: its victims, its phase, or somebody asks for another try."""
        document = happened.after.document
        node = document["spec"]["nodeName"]
        before = happened.before.document if happened.before is not None else document
        if _retry(before) != _retry(document):  # somebody asks for it, or the agent has heard it
            self.spent.pop(node, None)
        status = document.get("status") or {}
        for one in status.get("evictions") or ():
            self.met(f"answer {one.get('code', 'of no call')} {one.get('reason', 'well')}")
        victims = status.get("victims") or ()
        if victims or self._asked_for:
            for pod in victims:
                self._names[pod["uid"]] = pod["name"]
                self._asked_for[pod["uid"]] = self._wishes(pod["uid"]) or self._asked_for.get(pod["uid"], frozenset())
                self.nodes[pod["uid"]] = node
            self.look()
        if self.spent.get(node):
            self._ended_well(node)

    def plan(self, happened: Happened) -> None:
        """A plan has changed."""
        document = happened.after.document
        key = (document["metadata"]["uid"], document["metadata"]["generation"])
        if key not in self._most:
            self._most[key] = ((document.get("spec") or {}).get("disruption") or {}).get("maxEvictions")
        if self._asked_for:
            self.look()

    def node(self, name: str, closed: bool) -> None:
        """A node is closed by us, or is not, after a change of it."""
        if closed and name not in self._closure:
            self._closure[name] = set()
            self._closed_s[name] = self._now_s()
        elif not closed and name in self._closure:
            keys = self._closure.pop(name)
            self._longest_s[name] = max(self._longest_s.get(name, 0.0), self._now_s() - self._closed_s[name])
            if keys:
                self.spent.setdefault(name, set()).update(keys)
        if self._asked_for:
            self.look()

    def pod(self, happened: Happened) -> None:
        """A pod has changed; what was evicted says so."""
        if _evicted(happened.after.document) and not (happened.before and _evicted(happened.before.document)):
            self._accepted(happened.after.document)
        if self._asked_for:
            self.look()

    def _accepted(self, document: dict[str, Any]) -> None:
        uid, name, node = document["metadata"]["uid"], document["metadata"]["name"], node_of(document)
        self.met("eviction accepted")
        if uid in self.accepted:
            self.says(f"{name} is evicted twice")
        keys = self._asked_for.get(uid, frozenset())
        self.accepted[uid] = keys
        numbers = Counter(key for keys in self.accepted.values() for key in keys)
        for key in sorted(keys):
            most = self._most.get(key)
            if most is not None and numbers[key] > most:
                self.says(f"{numbers[key]} pods are evicted, and generation {key[1]} of the plan may evict {most}")
        again = keys & self.spent.get(node, set())
        if again:
            self.says(f"{name} is evicted for generation {min(again)[1]}, after a drain of {node} that was in vain")
        if node in self._closure:
            self._closure[node] |= keys

    def _ended_well(self, node: str) -> None:
        """What is Ready was not in vain."""
        mine: dict[Key, list[str]] = {}
        for one in self.fleet.partitions(node):
            if one.spec.desired is not None:
                mine.setdefault(_key(one), []).append(one.status.phase)
        self.spent[node] -= {key for key, phases in mine.items() if set(phases) == {"Ready"}}

    # ---- at the end

    def says_true(self, one: Partition, maybe: Sequence[dict[str, Any]]) -> bool:
        """Whether a GPU whose node was or would be drained for it says truly why that does not go on.

        maybe: pods that may hold something there, though nobody can tell any more.
        """
        holders = [*self._holders(one.spec.node_name), *maybe]
        if not holders or one.spec.desired is None:
            return False
        how = self.fleet.plan(one.spec.desired.plan.name).get("spec", {}).get("disruption") or {}
        longest_s = self._longest_s.get(one.spec.node_name, 0.0)
        spent = any(map(self.is_spent, self.fleet.partitions(one.spec.node_name)))  # its GPUs wait for each other
        match one.status.reason:
            case "DrainBlocked":
                return longest_s >= DRAINED_S or any(self._stays(pod, how) for pod in holders)
            case "DrainTimeout":
                return longest_s >= DRAINED_S
            case "EvictionBudget":
                return spent or how.get("maxEvictions") is not None
        return False

    def counted(self, name: str, *, exactly: bool) -> list[str]:
        """What is wrong with the evictions that a plan tells of. exactly: none may be too many."""
        plan = self.fleet.plan(name)
        key = (plan["metadata"]["uid"], plan["metadata"]["generation"])
        number = sum(key in keys for keys in self.accepted.values())
        told = (plan.get("status") or {}).get("evictions") or {}
        said = told.get("evicted", 0) if told.get("generation", key[1]) == key[1] else 0
        wrong = [f"plan {name} has {told['pending']} pending at the end"] if told.get("pending") else []
        if said < number or (exactly and said != number):
            wrong.append(f"plan {name} tells of {said} evictions, and {number} were accepted")
        return wrong

    def _holders(self, node: str) -> list[dict[str, Any]]:
        """The pods that hold something on a node."""
        there = truth(self.fleet.cluster.node(node)).values()
        names = {who for gpu in there for held in (gpu.held, *(one.held for one in gpu.there)) for who in held}
        found = (
            self.fleet.cluster.get("pods", who.partition("/")[2], "default") for who in sorted(names) if "/" in who
        )
        return [pod for pod in found if pod is not None]

    def _stays(self, pod: dict[str, Any], how: Mapping[str, Any]) -> bool:
        """Whether a pod may not go now, or would come straight back."""
        returns = {"operator": "Exists"} in (pod["spec"].get("tolerations") or ())
        return returns or bool(stays(pod, how) or budgets_of(pod, self.fleet.cluster.all("poddisruptionbudgets")))

    # ---- what is so

    def is_spent(self, one: Partition) -> bool:
        """Whether nobody is to be evicted for this wish on this node again."""
        return one.spec.desired is not None and _key(one) in self.spent.get(one.spec.node_name, ())

    def _wishes(self, uid: str) -> frozenset[Key]:
        """For which wishes a pod must go, as published."""
        found = (p for p in self.fleet.partitions() if uid in {pod.uid for pod in p.status.victims})
        return frozenset(_key(one) for one in found if one.spec.desired is not None)

    def _why(self, uid: str) -> str:
        """Why this victim should not be asked to go now; "" where it should."""
        name, node = self._names[uid], self.nodes[uid]
        pod = self.fleet.cluster.get("pods", name, "default")
        if pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]:
            return ""  # whoever asks is told so
        document = self.fleet.cluster.get("nodes", node)
        if document is None or not _closed(document):
            return f"{node} is not closed by us"
        mine = [p for p in self.fleet.partitions(node) if uid in {v.uid for v in p.status.victims}]
        if not mine:
            return "it is no victim any more"
        sim = self.fleet.cluster.node(node)
        there, who = truth(sim), f"default/{name}"
        if who not in astray(sim) and not any(_holds(who, _gpu_of(one, there), one) for one in mine):
            return "it holds nothing that must go"
        return next((why for one in mine if (why := self._barred(one, pod))), "")

    def _barred(self, one: Partition, pod: dict[str, Any]) -> str:
        """Why nobody may evict this pod for this GPU's wish."""
        if one.spec.desired is None:
            return "nothing is wished"
        plan = self.fleet.plan(one.spec.desired.plan.name)
        if not plan or plan["metadata"]["uid"] != one.spec.desired.plan.uid:
            return "the plan is gone"
        if plan["spec"].get("paused"):
            return "the plan is paused"
        return stays(pod, plan["spec"].get("disruption") or {})

    def _now_s(self) -> float:
        return self.fleet.cluster.stage.now_s()


def stays(pod: Mapping[str, Any], disruption: Mapping[str, Any]) -> str:
    """Why a pod may not be evicted by a plan that says this; "" where it may."""
    metadata, spec = pod["metadata"], pod["spec"]
    if disruption.get("policy") != "Evict":
        return "the plan does not evict"
    if terminal(dict(pod)) or "deletionTimestamp" in metadata:
        return ""
    allow = disruption.get("allow") or ()
    owners = [owner["kind"] for owner in metadata.get("ownerReferences") or () if owner.get("controller")]
    kept = ((disruption.get("protect") or {}).get("matchLabels") or {}).items()
    labels = metadata.get("labels") or {}
    if "DaemonSet" in owners or "kubernetes.io/config.mirror" in (metadata.get("annotations") or {}):
        return "it cannot be evicted"
    if disruption.get("protect") is not None and all(labels.get(key) == value for key, value in kept):
        return "it is protected"
    if not owners and "Unmanaged" not in allow:
        return "nobody would make it again"
    if any("emptyDir" in volume for volume in spec.get("volumes") or ()) and "EmptyDir" not in allow:
        return "its emptyDir would be lost"
    return ""


def _key(one: Partition) -> Key:
    assert one.spec.desired is not None
    return one.spec.desired.plan.uid, one.spec.desired.plan.generation


def _gpu_of(one: Partition, there: Mapping[str, GpuTruth]) -> GpuTruth | None:
    return next((gpu for uuid, gpu in there.items() if uuid.lower() == one.name), None)


def _retry(document: Mapping[str, Any]) -> str | None:
    found: str | None = (document["metadata"].get("annotations") or {}).get("migd.dev/retry")
    return found


def _holds(pod: str, gpu: GpuTruth | None, one: Partition) -> bool:
    """Whether a pod holds something on a GPU that is not as wished."""
    if gpu is None or one.spec.desired is None or one.gpu is None:
        return False
    wish = resolve(rule_of(one.spec.desired), one.gpu)
    if isinstance(wish, Wish) and as_wished(gpu, wish):
        return False
    return pod in gpu.held or any(pod in there.held for there in gpu.there)


def _evicted(document: Mapping[str, Any]) -> bool:
    conditions = (document.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "DisruptionTarget" and c.get("reason") == "EvictionByEvictionAPI" for c in conditions)


def _closed(node: Mapping[str, Any]) -> bool:
    tainted = any(taint["key"] == TAINT for taint in node["spec"].get("taints") or ())
    owed = (node["metadata"].get("annotations") or {}).get(OWED)
    return tainted and owed is not None and bool(json.loads(owed))
