"""Events for people, from how one status of a GPUPartition follows another. Pure."""

from __future__ import annotations

from typing import Final, Literal

from migd.kube.events import Note, Regarding
from migd.kube.stored import Stored
from migd.plans.conditions import Reason
from migd.plans.partitions import KIND, LastTransition, Partition, PartitionStatus
from migd.plans.plan import API_VERSION

Type = Literal["Normal", "Warning"]
_ENDED: Final[dict[str, tuple[Type, str, str]]] = {
    "Succeeded": ("Normal", "Change", "changed"),
    "RolledBack": ("Warning", "RollBack", "rolled back; it should have been changed"),
    "BackedOut": ("Normal", "BackOut", "backed out before anything was changed; it should have been changed"),
    "Failed": ("Warning", "Change", "not changed"),
    "Held": ("Warning", "Hold", "held half way; it should have been changed"),
}
"""result -> type, action, and the sentence's beginning."""
_STUCK: Final = frozenset({"Blocked", "RebootRequired", "Failed", "Held", "Lost"})


def notes(partition: Stored[Partition], before: PartitionStatus, after: PartitionStatus) -> tuple[Note, ...]:
    """What is worth an Event now that a partition's status follows another: a change that began or ended, or is stuck.

    The reason is that of the condition Ready.
    """
    about = Regarding(API_VERSION, KIND, partition.name, partition.uid)
    ready = next((c for c in after.conditions if c.type == "Ready"), None)
    reason: Reason = ready.reason if ready is not None else "Waiting"
    said = f": {after.message}" if after.message else ""
    old, new = before.last_transition, after.last_transition
    known = old if old is not None and new is not None and _same(old, new) else None
    found = []
    if new is not None and known is None and new.result is None:
        found.append(Note(about, "Normal", reason, "Change", f"changing {_ways(new)}"))
    if new is not None and new.result is not None and (known is None or known.result is None):
        kind, action, text = _ENDED[new.result]
        found.append(Note(about, kind, reason, action, f"{text} {_ways(new)}{said}"))
    elif after.phase in _STUCK and after.phase != before.phase:
        found.append(Note(about, "Warning", reason, "Look", f"{after.phase}{said}"))
    return tuple(found)


def _same(one: LastTransition, other: LastTransition) -> bool:
    return one.id == other.id and one.started_at == other.started_at


def _ways(transition: LastTransition) -> str:
    return f"from {transition.from_layout or 'what is there'} to {transition.to or 'what is wished'}"
