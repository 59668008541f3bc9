"""From a decision to the API server: what is applied, in which order, and what becomes of each refusal.

What is told comes before what is done: a plan whose status was not written starts nothing and evicts nobody. A pass may
end anywhere, and the next one goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from migd.kube.errors import ConflictError, DeniedError, Json, KubeError, MissingError, RefusedError, UnreadableError
from migd.kube.nodes import NODES
from migd.kube.partitions import PARTITIONS, PLANS, PlanObject
from migd.kube.ports import Cluster
from migd.kube.stored import Stored, Where
from migd.plans.partitions import Partition, written
from migd.plans.statuses import PlanStatus, plan_status_document
from migd_operator.assembling import Look
from migd_operator.deciding import PLAN_LABEL, Decision, SpecWrite, StatusWrite
from migd_operator.draining import Evictor
from migd_operator.evicting import Ask
from migd_operator.facts import HOLD
from migd_operator.paying import NodeWrite

_log = logging.getLogger(__name__)
PASS_WRITES: Final = 200
PASS_S: Final = 10.0
"""A pass ends after so many writes or so long, so that the rest is decided on anew, with what was heard meanwhile."""
PASS_ASKS: Final = 50
"""So many pods are looked at or called in one pass: what was answered is told before it goes on."""
ACCEPTED: Final = 201
REFUSED_S: Final = 30.0
"""So long before what a person has to cure is tried again."""


class LostError(Exception):
    """The lease is not ours any more: nothing is written from here on."""


@dataclass(slots=True)
class Done:
    """What a pass did. ends_s: when it must end. plans, nodes, gpus: which of them were written.

    more: there is more to write, or a new answer, so decide again soon.
    again_s: when what was refused may be tried again, in seconds from now; None for nothing of that kind.
    evicted: pods whose eviction was accepted.
    """

    ends_s: float
    writes: int = 0
    plans: set[str] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    gpus: set[str] = field(default_factory=set)
    more: bool = False
    again_s: float | None = None
    evicted: list[Ask] = field(default_factory=list)


def spec_body(write: SpecWrite) -> Json:
    """The operator's part of a partition: the wish, the turn, and the label that names the plan."""
    spec: Json = {}
    if write.desired is not None:
        spec["desired"] = written(write.desired)
        if write.desired.instances:  # the API server fills in counts, inside a list that is one value
            spec["desired"]["instances"] = [{**written(i), "count": i.count} for i in write.desired.instances]
    if write.assignment is not None:
        spec["assignment"] = written(write.assignment)
    labels = {PLAN_LABEL: write.label} if write.label is not None else {}
    return {"metadata": {"labels": labels}, "spec": spec}


def told_body(write: StatusWrite) -> Json:
    """The operator's part of a partition's status: two conditions, and what came of evictions."""
    status: Json = {"conditions": [written(c) for c in write.conditions]}
    if write.evictions:
        status["evictions"] = [written(one) for one in write.evictions]
    return {"status": status}


def status_body(status: PlanStatus, seen: Stored[PlanObject]) -> Json:
    """A plan's status, all of which is the operator's.

    It is only written on what was seen: so a cache that is late, as of an operator that has just taken over, makes no
    count of evictions smaller.
    """
    return {"metadata": {"resourceVersion": seen.resource_version}, "status": plan_status_document(status)}


