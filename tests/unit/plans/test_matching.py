"""Which rule decides on which GPU, what a plan names that is not there, and which labels a selector matches."""

from __future__ import annotations

import pytest
from unit.plans.boards import A30_NAME, A100_40_NAME, A100_80_NAME, gpu, not_capable, uuid
from unit.plans.texts import plan

from migd.plans.matching import match, matches, ranges
from migd.plans.plan import LabelSelector

NODE = [gpu(0, A100_40_NAME), gpu(1, A100_80_NAME), gpu(2, A30_NAME), not_capable(3)]


def decided(*selectors: dict) -> tuple[int | None, ...]:
    return match(plan(*({"gpus": s, "mig": "Disabled"} for s in selectors)), NODE).rules


@pytest.mark.parametrize(
    ("selector", "indices"),
    [
        ({"all": True}, {0, 1, 2, 3}),
        ({"indices": [2, 0]}, {0, 2}),
        ({"uuids": [uuid(1).upper()]}, {1}),
        ({"models": ["*A100*80GB*"]}, {1}),
        ({"models": ["*a100*"]}, set()),
        ({"models": ["*A30", "*A40"]}, {2, 3}),
        ({"models": ["A100"]}, set()),
        ({"pciDeviceIds": ["0x20b210DE"]}, {1}),
        ({"pciDeviceIds": ["20B010DE", "0x20B710DE"]}, {0, 2}),
        ({"all": True, "models": ["*A100*"], "indices": [1, 2]}, {1}),
    ],
)
def test_a_gpu_must_pass_every_part_that_is_given(selector, indices):
    assert {i for i, rule in enumerate(decided(selector)) if rule == 0} == indices


def test_the_first_rule_that_matches_decides_and_the_rest_are_left_alone():
    assert decided({"models": ["*80GB*"]}, {"models": ["*A100*"]}, {"indices": [3]}) == (1, 0, None, 2)


def test_an_index_or_uuid_that_is_not_there_is_a_problem():
    found = match(plan({"gpus": {"indices": [0, 9], "uuids": ["GPU-abc-1"]}, "mig": "Disabled"}), NODE)
    assert [str(p) for p in found.problems] == [
        "spec.rules[0].gpus.indices[1]: plan names GPU index 9; this machine has 0–3",
        "spec.rules[0].gpus.uuids[0]: plan names GPU-abc-1, which is not in this machine (see migd gpus)",
    ]


def test_a_machine_without_gpus_is_told_so():
    found = match(plan({"gpus": {"indices": [0]}, "mig": "Disabled"}), [])
    assert [p.message for p in found.problems] == ["plan names GPU index 0; this machine has no NVIDIA GPU"]


def test_a_rule_that_decides_on_nothing_is_noted():
    found = match(
        plan({"gpus": {"models": ["*H100*"]}, "mig": "Disabled"}, {"gpus": {"all": True}, "mig": "Disabled"}), NODE
    )
    assert found.notes == ("spec.rules[0] decides on no GPU of this machine",)


def test_indices_are_shown_in_short():
    assert ranges([5, 0, 1, 2, 7, 8]) == "0–2, 5, 7–8"


@pytest.mark.parametrize(
    ("selector", "holds"),
    [
        ({}, True),
        ({"matchLabels": {"team": "a"}}, True),
        ({"matchLabels": {"team": "b"}}, False),
        ({"matchLabels": {"team": "a", "absent": "a"}}, False),
        ({"matchLabels": {"absent": ""}}, False),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["b", "a"]}]}, True),
        ({"matchExpressions": [{"key": "absent", "operator": "In", "values": ["a"]}]}, False),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a"]}]}, False),
        ({"matchExpressions": [{"key": "absent", "operator": "NotIn", "values": ["a"]}]}, True),
        ({"matchExpressions": [{"key": "empty", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "absent", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "empty", "operator": "DoesNotExist"}]}, False),
        ({"matchExpressions": [{"key": "absent", "operator": "DoesNotExist"}]}, True),
        ({"matchLabels": {"team": "b"}, "matchExpressions": [{"key": "team", "operator": "Exists"}]}, False),
    ],
)
def test_a_selector_matches_labels_as_kubernetes_has_it(selector: dict, holds: bool):
    assert matches(LabelSelector.model_validate(selector), {"team": "a", "empty": ""}) is holds


def test_nothing_is_what_only_an_empty_selector_and_absence_match():
    assert matches(LabelSelector(), {})
    assert not matches(LabelSelector(match_labels={"a": ""}), {})
