"""Nothing was changed on any GPU: when to back out of a transaction, and how the node is opened again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from migd.agent.deciding import under_way
from migd.agent.node.advertising import advertised
from migd.agent.node.bounds import KUBELET_LOOK_S, KUBELET_TELLS_S
from migd.agent.node.clients import plugins
from migd.agent.node.effects import LookAgain, Wait
from migd.agent.node.guarding import guard
from migd.agent.node.moments import Decided, View, back_out, enter, in_debt, judge, not_before, pay, work_of
from migd.agent.node.victims import in_vain, not_again
from migd.agent.records import Cause, Record
from migd.plans.conditions import time_text

NOBODY: Final[Mapping[str, Any]] = {"victims": {}, "asked": (), "gone_s": None, "stuck_s": None}
"""Of the node's work, once nobody is asked to go any more."""


def back(record: Record, view: View) -> Decided:
    """Nothing was changed: open the node, then wait again, or rest where the turn was taken back.

    Where the plugin was stopped the kubelet is given time to say so first: a pod that is bound to what it still
    advertises would be refused for good.
    """
    work = work_of(record)
    if in_debt(view):
        runs = any(not pod.deleting for pod in plugins(view.seen))
        left_s = work.since_s + KUBELET_TELLS_S - view.now_s
        if work.paused_s is not None and not runs and advertised(view.seen.node.value) and left_s > 0:
            return record, Wait(min(KUBELET_LOOK_S, left_s), "the kubelet still advertises what nobody hands out")
        return record, pay(view)
    over: dict[str, Any] = {
        "ended_at": time_text(view.seen.wall),
        "closed_s": None,
        "paused_s": None,
        "pause": "",
        **NOBODY,
    }
    if view.turn is None or view.turn.id != work.turn:
        half_done = not_before(work, view) if record.open else {}
        return enter(record, "Rest", view, turn="", **over, **half_done), LookAgain()
    if work.why is None:
        return enter(record, "Waiting", view, **over), LookAgain()
    if work.spent and (work.asked or in_vain(work.why) == work.why):
        over |= {"spent_why": in_vain(work.why), "why": not_again(in_vain(work.why))}
    return enter(record, "Waiting", view, **over, **not_before(work, view)), LookAgain()


def leaving(record: Record, view: View) -> tuple[Record, bool]:
    """Back out where nothing is to be done any more, or may be; what a crash left half done is finished in any case."""
    if under_way(record):
        return record, False
    if view.turn is None or view.turn.id != work_of(record).turn:
        return back_out(record, view, Cause("Waiting", "the turn was taken back before anything was changed")), True
    why = guard(view.seen)
    if why is not None:
        return back_out(record, view, why), True
    if not judge(record, view).changing:
        return back_out(record, view, None), True
    return record, False
