"""Draining: the node is closed, and the pods that must go are asked to, until nobody holds what must go; or it ends.

The agent only says who must go. The operator checks it, makes the calls, and answers in the partition's status.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from migd.agent.node.backing import leaving
from migd.agent.node.bounds import CLOSED_MAX_S, GONE_S, HEARD_S, POLL_S
from migd.agent.node.effects import LookAgain, Wait
from migd.agent.node.moments import Decided, Judged, View, back_out, enter, judge, work_of, working
from migd.agent.node.victims import Going, each_of, spent_key
from migd.agent.records import Cause, NodeWork, Record
from migd.plans.fields import duration_of
from migd.plans.partitions import EvictionDoc

NAMES_MAX: Final = 5
"""How many pods a sentence names."""


def drain(record: Record, view: View) -> Decided:
    """Ask those that must go, and wait until they have gone; within the plan's timeout, else open the node again."""
    judged = judge(record, view)
    record = _in_mind(record, view)
    record, left = leaving(record, view)
    if left:
        return record, LookAgain()
    if not view.seen.node.value.closed:
        opened = Cause("ForeignOwner", "somebody else opened the node in the middle of its drain")
        return given_up(record, view, judged, opened), LookAgain()
    if not judged.busy:
        return enter(record, "Settling", view, victims={}, stuck_s=None), LookAgain()
    record = _asking(record, view, judged)
    work = work_of(record)
    why = _over(work, view, judged)
    if why is not None:
        return given_up(record, view, judged, why), LookAgain()
    return record, Wait(POLL_S, waiting_for(work, view, judged).message)


def drains(judged: Judged) -> bool:
    """Whether somebody is to be evicted, or goes already, and then the whole turn can go through."""
    return judged.going is not None and judged.going.stuck is None


def given_up(record: Record, view: View, judged: Judged, why: Cause) -> Record:
    """The drain came to nothing: open the node, and evict nobody for these wishes again."""
    return back_out(_spent_on(record, view, _keys(view, judged.changing), why), view, why)


def _spent_on(record: Record, view: View, keys: Collection[str], why: Cause) -> Record:
    """The record with these wishes spent too; of wishes that are gone none is kept."""
    work = work_of(record)
    there = {spent_key(d) for p in view.seen.partitions if (d := p.value.spec.desired) is not None}
    now = there.intersection({*work.spent}.union(keys))
    return working(record, replace(work, spent=tuple(sorted(now)), spent_why=why if now else None))


def _keys(view: View, uuids: Iterable[str]) -> frozenset[str]:
    """The wishes of these GPUs for which pods may be evicted, as `spent_key` names them."""
    wishes = view.turn.desired if view.turn is not None else {}
    found = [wishes[uuid] for uuid in uuids if uuid in wishes]
    return frozenset(spent_key(desired) for desired in found if desired.disruption.policy == "Evict")


def answers(view: View) -> dict[str, EvictionDoc]:
    """What the operator last said of each pod, by uid; of one that holds several GPUs, what is in the way first."""
    found: dict[str, EvictionDoc] = {}
    for partition in view.seen.partitions:
        for said in partition.value.status.evictions:
            if said.pod_uid not in found or said.reason is not None:
                found[said.pod_uid] = said
    return found


def waiting_for(work: NodeWork, view: View, judged: Judged) -> Cause:
    """What a drain waits for now: a budget, or pods that are on their way out."""
    said = answers(view)
    asked = each_of(work.victims)
    held = [(pod, said[pod.uid]) for pod in asked if pod.uid in said and said[pod.uid].reason == "DrainBlocked"]
    if held:
        return Cause("DrainBlocked", _named(f"pod {pod.key} is not evicted: {_held_by(one)}" for pod, one in held))
    late = [(pod, said[pod.uid].message) for pod in asked if pod.uid in said and said[pod.uid].reason is not None]
    if late:
        return Cause("Waiting", _named(f"pod {pod.key} is not evicted yet: {why}" for pod, why in late))
    if asked:
        return Cause("Waiting", f"pods are evicted: {_named(pod.key for pod in asked)}")
    going = judged.going.leaving if judged.going is not None else ()
    if going:
        return Cause("Waiting", f"pods are ending: {_named(pod.key for pod in going)}")
    stuck = judged.going.stuck if judged.going is not None else None
    return stuck or Cause("Waiting", _in_use(judged))


