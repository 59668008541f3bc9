"""Which exit code applies first, and which outcome has which."""

from __future__ import annotations

from itertools import combinations

import pytest

from migd.agent.records import Cause, Outcome
from migd.cli.exits import ORDER, Exit, exit_of, worst


def test_of_several_codes_the_first_that_applies_wins() -> None:
    assert [code.value for code in ORDER] == [2, 3, 1, 4, 5, 0]
    for first, later in combinations(ORDER, 2):
        assert worst([later, first, later]) == first
    assert worst([]) == Exit.DONE


@pytest.mark.parametrize(
    ("phase", "reason", "touched", "code"),
    [
        ("Ready", "AsWished", True, Exit.DONE),
        ("Ready", "AsWished", False, Exit.DONE),
        ("Failed", "Infeasible", False, Exit.INFEASIBLE),
        ("Failed", "UnknownProfile", False, Exit.INFEASIBLE),
        ("Failed", "NotCapable", False, Exit.INFEASIBLE),
        ("Failed", "Infeasible", True, Exit.FAILED),
        ("Failed", "NVMLError", False, Exit.FAILED),
        ("Held", "Held", True, Exit.FAILED),
        ("Lost", "GPUUnhealthy", True, Exit.FAILED),
        ("Blocked", "InUse", False, Exit.BLOCKED),
        ("Blocked", "ForeignInstances", False, Exit.BLOCKED),
        ("RebootRequired", "RebootRequired", True, Exit.BLOCKED),
    ],
)
def test_an_outcome_has_the_exit_code_of_its_phase_and_reason(
    phase: str, reason: str, touched: bool, code: Exit
) -> None:
    assert exit_of(Outcome(phase, Cause(reason, ""), touched=touched)) == code  # type: ignore[arg-type]
