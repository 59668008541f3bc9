"""What must hold all the time, looked at whenever something changes; what is wrong is kept as sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fleet import Fleet

from migd.agent.node.looking import AgentPorts
from migd.agent.ports import Gpus, Reset
from migd.kube.nodes import TAINT
from migd.kube.owed import OWED, PAUSED
from migd.mig.observed import SeenGpu
from migd.mig.operations import Operation
from migd.mig.transition import Refusal, transition
from migd.plans.partitions import Partition, partition_of
from migd.plans.wishes import Wish, resolve
from migd.sim.cluster.entries import Happened
from migd.sim.cluster.kinds import SimKind
from migd.sim.cluster.server import SimRequest
from migd.sim.nodes.documents import node_of, wants_of
from migd.sim.nodes.world import SimNode
from migd_operator.reconciling import NAMESPACE
from whole.evicted import Evictions, stays
from whole.truth import GpuTruth, rule_of, truth

SETTLED_S: Final = 5.0
"""A pod that was bound so soon after the taint must not die of a pause."""
OLD_S: Final = 15.0
"""Who has been on an instance for so long must be known to who closes a node."""
_WRITABLE: Final = ("nvidia.com/gpu.deploy.", "nvidia.com/mig.config.state")


@dataclass
class Closed:
    """A node that is closed by us. turn: for which. since_s: by the loop's clock. at_once: after a reboot."""

    turn: str
    since_s: float