def _in_mind(record: Record, view: View) -> Record:
    """The record with what became of those who were asked. Once one has gone, the drain counts as spent.

    That is for what they were asked for: a wish that was edited since has nothing to do with it.
    """
    work, here = work_of(record), {pod.uid: pod for pod in view.seen.pods}
    if not work.asked:
        return record
    some = any(pod.uid in here and not here[pod.uid].value.terminal for pod in work.asked)
    gone_s = None if some else view.now_s if work.gone_s is None else work.gone_s
    record = record if gone_s == work.gone_s else working(record, replace(work, gone_s=gone_s))
    if all(pod.uid in here and not here[pod.uid].deleting for pod in work.asked):
        return record
    return _spent_on(record, view, work.asked_for, Cause("EvictionBudget", "pods were evicted for this, and in vain"))


def _asking(record: Record, view: View, judged: Judged) -> Record:
    """The record with those who must go now. While some of the asked are there, no others are added.

    What is seen changes in the middle of a pod's going, and must not make others go in its place.
    """
    work, asked, going = work_of(record), frozenset(work_of(record).asked), judged.going or Going()
    victims = dict(going.victims)
    lately = bool(asked) and (work.gone_s is None or view.now_s - work.gone_s < GONE_S)
    if lately and not set(going.pods) <= asked:
        staying = {pod.uid for pod in view.seen.pods if not pod.deleting and not pod.value.terminal}
        victims = {
            uuid: kept for uuid, pods in work.victims.items() if (kept := tuple(p for p in pods if p.uid in staying))
        }
    fresh = frozenset(each_of(victims))
    waits = bool(fresh or going.leaving) or lately
    stuck_s = None if waits else view.now_s if work.stuck_s is None else work.stuck_s
    gone_s = None if fresh - asked else work.gone_s
    wishes = tuple(sorted(_keys(view, judged.changing).union(work.asked_for))) if fresh else work.asked_for
    now = replace(work, victims=victims, asked=tuple(sorted(asked | fresh)), asked_for=wishes)
    now = replace(now, gone_s=gone_s, stuck_s=stuck_s)
    return record if now == work else working(record, now)


def _over(work: NodeWork, view: View, judged: Judged) -> Cause | None:
    """Why the drain has come to its end without success; None where it goes on."""
    said = answers(view)
    asked = each_of(work.victims)
    used_up = [pod for pod in asked if pod.uid in said and said[pod.uid].reason == "EvictionBudget"]
    if used_up and view.now_s - work.since_s >= HEARD_S:
        return Cause("EvictionBudget", f"pod {used_up[0].key} must go, but {said[used_up[0].uid].message}")
    timeout_s = _timeout_s(view, judged)
    closed_s = work.since_s if work.closed_s is None else work.closed_s
    if view.now_s - closed_s >= timeout_s:
        why = waiting_for(work, view, judged)
        return Cause("DrainTimeout", f"not drained within {duration_of(timeout_s)}: {why.message or _in_use(judged)}")
    if work.stuck_s is not None and view.now_s - work.stuck_s >= CLOSED_MAX_S:
        why = waiting_for(work, view, judged)
        reason = why.reason if why.reason in ("DrainBlocked", "InUse") else "InUse"
        return Cause(reason, f"nobody who could be evicted is left in the way: {why.message}")
    return None


def _timeout_s(view: View, judged: Judged) -> int:
    assert view.turn is not None, "what is busy has a turn"
    return min(view.turn.desired[uuid].disruption.timeout_s for uuid in judged.busy)


def _held_by(said: EvictionDoc) -> str:
    names = ", ".join(said.pod_disruption_budgets)
    if not names:
        return said.message
    return f"PodDisruptionBudget {names} does not allow it now" if "," not in names else f"{said.message} ({names})"


def _in_use(judged: Judged) -> str:
    plan = next((judged.plans[uuid] for uuid in judged.busy), None)
    return plan.blocked.message if plan is not None and plan.blocked is not None else ""


def _named(texts: Iterable[str]) -> str:
    found = tuple(dict.fromkeys(texts))
    more = len(found) - NAMES_MAX
    return ", ".join(found[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
