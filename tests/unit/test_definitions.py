"""The custom resource definitions as texts: bounded, explained, and with exactly the fields of the values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from migd.plans.partitions import BUDGETS_MAX, PODS_MAX, NotGoing
from migd.plans.plan import API_VERSION, KIND, PlanSpec

ROOT = Path(__file__).parents[2]
PATHS = sorted((ROOT / "crds").glob("*.yaml"))
BY_PLURAL = {crd["spec"]["names"]["plural"]: crd for crd in (yaml.safe_load(p.read_text()) for p in PATHS)}
SCHEMAS = {n: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for n, crd in BY_PLURAL.items()}
# what Kubernetes itself explains
ITS_OWN = {"apiVersion", "kind", "metadata"}


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field under a schema by its path, items of lists and values of mappings included."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        if path or name not in ITS_OWN:
            yield from fields(field, f"{path}.{name}")
    for inner, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if inner in schema:
            yield from fields(schema[inner], path + mark)


ALL = [pytest.param(field, id=n + path) for n, schema in SCHEMAS.items() for path, field in fields(schema, "")]


@pytest.mark.parametrize("field", ALL)
def test_every_field_has_a_type_and_bounds(field: dict[str, Any]):
    assert field.get("type") or field.get("x-kubernetes-int-or-string")
    assert not field.get("x-kubernetes-preserve-unknown-fields")
    kind = field.get("type")
    if kind == "array":
        assert field["maxItems"] <= 1024
        assert field["x-kubernetes-list-type"] in ("atomic", "set", "map")
    elif kind == "string":
        assert "maxLength" in field or "enum" in field or field.get("format") == "date-time"
    elif kind == "integer":
        assert "minimum" in field
        assert field["format"] in ("int32", "int64")
    elif "additionalProperties" in field:
        assert "maxProperties" in field


@pytest.mark.parametrize("field", ALL)
def test_every_field_is_explained_with_its_default(field: dict[str, Any], request: pytest.FixtureRequest):
    if request.node.callspec.id.endswith(("[]", "{}")) and field["type"] != "object":
        return  # the list says it
    said = field["description"]
    assert said[0].isupper() or said[0] == "{"
    assert said.endswith((".", "?"))
    if "default" in field and not isinstance(field["default"], dict):
        default = str(field["default"]).lower() if isinstance(field["default"], bool) else field["default"] or "none"
        assert f"Default {0 if field['default'] == 0 and default == 'none' else default}." in said


@pytest.mark.parametrize("field", ALL)
def test_every_rule_says_what_is_wrong_to_people(field: dict[str, Any]):
    for rule in field.get("x-kubernetes-validations", ()):
        assert len(rule["message"].split()) >= 4
        assert "self" not in rule["message"]


def test_the_definitions_are_named_as_the_values():
    plan = BY_PLURAL["gpupartitionplans"]["spec"]
    assert f"{plan['group']}/{plan['versions'][0]['name']}" == API_VERSION
    assert plan["names"]["kind"] == KIND
    for plural, crd in BY_PLURAL.items():
        assert crd["metadata"]["name"] == f"{plural}.{crd['spec']['group']}"
        assert crd["spec"]["scope"] == "Cluster"
        assert crd["spec"]["names"]["categories"] == ["migd"]
        assert [v["name"] for v in crd["spec"]["versions"]] == ["v1alpha1"]


def test_a_plan_has_exactly_the_fields_of_the_values():
    """Names only; what they take is compared on a real API server, document by document."""
    schema = SCHEMAS["gpupartitionplans"]["properties"]["spec"]
    assert _names(schema) == _names_of_values(PlanSpec.model_json_schema(by_alias=True))


def test_a_partition_has_the_bounds_of_the_values():
    schema = SCHEMAS["gpupartitions"]["properties"]["status"]["properties"]
    assert {schema[name]["maxItems"] for name in ("victims", "evictions")} == {PODS_MAX}
    answer = schema["evictions"]["items"]["properties"]
    assert set(answer["reason"]["enum"]) == set(get_args(NotGoing))
    for inner in (answer, schema["blockers"]["items"]["properties"]):
        assert inner["podDisruptionBudgets"]["maxItems"] == BUDGETS_MAX


def test_the_words_are_those_of_the_docs_in_both_definitions():
    page = (ROOT / "docs" / "plans.md").read_text()
    listed = {
        word: set(re.findall(r"`(\w+)`", page.split(f"**{word}**", 1)[1].split("\n\n", 1)[0]))
        for word in ("Phases", "Reasons")
    }
    status = {plural: schema["properties"]["status"]["properties"] for plural, schema in SCHEMAS.items()}
    phases = set(status["gpupartitions"]["phase"]["enum"])
    assert phases == listed["Phases"]
    counted = set(status["gpupartitionplans"]["gpus"]["properties"]) - {"summary", "matched"}
    assert counted == {phase[0].lower() + phase[1:] for phase in phases}
    for found in status.values():
        assert set(found["conditions"]["items"]["properties"]["reason"]["enum"]) == listed["Reasons"]
    groups = status["gpupartitionplans"]["preview"]["properties"]["groups"]["items"]["properties"]
    assert set(groups["reason"]["enum"]) == listed["Reasons"]


def _names(schema: dict[str, Any]) -> dict[str, Any]:
    """The names of a schema's fields, nested as the fields are."""
    inner = schema.get("items", schema)
    return {name: _names(field) for name, field in inner.get("properties", {}).items()}


def _names_of_values(schema: dict[str, Any]) -> dict[str, Any]:
    """The same of a JSON schema that pydantic wrote: with references, and null as one of several."""
    known = schema.get("$defs", {})

    def names(part: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in part:
            return names(known[part["$ref"].rsplit("/", 1)[1]])
        inside = [found for choice in part.get("anyOf", ()) if (found := names(choice))]
        if inside:
            return inside[0]
        if "items" in part:
            return names(part["items"])
        return {name: names(field) for name, field in part.get("properties", {}).items()}

    return names(schema)
