"""Who must go so that a node's whole turn can go through: the fewest pods, over all its GPUs together.

Nobody is chosen unless the turn could go through once the chosen are gone: where something on a GPU may not go, or is
not known, the node waits for it as if the plan did not evict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from migd.agent.node.holding import Held, Place, owner_of
from migd.agent.node.seeing import NodeSeen
from migd.agent.node.turning import Turn
from migd.agent.records import Cause, NodeWork, PodRef
from migd.kube.pods import Pod, may_not_go
from migd.kube.stored import Stored
from migd.mig.evicting import Eviction, Occupied, fewest
from migd.mig.geometry import EMPTY, Geometry, GpuInstance, by_start
from migd.mig.observed import Holder
from migd.plans.partitions import Desired
from migd.plans.preview import GpuPreview
from migd.plans.wishes import Wish

NOT_AGAIN: Final = (
    "nobody is evicted for it again until the plan is edited or a GPUPartition of the node gets the annotation "
    "migd.dev/retry; what must go is waited for"
)
NO_REQUEST: Final = (
    "it holds the GPU without asking for one, so that it is no pod of a GPU to the cluster: end it by hand"
)
CAME_BACK: Final = "it is there although the node is closed: it tolerates migd.dev/changing, so evicting it is no use"


@dataclass(frozen=True, slots=True)
class Going:
    """Who goes. victims: by GPU UUID, the pods to be evicted, by key; one that holds several GPUs is under each.

    leaving: pods that hold what must go and end by themselves, or have gone just now, by key. freed: by GPU UUID, the
    instances in use that are free once all of these have gone. stuck: why nobody is to be evicted, None where the whole
    turn can go through. proven: whether the number of victims is known to be the least.
    """

    victims: Mapping[str, tuple[PodRef, ...]] = field(default_factory=dict)
    leaving: tuple[PodRef, ...] = ()
    freed: Mapping[str, Geometry] = field(default_factory=dict)
    stuck: Cause | None = None
    proven: bool = True

    @property
    def pods(self) -> tuple[PodRef, ...]:
        """All victims, each once."""
        return each_of(self.victims)


def each_of(victims: Mapping[str, tuple[PodRef, ...]]) -> tuple[PodRef, ...]:
    """The pods of several GPUs by key, each once."""
    return tuple(sorted({pod for pods in victims.values() for pod in pods}))


def in_vain(why: Cause) -> Cause:
    """What a drain came to that did not lead to its change, for this reason."""
    if why.reason in ("DrainTimeout", "DrainBlocked", "EvictionBudget"):
        return why
    return Cause("EvictionBudget", f"pods were evicted for this, and it could not go on: {why.message}")


def not_again(why: Cause) -> Cause:
    """The same, with what follows from it and what to do."""
    return Cause(why.reason, f"{why.message}; {NOT_AGAIN}")


def spent_key(desired: Desired) -> str:
    """The wish that a drain is spent on: a plan's generation. An edit makes another."""
    return f"{desired.plan.uid}/{desired.plan.generation}"


def who_goes(
    work: NodeWork,
    seen: NodeSeen,
    held: Held,
    turn: Turn,
    plans: Mapping[str, GpuPreview],
    changing: Sequence[str],
    owned: Mapping[str, Geometry],
) -> Going:
    """Who must go for these plans, made as if nobody went; changing: UUIDs of the GPUs that something is to be done on.

    owned: by GPU UUID, the instances in this node's record.
    """
    people = _People(work, seen, held, turn)
    found: list[tuple[str, Occupied]] = []
    for uuid in changing:
        one = people.occupied(plans[uuid], owned.get(uuid, EMPTY))
        if one is not None:
            found.append((uuid, one))
    eviction = _fewest(tuple(one for _, one in found))
    freed = {
        uuid: free | people.loose(uuid)
        for (uuid, _), free in zip(found, eviction.freed, strict=True)
        if free is not None
    }
    if len(freed) < len(changing):
        return Going(leaving=people.leaving(), stuck=people.cause(plans, [u for u in changing if u not in freed]))
    victims: dict[str, tuple[PodRef, ...]] = {}
    for uuid in changing:
        after = turn.orders[uuid].plan(plans[uuid].seen, owned.get(uuid, EMPTY), freed[uuid])
        mine = people.in_the_way(after)
        if mine is None:
            return Going(leaving=people.leaving(), stuck=people.cause({**plans, uuid: after}, [uuid]))
        if mine:
            victims[uuid] = mine
    return Going(victims, people.leaving(), freed, None, eviction.proven)


@lru_cache(maxsize=256)
def _fewest(gpus: tuple[Occupied, ...]) -> Eviction:
    """Remembered: the same node is looked at again and again while its pods go."""
    return fewest(gpus)


