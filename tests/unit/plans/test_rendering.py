"""The JSON of `gpus` and `plan`: as the schemas say, and equal to the byte for equal input."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from unit.plans.boards import A30_NAME, A100_40, A100_80_NAME, at, geometry, gpu, not_capable, there, uuid
from unit.plans.texts import document, everywhere, plan

from migd.mig.geometry import Layout
from migd.mig.observed import Holder, MigMode, SeenGpu, SeenInstance
from migd.plans.plan import plan_of
from migd.plans.preview import preview
from migd.plans.reading import read
from migd.plans.rendering import gpus_json, json_text, layout_json, to_json


def schema(name: str) -> Draft202012Validator:
    found = json.loads(files("migd.plans").joinpath(f"schemas/{name}.json").read_text())
    Draft202012Validator.check_schema(found)
    return Draft202012Validator(found)


PLAN, GPUS = schema("plan"), schema("gpus")
NODE = [
    gpu(0),
    gpu(1, instances="3g.20gb@4 1g.5gb@0", busy="1g.5gb@0"),
    gpu(2, instances=(there(at("3g.20gb@0", A100_40), compute="none"), there(at("3g.20gb@4", A100_40), 7, "narrow"))),
    gpu(3, A100_80_NAME, resetless=True, in_use=True, holders=(Holder(31, "", "abc"), Holder(30), Holder(None))),
    gpu(4, A30_NAME, instances="", mode=MigMode(True, False)),
    gpu(5, board=None),
    not_capable(6),
    SeenGpu(uuid(7), 7, "", "", 0, None, lost=True),
]
OWNED = {g.uuid: g.geometry for g in NODE}
PLANS = [
    plan(everywhere({"7g.40gb": 1})),
    plan(everywhere({"3g.20gb": 2, "1g.5gb": 1})),
    plan(everywhere({"1g.5gb": 7}), foreignInstances="Adopt"),
    plan({"gpus": {"all": True}, "mig": "Disabled"}),
    plan({"gpus": {"indices": [1, 2]}, "instances": [], "allowEmpty": True}),
]


@pytest.mark.parametrize("wanted", PLANS)
@pytest.mark.parametrize("owned", [{}, OWNED])
def test_a_preview_is_as_its_schema_says(wanted, owned):
    found = to_json(preview(wanted, NODE, owned))
    PLAN.validate(json.loads(json_text(found)))
    assert [g["index"] for g in found["gpus"]] == list(range(8))


def test_the_gpus_are_as_their_schema_says():
    GPUS.validate(json.loads(json_text(gpus_json(NODE, None))))
    left = {
        "index": 0,
        "uuid": uuid(0),
        "going": "back",
        "step": None,
        "before": layout_json(Layout(False)),
        "target": None,
    }
    GPUS.validate(gpus_json(NODE, {"gpus": [left]}))
    assert not GPUS.is_valid(gpus_json(NODE, {"phase": "Changing"}))


@pytest.mark.parametrize("key", ["matched", "keep", "blockedBy", "refused"])
def test_the_schema_misses_nothing_that_is_left_out_or_put_in(key):
    found = to_json(preview(PLANS[0], NODE, OWNED))
    del found["gpus"][0][key]
    assert not PLAN.is_valid(found)
    assert not PLAN.is_valid({**to_json(preview(PLANS[0], NODE, OWNED)), "more": 1})


def test_a_preview_in_json_reads_as_promised():
    found = to_json(preview(PLANS[0], NODE[1:2], OWNED))
    assert found == {
        "gpus": [
            {
                "index": 1,
                "uuid": uuid(1),
                "matched": True,
                "keep": [],
                "destroy": [
                    {
                        "profile": "1g.5gb",
                        "placement": {"start": 0, "size": 1},
                        "gi": 7,
                        "ci": 0,
                        "uuid": "MIG-1g.5gb@0",
                        "inUse": True,
                        "holders": [{"pid": 100, "command": "python train.py", "container": None}],
                    },
                    {
                        "profile": "3g.20gb",
                        "placement": {"start": 4, "size": 4},
                        "gi": 11,
                        "ci": 0,
                        "uuid": "MIG-3g.20gb@4",
                        "inUse": False,
                        "holders": [],
                    },
                ],
                "create": [{"profile": "7g.40gb", "placement": {"start": 0, "size": 8}}],
                "modeChange": None,
                "reset": False,
                "blockedBy": [
                    {
                        "pid": 100,
                        "command": "python train.py",
                        "container": None,
                        "instance": "1g.5gb@0",
                        "reason": "InUse",
                    }
                ],
                "refused": None,
            }
        ]
    }


def test_a_refusal_in_json_names_what_is_left_over_and_what_is_near():
    (found,) = to_json(preview(PLANS[1], NODE[:1], {}))["gpus"]
    assert found["refused"]["reason"] == "Infeasible"
    assert found["refused"]["leftOver"] == {"1g.5gb": 1}
    assert {"3g.20gb": 2} in found["refused"]["nearest"]
    assert (found["create"], found["modeChange"], found["reset"]) == ([], None, False)


def test_free_and_fragmentation_are_told_and_with_mig_off_what_would_fit():
    off, cut, _, _, _, unlisted, incapable, _ = gpus_json(NODE, None)["gpus"]
    assert off["mig"] == {"capable": True, "current": False, "pending": False}
    assert off["free"]["1g.5gb"] == 7
    assert off["fragmentation"] is None
    assert cut["free"]["1g.5gb"] == 3
    assert cut["free"]["3g.20gb"] == 0
    assert 0 <= cut["fragmentation"] <= 1
    assert (unlisted["free"], unlisted["fragmentation"]) == ({}, None)
    assert (incapable["mig"], incapable["free"]) == ({"capable": False, "current": None, "pending": None}, {})


def shuffled(value: Any, draw: st.DrawFn) -> Any:
    """The same mapping with its keys, at every level, in another order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key], draw) for key in draw(st.permutations(sorted(value)))}
    return [shuffled(item, draw) for item in value] if isinstance(value, list) else value


