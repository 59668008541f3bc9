"""From caches to what is decided on: one look at the whole fleet, with the stored objects that it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from migd.kube.caches import Cache
from migd.kube.leases import DUPLICATES, Lease
from migd.kube.nodes import Node
from migd.kube.owed import owing
from migd.kube.partitions import PlanObject
from migd.kube.stored import Stored
from migd.plans.partitions import Partition
from migd_operator.facts import NO_ANSWERS, Answer, Fleet, InvalidPlan, NodeFacts, PlanFacts
from migd_operator.hearing import Agent, Hearing

Owners = Mapping[str, tuple[str, ...]]
"""Others that own MIG on a node and show elsewhere than on it: node -> who, for people."""
_NONE: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Caches:
    """The caches that a look is taken from."""

    plans: Cache[PlanObject]
    partitions: Cache[Partition]
    nodes: Cache[Node]
    leases: Cache[Lease]

    @property
    def synced(self) -> bool:
        """Whether each of them has had one complete list."""
        return all(c.synced for c in (self.plans, self.partitions, self.nodes, self.leases))


@dataclass(frozen=True, slots=True)
class Look:
    """The fleet as values, and the objects by name, as of the same moment.

    listened: nodes whose agents are listened for: those with partitions, and those that are owed something.
    overdue: nodes whose agent has been silent for so long that others pay what they are owed.
    """

    fleet: Fleet
    plans: Mapping[str, Stored[PlanObject]]
    partitions: Mapping[str, Stored[Partition]]
    nodes: Mapping[str, Stored[Node]]
    listened: frozenset[str]
    overdue: frozenset[str]


class Assembler:
    """Takes looks. What has not changed since the last one is the same value again, so that answers can be reused."""

    def __init__(self, hearing: Hearing, namespace: str) -> None:
        self._hearing = hearing
        self._namespace = namespace
        self._nodes: dict[str, NodeFacts] = {}
        self._plans: dict[str, tuple[Stored[PlanObject], PlanFacts]] = {}

    def look(
        self,
        caches: Caches,
        owners: Owners,
        until_s: float,
        now: datetime,
        answers: Mapping[str, Answer] = NO_ANSWERS,
        at_s: float = 0.0,
    ) -> Look:
        """The fleet now. until_s: up to when silence counts; see `Hearing.listening`. answers, at_s: see `Fleet`.

        What is being deleted counts as gone: somebody's finalizer holds it, and no wish.
        """
        partitions = {one.name: one for one in caches.partitions if not one.deleting}
        plans = {one.name: one for one in caches.plans if not one.deleting}
        nodes = {one.name: one for one in caches.nodes}
        inhabited = {one.value.spec.node_name for one in partitions.values()} & nodes.keys()
        agents = self._agents(inhabited | {name for name, one in nodes.items() if owing(one)}, partitions, until_s)
        facts = [
            self._node(one, agents.get(name, "unheard"), caches.leases, owners.get(name, ()))
            for name, one in nodes.items()
        ]
        self._nodes = {one.name: self._nodes[one.name] for one in facts}
        fleet = Fleet(
            plans=tuple(self._plan(one) for one in plans.values() if one.value.plan is not None),
            partitions=tuple(one.value for one in partitions.values()),
            nodes=tuple(facts),
            now=now,
            invalid=tuple(_invalid(one) for one in plans.values() if one.value.plan is None),
            answers=answers,
            at_s=at_s,
        )
        self._plans = {name: self._plans[name] for name in plans if name in self._plans}
        overdue = frozenset(name for name in agents if self._hearing.overdue(name, until_s))
        return Look(fleet, plans, partitions, nodes, frozenset(agents), overdue)

    def _agents(self, nodes: set[str], partitions: Mapping[str, Stored[Partition]], until_s: float) -> dict[str, Agent]:
        """What is known of agents. One that was not heard yet, and was said to be silent before, still is."""
        found = {name: self._hearing.agent(name, until_s) for name in sorted(nodes)}
        if "unheard" in found.values():
            for one in partitions.values():
                alive = one.value.says("AgentAlive")
                name = one.value.spec.node_name
                if found.get(name) == "unheard" and alive is not None and alive.status == "False":
                    found[name] = "silent"
        return found

    def _node(self, stored: Stored[Node], agent: Agent, leases: Cache[Lease], owners: tuple[str, ...]) -> NodeFacts:
        """A node; a heartbeat makes another version of an equal one, which is the same value as before."""
        node = stored.value
        made = NodeFacts(
            name=stored.name,
            uid=stored.uid,
            labels=node.labels,
            annotations={**stored.annotations, **node.others} if node.others else stored.annotations,
            ready=node.ready,
            unschedulable=node.unschedulable,
            tainted=node.closed,
            agent=agent,
            duplicates=_duplicates(leases.get(stored.name, self._namespace)),
            owners=owners,
        )
        known = self._nodes.get(stored.name)
        found = self._nodes[stored.name] = known if known is not None and known == made else made
        return found

    def _plan(self, stored: Stored[PlanObject]) -> PlanFacts:
        known = self._plans.get(stored.name)
        if known is None or known[0] is not stored:
            plan, status = stored.value.plan, stored.value.status
            assert plan is not None, "an invalid plan is told apart before"
            assert status is not None, "a plan whose status cannot be read is invalid"
            known = (stored, PlanFacts(plan, stored.uid, stored.generation, stored.annotations, status))
            self._plans[stored.name] = known
        return known[1]


def _invalid(stored: Stored[PlanObject]) -> InvalidPlan:
    return InvalidPlan(stored.name, stored.uid, stored.generation, stored.value.invalid, stored.value.status)


def _duplicates(lease: Stored[Lease] | None) -> frozenset[str]:
    """The partitions that a node's agent claims although they are another's, as its lease says."""
    said = lease.annotations.get(DUPLICATES, "") if lease is not None else ""
    return frozenset(part.strip() for part in said.split(",") if part.strip()) if said else _NONE
