"""How a story must end: all is as wished, or for a reason that is true; nothing of ours is left, and nobody writes."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from fleet import Fleet

from migd.mig.observed import SeenGpu
from migd.mig.transition import Refusal, transition
from migd.plans.partitions import Partition
from migd.plans.plan import plan_of
from migd.plans.wishes import Refused, Wish, resolve
from migd.sim.nodes.documents import labels_of, running
from migd.sim.nodes.world import SimNode
from whole.acting import PLAN, Acting
from whole.truth import GpuTruth, as_wished, offered, rule_of, truth
from whole.watching import Watching, ours_left

RESTING: Final = frozenset({"Idle", "Ready", "Blocked", "RebootRequired", "Held", "Lost", "WaitingForIdle", "Pending"})
HOLD: Final = "migd.dev/hold"
PLANS: Final = (PLAN, "rival", "upper")


def settled(fleet: Fleet, acting: Acting) -> bool:
    """Whether everything seems to be over: nothing of ours on a node, every GPU answered and at rest."""
    for node in fleet.cluster.all("nodes"):
        if ours_left(node):
            return False
    for one in fleet.partitions():
        if one.spec.node_name in acting.gone:
            continue
        given_up = one.status.phase == "Failed" and one.spec.node_name in acting.odd
        if (one.status.phase not in RESTING and not given_up) or one.status.observed_generation != one.generation:
            return False
        if one.status.phase == "Pending" and one.spec.assignment is not None:
            return False
    return True


def check(fleet: Fleet, watching: Watching, acting: Acting) -> list[str]:
    """What is wrong at the end."""
    wrong = list(watching.wrong)
    for node in fleet.nodes:
        document = fleet.cluster.get("nodes", node.name)
        if document is None:
            wrong += [f"{one.name} is left of a node that is gone" for one in fleet.partitions(node.name)]
            continue
        wrong += [f"{key} is left on {node.name}" for key in ours_left(document)]
        if node.name in acting.gone or not node.kubelet.up:
            continue
        wrong += _of_node(fleet, watching, acting, node, document)
    for name in PLANS:
        if fleet.plan(name):
            wrong += _of_plan(fleet, name, acting)
            wrong += watching.evictions.counted(name, exactly=acting.tale.quiet)
    return wrong


def _of_node(fleet: Fleet, watching: Watching, acting: Acting, node: SimNode, document: dict[str, Any]) -> list[str]:
    wrong, there, mine = [], truth(node), {one.name: one for one in fleet.partitions(node.name)}
    for gpu in there.values():
        one = mine.get(gpu.uuid.lower())
        if one is None:
            wrong.append(f"{node.name}: GPU {gpu.index} has no object")
        else:
            wrong += [
                f"{node.name} GPU {gpu.index}: {why}"
                for why in _of_gpu(fleet, watching, acting, node, document, one, gpu)
            ]
    lost = any(gpu.lost for gpu in there.values())
    ready = all(one.status.phase == "Ready" for one in mine.values())
    if not lost and node.name not in acting.odd and (ready or "drift" not in acting.done):
        # where somebody else changed GPUs and migd does not, nobody has the device plugin look again
        wrong += _advertised(fleet, node)
    if not lost:
        wrong += _labels(node, document, there, any(one.spec.desired for one in mine.values()))
    return wrong


def _advertised(fleet: Fleet, node: SimNode) -> list[str]:
    """What the kubelet advertises is what there is."""
    told = {name: number for name, number in fleet.cluster.allocatable(node.name).items() if number}
    there = {name: number for name, number in offered(node).items() if number}
    return [] if told == there else [f"{node.name} tells allocatable {told}, and there is {there}"]


def _labels(node: SimNode, document: dict[str, Any], there: dict[str, GpuTruth], wished: bool) -> list[str]:
    """Ours say what pods can have, where anything is wished on the node: half an instance may be left by a failure."""
    whole = (one.instance.profile for gpu in there.values() for one in gpu.there if one.whole and wished)
    counts = Counter(whole)
    wanted = {f"migd.dev/mig-{profile.replace('+', '.')}.count": str(number) for profile, number in counts.items()}
    ours = {key: value for key, value in labels_of(document).items() if key.startswith("migd.dev/mig-")}
    return [] if ours == wanted else [f"{node.name} has labels {ours}, and there is {wanted}"]


def _of_gpu(
    fleet: Fleet,
    watching: Watching,
    acting: Acting,
    node: SimNode,
    document: dict[str, Any],
    one: Partition,
    gpu: GpuTruth,
) -> list[str]:
    phase, reason = one.status.phase, one.status.reason
    if gpu.lost:
        return [] if phase == "Lost" else [f"it is lost, and told to be {phase}"]
    wrong = [f"it still asks for {pod.key} to go" for pod in one.status.victims]
    observed = one.status.observed
    if observed is not None and one.gpu is not None and one.gpu.layout != gpu.layout:
        wrong.append(f"{one.gpu.layout} is told, and there is {gpu.layout}")
    wish = _wish(one)
    if phase == "Ready" and not (wish is not None and as_wished(gpu, wish)):
        wrong.append(
            f"Ready, and there is {gpu.layout} for {one.spec.desired.summary if one.spec.desired else 'no wish'}"
        )
    if phase in ("Ready", "Idle"):
        return wrong + _transition(one, gpu)
    unknown = bool({"reload", "reboot", "drift"} & acting.done)  # pods whose devices are gone may hold any
    maybe = _asking(fleet, node) if unknown else []
    if not (watching.evictions.says_true(one, maybe) or _true(fleet, acting, node, document, one, gpu)):
        wrong.append(f"{phase} {reason} is not true: {one.status.message}")
    return wrong


def _wish(one: Partition) -> Wish | None:
    if one.spec.desired is None or one.gpu is None:
        return None
    found = resolve(rule_of(one.spec.desired), one.gpu)
    return found if isinstance(found, Wish) else None


def _transition(one: Partition, gpu: GpuTruth) -> list[str]:
    last = one.status.last_transition
    if last is None or one.status.phase != "Ready":
        return []
    if last.finished_at is None:
        return [f"the last transition has no end: {last}"]
    if last.result == "Succeeded" and last.to != str(gpu.layout):
        return [f"the last transition led to {last.to}, and there is {gpu.layout}"]
    return []


def _true(fleet: Fleet, acting: Acting, node: SimNode, document: dict[str, Any], one: Partition, gpu: GpuTruth) -> bool:
    """Whether the reason why a GPU is not as wished holds in the world as it is."""
    labels, annotations = labels_of(document), document["metadata"].get("annotations") or {}
    there = truth(node).values()
    held = any(g.held or any(t.held for t in g.there) for g in there)  # a turn is of all GPUs of a node
    match one.status.reason:
        case "InUse" | "NeverIdle":
            unknown = bool({"reload", "reboot", "drift"} & acting.done)  # pods whose devices are gone may hold any
            return held or _unpaused(fleet, node) or (unknown and bool(_asking(fleet, node)))
        case "DrainTimeout":
            return bool({"watches bad", "api away", "api bad"} & acting.done)  # what clients did was not heard in time
        case "Infeasible" | "UnknownProfile":
            return _cannot_be(one) or any(_refused(fleet.plan(name), one) for name in PLANS if fleet.plan(name))
        case "ResetRefused":
            desired = one.spec.desired
            return _unpaused(fleet, node) and desired is not None and (desired.mig == "Enabled") != gpu.mig
        case "Conflict":
            return bool(fleet.plan("rival"))
        case "Held":
            return HOLD in annotations or HOLD in one.annotations or _holds(one)
        case "ForeignOwner":
            return labels.get("nvidia.com/gpu.deploy.mig-manager") == "true"
        case "ForeignInstances":
            desired = one.spec.desired
            return desired is not None and (
                (bool(gpu.there) and desired.foreign_instances == "Refuse")
                or (desired.drift == "Observe" and bool({"drift", "reload", "reboot"} & acting.done))
            )
        case "GPUUnhealthy":
            return gpu.lost or "xid" in fleet.cluster.log[-1] or bool(one.status.board and one.status.board.trouble)
        case "RebootRequired":
            return gpu.mig != gpu.pending
        case "NotAdvertised" | "NoDevicePlugin":
            runs = any(running(pod) for pod in _plugins(fleet, node))
            return any(g.lost for g in there) or not runs or bool(_advertised(fleet, node))
        case "Paused":
            return bool(fleet.plan(PLAN)["spec"].get("paused"))
    return one.status.phase in ("Pending", "Idle") and one.spec.assignment is None


def _cannot_be(one: Partition) -> bool:
    """Whether no layout of this board is as wished."""
    wish, seen = _wish(one), one.gpu
    if wish is None or seen is None or seen.board is None:
        return wish is None
    return isinstance(transition(seen.board, frozenset(), frozenset(), wish.counts), Refusal)


def _refused(document: dict[str, Any], one: Partition) -> bool:
    """Whether a plan wants of a GPU what cannot be: its agent says so although the wish never comes to it."""
    gpu = one.gpu
    return gpu is not None and any(_never(resolve(rule, gpu), gpu) for rule in plan_of(document, PLAN).spec.rules)


def _never(found: Wish | Refused, gpu: SeenGpu) -> bool:
    if isinstance(found, Refused) or gpu.board is None:
        return isinstance(found, Refused)
    return isinstance(transition(gpu.board, frozenset(), frozenset(), found.counts), Refusal)


def _holds(one: Partition) -> bool:
    return one.spec.desired is not None and one.spec.desired.on_failure == "Hold"


def _unpaused(fleet: Fleet, node: SimNode) -> bool:
    """A plugin that tolerates everything holds its GPUs open, so modes cannot change."""
    return node.spec.style == "helm-tolerant"


def _asking(fleet: Fleet, node: SimNode) -> list[dict[str, Any]]:
    pods = (pod for pod in fleet.cluster.pods(node.name) if running(pod))
    return [p for p in pods if any("nvidia.com/" in str(c.get("resources")) for c in p["spec"]["containers"])]


def _plugins(fleet: Fleet, node: SimNode) -> list[dict[str, Any]]:
    pods = fleet.cluster.pods(node.name)
    return [p for p in pods if p["spec"]["containers"][0]["name"].startswith("nvidia-device-plugin")]


def _of_plan(fleet: Fleet, name: str, acting: Acting) -> list[str]:
    """What a plan says of itself agrees with its GPUs, of which all that is true was looked at."""
    mine = [p for p in fleet.partitions() if p.spec.desired is not None and p.spec.desired.plan.name == name]
    status, reason, message = fleet.condition(name, "Ready")
    if not status:
        return [f"plan {name} says nothing of its present generation"]
    ready = bool(mine) and all(p.status.phase == "Ready" for p in mine)
    if status == "True" and not ready:
        return [f"plan {name} is Ready, and {[p.status.phase for p in mine]}"]
    if status == "True" or not mine or reason not in ("Waiting", "AsWished", "Valid"):
        return []
    others = {p.status.phase for p in fleet.partitions()} - {"Ready"}
    away = acting.gone or any(node.name in acting.odd for node in fleet.nodes) or _cordoned(fleet) or others
    return [] if away else [f"plan {name} is not Ready for no reason: {reason}: {message}"]


def _cordoned(fleet: Fleet) -> bool:
    return any(node["spec"].get("unschedulable") for node in fleet.cluster.all("nodes"))