@dataclass
class Watching:
    """Watches one story. wrong: what should never have been. reached: what was met, for coverage."""

    wrong: list[str] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    closed: dict[str, Closed] = field(default_factory=dict)
    previewed: dict[str, Any] = field(default_factory=dict)  # the first preview of the first plan
    done: dict[str, set[str]] = field(default_factory=dict)  # node -> turns that it ended well
    disturbed_s: dict[str, float] = field(default_factory=dict)  # node -> until when pods may die for other reasons
    _held_since: dict[tuple[str, int], float] = field(default_factory=dict)
    _bound_s: dict[str, float] = field(default_factory=dict)
    troubled: Callable[[], bool] = lambda: False
    """Whether watches may have told late."""
    _user: str = ""
    _foreign: dict[str, str] = field(default_factory=dict)

    def begin(self, fleet: Fleet) -> None:
        """From now on."""
        self.fleet = fleet
        self.cluster = fleet.cluster
        self.evictions = Evictions(fleet, self.says, self.reached.add, self.troubled)
        self.cluster.cluster.listen(self._happened)
        self.cluster.on_power(lambda name, _on: self._powered(name))

    def disturb(self, node: str, for_s: float) -> None:
        """A node's kubelet, device plugin or power goes, or a pod by force: pods may die of that for so long."""
        self.disturbed_s[node] = max(self.disturbed_s.get(node, 0.0), self.now_s() + for_s)

    def _powered(self, node: str) -> None:
        self.disturb(node, 300.0)
        self.disturb(f"power {node}", 600.0)

    def now_s(self) -> float:
        return self.cluster.stage.now_s()

    def says(self, what: str) -> None:
        """Something is wrong."""
        self.wrong.append(f"{self.now_s():.3f} {what}")
        self.cluster.stage.say("WRONG", what)

    # ---- requests

    def policy(self, request: SimRequest) -> str:
        """Nobody is refused; who writes is remembered until the write is heard of."""
        self._user = request.user
        self.evictions.asked(request)
        if request.writes and request.user.startswith("migd-operator") and request.resource not in ("leases", "events"):
            lease = self.cluster.get("leases", "migd-operator", NAMESPACE)
            holder = ((lease or {}).get("spec") or {}).get("holderIdentity", "")
            if holder != request.user:
                self.says(f"{request.user} writes {request.resource} {request.name} while {holder or 'nobody'} leads")
        if request.writes and request.user.startswith("migd-agent") and request.resource == "nodes":
            self._agent_writes(request)
        if request.resource == "pods/eviction":
            self._evicts(request)
        return ""

    def _evicts(self, request: SimRequest) -> None:
        """Evictions are the leader's calls, of one very pod, that is on a node which is closed by us."""
        if not request.user.startswith("migd-operator"):
            self.says(f"{request.user} evicts {request.name}")
        uid = ((request.body.get("deleteOptions") or {}).get("preconditions") or {}).get("uid")
        nodes = [node_of(pod) for pod in self.cluster.pods() if pod["metadata"]["uid"] == uid]
        if not uid or any(node not in self.closed for node in nodes):
            self.says(f"{request.user} evicts {request.name}, uid {uid}, on {nodes}, which we have not closed")

    def _agent_writes(self, request: SimRequest) -> None:
        if request.user != f"migd-agent {request.name}":
            self.says(f"{request.user} writes node {request.name}")
        for step in request.body if isinstance(request.body, list) else ():
            if step["op"] == "test":
                continue
            key = step["path"].rpartition("/")[2].replace("~1", "/")
            ours = key.startswith("migd.dev/") or any(key.startswith(name) for name in _WRITABLE)
            if not ours and key not in ("labels", "annotations", "taints", "-"):
                self.says(f"{request.user} writes {step['path']}")

    # ---- changes

    def _happened(self, kind: SimKind, happened: Happened) -> None:
        match kind.plural:
            case "nodes":
                self._node(happened)
            case "pods":
                self._pod(happened)
            case "gpupartitions":
                self._partition(happened)
            case "gpupartitionplans":
                self.evictions.plan(happened)
                status = happened.after.document.get("status") or {}
                if not self.previewed and "preview" in status:
                    self.previewed.update(status["preview"])
                for one in status.get("conditions") or ():
                    self.reached.add(f"plan {one['type']} {one['status']} {one['reason']}")

    def _node(self, happened: Happened) -> None:
        name = happened.after.document["metadata"]["name"]
        before = _foreign(happened.before.document) if happened.before is not None else None
        if before is not None and self._user.startswith("migd-") and not happened.deleted:
            after = _foreign(happened.after.document)
            if before != after:
                self.says(f"{self._user} changed foreign keys of {name}: {before} to {after}")
        is_closed = not happened.deleted and _tainted(happened.after.document)
        self.evictions.node(name, is_closed)
        if is_closed and name not in self.closed:
            self._closes(name, happened.after.document)
        elif not is_closed and name in self.closed:
            was = self.closed.pop(name)
            if not happened.deleted and self._user.startswith("migd-agent"):
                self.reached.add("opened")
            if self.now_s() - was.since_s > 900 and self._user.startswith("migd-agent"):
                self.says(f"{name} was closed for {self.now_s() - was.since_s:.0f} s")

    def _closes(self, name: str, document: dict[str, Any]) -> None:
        owed = document["metadata"].get("annotations", {}).get(OWED)
        if owed is None:
            self.says(f"{name} is closed and nothing is owed")
            return
        turn = str(json.loads(owed)["turn"])
        self.closed[name] = Closed(turn, self.now_s())
        self.reached.add("closed")
        if self.now_s() < self.disturbed_s.get(f"power {name}", 0.0):
            return  # after a reboot a node is closed at once
        if turn:
            self._within_limits()
        self._must_be_idle(name, turn)

    def _within_limits(self) -> None:
        """No plan has more nodes closed for the first time at their wishes than it allows."""
        rolling = [n for n, c in self.closed.items() if c.turn and c.turn not in self.done.get(n, ())]
        of_plan: dict[str, set[str]] = {}
        for one in self.fleet.partitions():
            if one.spec.node_name in rolling and one.spec.desired is not None:
                of_plan.setdefault(one.spec.desired.plan.name, set()).add(one.spec.node_name)
        for name, nodes in sorted(of_plan.items()):
            said = ((self.fleet.plan(name).get("spec") or {}).get("rollout") or {}).get("maxUnavailable", 1)
            most = said if isinstance(said, int) else max(1, len(self.fleet.nodes) * int(said[:-1]) // 100)
            if len(nodes) > most:
                self.says(f"{', '.join(sorted(nodes))} are closed at once, and plan {name} allows {most}")

    def _must_be_idle(self, name: str, turn: str) -> None:
        there = truth(self.cluster.node(name))
        for one in self.fleet.partitions(name):
            gpu = next((g for uuid, g in there.items() if uuid.lower() == one.name), None)
            if gpu is None or one.spec.desired is None or one.spec.assignment is None or one.spec.assignment.id != turn:
                continue
            if one.spec.desired.disruption.policy == "Evict":
                continue  # closed first, so that nobody comes while those in the way go
            why = self._in_the_way(gpu, one)
            if why:
                self.says(f"{name} is closed though GPU {gpu.index} is not idle: {why}")

    def _in_the_way(self, gpu: GpuTruth, one: Partition) -> str:
        """Who has long been on what would have to go for this wish; "" for nobody."""
        seen = one.gpu
        assert one.spec.desired is not None
        if seen is None or seen.board is None or gpu.lost:
            return ""
        if one.spec.desired.foreign_instances == "Refuse" and gpu.layout.instances - one.owned:
            return ""  # it is set apart where somebody else's are in the way, and stops no other GPU
        old = {t.instance: t.held for t in gpu.there if t.held and self._long_held(gpu.uuid, t.serial)}
        old = {instance: stay for instance, held in old.items() if (stay := self._staying(one, held))}
        wish = resolve(rule_of(one.spec.desired), seen)
        if not isinstance(wish, Wish):
            return ""
        if not wish.mig:
            return ", ".join(who for held in old.values() for who in held)
        found = transition(seen.board, gpu.layout.instances, frozenset(old), wish.counts)
        if isinstance(found, Refusal) and found.reason == "InUse":
            return ", ".join(f"{i} by {old[i]}" for i in found.blocked_by)
        return ""

    def _staying(self, one: Partition, held: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the holders who may not be evicted for this wish, each with why; processes are their pods'."""
        assert one.spec.desired is not None
        how = one.spec.desired.disruption
        if how.policy != "Evict":
            return held
        pods = [holder for holder in held if not holder.startswith("pid ")]
        if not pods:
            return held
        if self.evictions.is_spent(one):
            return tuple(f"{pod} (nobody is evicted for it again)" for pod in pods)
        protect = None if how.protect is None else {"matchLabels": how.protect.match_labels}
        said = {"policy": "Evict", "protect": protect, "allow": how.allow}
        found = []
        for pod in pods:
            document = self.cluster.get("pods", pod.partition("/")[2], pod.partition("/")[0])
            why = stays(document, said) if document is not None else ""
            found += [f"{pod} ({why})"] if why else []
        return tuple(found)

    def _long_held(self, uuid: str, serial: int) -> bool:
        return self.now_s() - self._held_since.get((uuid, serial), self.now_s()) >= OLD_S

    def _pod(self, happened: Happened) -> None:
        document = happened.after.document
        node, uid = node_of(document), document["metadata"]["uid"]
        if not node:
            return
        self.evictions.pod(happened)
        self._held(self.cluster.node(node))
        if uid not in self._bound_s:
            self._bound_s[uid] = self.now_s()
        status = document.get("status") or {}
        asks = any(
            name.startswith("nvidia.com/") and number
            for limits in wants_of(document).containers.values()
            for name, number in limits.items()
        )
        failed_before = happened.before is not None and (happened.before.document.get("status") or {}).get("reason")
        if asks and status.get("reason") == "UnexpectedAdmissionError" and not failed_before:
            self._died(node, uid, document["metadata"]["name"])

    def _died(self, node: str, uid: str, name: str) -> None:
        self.reached.add("pod dies")
        closed = self.closed.get(node)
        if closed is None or self.now_s() < self.disturbed_s.get(node, 0.0):
            return
        bound_s = self._bound_s[uid]
        if bound_s <= closed.since_s + SETTLED_S:
            self.says(f"pod {name} on {node} dies of a pause: bound {bound_s - closed.since_s:.3f} s after the taint")

    def _held(self, node: SimNode) -> None:
        """Remember since when instances are held."""
        for gpu in truth(node).values():
            for one in gpu.there:
                if one.held:
                    self._held_since.setdefault((gpu.uuid, one.serial), self.now_s())
                else:
                    self._held_since.pop((gpu.uuid, one.serial), None)

    def _partition(self, happened: Happened) -> None:
        if happened.deleted:
            return
        self.evictions.partition(happened)
        status = happened.after.document.get("status") or {}
        phase = status.get("phase", "")
        self.reached.add(f"phase {phase}")
        for one in status.get("conditions") or ():
            self.reached.add(f"{one['type']} {one['status']} {one['reason']}")
        for step in (status.get("lastTransition") or {}).get("steps") or ():
            self.reached.add(f"step {step['name']}")
        if phase == "Ready":
            spec = partition_of(happened.after.document).spec
            if spec.assignment is not None:
                self.done.setdefault(spec.node_name, set()).add(spec.assignment.id)

    # ---- hardware

    def refit(self, node: SimNode, ports: AgentPorts) -> AgentPorts:
        """The ports of an agent, watched."""
        machine = ports.machine
        gpus = _WatchedGpus(machine.gpus, node, self)
        reset = _WatchedReset(machine.reset, node, self)
        return replace(ports, machine=replace(machine, gpus=gpus, reset=reset))

    def around(self, node: SimNode, what: str, work: Callable[[], None]) -> None:
        """Something that an agent does to hardware: nobody may lose what he holds by it."""
        before = {(g.uuid, t.serial): t for g in truth(node).values() for t in g.there}
        modes = {g.uuid: g.mig for g in truth(node).values()}
        try:
            work()
        finally:
            after = truth(node)
            left = {(g.uuid, t.serial): t for g in after.values() for t in g.there}
            for key, one in before.items():
                now = left.get(key)
                if one.held and (now is None or (one.whole and not now.whole)):
                    self.says(f"{what} on {node.name} takes {one.instance} from {', '.join(one.held)}")
            changed = [g for g in after.values() if g.mig != modes.get(g.uuid, g.mig)]
            for gpu in changed:
                if gpu.held:
                    self.says(f"{what} on {node.name} changes the mode under {', '.join(gpu.held)}")
            if (set(before) != set(left) or changed) and node.name not in self.closed:
                gone = set(before) - set(left)
                if gone or changed:
                    self.says(f"{what} on {node.name}, which is not closed")


class _WatchedGpus(Gpus):
    """An agent's GPUs, watched."""

    def __init__(self, gpus: Gpus, node: SimNode, watching: Watching) -> None:
        self._gpus, self._node, self._watching = gpus, node, watching

    def look(self) -> tuple[SeenGpu, ...]:
        return self._gpus.look()

    def look_at(self, uuid: str) -> SeenGpu | None:
        return self._gpus.look_at(uuid)

    def perform(self, operation: Operation) -> None:
        self._watching.reached.add(f"effect {type(operation).__name__}")
        self._watching.around(self._node, str(operation), lambda: self._gpus.perform(operation))

    def close(self) -> None:
        self._gpus.close()


class _WatchedReset(Reset):
    def __init__(self, reset: Reset, node: SimNode, watching: Watching) -> None:
        self._reset, self._node, self._watching = reset, node, watching

    def reset(self, gpu_uuid: str) -> None:
        self._watching.reached.add("effect ResetGpu")
        self._watching.around(self._node, "reset", lambda: self._reset.reset(gpu_uuid))


def _tainted(node: dict[str, Any]) -> bool:
    return any(taint["key"] == TAINT for taint in node["spec"].get("taints") or ())


def _foreign(node: dict[str, Any]) -> dict[str, Any]:
    """What of a node is not ours to write."""
    metadata, spec = node["metadata"], node["spec"]
    labels = {
        key: value
        for key, value in (metadata.get("labels") or {}).items()
        if not key.startswith("migd.dev/") and not key.startswith(_WRITABLE)
    }
    annotations = {k: v for k, v in (metadata.get("annotations") or {}).items() if not k.startswith("migd.dev/owed")}
    taints = [taint for taint in spec.get("taints") or () if taint["key"] != TAINT]
    rest = {key: value for key, value in spec.items() if key != "taints"}
    return {"labels": labels, "annotations": annotations, "taints": taints, "spec": rest}


def ours_left(node: dict[str, Any]) -> list[str]:
    """What of ours is still on a node that should not be there at rest."""
    metadata = node["metadata"]
    left = [TAINT] if _tainted(node) else []
    left += [OWED] if OWED in (metadata.get("annotations") or {}) else []
    return left + [key for key, value in (metadata.get("labels") or {}).items() if value == PAUSED]
