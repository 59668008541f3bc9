"""The operator at work: caches wake it, it looks at the whole fleet, decides, and writes what differs, while it leads.

`run_operator` is all of it but for the edges of a real process (kopf, probes, signals), so that it also runs in
simulation, beside others, on a loop with virtual time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from migd.kube.caches import Change
from migd.kube.holding import Holding, Pace
from migd.kube.leases import LEASES, Claim, Lease
from migd.kube.nodes import NODES, Node
from migd.kube.partitions import PARTITIONS, PLANS, PlanObject
from migd.kube.ports import Cluster, Following
from migd.kube.stored import Stored, Where
from migd.kube.working import Worker
from migd.plans.partitions import Partition
from migd_operator.announcing import notes_of
from migd_operator.assembling import Assembler, Caches, Look
from migd_operator.deciding import Decision, decide
from migd_operator.draining import Evictor
from migd_operator.evicting import concerned
from migd_operator.facts import Fleet
from migd_operator.hearing import Agent, Hearing
from migd_operator.metering import Meters
from migd_operator.owners import OwnersElsewhere
from migd_operator.paying import node_writes
from migd_operator.telling import CONDITIONS
from migd_operator.writing import LostError, Writer

NAMESPACE: Final = "migd-system"
LEASE: Final = "migd-operator"
LEASE_S: Final = 15
FLEET: Final = "fleet"
PACE_S: Final = 1.0
"""Decisions begin at least so far apart, and four times as far as the last one took."""
_SHARE: Final = 4
_LISTEN_S: Final = 30.0
_TOLD_MAX: Final = 25
_log = logging.getLogger(__name__)

Think = Callable[[Fleet], Awaitable[Decision]]
"""How a decision is made: at once, or in a thread of its own so that the loop goes on meanwhile."""


async def at_once(fleet: Fleet) -> Decision:
    """Decide here and now, as in simulation."""
    return decide(fleet)


async def in_a_thread(fleet: Fleet) -> Decision:
    """Decide beside the loop: a large fleet takes a second, and the lease and the probes must not wait."""
    return await asyncio.to_thread(decide, fleet)


@dataclass(frozen=True, slots=True)
class Setup:
    """Who this operator is. identity: of this process, as the pod's name. namespace: of its lease and the agents'.

    pace: how often it renews its lease.
    """

    identity: str
    namespace: str = NAMESPACE
    pace: Pace = field(default_factory=Pace)


@dataclass(frozen=True, slots=True)
class Health:
    """How it is doing.

    ages_s: since each cache heard the API server last, or since the start where it never did. leader: it holds the
    lease.
    settled: all caches are complete, and it is known who leads.
    """

    ages_s: Mapping[str, float]
    leader: bool
    settled: bool


class Operator:
    """One operator. Another one with another identity waits, and takes over once this one's lease has expired."""

    def __init__(
        self,
        cluster: Cluster,
        setup: Setup,
        wall_clock: Callable[[], datetime],
        think: Think = at_once,
        meters: Meters | None = None,
    ) -> None:
        self._cluster = cluster
        self._setup = setup
        self._wall_clock = wall_clock
        self._think = think
        self._meters = meters or Meters()
        self._hearing = Hearing()
        self._assembler = Assembler(self._hearing, setup.namespace)
        claim = Claim(LEASE, setup.namespace, setup.identity, LEASE_S)
        self._holding = Holding(cluster, claim, setup.pace, self._led)
        self._evictor = Evictor(cluster, wall_clock, self._meters.failed, self._meters.evicted)
        self._writer = Writer(cluster, self._evictor, lambda: self._holding.held, self._meters.failed)
        self._worker: Worker[str] = Worker(self._reconcile, at_once=1, failed=lambda _key, e: self._meters.failed(e))
        self._owners = OwnersElsewhere(cluster, self.wake)
        self._following: dict[str, Following[Any]] = {}
        self._caches: Caches | None = None
        self._agents: dict[str, tuple[Agent, bool]] = {}  # as of the last look: what is known, and overdue
        self._not_before_s = float("-inf")
        self._limit: asyncio.Timeout | None = None
        self._began_s = float("-inf")
        self.looks = 0  # at the whole fleet, so far

    async def run(self) -> None:
        """Work until cancelled; then the lease is given up. An error that no KubeError is ends it: a bug."""
        self._began_s = self._now_s()
        self._follow()
        async with asyncio.TaskGroup() as group:
            for work in (self._holding.run(), self._worker.run(), self._listen(), self._owners.run()):
                group.create_task(work)

    def wake(self) -> None:
        """Have the fleet looked at soon; cheap, and never harmful."""
        self._worker.add(FLEET, max(0.0, self._not_before_s - self._now_s()))

    @property
    def health(self) -> Health:
        """How it is doing now."""
        now_s = self._now_s()
        ages = {name: now_s - max(one.heard_s, self._began_s) for name, one in self._following.items()}
        led = self._holding.held or bool(self._holding.holder)
        return Health(ages, self._holding.held, led and self._caches is not None and self._caches.synced)

    def _follow(self) -> None:
        follow, leases = self._cluster.follow, Where(namespace=self._setup.namespace)
        plans = follow(PLANS, self._changed, self.wake)
        partitions = follow(PARTITIONS, self._changed, self.wake)
        nodes = follow(NODES, self._node_changed, self.wake)
        heard = follow(LEASES, self._lease_changed, self._leases_listed, leases)
        self._following = {"plans": plans, "partitions": partitions, "nodes": nodes, "leases": heard}
        self._caches = Caches(plans.cache, partitions.cache, nodes.cache, heard.cache)

    def _changed(self, change: Change[PlanObject] | Change[Partition]) -> None:
        """What we wrote ourselves was decided already: another pass over the fleet would find nothing to do."""
        before, after = change.before, change.after
        if not change.ours or before is None or after is None or _of_others(before) != _of_others(after):
            self.wake()

    def _node_changed(self, change: Change[Node]) -> None:
        """Heartbeats come all the time and change nothing that is decided on."""
        before, after = change.before, change.after
        if before is None or after is None or _told(before) != _told(after):
            self.wake()

    def _lease_changed(self, change: Change[Lease]) -> None:
        now_s = self._now_s()
        stored = change.after or change.before
        assert stored is not None, "a change of nothing"
        self._until_s()
        self._hearing.lease(stored.name, change.after.value if change.after else None, now_s)
        if self._agents.get(stored.name, ("alive", False)) != ("alive", False):
            self.wake()  # it was not taken to be alive

    def _leases_listed(self) -> None:
        self._hearing.listed()
        self.wake()

    def _until_s(self) -> float:
        """Until when an agent's silence counts."""
        return self._hearing.listening(self._following["leases"].heard_s, self._now_s())

    async def _listen(self) -> None:
        """Notice what no event tells of: that agents have fallen silent, and for how long."""
        while True:
            until_s = self._until_s()
            now = {n: (self._hearing.agent(n, until_s), self._hearing.overdue(n, until_s)) for n in self._agents}
            if any(now[name][1] != said[1] or (now[name][0] != said[0]) for name, said in self._agents.items()):
                self.wake()
            next_s = self._hearing.next_s(self._agents, until_s)
            wait_s = _LISTEN_S if next_s is None else min(_LISTEN_S, max(PACE_S, next_s - until_s))
            await asyncio.sleep(wait_s)

    def _led(self, leads: bool) -> None:
        _log.info("leading" if leads else "not leading any more")
        self._evictor.forget()
        if leads:
            self.wake()
        elif self._limit is not None:
            self._limit.reschedule(self._now_s())  # what is under way ends: somebody else may start soon

    async def _reconcile(self, _key: str) -> float | None:
        """One pass over the fleet; after how many seconds to look again, None for when something changes."""
        assert self._caches is not None
        if not self._caches.synced:
            return None
        if not self._holding.held:
            return self._setup.pace.renew_s  # where an answer was only slow, nobody tells that it is ours again
        began_s = self._now_s()
        self._not_before_s = began_s + PACE_S
        try:
            async with asyncio.timeout(None) as self._limit:
                return await self._pass(self._caches)
        except (TimeoutError, LostError):
            _log.warning("the lease was lost: the rest of this pass is not written")
            return self._setup.pace.renew_s
        finally:
            self._limit = None

    async def _pass(self, caches: Caches) -> float | None:
        self.looks += 1
        began_s, until_s = self._now_s(), self._until_s()
        answers, now = self._evictor.answers, self._wall_clock()
        look = self._assembler.look(caches, self._owners.found, until_s, now, answers, began_s)
        if answers:
            self._evictor.keep(concerned(look.fleet))
        self._remember(look, until_s)
        decision = await self._think(look.fleet)
        took_s = self._now_s() - began_s
        self._not_before_s = began_s + max(PACE_S, _SHARE * took_s)
        self._meters.decided(look, decision, took_s)
        nodes = node_writes(look, decision)
        done = await self._writer.write(look, decision, nodes)
        for note in notes_of(look, decision, nodes, done)[:_TOLD_MAX]:
            await self._cluster.tell(note)
        if done.more:
            return max(0.0, self._not_before_s - self._now_s())
        times_s = [time_s for time_s in (done.again_s, self._evictor.again_s) if time_s is not None]
        return min(times_s, default=None)

    def _remember(self, look: Look, until_s: float) -> None:
        self._agents = {
            n: (self._hearing.agent(n, until_s), self._hearing.overdue(n, until_s)) for n in sorted(look.listened)
        }

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _of_others(stored: Stored[PlanObject] | Stored[Partition]) -> object:
    """What of a plan or a partition others write."""
    value = stored.value
    if isinstance(value, PlanObject):
        return stored.uid, stored.generation, stored.annotations, stored.deleting
    theirs = tuple(one for one in value.status.conditions if one.type not in CONDITIONS)
    told = value.status.model_copy(update={"conditions": theirs, "evictions": ()})
    return stored.uid, stored.annotations, stored.deleting, told


def _told(node: Stored[Node]) -> object:
    """What of a node is decided on, or written."""
    value = node.value
    return (
        *(node.uid, node.annotations, node.deleting, value.labels, value.others),
        *(value.ready, value.unschedulable, value.closed),
    )


async def run_operator(
    cluster: Cluster,
    identity: str,
    wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    namespace: str = NAMESPACE,
    meters: Meters | None = None,
) -> None:
    """Run an operator on a cluster until cancelled; decisions are made on the running loop."""
    await Operator(cluster, Setup(identity, namespace), wall_clock, meters=meters).run()