@st.composite
def shuffles(draw: st.DrawFn) -> tuple[Any, list[SeenGpu], dict[str, Any]]:
    rules = [
        {
            "gpus": {"indices": [0, 1], "models": ["*"]},
            "instances": [{"profile": "1g.5gb", "count": 3}, {"memoryGB": 20}],
        },
        {"gpus": {"all": True}, "instances": [{"memoryGB": 10, "computeSlices": 1, "count": 2}]},
    ]
    written = shuffled(document(rules, rollout={"maxUnavailable": "5%", "pauseOnFailure": True}), draw)
    node = []
    for seen in draw(st.permutations(NODE)):
        instances = tuple(
            SeenInstance(s.instance, s.gi_id, s.compute_instances, s.in_use, tuple(draw(st.permutations(s.holders))))
            for s in draw(st.permutations(seen.instances))
        )
        fields = {name: getattr(seen, name) for name in SeenGpu.__dataclass_fields__}
        node.append(
            SeenGpu(**{**fields, "instances": instances, "holders": tuple(draw(st.permutations(seen.holders)))})
        )
    return written, node, {key: OWNED[key] for key in draw(st.permutations(sorted(OWNED)))}


@settings(max_examples=100, deadline=None)
@given(shuffles())
def test_equal_input_gives_equal_bytes_with_keys_and_gpus_shuffled(shuffle):
    written, node, owned = shuffle
    rules = written["spec"]["rules"]
    expected = json_text(to_json(preview(plan_of(document(rules)), NODE, OWNED)))
    assert json_text(to_json(preview(plan_of(written), node, owned))) == expected
    assert json_text(to_json(preview(read(json.dumps(written)), node, owned))) == expected
    assert json_text(gpus_json(node, None)) == json_text(gpus_json(NODE, None))


def test_ids_of_what_exists_do_not_change_what_is_planned():
    """GPU instance ids say nothing about what should be done: they are reused at once."""
    seen = gpu(0, instances="1g.5gb@0 2g.10gb@4")
    other = gpu(0, instances=tuple(SeenInstance(s.instance, s.gi_id + 50, s.compute_instances) for s in seen.instances))
    one, two = (
        preview(PLANS[2], [g], {uuid(0): geometry("1g.5gb@0 2g.10gb@4", A100_40)}).gpus[0] for g in (seen, other)
    )
    assert (one.keep, one.destroy, one.create) == (two.keep, two.destroy, two.create)
