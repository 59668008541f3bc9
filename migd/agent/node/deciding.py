"""The node's transaction as one pure, total function: (record, what is seen) to (record, one effect)."""

from __future__ import annotations

from migd.agent.node.effects import Acting, Effect
from migd.agent.node.seeing import NodeSeen
from migd.agent.records import Cause, Record


def decide(record: Record, seen: NodeSeen) -> tuple[Record, Effect | None]:
    """The next record, to be saved before anything else where it differs, and the one effect to begin then.

    None is at rest until something changes: look again after REST_LOOK_S at the latest.
    """
    raise NotImplementedError


def answered(record: Record, effect: Acting, error: Cause | None, now_s: float) -> Record:
    """The record after an effect was done (None) or failed. To be called after every Acting effect.

    A ConflictError or an API server that is away is no answer: wait a little, and look and decide again. After an
    Operation that did not return (HungError) call `migd.agent.deciding.hung` instead, save, and end the process.
    error: reason NoPermission where the API server denies it, NVMLError for devices, as `reason_of` for operations.
    """
    raise NotImplementedError


def needs_list(record: Record) -> bool:
    """Whether the next look must LIST the node's pods consistently, and not take them from the cache."""
    raise NotImplementedError
