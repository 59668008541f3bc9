"""Which pods are evicted now: by whose plan, within its maxEvictions, and what is told of each. Pure.

A pod is looked at before it is counted, and counted, in its plan's written status, before it is called. So a process
that dies anywhere leaves a count that is never too small; and nobody of a node is called before all who must go there
were looked at, and may go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from migd.kube.pods import Pod, may_not_go
from migd.kube.stored import Stored
from migd.plans.conditions import cut, whole_second
from migd.plans.partitions import EvictionDoc, Partition
from migd.plans.partitions import Pod as Victim
from migd.plans.plan import Disruption
from migd.plans.statuses import PlanEvictions
from migd_operator.facts import Answer, Fleet, PlanFacts

PENDING_MAX: Final = 256
"""So many pods of a plan may be called at a time. Source: crds/migd.dev_gpupartitionplans.yaml."""
_MESSAGE_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Drain:
    """A node of which pods may be evicted now: its GPUs that drain, each with the plan that wishes it."""

    node: str
    gpus: tuple[tuple[Partition, PlanFacts], ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One pod to look at, and to call where it may go. rules: of its plans, which all must let it go.

    counted: it stands in each plan's status as it shall be written. call: ask for its eviction; else only look.
    """

    pod: Victim
    node: str
    plans: tuple[str, ...]
    rules: tuple[Disruption, ...]
    counted: bool = False
    call: bool = False

    @property
    def grace_s(self) -> int | None:
        """How long it may take to end: as its plans say, the gentlest of them; None is the pod's own."""
        given = [rule.grace_period_s for rule in self.rules]
        known = [grace_s for grace_s in given if grace_s is not None]
        return max(known) if len(known) == len(given) else None


@dataclass(frozen=True, slots=True)
class Evictions:
    """What is to be counted, told and done.

    counts: of each plan by uid, as its status shall say; None for nothing to say. closed: how many pods the generation
    before evicted, where one has just been followed by another. told: of each partition by name, as its status shall
    say. asks: in the order in which they are made; a call only once the counts that it stands in are written.
    """

    counts: Mapping[str, PlanEvictions | None] = field(default_factory=dict)
    closed: Mapping[str, PlanEvictions] = field(default_factory=dict)
    told: Mapping[str, tuple[EvictionDoc, ...]] = field(default_factory=dict)
    asks: tuple[Ask, ...] = ()


def evictions_of(drains: Iterable[Drain], fleet: Fleet) -> Evictions:
    """What to do for these nodes, and what becomes of what was begun for others. Equal input, equal output."""
    ordered = sorted((_Draining(drain, fleet) for drain in drains), key=lambda d: d.node)
    ledgers, closed = _ledgers(ordered, fleet)
    ready = [drain for drain in ordered if not drain.barred]
    over = {uid: why for drain in ready if (why := _beyond(drain, ledgers)) for uid in drain.needed}
    callable_now = {uid for drain in ready for uid in drain.needed if uid not in over and drain.due(uid)}
    for ledger in ledgers.values():
        ledger.lent = {u for u in ledger.pending if u not in callable_now and _unspent(fleet.answers.get(u))}
    asks = [ask for drain in ordered for ask in drain.looks()]
    for drain in ready:
        due = [uid for uid in drain.needed if uid in callable_now]
        _reserve({plan: [u for u in due if plan in drain.plans[u]] for plan in ledgers}, ledgers)
        asks += [drain.ask(u, call=True) for u in due if all(u in ledgers[plan].pending for plan in drain.plans[u])]
    return Evictions(
        counts={uid: ledger.written() for uid, ledger in ledgers.items()},
        closed=closed,
        told=_told(fleet, over),
        asks=tuple(asks),
    )


def verdict(ask: Ask, found: Stored[Pod] | None) -> tuple[bool, str]:
    """Whether a pod that was just looked at ends or is gone, and what there is to say of that.

    Where it does not, the text says why it may not be evicted; "" where it may.
    """
    if found is None:
        return True, "it is gone"
    if found.uid != ask.pod.uid:
        return True, "it is gone; another pod has its name"
    if found.deleting:
        return True, "it is ending already"
    if found.value.node_name != ask.node:
        return False, f"it is not on node {ask.node}"
    if not found.value.gpus and not found.value.claims:
        return False, "it asks for no GPU"
    return False, next((why for r in ask.rules if (why := may_not_go(found.value, r.protect, r.allow))), "")