class _People:
    """Whoever holds something on this node, told apart by whether they go."""

    def __init__(self, work: NodeWork, seen: NodeSeen, held: Held, turn: Turn) -> None:
        self._work, self._seen, self._held, self._turn = work, seen, held, turn
        self._pods = {(pod.namespace, pod.name): pod for pod in seen.pods}
        self._refs: dict[str, PodRef] = {}
        self._asked = frozenset(work.asked)
        self._names = {(pod.namespace, pod.name): pod for pod in work.asked}
        self._leaving: set[PodRef] = set()
        self._loose: dict[str, set[GpuInstance]] = {}
        self._barred: dict[str, list[str]] = {}

    def occupied(self, plan: GpuPreview, owned: Geometry) -> Occupied | None:
        """A GPU as the search sees it; None where whoever holds it as a whole may not go."""
        now, order = plan.seen, self._turn.orders[plan.uuid]
        fixed = set(now.geometry - owned) if order.foreign == "Refuse" else set()
        holding: dict[GpuInstance, frozenset[str]] = {}
        for there in now.instances:
            if there.in_use and there.instance not in fixed:
                pods = self._who((now.uuid, there.instance), there.holders)
                if pods is None:
                    fixed.add(there.instance)
                elif pods:
                    holding[there.instance] = frozenset(pod.uid for pod in pods)
                else:
                    self._loose.setdefault(now.uuid, set()).add(there.instance)
        everything = _everything_goes(plan)
        whole: frozenset[str] = frozenset()
        if everything and now.in_use:
            pods = self._who((now.uuid, None), now.holders)
            if pods is None:
                return None
            whole = frozenset(pod.uid for pod in pods)
        current = now.geometry if plan.wish is not None else frozenset(plan.destroy)  # a layout to come back to
        return Occupied(
            board=now.board,
            current=current,
            wanted=None if everything or not isinstance(plan.wish, Wish) else plan.wish.counts,
            fixed=frozenset(fixed) & current,
            held=tuple((i, holding[i]) for i in by_start(holding) if i in current),
            whole=whole,
        )

    def in_the_way(self, plan: GpuPreview) -> tuple[PodRef, ...] | None:
        """The pods that stand in the way of a plan, by key; None where somebody else does."""
        found: set[PodRef] = set()
        if any(blocker.reason != "InUse" for blocker in plan.blocked_by):
            return None
        there = {s.instance: s for s in plan.seen.instances}
        for instance in dict.fromkeys(blocker.instance for blocker in plan.blocked_by):
            holders = plan.seen.holders if instance is None else there[instance].holders
            pods = self._who((plan.uuid, instance), holders)
            if pods is None:
                return None
            found |= {self._refs[pod.uid] for pod in pods}
        return tuple(sorted(found))

    def loose(self, uuid: str) -> Geometry:
        """Instances of a GPU that are in use, but by nobody who stays."""
        return frozenset(self._loose.get(uuid, ()))

    def leaving(self) -> tuple[PodRef, ...]:
        """Those that were found to hold something, and go already."""
        return tuple(sorted(self._leaving))

    def cause(self, plans: Mapping[str, GpuPreview], uuids: Iterable[str]) -> Cause:
        """Why nobody is evicted, of the first GPU of these on which somebody may not go."""
        uuids = tuple(uuids)
        for uuid in uuids:
            if self._is_spent(uuid) and self._work.spent_why is not None:
                return not_again(self._work.spent_why)
        for uuid in uuids:
            if self._barred.get(uuid):
                return Cause("DrainBlocked", "; ".join(dict.fromkeys(self._barred[uuid])))
        for uuid in uuids:
            blocked = plans[uuid].blocked
            if blocked is not None:
                return Cause("InUse", blocked.message)
        return Cause("InUse", "")

    def _is_spent(self, uuid: str) -> bool:
        """Whether pods were evicted for this wish before, and it was in vain. One attempt goes on to its end."""
        return not self._work.asked and spent_key(self._turn.desired[uuid]) in self._work.spent

    def _who(self, place: Place, holders: Iterable[Holder]) -> tuple[Stored[Pod], ...] | None:
        """The pods that hold a place and would have to be evicted; None where somebody who may not go does, too."""
        uuid = place[0]
        if self._turn.desired[uuid].disruption.policy != "Evict" or self._is_spent(uuid):
            return None
        names = self._held.pods.get(place, ())
        found: dict[str, Stored[Pod]] = {}
        for name in names:
            pod = self._pods.get(name)
            if pod is not None:
                found[pod.uid] = pod
            elif name in self._names:
                self._leaving.add(self._names[name])  # it is gone, and the kubelet has yet to hear of it
            else:
                return None
        for holder in holders:
            if holder.pid is None:
                if holder.command not in {f"pod {namespace}/{name}" for namespace, name in names}:
                    return None
                continue
            owner = owner_of(self._seen, holder, names)
            if owner is None:
                return None
            found[owner.uid] = owner
        if not names and not found:
            return None
        barred = [pod for pod in found.values() if not self._may_go(uuid, pod)]  # each of them, so that each is told of
        if barred:
            return None
        staying = [pod for uid, pod in sorted(found.items()) if not pod.deleting and not pod.value.terminal]
        for pod in found.values():
            self._refs[pod.uid] = PodRef(pod.namespace, pod.name, pod.uid)
            if pod not in staying:
                self._leaving.add(self._refs[pod.uid])
        return tuple(staying)

    def _may_go(self, uuid: str, pod: Stored[Pod]) -> bool:
        if pod.deleting or pod.value.terminal:
            return True
        how = self._turn.desired[uuid].disruption
        why = may_not_go(pod.value, how.protect, how.allow)
        if not (pod.value.gpus or pod.value.claims):
            why = NO_REQUEST
        if not why and self._asked and pod.value.tolerates and pod.uid not in {one.uid for one in self._asked}:
            why = CAME_BACK
        if why:
            self._barred.setdefault(uuid, []).append(f"pod {pod.key} is not evicted: {why}")
        return not why


def _everything_goes(plan: GpuPreview) -> bool:
    """Whether a plan leaves no instance and no client on its GPU: its MIG mode changes, or it has none afterwards."""
    mode = plan.seen.mode
    switches = plan.mode_change is not None and mode is not None and (plan.mode_change == "Enable") != mode.current
    return switches or plan.seen.board is None or not isinstance(plan.wish, Wish) or not plan.wish.mig
