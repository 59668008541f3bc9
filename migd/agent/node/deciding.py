"""The node's transaction as one pure, total function: (record, what is seen) to (record, one effect).

    Rest ─► Waiting ─► Closing ─► Settling ─► Pausing ─► Applying ─► Refreshing ─► Opening ─► Verifying ─► Rest
                └ nothing to do ──────│───────────│───────────────────────────────────────────────▲
                ▲                     └► Backing ◄┘  (nothing was changed: open, and wait again)
                └────────────────────────────┘

Closing, pausing and opening are of the node; what is changed, fails and goes back is one GPU. Every turn looks again,
so a crash anywhere is nothing special: the same function, the last record, a fresh look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from migd.agent import deciding
from migd.agent.deciding import after_boot, without_gone
from migd.agent.node import backing, beginning, changing, draining, pausing, verifying
from migd.agent.node.bounds import DENIED_S
from migd.agent.node.effects import (
    Acting,
    ChangeNode,
    Effect,
    ForgetRetry,
    HangUp,
    RefreshDevices,
    StopPlugin,
    Wait,
)
from migd.agent.node.moments import View, view_of, work_of, working
from migd.agent.node.seeing import NodeSeen
from migd.agent.records import Cause, NodeWork, Record, Stage

_STAGES: Final[Mapping[Stage, Callable[[Record, View], tuple[Record, Effect | None]]]] = {
    "Rest": beginning.rest,
    "Waiting": beginning.waiting,
    "Closing": pausing.close,
    "Draining": draining.drain,
    "Settling": pausing.settle,
    "Pausing": pausing.pause,
    "Backing": backing.back,
    "Applying": changing.apply,
    "Refreshing": changing.refresh,
    "Opening": changing.open_node,
    "Verifying": verifying.verifying,
}


def decide(record: Record, seen: NodeSeen) -> tuple[Record, Effect | None]:
    """The next record, to be saved before anything else where it differs, and the one effect to begin then.

    None is at rest until something changes: look again after REST_LOOK_S at the latest.
    """
    record = without_gone(_after_boot(record, seen), seen.gpus)
    work = work_of(record)
    opens = work.stage == "Backing" and work.denied is not None and work.why == work.denied  # another change was denied
    if 0 < work.denied_s - seen.now_s <= DENIED_S and not opens:
        return record, Wait(work.denied_s - seen.now_s, "the API server denied a change; it is asked again")
    return _STAGES[work.stage](record, view_of(seen, work))


def answered(record: Record, effect: Acting, error: Cause | None, now_s: float) -> Record:
    """The record after an effect was done (None) or failed. To be called after every Acting effect.

    A ConflictError or an API server that is away is no answer: wait a little, and look and decide again. After an
    Operation that did not return (HungError) call `migd.agent.deciding.hung` instead, save, and end the process.
    error: reason NoPermission where the API server denies it, NVMLError for devices, as `reason_of` for operations.
    """
    work = work_of(record)
    match effect:
        case RefreshDevices():
            tries = work.refresh_tries + 1
            return working(record, replace(work, refreshed=error is None, refresh=error, refresh_tries=tries))
        case HangUp():  # one that a crash swallowed is not counted: it comes again at once, which is harmless
            return working(record, replace(work, nudges=work.nudges + 1, nudged_s=now_s))
        case ChangeNode() | StopPlugin() | ForgetRetry():
            return _granted(record) if error is None else _denied(record, error, now_s)
    return record if error is None else deciding.failed(record, effect, error, now_s)


def needs_list(record: Record) -> bool:
    """Whether the next look must LIST the node's pods consistently, and not take them from the cache."""
    return work_of(record).stage in ("Settling", "Pausing")


def _granted(record: Record) -> Record:
    work = work_of(record)
    return record if work.denied is None else working(record, replace(work, denied=None))


def _denied(record: Record, error: Cause, now_s: float) -> Record:
    """Before anything was changed, a denied change is a reason to back out; later it is asked for again and again."""
    work = replace(work_of(record), denied_s=now_s + DENIED_S, denied=error)
    if work.stage in ("Closing", "Draining", "Settling", "Pausing"):
        return working(record, replace(work, stage="Backing", since_s=now_s, why=error, at_once=False))
    return working(record, work)


def _after_boot(record: Record, seen: NodeSeen) -> Record:
    """A changed boot id voids every time, and what was under way: what the node had is to be made again, at once."""
    if record.boot_id == seen.boot_id:
        return record
    record = after_boot(record, seen.boot_id)
    if record.node is None:
        return record
    was = record.node
    kept = NodeWork(since_s=seen.now_s, at_once=True, accepted=was.accepted, spent=was.spent, spent_why=was.spent_why)
    return working(record, kept)