def concerned(fleet: Fleet) -> frozenset[str]:
    """The pods, by uid, of which answers are still of use."""
    victims = {pod.uid for one in fleet.partitions for pod in one.status.victims}
    return frozenset(victims.union(*(p.status.evictions.pending for p in fleet.plans if p.status.evictions)))


@dataclass(slots=True)
class _Ledger:
    """What is counted of one plan's generation while it is decided.

    lent: those of the pending ones that are not called now and of which it is known that nobody has evicted them: their
    places may be had.
    """

    plan: PlanFacts
    evicted: int
    pending: set[str]
    lent: set[str] = field(default_factory=set)

    @property
    def most(self) -> int | None:
        """How many pods may be evicted; None for no limit."""
        return self.plan.plan.spec.disruption.max_evictions

    @property
    def free(self) -> int:
        """How many places there are now."""
        room = PENDING_MAX if self.most is None else min(PENDING_MAX, self.most - self.evicted)
        return max(0, room - len(self.pending))

    def take(self, new: Sequence[str]) -> None:
        """Count these, as many as there are places for; those that are lent are taken back if need be."""
        while self.lent and self.free < len(new):
            uid = max(self.lent)
            self.lent.remove(uid)
            self.pending.remove(uid)
        self.pending.update(new[: self.free])

    def written(self) -> PlanEvictions | None:
        """As the plan's status shall say."""
        if not self.evicted and not self.pending:
            return None
        pending = tuple(sorted(self.pending))
        return PlanEvictions(generation=self.plan.generation, evicted=self.evicted, pending=pending)


class _Draining:
    """A node that is drained: its pods that must go, once each, and how far each of them is."""

    def __init__(self, drain: Drain, fleet: Fleet) -> None:
        self.node = drain.node
        self.plans: dict[str, dict[str, PlanFacts]] = {}  # of each pod by uid, the plans by uid for which it must go
        self._at_s = fleet.at_s
        self._pods: dict[str, Victim] = {}
        told_going: set[str] = set()
        for partition, plan in drain.gpus:
            for pod in partition.status.victims:
                self._pods[pod.uid] = pod
                self.plans.setdefault(pod.uid, {})[plan.uid] = plan
            told_going |= _going(partition)
        known: dict[str, Answer | None] = {uid: fleet.answers.get(uid) for uid in sorted(self._pods)}
        left = {uid: one for uid, one in known.items() if not (one.going if one is not None else uid in told_going)}
        self._left = left

    @property
    def needed(self) -> tuple[str, ...]:
        """The pods that are still to be evicted, by uid."""
        return tuple(self._left)

    @property
    def barred(self) -> bool:
        """Whether one of them has not been looked at yet, or may not go: then none of them is called."""
        return any(answer is None or not answer.fit for answer in self._left.values())

    def due(self, uid: str) -> bool:
        """Whether a pod may be asked for now."""
        answer = self._left[uid]
        return answer is None or answer.due(self._at_s)

    def looks(self) -> list[Ask]:
        """The pods to look at first."""
        return [self.ask(u) for u, answer in self._left.items() if (answer is None or not answer.fit) and self.due(u)]

    def ask(self, uid: str, *, call: bool = False) -> Ask:
        """What is done with one pod."""
        plans = sorted(self.plans[uid].values(), key=lambda p: p.name)
        rules = tuple(plan.plan.spec.disruption for plan in plans)
        counted = call or any(_counted(plan, uid) for plan in plans)
        return Ask(self._pods[uid], self.node, tuple(plan.name for plan in plans), rules, counted, call)


def _counted(plan: PlanFacts, uid: str) -> bool:
    """Whether a pod is pending in a plan's status as written."""
    told = plan.status.evictions
    return told is not None and told.generation == plan.generation and uid in told.pending


def _going(partition: Partition) -> set[str]:
    """The pods of which it is told that they go or are gone: nobody asks for those again."""
    return {one.pod_uid for one in partition.status.evictions if one.reason is None}


def _unspent(answer: Answer | None) -> bool:
    """Whether it is known that nobody of ours has evicted a pod. Of a call by an earlier process nothing is known."""
    return answer is not None and not answer.spent


