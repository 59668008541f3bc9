"""Words for GPUs, instances and durations."""

from __future__ import annotations

import pytest

from migd.cli import wording
from migd.mig.geometry import GpuInstance
from migd.mig.profiles import Placement


def at(profile: str, start: int, size: int) -> GpuInstance:
    return GpuInstance(profile, Placement(start, size))


def test_instances_of_one_profile_share_its_name() -> None:
    found = wording.places([at("3g.40gb", 4, 4), at("1g.10gb", 2, 1), at("1g.10gb", 0, 1)])
    assert found == "1g.10gb@0,2 3g.40gb@4"
    assert wording.places([]) == "-"


def test_gpus_that_read_the_same_share_a_row() -> None:
    rows = [(0, ("A", "x")), (1, ("A", "x")), (2, ("A", "y")), (3, ("A", "x"))]
    assert wording.together(rows) == [("0–1, 3", "A", "x"), ("2", "A", "y")]


def test_a_sentence_is_said_once_for_all_gpus_it_is_about() -> None:
    told = [(0, "is full"), (1, "is lost"), (2, "is full")]
    assert wording.said_once(told) == ["GPU 0, 2 is full", "GPU 1 is lost"]
    assert wording.said_once(told[:1], ": ") == ["GPU 0: is full"]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0.00 s"), (0.1234, "0.12 s"), (7.26, "7.3 s"), (59.94, "59.9 s"), (125.9, "2 min 5 s")]
)
def test_durations_are_as_exact_as_people_need(number: float, text: str) -> None:
    assert wording.seconds(number) == text


def test_one_of_a_thing_has_no_plural() -> None:
    assert (wording.count(1, "GPU"), wording.count(0, "GPU")) == ("1 GPU", "0 GPUs")
