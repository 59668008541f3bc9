"""Conditions, phases and reasons: the closed lists of words, and how one set of conditions follows another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, get_args

from pydantic import BeforeValidator, Field, PlainSerializer

from migd.plans.fields import Value
from migd.plans.problems import shown, wrong

Phase = Literal[
    "Idle", "Pending", "WaitingForIdle", "Draining", "Changing", "Verifying", "RollingBack",
    "Ready", "Blocked", "RebootRequired", "Failed", "Held", "Lost",
]  # fmt: skip
Reason = Literal[
    "AsWished", "Valid", "Assigned", "Waiting", "NotNeeded",
    "Infeasible", "UnknownProfile", "NotCapable", "Conflict", "DuplicateGPU", "InUse", "NeverIdle", "DrainBlocked",
    "DrainTimeout", "EvictionBudget", "ForeignOwner", "ForeignInstances", "DriverUpgrade", "GPUUnhealthy", "MPSInUse",
    "NoPermission", "ModeChangeFailed", "ResetRefused", "RebootRequired", "NVMLError", "NotAdvertised",
    "NoDevicePlugin", "Paused", "AwaitingApproval", "Held", "Invalid", "AgentSilent",
]  # fmt: skip
PlanConditionType = Literal["Accepted", "Progressing", "Ready", "Stalled"]
PartitionConditionType = Literal["Ready", "Drained", "Applied", "Advertised", "Assigned", "AgentAlive"]
Status = Literal["True", "False", "Unknown"]

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
HALF_WAY: Final[frozenset[Phase]] = frozenset({"Changing", "RollingBack"})
"""Hardware is being changed just now."""
COMMITTED: Final[frozenset[Phase]] = HALF_WAY | {"Verifying"}
"""After the first effect on hardware: such a node finishes, whatever is decided meanwhile."""
MOVING: Final[frozenset[Phase]] = COMMITTED | {"Pending", "WaitingForIdle", "Draining"}
"""On the way to a wish, or waiting for a turn or for idleness: neither there nor stuck."""
WELL: Final = frozenset({"AsWished", "Valid", "Assigned", "Waiting", "NotNeeded"})
"""The reasons that name nothing wrong."""
MESSAGE_MAX: Final = 4096


def _time(value: object) -> object:
    if isinstance(value, datetime) and value.tzinfo is not None:
        if value.tzinfo is UTC:
            return value
        return value.astimezone(UTC)
    if isinstance(value, str):
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            found = None
        if found is not None and found.tzinfo is not None and "T" in value:
            return found.astimezone(UTC)
    raise wrong(f"must be a time, not {shown(value)}", "such as 2026-01-31T12:00:00Z")


def time_text(moment: datetime) -> str:
    """A moment as Kubernetes writes it: whole seconds, UTC, 2026-01-31T12:00:00Z."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Time = Annotated[datetime, BeforeValidator(_time), PlainSerializer(time_text)]
"""A moment with its zone; read from RFC 3339 text, written in whole seconds of UTC."""


class Condition(Value):
    """One thing that is so, is not so, or is not known. observed_generation: of the object that this answers."""

    type: PartitionConditionType | PlanConditionType
    status: Status
    observed_generation: Annotated[int, Field(ge=0)] = Field(alias="observedGeneration")
    last_transition_time: Time = Field(alias="lastTransitionTime")
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Said:
    """What is to be said of one condition now; without a time, since only a change of status has one."""

    type: PartitionConditionType | PlanConditionType
    status: Status
    reason: Reason
    message: str


def following(
    before: Iterable[Condition], said: Iterable[Said], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The conditions that say this now, in order of type.

    The time of the last transition stays where the status does. A message is cut to what the API takes.
    """
    known = {c.type: c for c in before}
    found = []
    for one in sorted(said, key=lambda s: s.type):
        old = known.get(one.type)
        says = (one.status, generation, one.reason, cut(one.message, MESSAGE_MAX))
        if old is not None and (old.status, old.observed_generation, old.reason, old.message) == says:
            found.append(old)
            continue
        since = old.last_transition_time if old is not None and old.status == one.status else whole_second(now)
        found.append(
            Condition(
                type=one.type,
                status=one.status,
                observed_generation=generation,
                last_transition_time=since,
                reason=one.reason,
                message=says[-1],
            )
        )
    return tuple(found)


def whole_second(moment: datetime) -> datetime:
    """A moment as it reads back once it was written."""
    return moment.astimezone(UTC).replace(microsecond=0)


def cut(text: str, most: int) -> str:
    """A text of at most so many characters; what is left out shows as three dots."""
    return text if len(text) <= most else text[: most - 1] + "…"


def find(conditions: Sequence[Condition], kind: str) -> Condition | None:
    """The condition of this type, or None."""
    return next((c for c in conditions if c.type == kind), None)
