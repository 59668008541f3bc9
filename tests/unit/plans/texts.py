"""Plans as texts and values, for the tests of plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from migd.plans.migparted import MigParted
from migd.plans.plan import Plan, plan_of
from migd.plans.problems import BadInput
from migd.plans.reading import read

DATA = Path(__file__).parents[2] / "data"


def case(name: str) -> str:
    """The text of the case file whose name starts so."""
    (found,) = DATA.glob(f"{name}-*")
    return found.read_text()


def migparted(text: str) -> MigParted:
    found = read(text, "file")
    assert isinstance(found, MigParted)
    return found


def document(rules: list[dict[str, Any]], /, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "migd.dev/v1alpha1",
        "kind": "GPUPartitionPlan",
        "metadata": {"name": "test"},
        "spec": {"nodeSelector": {}, "rules": rules, **spec},
    }


def plan(*rules: dict[str, Any], **spec: Any) -> Plan:
    return plan_of(document(list(rules), **spec))


def everywhere(counts: dict[str, int], **rule: Any) -> dict[str, Any]:
    """A rule for every GPU, from profile name to number."""
    return {"gpus": {"all": True}, "instances": [{"profile": p, "count": n} for p, n in counts.items()], **rule}


def problems(text_or_document: object) -> dict[str, str]:
    """Path to message and hint of everything wrong with a plan."""
    bad = refusal(lambda: read(text_or_document) if isinstance(text_or_document, str) else plan_of(text_or_document))
    if bad is None:
        return {}
    assert len({p.path for p in bad.problems}) == len(bad.problems), "two problems at one path"
    return {p.path: f"{p.message} | {p.hint}" for p in bad.problems}


def refusal(call: Callable[[], object]) -> BadInput | None:
    """The BadInput that a call raises, or None where it raises nothing; anything else passes through."""
    try:
        call()
    except BadInput as bad:
        return bad
    return None
