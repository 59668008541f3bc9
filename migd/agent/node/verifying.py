"""Verified: what the kubelet advertises is what is there. It is waited for, asked for again, and told; never more.

That GPUs are as wished and the kubelet does not show it is no reason to touch them again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from migd.agent.node.backing import NOBODY
from migd.agent.node.bounds import BACKOFF_MAX_S, KUBELET_LOOK_S, NUDGE_S, POLL_S, VERIFY_MAX_S
from migd.agent.node.clients import by_labels, hang_up, plugins
from migd.agent.node.effects import Effect, LookAgain, Wait
from migd.agent.node.moments import View, enter, in_debt, judge, not_before, pay, shown_otherwise, work_of, working
from migd.agent.node.turning import RESTORE
from migd.agent.node.victims import in_vain
from migd.agent.records import Cause, NodeWork, Record
from migd.mig.geometry import Layout
from migd.plans.conditions import time_text

_NO_PLUGIN_S = 30.0
"""Without any device plugin to wait for, somebody else may still advertise."""


def verifying(record: Record, view: View) -> tuple[Record, Effect | None]:
    """Wait until what is advertised is as expected, within a bound; then the attempt is over."""
    work = work_of(record)
    odd = shown_otherwise(view)
    closed = in_debt(view)
    # A plugin that was not stopped must look again before anything counts: so far it shows what was there.
    ran_on = (closed or (work.refreshed and not work.pause)) and bool(plugins(view.seen))
    blind = ran_on and (not work.nudges or view.now_s - work.nudged_s < POLL_S)
    if not odd and not blind:
        return (record, pay(view)) if closed else finished(record, view, None)
    left_s = work.since_s + (VERIFY_MAX_S if _plugin_expected(view, work) else _NO_PLUGIN_S) - view.now_s
    if left_s <= 0:
        return (record, pay(view)) if closed else finished(record, view, _unadvertised(view, odd))
    return record, _nudge(view, work) or Wait(
        min(KUBELET_LOOK_S, left_s), odd or "the device plugin looks at the GPUs again"
    )


def watch(record: Record, view: View) -> tuple[Record, Effect | None]:
    """At rest: a kubelet that restarts shows nothing for a while; what lasts is told, and asked for again."""
    work = work_of(record)
    odd = shown_otherwise(view)
    if not odd:
        well = replace(work, unadvertised=None, short_s=None, nudges=0)
        return (record if well == work else working(record, well)), None
    if work.unadvertised is not None:
        left_s = _next_nudge_s(work) - view.now_s
        return record, _nudge(view, work) or (Wait(left_s, odd) if left_s > 0 else None)
    since_s = view.now_s if work.short_s is None else work.short_s
    left_s = since_s + VERIFY_MAX_S - view.now_s
    if left_s > 0:
        return (record if work.short_s is not None else working(record, replace(work, short_s=since_s))), Wait(
            left_s, odd
        )
    cause = _unadvertised(view, odd)
    lasting = replace(work, unadvertised=cause, short_s=None, nudges=0, nudged_s=view.now_s - NUDGE_S)
    return working(record, lasting), LookAgain()


def finished(record: Record, view: View, unadvertised: Cause | None) -> tuple[Record, Effect | None]:
    """The attempt is over: at rest, with what became of each GPU; what did not end well comes again by itself."""
    work = work_of(record)
    accepted = dict(work.accepted)
    well = work.refresh is None and not record.open
    drifted = judge(record, view).drifted
    for uuid in view.turn.orders if view.turn is not None and view.turn.id == work.turn else ():
        outcome, now = record.gpu(uuid).outcome, view.held.gpu(uuid)
        if outcome is None or outcome.phase != "Ready":
            well = False
        elif now is not None and uuid not in drifted:
            accepted[uuid] = Layout(now.mig_on, record.gpu(uuid).owned & now.geometry)
    turn = "" if work.turn == RESTORE and well else work.turn
    again: dict[str, Any] = {"tries": 0, "not_before_s": 0.0} if well else not_before(work, view)
    again |= {"spent": (), "spent_why": None} if well else {"spent_why": _in_vain(record, view)}
    record = enter(
        record,
        "Rest",
        view,
        turn=turn,
        ended_at=time_text(view.seen.wall),
        closed_s=None,
        paused_s=None,
        accepted=accepted,
        unadvertised=unadvertised,
        nudges=0,
        nudged_s=view.now_s,
        short_s=None,
        why=None,
        at_once=False,
        **NOBODY,
        **again,
    )
    return record, LookAgain()


def _in_vain(record: Record, view: View) -> Cause | None:
    """What a drain came to that is spent: pods have gone, and a GPU is not as wished all the same."""
    work = work_of(record)
    if not work.spent:
        return None
    outcomes = [record.gpu(uuid).outcome for uuid in (view.turn.orders if view.turn is not None else ())]
    bad = next((o.cause.message for o in outcomes if o is not None and o.phase != "Ready"), "")
    return in_vain(Cause("NVMLError", bad)) if bad and work.asked else work.spent_why


def _unadvertised(view: View, odd: str) -> Cause:
    if not plugins(view.seen) and not by_labels(view.seen.node):
        return Cause("NoDevicePlugin", f"no device plugin runs on this node, so nothing is advertised: {odd}")
    return Cause("NotAdvertised", f"the GPUs are as they should be, but the kubelet shows otherwise: {odd}")


def _plugin_expected(view: View, work: NodeWork) -> bool:
    return work.pause in ("Labels", "Pods") or bool(plugins(view.seen)) or by_labels(view.seen.node)


def _next_nudge_s(work: NodeWork) -> float:
    pause_s: float = min(NUDGE_S * 2 ** min(work.nudges, 10), BACKOFF_MAX_S)
    return work.nudged_s + pause_s


def _nudge(view: View, work: NodeWork) -> Effect | None:
    """Tell the plugin to look again where that is due and one runs. It counts once it is answered: see `answered`."""
    return hang_up(view.seen) if view.now_s >= _next_nudge_s(work) else None