def _ledgers(drains: Sequence[_Draining], fleet: Fleet) -> tuple[dict[str, _Ledger], dict[str, PlanEvictions]]:
    """What each plan has counted, with what has come of the pods that were pending; and that of generations before."""
    wanted = {(plan, uid) for drain in drains for uid in drain.needed for plan in drain.plans[uid]}
    pending = any(plan.status.evictions is not None and plan.status.evictions.pending for plan in fleet.plans)
    there = {pod.uid for one in fleet.partitions for pod in one.status.victims} if pending else set()
    going = {uid for one in fleet.partitions for uid in _going(one)} if pending else set()
    found: dict[str, _Ledger] = {}
    closed: dict[str, PlanEvictions] = {}
    for plan in fleet.plans:
        told = plan.status.evictions or PlanEvictions(generation=plan.generation)
        ledger = found[plan.uid] = _Ledger(plan, told.evicted, set(told.pending))
        for uid in told.pending:
            answer = fleet.answers.get(uid)
            over = uid not in there or (answer.going if answer is not None else uid in going)
            if over or (_unspent(answer) and (plan.uid, uid) not in wanted):
                # it counts unless it is known that nobody has evicted it: another process may have called
                ledger.pending.remove(uid)
                ledger.evicted += not _unspent(answer)
        if told.generation != plan.generation:
            number = ledger.evicted + sum(not _unspent(fleet.answers.get(uid)) for uid in ledger.pending)
            closed[plan.uid] = PlanEvictions(generation=told.generation, evicted=number)
            found[plan.uid] = _Ledger(plan, 0, set())
    return found, closed


def _beyond(drain: _Draining, ledgers: Mapping[str, _Ledger]) -> str:
    """Why a node asks for more than its plans may evict; "" where it does not. All of its pods go, or none."""
    need = Counter(plan for uid in drain.needed for plan in drain.plans[uid])
    for plan, number in sorted(need.items()):
        ledger = ledgers[plan]
        if ledger.most is not None and ledger.evicted + number > ledger.most:
            return (
                f"plan {ledger.plan.name} may evict {ledger.most} pods (disruption.maxEvictions) and has evicted "
                f"{ledger.evicted}; {number} more must go on node {drain.node}"
            )
    return ""


def _reserve(due: Mapping[str, Sequence[str]], ledgers: Mapping[str, _Ledger]) -> None:
    """Count the pods of a node that are to be called, by plan. Where there is a limit all of them get a place, or none.

    None get one while others have it who may still give it back.
    """
    new = {plan: [u for u in uids if u not in ledgers[plan].pending] for plan, uids in due.items()}
    asked = [(ledgers[plan], uids) for plan, uids in sorted(new.items()) if uids]
    if any(ledger.most is not None and len(uids) > ledger.free + len(ledger.lent) for ledger, uids in asked):
        return
    for ledger, uids in asked:
        ledger.take(uids)


def _told(fleet: Fleet, over: Mapping[str, str]) -> dict[str, tuple[EvictionDoc, ...]]:
    """What is told of the pods that must go; of the others nothing stays."""
    found = {}
    for partition in fleet.partitions:
        status = partition.status
        if not status.victims and not status.evictions:
            continue
        before = {one.pod_uid: one for one in status.evictions}
        said = [_doc(p.uid, fleet, before.get(p.uid), over.get(p.uid, "")) for p in status.victims]
        found[partition.name] = tuple(sorted((one for one in said if one is not None), key=lambda d: d.pod_uid))
    return found


def _doc(uid: str, fleet: Fleet, before: EvictionDoc | None, over: str) -> EvictionDoc | None:
    """What is told of one pod; what was told before stays until there is something else to tell."""
    answer = fleet.answers.get(uid)
    if over:
        made = EvictionDoc(pod_uid=uid, reason="EvictionBudget", message=cut(over, _MESSAGE_MAX), at=fleet.now)
    elif answer is None or not (answer.going or answer.reason):
        ours = before is not None and before.reason is not None and before.code is None
        return None if ours and answer is not None else before  # what we said ourselves holds no more
    else:
        made = EvictionDoc(
            pod_uid=uid,
            code=answer.code,
            reason=answer.reason,
            pod_disruption_budgets=answer.budgets,
            message=cut(answer.message, _MESSAGE_MAX),
            at=answer.at,
        )
    made = made.model_copy(update={"at": whole_second(made.at)})
    return before if before is not None and before == made.model_copy(update={"at": before.at}) else made
