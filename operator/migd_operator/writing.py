"""From a decision to the API server: what is applied, in which order, and what becomes of each refusal.

What is told comes before what is done: a plan whose status was not written starts nothing. A pass may end anywhere, and
the next one goes on.
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
from migd.kube.partitions import PARTITIONS, PLANS
from migd.kube.ports import Cluster
from migd.plans.partitions import written
from migd.plans.statuses import PlanStatus, plan_status_document
from migd_operator.assembling import Look
from migd_operator.deciding import PLAN_LABEL, ConditionsWrite, Decision, SpecWrite
from migd_operator.paying import NodeWrite

_log = logging.getLogger(__name__)
PASS_WRITES: Final = 200
PASS_S: Final = 10.0
"""A pass ends after so many writes or so long, so that the rest is decided on anew, with what was heard meanwhile."""
REFUSED_S: Final = 30.0
"""So long before what a person has to cure is tried again."""


class LostError(Exception):
    """The lease is not ours any more: nothing is written from here on."""


@dataclass(slots=True)
class Done:
    """What a pass did. ends_s: when it must end. plans, nodes: which of them were written.

    more: there is more to write, so decide again soon.
    again_s: when what was refused may be tried again, in seconds from now; None for nothing of that kind.
    """

    ends_s: float
    writes: int = 0
    plans: set[str] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    more: bool = False
    again_s: float | None = None


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


def conditions_body(write: ConditionsWrite) -> Json:
    """The operator's conditions of a partition."""
    return {"status": {"conditions": [written(c) for c in write.conditions]}}


def status_body(status: PlanStatus) -> Json:
    """A plan's status, all of which is the operator's."""
    return {"status": plan_status_document(status)}


class Writer:
    """Carries decisions out. held: whether the lease is ours, asked before each write. failed: told of each failure."""

    def __init__(
        self, cluster: Cluster, held: Callable[[], bool], failed: Callable[[KubeError], None] = lambda _error: None
    ) -> None:
        self._cluster = cluster
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
        untaken = set(decision.taken_over) - done.nodes
        for node, specs in _by_node(look, decision):
            if node in untaken or any(s.assignment and s.desired and s.desired.plan.name in untold for s in specs):
                continue
            for spec in specs:
                await self._try(done, "spec", spec.partition, partial(self._spec, look, spec))
        for name in decision.deletions:
            await self._try(done, "delete", name, partial(self._delete, look, name))
        for said in decision.conditions:
            await self._try(done, "conditions", said.partition, partial(self._conditions, look, said))
        return done

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
        await self._cluster.apply(PLANS, name, status_body(status), look.plans[name], "status")

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

    async def _conditions(self, look: Look, write: ConditionsWrite) -> None:
        seen = look.partitions[write.partition]
        await self._cluster.apply(PARTITIONS, write.partition, conditions_body(write), seen, "status")

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


def _stale(why: str) -> ConflictError:
    """What was decided on is older than what the API server has: look again."""
    return ConflictError("LOOK", 0, f"{why}, and our cache has not heard of it yet")


def _by_node(look: Look, decision: Decision) -> list[tuple[str, list[SpecWrite]]]:
    """The writes of each node together, first where a turn is taken back: room is made before it is given away."""
    nodes: dict[str, list[SpecWrite]] = {}
    for spec in decision.specs:
        nodes.setdefault(look.partitions[spec.partition].value.spec.node_name, []).append(spec)
    return sorted(nodes.items(), key=lambda item: (any(s.assignment is not None for s in item[1]), item[0]))
