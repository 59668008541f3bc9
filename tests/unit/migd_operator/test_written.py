"""What is decided is what the definitions take: the same words, bounds and required fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from unit.migd_operator.fleets import HALVES, fleet, gpu, node, plan, settled, turn

from migd.plans.partitions import partition_document
from migd.plans.statuses import plan_status_document, plan_status_of
from migd_operator.facts import HOLD, Fleet

SCHEMAS: dict[str, Any] = {
    crd["spec"]["names"]["plural"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    for crd in (yaml.safe_load(p.read_text()) for p in sorted((Path(__file__).parents[3] / "crds").glob("*.yaml")))
}


def faults(schema: dict[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """Where a value is not what a structural schema takes."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kind = kinds.get(schema.get("type", ""), object)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{path} is no {schema['type']}: {value!r}"
    elif isinstance(value, dict):
        if not value and "[" not in path:  # lists are written whole
            yield f"{path} is empty: applied after one with something in it, the API server makes it null"
        yield from (f"{path}.{key} is missing" for key in schema.get("required", ()) if key not in value)
        for key, inner in value.items():
            known = schema.get("properties", {})
            yield from faults(known[key], inner, f"{path}.{key}") if key in known else (f"{path}.{key} is unknown",)
    elif isinstance(value, list):
        if len(value) > schema["maxItems"]:
            yield f"{path} has too many items"
        for at, inner in enumerate(value):
            yield from faults(schema["items"], inner, f"{path}[{at}]")
    elif isinstance(value, str):
        wrong = len(value) > schema.get("maxLength", 1 << 30) or len(value) < schema.get("minLength", 0)
        wrong |= value not in schema.get("enum", [value]) or not re.search(schema.get("pattern", ""), value)
        if wrong:
            yield f"{path}: {value!r}"
    elif isinstance(value, int) and value < schema.get("minimum", value):
        yield f"{path} is too small"


FLEETS = {
    "nothing": turn(fleet([plan()], [node()], [])),
    "done": settled(fleet([plan()], [node()], [gpu(), gpu(index=1, layout="7g.80gb")])),
    "started": turn(fleet([plan(instances=HALVES)], [node()], [gpu(layout="7g.80gb")])),
    "conflict": turn(fleet([plan("a"), plan("b", HALVES)], [node()], [gpu()])),
    "refused": turn(fleet([plan(instances=[{"profile": "9g.99gb"}])], [node()], [gpu()])),
    "held": turn(fleet([plan("off", None), plan("x", paused=True)], [node(annotations={HOLD: ""})], [gpu()])),
    "needs": turn(fleet([plan(instances=[{"memoryGB": 40, "count": 2}])], [node()], [gpu(layout=None)])),
    "silent": turn(fleet([plan(approval="Manual")], [node(agent="silent")], [gpu(layout="7g.80gb")])),
}


@pytest.mark.parametrize("found", FLEETS.values(), ids=FLEETS)
def test_the_definitions_take_all_that_is_written(found: Fleet):
    for one in found.partitions:
        document = partition_document(one)
        for part in ("spec", "status"):
            assert list(faults(SCHEMAS["gpupartitions"][part], document[part], part)) == []
    for facts in found.plans:
        document = plan_status_document(facts.status)
        assert list(faults(SCHEMAS["gpupartitionplans"]["status"], document, "status")) == []
        assert plan_status_of(document) == facts.status


def test_a_plan_that_loses_all_its_gpus_can_be_told():
    """Seen: its status was refused for ever, so it went on to say what had been true before."""
    before = turn(fleet([plan()], [node()], [gpu(layout="7g.80gb")]))
    after = turn(replace(before, partitions=()))
    totals = plan_status_document(after.plans[0].status)["preview"]["totals"]
    assert totals == {"nodes": 0, "gpus": 0}


def test_the_check_itself_finds_faults():
    schema = SCHEMAS["gpupartitionplans"]["status"]
    assert list(faults(schema, {"reason": "x" * 65}, "status")) == ["status.reason: " + repr("x" * 65)]
    assert list(faults(schema, {"nope": 1}, "status")) == ["status.nope is unknown"]
    assert list(faults(schema, {"preview": {"digest": "0" * 16}}, "status")) == [
        "status.preview.observedGeneration is missing",
        "status.preview.totals is missing",
    ]
