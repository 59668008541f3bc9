"""Rules become wishes in a board's own names, or refusals that say what the board offers."""

from __future__ import annotations

from typing import Any

import pytest
from unit.plans.boards import A100_40_NAME, A100_80_NAME, gpu, not_capable, profile, seven_slices
from unit.plans.texts import plan

from migd.mig.boards import Board
from migd.mig.observed import MigMode
from migd.plans.plan import Rule
from migd.plans.wishes import Refused, UnknownYet, Wish, resolve


def rule(*instances: dict[str, Any], **more: Any) -> Rule:
    return plan({"gpus": {"all": True}, "instances": list(instances), **more}).spec.rules[0]


OFF = plan({"gpus": {"all": True}, "mig": "Disabled"}).spec.rules[0]


def test_names_and_needs_that_mean_one_profile_are_added_up():
    found = resolve(rule({"profile": "1g.10gb", "count": 2}, {"memoryGB": 10, "count": 3}), gpu(0, A100_80_NAME))
    assert found == Wish(True, (("1g.10gb", 5),))


def test_mig_off_is_satisfied_where_there_is_no_mig_and_mig_on_is_refused():
    assert resolve(OFF, not_capable()) == Wish(False)
    found = resolve(rule({"profile": "1g.10gb"}), not_capable())
    assert found == Refused("NotCapable", "NVIDIA A40 is not MIG-capable")
    assert isinstance(resolve(rule(allowEmpty=True), not_capable()), Refused)


@pytest.mark.parametrize(
    ("need", "name"),
    [
        ({"memoryGB": 10}, "1g.10gb"),
        ({"memoryGB": 10, "computeSlices": 2}, "2g.10gb"),
        ({"memoryGB": 1}, "1g.5gb"),
        ({"memoryGB": 11}, "3g.20gb"),
        ({"memoryGB": 20, "computeSlices": 4}, "4g.20gb"),
        ({"memoryGB": 5, "computeSlices": 5}, "7g.40gb"),
    ],
)
def test_a_need_takes_the_smallest_memory_then_fewest_slices_then_fewest_attributes(need, name):
    assert resolve(rule(need), gpu(0, A100_40_NAME)) == Wish(True, ((name, 1),))


def test_a_need_too_large_is_refused_with_what_there_is():
    found = resolve(rule({"memoryGB": 40, "computeSlices": 8}), gpu(0))
    assert isinstance(found, Refused)
    assert found.reason == "Infeasible"
    assert found.message.startswith(
        "no profile is large enough for 40 GB and 8 compute slices; NVIDIA A100-SXM4-40GB offers 1g.5gb,"
    )


def test_every_unknown_name_is_told_at_once():
    found = resolve(rule({"profile": "1g.6gb"}, {"profile": "9g.90gb"}, {"profile": "7g.40gb"}), gpu(0))
    assert isinstance(found, Refused)
    assert found.reason == "UnknownProfile"
    assert "1g.6gb is not offered (nearest: 1g.5gb" in found.message
    assert "9g.90gb is not offered" in found.message
    assert "7g.40gb is not offered" not in found.message


def test_a_name_that_could_be_two_profiles_is_refused_naming_both():
    near = seven_slices("1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.79gb", (9984, 19968, 40448, 80896))
    twice = Board.of([*near.profiles, profile("7g.81gb", 99, 82944, ((0, 8),), 1, (7, 5, 0, 1, 1))])
    found = resolve(rule({"profile": "7g.80gb"}), gpu(0, A100_80_NAME, board=twice))
    assert isinstance(found, Refused)
    assert "7g.80gb could be 7g.79gb and 7g.81gb: write which" in found.message


def test_without_a_profile_list_the_wish_is_known_once_mig_is_on():
    found = resolve(rule({"profile": "1g.5gb", "count": 7}, {"memoryGB": 10}), gpu(0, board=None))
    assert isinstance(found, UnknownYet)
    assert found.wanted == ("7×1g.5gb", "10 GB")
    assert "lists no profiles while MIG is off" in found.message
    assert resolve(OFF, gpu(0, board=None)) == Wish(False)
    assert resolve(rule(allowEmpty=True), gpu(0, board=None)) == Wish(True, (), True)


def test_no_profile_list_with_mig_on_is_refused():
    found = resolve(rule({"profile": "1g.5gb"}), gpu(0, board=None, mode=MigMode(True, True)))
    assert isinstance(found, Refused)
    assert found.reason == "NVMLError"
