"""PodDisruptionBudgets as the API server and the disruption controller see them: whom they have, what they allow. Pure.

Source: the policy/v1 API, registry/core/pod/storage/eviction.go and controller/disruption of Kubernetes 1.37.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final

from migd.sim.cluster.deleting import time_of
from migd.sim.cluster.fields import Json

FORGOTTEN_AFTER: Final = timedelta(minutes=2)
"""So long a budget counts a pod as gone whose eviction was let through; then it must have begun to go."""
Scale = Callable[[Json], int | None]
"""How many pods the controller behind an owner reference wants; None where that cannot be known, as for a Job."""


def has(budget: Json, labels: Mapping[str, str]) -> bool:
    """Whether a budget has a pod of its namespace with these labels; one without selector has none."""
    selector = budget["spec"].get("selector")
    if selector is None:
        return False
    wanted = selector.get("matchLabels") or {}
    needs = selector.get("matchExpressions") or ()
    return all(labels.get(key) == value for key, value in wanted.items()) and all(_met(need, labels) for need in needs)


def _met(need: Json, labels: Mapping[str, str]) -> bool:
    label, values = labels.get(need["key"]), need.get("values") or ()
    match need["operator"]:
        case "In":
            return label in values
        case "NotIn":
            return label not in values
        case "Exists":
            return label is not None
        case _:
            return label is None


def budgets_of(pod: Json, budgets: Iterable[Json]) -> list[Json]:
    """The budgets that have this pod."""
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    return [b for b in budgets if b["metadata"]["namespace"] == metadata["namespace"] and has(b, labels)]


def healthy(pod: Json) -> bool:
    """Whether a pod is told to be ready."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def counted(budget: Json, pods: Collection[Json], scale: Scale, now: datetime) -> tuple[Json, float | None]:
    """The status of a budget over its pods, and after how many seconds it has to be counted again by itself.

    pods: all that it has. Where it is a share, or a number that may be away, it is of what the controllers of the pods
    want: pods without one do not count, and where one cannot tell, nobody may go.
    """
    generation = budget["metadata"]["generation"]
    found = _needed(budget["spec"], pods, scale)
    if found is None:
        status = {**(budget.get("status") or {}), "disruptionsAllowed": 0, "observedGeneration": generation}
        return {**status, "conditions": [_condition("SyncFailed", generation)]}, None
    expected, desired = found
    disrupted, again_s = _disrupted(budget, pods, now)
    current = sum(1 for pod in pods if healthy(pod) and not _going(pod) and pod["metadata"]["name"] not in disrupted)
    allowed = max(0, current - desired) if expected > 0 else 0
    status = {
        "observedGeneration": generation,
        "disruptionsAllowed": allowed,
        "currentHealthy": current,
        "desiredHealthy": desired,
        "expectedPods": expected,
        "conditions": [_condition("SufficientPods" if allowed else "InsufficientPods", generation)],
    }
    return status | ({"disruptedPods": disrupted} if disrupted else {}), again_s


def _needed(spec: Json, pods: Collection[Json], scale: Scale) -> tuple[int, int] | None:
    """How many pods there should be, and how many of them healthy; None where that cannot be known."""
    least, most_away = spec.get("minAvailable"), spec.get("maxUnavailable")
    if isinstance(least, int):
        return len(pods), least
    owners = {
        owner["uid"]: owner
        for pod in pods
        for owner in pod["metadata"].get("ownerReferences") or ()
        if owner.get("controller")
    }
    scales = [scale(owner) for owner in owners.values()]
    if None in scales:
        return None
    expected = sum(number for number in scales if number is not None)
    if least is not None:
        return expected, _share(least, expected)
    return expected, max(
        0, expected - (most_away if isinstance(most_away, int) else _share(most_away or "0%", expected))
    )


def _share(text: str, of: int) -> int:
    return math.ceil(int(text.rstrip("%")) * of / 100)


def _disrupted(budget: Json, pods: Iterable[Json], now: datetime) -> tuple[dict[str, str], float | None]:
    """The pods whose eviction was let through and that are not going yet, with when; and when that is forgotten."""
    told = (budget.get("status") or {}).get("disruptedPods") or {}
    kept = {
        name: told[name]
        for name in sorted(pod["metadata"]["name"] for pod in pods if not _going(pod))
        if name in told and time_of(told[name]) + FORGOTTEN_AFTER > now
    }
    left = [(time_of(at) + FORGOTTEN_AFTER - now).total_seconds() for at in kept.values()]
    return kept, min(left, default=None)


def _going(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _condition(reason: str, generation: int) -> Json:
    allowed = "True" if reason == "SufficientPods" else "False"
    return {"type": "DisruptionAllowed", "status": allowed, "reason": reason, "observedGeneration": generation}
