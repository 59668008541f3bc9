"""What is sent of a plan's status: on which version of the plan it may be written."""

from __future__ import annotations

import pytest
from unit.migd_operator.fleets import plan

from migd.kube.partitions import PlanObject
from migd.kube.stored import Stored
from migd.plans.statuses import PlanEvictions, PlanStatus
from migd_operator.writing import status_body

COUNTED = PlanEvictions(generation=1, evicted=1)


@pytest.mark.parametrize("seen", [None, COUNTED])
def test_a_plans_status_is_only_written_on_the_version_that_was_seen_also_where_the_count_stays(
    seen: PlanEvictions | None,
):
    """What was seen may be old, and the count in it smaller than the one that is there."""
    facts = plan("p")
    value = PlanObject(facts.plan, PlanStatus(evictions=seen))
    stored = Stored("p", "", "uid-p", "7", 1, False, {}, {}, value)
    body = status_body(PlanStatus(evictions=COUNTED), stored)
    assert body["metadata"] == {"resourceVersion": "7"}
    assert body["status"]["evictions"]["evicted"] == 1
