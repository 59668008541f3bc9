"""PodDisruptionBudgets: which pods a budget has, so that one that refuses can be named. Nothing here writes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from migd.kube.errors import Json
from migd.kube.stored import Interner, Kind


@dataclass(frozen=True, slots=True)
class Budget:
    """What we read of a budget; it is for pods of its own namespace only.

    selector: as the document has it; None selects nothing, an empty one everything. allowed: so many more pods may go,
    as its controller last counted; 0 where it has not counted yet.
    """

    selector: Mapping[str, Any] | None
    allowed: int


def selects(budget: Budget, labels: Mapping[str, str]) -> bool:
    """Whether a budget has a pod with these labels. Source: apimachinery, LabelSelectorAsSelector.

    NotIn also matches where the label is absent. What cannot be read selects nothing, as for the API server.
    """
    if budget.selector is None:
        return False
    wanted: Mapping[str, str] = budget.selector.get("matchLabels") or {}
    needs: Sequence[Json] = budget.selector.get("matchExpressions") or ()
    return all(labels.get(key) == value for key, value in wanted.items()) and all(_holds(n, labels) for n in needs)


def _holds(need: Json, labels: Mapping[str, str]) -> bool:
    holds = _OPERATORS.get(str(need.get("operator")))
    return holds is not None and holds(labels.get(str(need.get("key"))), need.get("values") or ())


_OPERATORS: Final[Mapping[str, Callable[[str | None, Sequence[str]], bool]]] = {
    "In": lambda label, values: label in values,
    "NotIn": lambda label, values: label not in values,
    "Exists": lambda label, _values: label is not None,
    "DoesNotExist": lambda label, _values: label is None,
}


def _budget(document: Json, _same: Interner) -> Budget:
    return Budget(
        selector=(document.get("spec") or {}).get("selector"),
        allowed=int((document.get("status") or {}).get("disruptionsAllowed") or 0),
    )


BUDGETS: Final = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", _budget, namespaced=True)