class Writer:
    """Carries decisions out. held: whether the lease is ours, asked before each write. failed: told of each failure."""

    def __init__(
        self,
        cluster: Cluster,
        evictor: Evictor,
        held: Callable[[], bool],
        failed: Callable[[KubeError], None] = lambda _error: None,
    ) -> None:
        self._cluster = cluster
        self._evictor = evictor
        self._held = held
        self._failed = failed
        self._refused: dict[tuple[str, str], float] = {}  # what, name -> not before

    async def write(self, look: Look, decision: Decision, nodes: tuple[NodeWrite, ...]) -> Done:
        """One pass. LostError where the lease is lost; UnavailableError where the API server is not well."""
        done = Done(ends_s=self._now_s() + PASS_S)
        for change in nodes:
            if await self._try(done, "node", change.node.name, partial(self._node, change)):
                done.nodes.add(change.node.name)
        for name, status in decision.statuses:
            if await self._try(done, "plan", name, partial(self._status, look, name, status)):
                done.plans.add(name)
        untold = {name for name, _ in decision.statuses} - done.plans
        await self._evict(look, decision.asks, done, untold)
        untaken = set(decision.taken_over) - done.nodes
        for node, specs in _by_node(look, decision):
            if node in untaken or any(s.assignment and s.desired and s.desired.plan.name in untold for s in specs):
                continue
            for spec in specs:
                await self._try(done, "spec", spec.partition, partial(self._spec, look, spec))
        for name in decision.deletions:
            await self._try(done, "delete", name, partial(self._delete, look, name))
        for said in decision.told:
            if await self._try(done, "told", said.partition, partial(self._told, look, said)):
                done.gpus.add(said.partition)
        return done

    async def _evict(self, look: Look, asks: tuple[Ask, ...], done: Done, untold: set[str]) -> None:
        """Look at pods and call for their evictions, while the API server takes that."""
        agreed: dict[str, bool] = {}
        for number, ask in enumerate(asks):
            if not self._held():
                raise LostError
            if number >= PASS_ASKS or self._now_s() >= done.ends_s:
                done.more = True
                return
            if self._evictor.busy:
                return
            if ask.call and (untold & set(ask.plans) or not await self._agreed(look, ask, done, agreed)):
                done.more = True
                continue
            if not self._held():
                raise LostError
            new = await self._evictor.ask(ask)
            done.more |= new
            if new and self._evictor.answers[ask.pod.uid].code == ACCEPTED:
                done.evicted.append(ask)  # to be told with this pass

    async def _agreed(self, look: Look, ask: Ask, done: Done, agreed: dict[str, bool]) -> bool:
        """Whether all is still as it was decided on, by the API server and not by our caches: asked once in a pass.

        An eviction cannot be taken back, and a watch may be dead for a while before that is noticed.
        """
        for name in ask.plans:
            if f"plan {name}" not in agreed:
                agreed[f"plan {name}"] = name in done.plans or await self._counts(look.plans[name])
        if ask.node not in agreed:
            agreed[ask.node] = await self._drains(look, ask.node)
        return agreed[ask.node] and all(agreed[f"plan {name}"] for name in ask.plans)

    async def _counts(self, seen: Stored[PlanObject]) -> bool:
        """Whether a plan is what was seen of it, so that what it counts is what was decided with."""
        there = await self._cluster.get(PLANS, seen.name)
        return there is not None and (there.uid, there.value) == (seen.uid, seen.value)

    async def _drains(self, look: Look, node: str) -> bool:
        """Whether a node's GPUs still ask for the pods that they were seen to ask for."""
        there = await self._cluster.list(PARTITIONS, Where(fields=f"spec.nodeName={node}"))
        now = {one.name: one for one in there}
        seen = [one for one in look.partitions.values() if one.value.spec.node_name == node]
        return all(one.name in now and _asks(now[one.name]) == _asks(one) for one in seen if one.value.status.victims)

    async def _try(self, done: Done, what: str, name: str, write: Callable[[], Awaitable[object]]) -> bool:
        """One write; whether it went well. What cannot go well now is left for a later pass."""
        if not self._held():
            raise LostError
        now_s = self._now_s()
        if done.writes >= PASS_WRITES or now_s >= done.ends_s:
            done.more = True
            return False
        not_before_s = self._refused.get((what, name), now_s)
        if not_before_s > now_s:
            done.again_s = min(done.again_s or REFUSED_S, not_before_s - now_s)
            return False
        self._refused.pop((what, name), None)
        try:
            done.writes += 1
            await write()
        except (DeniedError, RefusedError, UnreadableError) as error:
            _log.warning("%s; again in %.0f s", error, REFUSED_S)
            self._failed(error)
            self._refused[what, name] = now_s + REFUSED_S
            done.again_s = min(done.again_s or REFUSED_S, REFUSED_S)
            return False
        except (ConflictError, MissingError) as error:
            _log.info("%s; looking again", error)
            self._failed(error)
            done.more = True
            return False
        return True

    async def _node(self, write: NodeWrite) -> None:
        await self._cluster.change_node(write.node, write.change)

    async def _status(self, look: Look, name: str, status: PlanStatus) -> None:
        seen = look.plans[name]
        await self._cluster.apply(PLANS, name, status_body(status, seen), seen, "status")

    async def _spec(self, look: Look, write: SpecWrite) -> None:
        """Caches of different kinds are not equally fresh: what would undo a wish is checked where it would be news."""
        seen = look.partitions[write.partition]
        before = seen.value.spec.desired
        if before is not None:
            known = {plan.uid for plan in look.plans.values()}
            if write.desired is None and before.plan.uid not in known:
                there = await self._cluster.get(PLANS, before.plan.name)
                if there is not None and there.uid == before.plan.uid and not there.deleting:
                    raise _stale(f"plan {before.plan.name} is there")
            after = write.desired.plan if write.desired is not None else before.plan
            if after.uid == before.plan.uid and after.generation < before.plan.generation:
                raise _stale(f"plan {before.plan.name} has a newer generation")
        await self._cluster.apply(PARTITIONS, write.partition, spec_body(write), seen)

    async def _told(self, look: Look, write: StatusWrite) -> None:
        seen = look.partitions[write.partition]
        await self._cluster.apply(PARTITIONS, write.partition, told_body(write), seen, "status")

    async def _delete(self, look: Look, name: str) -> None:
        """A GPU whose node was not heard of yet is no GPU of a node that is gone."""
        seen = look.partitions[name]
        spec = seen.value.spec
        if not any(node.uid == spec.node_uid for node in look.nodes.values()):
            there = await self._cluster.get(NODES, spec.node_name)
            if there is not None and there.uid == spec.node_uid:
                raise _stale(f"node {spec.node_name} is there")
        await self._cluster.delete(PARTITIONS, seen)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _asks(one: Stored[Partition]) -> object:
    """What of a GPU an eviction rests on."""
    status = one.value.status
    victims = frozenset(pod.uid for pod in status.victims)
    return one.uid, one.generation, HOLD in one.annotations, status.phase, status.observed_generation, victims


def _stale(why: str) -> ConflictError:
    """What was decided on is older than what the API server has: look again."""
    return ConflictError("LOOK", 0, f"{why}, and our cache has not heard of it yet")


def _by_node(look: Look, decision: Decision) -> list[tuple[str, list[SpecWrite]]]:
    """The writes of each node together, first where a turn is taken back: room is made before it is given away."""
    nodes: dict[str, list[SpecWrite]] = {}
    for spec in decision.specs:
        nodes.setdefault(look.partitions[spec.partition].value.spec.node_name, []).append(spec)
    return sorted(nodes.items(), key=lambda item: (any(s.assignment is not None for s in item[1]), item[0]))
