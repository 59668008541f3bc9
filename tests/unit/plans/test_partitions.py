"""GPUPartitions and plan statuses as values: the fields of the definitions, strict, and equal when read back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from unit.migd_operator.fleets import gpu

from migd.plans.conditions import PHASES, REASONS, Condition, Said, following, time_text
from migd.plans.partitions import PartitionSpec, PartitionStatus, partition_document, partition_of
from migd.plans.problems import BadInput
from migd.plans.statuses import PlanEvictions, PlanStatus, plan_status_document, plan_status_of

ROOT = Path(__file__).parents[3]
SCHEMAS: dict[str, Any] = {
    crd["spec"]["names"]["plural"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    for crd in (yaml.safe_load(p.read_text()) for p in sorted((ROOT / "crds").glob("*.yaml")))
}
GPUS = SCHEMAS["gpupartitions"]
NOW = datetime(2026, 3, 1, tzinfo=UTC)


def names_in_definition(schema: dict[str, Any]) -> dict[str, Any]:
    inner = schema.get("items", schema)
    return {name: names_in_definition(field) for name, field in inner.get("properties", {}).items()}


def names_in_values(schema: dict[str, Any]) -> dict[str, Any]:
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


@pytest.mark.parametrize(
    ("model", "definition"),
    [
        (PartitionSpec, GPUS["spec"]),
        (PartitionStatus, GPUS["status"]),
        (PlanStatus, SCHEMAS["gpupartitionplans"]["status"]),
    ],
)
def test_the_values_have_exactly_the_fields_of_the_definitions(model: Any, definition: dict[str, Any]):
    assert names_in_values(model.model_json_schema(by_alias=True)) == names_in_definition(definition)


def test_phases_and_reasons_are_the_definitions_closed_lists():
    assert set(PHASES) == set(GPUS["status"]["properties"]["phase"]["enum"])
    conditions = GPUS["status"]["properties"]["conditions"]["items"]["properties"]
    assert set(REASONS) == set(conditions["reason"]["enum"])


def full() -> dict[str, Any]:
    """A document with everything in it that an agent and the operator write."""
    document = partition_document(gpu(layout="3g.40gb 2g.20gb", busy=["2g.20gb@0"], labels={"migd.dev/node": "n1"}))
    document["spec"] |= {
        "desired": {
            "summary": "3g.40gb 40 GB",
            "mig": "Enabled",
            "instances": [{"profile": "3g.40gb"}, {"memoryGB": 40, "computeSlices": 2, "count": 2}],
            "plan": {"name": "p", "uid": "u", "generation": 3},
            "disruption": {
                "policy": "Evict",
                "timeout": "1h30m",
                "protect": {"matchLabels": {"keep": "yes"}},
                "allow": ["EmptyDir"],
            },
            "drift": "Observe",
        },
        "assignment": {"id": "0123456789abcdef", "gpus": 2},
    }
    pod = {"namespace": "a", "name": "b", "uid": "c"}
    document["status"] |= {
        "phase": "Draining",
        "reason": "InUse",
        "blockers": [{"reason": "InUse", "instance": "2g.20gb@0", "pod": pod, "pid": 7, "command": "python"}],
        "victims": [pod],
        "evictions": [
            {
                "podUID": "c",
                "code": 429,
                "reason": "DrainBlocked",
                "podDisruptionBudgets": ["x"],
                "at": "2026-03-01T00:00:01Z",
            }
        ],
        "lastTransition": {
            "id": "t",
            "generation": 3,
            "from": "a",
            "to": "b",
            "startedAt": "2026-03-01T00:00:00Z",
            "steps": [{"name": "Close", "startedAt": "2026-03-01T00:00:00Z", "milliseconds": 0}],
        },
        "previous": {"mig": "Enabled", "instances": [{"profile": "7g.80gb", "placement": {"start": 0, "size": 8}}]},
    }
    return document


def test_a_document_reads_back_equal_and_writes_the_same_bytes():
    one = partition_of(full())
    again = partition_document(one)
    assert partition_of(again) == one
    assert again["spec"] == full()["spec"]
    assert yaml.safe_dump(partition_document(partition_of(again))) == yaml.safe_dump(again)


def test_the_gpu_of_a_partition_is_what_its_status_tells_and_boards_are_shared():
    one, other = partition_of(full()), partition_of(full())
    assert one.gpu is not None
    assert other.gpu is not None
    assert one.gpu.board is other.gpu.board
    assert sorted(map(str, one.gpu.busy)) == ["2g.20gb@0"]
    assert one.owned == one.gpu.geometry
    assert one.gpu.mig_on
    foreign = gpu(layout="3g.40gb", foreign=True)
    assert foreign.owned == frozenset()


def test_an_instance_of_which_use_is_not_told_counts_as_in_use():
    document = full()
    for instance in document["status"]["observed"]["instances"]:
        del instance["inUse"]
    found = partition_of(document).gpu
    assert found is not None
    assert found.busy == found.geometry


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("spec", "desired", "mig"), "On", "spec.desired.mig"),
        (("spec", "wish"), 1, "spec.wish"),
        (("spec", "assignment", "gpus"), "2", "spec.assignment.gpus"),
        (("spec", "assignment", "id"), "XYZ", "spec.assignment.id"),
        (("spec", "desired", "disruption", "maxEvictions"), 1, "spec.desired.disruption.maxEvictions"),
        (("status", "evictions", 0, "reason"), "InUse", "status.evictions[0].reason"),
        (("status", "phase"), "Busy", "status.phase"),
        (("status", "board", "index"), True, "status.board.index"),
        (("status", "lastTransition", "startedAt"), "yesterday", "status.lastTransition.startedAt"),
        (("spec", "desired", "instances"), [], "spec.desired"),
    ],
)
def test_what_is_wrong_in_a_document_is_said_with_its_place(path: tuple[str | int, ...], value: object, said: str):
    document = full()
    inner = document
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    with pytest.raises(BadInput) as bad:
        partition_of(document)
    assert said in str(bad.value)


def test_an_answer_without_a_call_has_no_code_and_one_that_is_well_no_reason():
    document = full()
    document["status"]["evictions"] = [
        {"podUID": "a", "at": "2026-03-01T00:00:01Z"},
        {"podUID": "b", "code": 201, "at": "2026-03-01T00:00:01Z"},
        {"podUID": "c", "reason": "DrainBlocked", "message": "a static pod", "at": "2026-03-01T00:00:01Z"},
    ]
    found = partition_of(document)
    assert [(e.code, e.reason) for e in found.status.evictions] == [(None, None), (201, None), (None, "DrainBlocked")]
    assert partition_document(found)["status"]["evictions"] == document["status"]["evictions"]


def test_a_board_that_names_a_profile_twice_is_refused_with_its_place():
    document = full()
    document["status"]["board"]["profiles"] *= 2
    with pytest.raises(BadInput, match="profiles"):
        partition_of(document)


def test_a_plan_status_reads_back_equal():
    document = {
        "observedGeneration": 2,
        "nodes": {"summary": "1/2", "matched": 2, "ready": 1},
        "preview": {"digest": "0" * 56, "observedGeneration": 2, "totals": {"nodes": 0, "gpus": 0}},
        "evictions": {"generation": 2, "evicted": 3, "pending": ["u-1", "u-2"]},
        "history": [{"generation": 2, "startedAt": "2026-03-01T00:00:00Z", "result": "Running", "evicted": 3}],
    }
    status = plan_status_of(document)
    assert plan_status_document(status) == document
    assert plan_status_of(None) == PlanStatus()
    assert plan_status_document(PlanStatus(evictions=PlanEvictions(generation=3))) == {"evictions": {"generation": 3}}
    with pytest.raises(BadInput, match=r"status\.nodes"):
        plan_status_of({"nodes": 3})


@given(st.sampled_from(["True", "False", "Unknown"]), st.sampled_from(["True", "False", "Unknown"]))
def test_the_time_of_a_transition_moves_with_the_status_only(first: Any, second: Any):
    (one,) = following((), [Said("Ready", first, "Waiting", "a")], 1, NOW)
    later = NOW + timedelta(hours=1, microseconds=5)
    (two,) = following((one,), [Said("Ready", second, "InUse", "b")], 2, later)
    assert two.observed_generation == 2
    assert two.last_transition_time == (NOW if first == second else NOW + timedelta(hours=1))


def test_times_are_read_in_any_zone_and_written_in_utc():
    moment = datetime(2026, 3, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert time_text(moment) == "2026-03-01T00:00:00Z"
    text = {
        "type": "Ready",
        "status": "True",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-03-01T02:00:00+02:00",
        "reason": "AsWished",
        "message": "",
    }
    read = Condition.model_validate(text, by_alias=True)
    assert read.last_transition_time == NOW
    assert read.model_dump(mode="json", by_alias=True)["lastTransitionTime"] == "2026-03-01T00:00:00Z"
