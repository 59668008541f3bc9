"""GPUPartitionPlan on a real API server: it takes and refuses what the strict values take and refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from controlplane.api import MERGE
from controlplane.running import ControlPlane
from integration.plan_documents import BAD, DIFFERENCES, DIFFERENT, FULL, GOOD, ROOT, Doc
from integration.texts import OFF, PLANS, condition, plan

from migd.plans.plan import plan_of
from migd.plans.problems import BadInput


def named(documents: tuple[Doc, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("doc", documents, ids=lambda doc: doc.id)


def strictly(document: object) -> bool:
    """Whether the strict values take it."""
    try:
        plan_of(document)
    except BadInput:
        return False
    return True


@named(GOOD)
def test_a_good_plan_is_taken_and_means_the_same_when_read_back(plane: ControlPlane, doc: Doc):
    assert strictly(doc.document)
    answer = plane.admin.create(PLANS, doc.document, dryRun="All")
    stored = answer.object()
    assert plan_of(stored) == plan_of(doc.document), "the defaults of the definition are not those of the values"
    assert answer.warnings == ()


@named(tuple(doc for doc in BAD if doc.id not in DIFFERENCES))
def test_a_bad_plan_is_refused_by_both_with_a_sentence_for_people(plane: ControlPlane, doc: Doc):
    assert not strictly(doc.document)
    answer = plane.admin.create(PLANS, doc.document, dryRun="All")
    assert answer.code in (400, 422), f"{answer.code} {answer.message}"
    assert doc.said in answer.message
    assert doc.said, "say what the refusal must say"
    assert "should match" not in answer.message, "a pattern is no sentence"


@named(DIFFERENT)
def test_where_the_two_differ_the_docs_say_so(plane: ControlPlane, doc: Doc):
    answer = plane.admin.create(PLANS, doc.document, dryRun="All")
    assert answer.ok != strictly(doc.document), "no difference any more: move it to the others"
    assert doc.said in answer.message
    assert DIFFERENCES[doc.id] in (ROOT / "docs" / "plans.md").read_text()


def test_the_plans_of_the_docs_are_among_the_good_ones():
    assert len([doc for doc in GOOD if doc.id.startswith("plans.md-")]) == 5


def test_every_difference_has_a_document():
    assert {doc.id for doc in DIFFERENT} == set(DIFFERENCES)
    everything = [doc.id for doc in (*GOOD, *BAD, *DIFFERENT) if doc not in BAD or doc.id not in DIFFERENCES]
    assert len(everything) == len(set(everything))


def test_a_misspelt_key_is_refused_by_kubectl_and_dropped_for_clients_that_do_not_ask(plane: ControlPlane, name: str):
    document = {**plan(name), "spec": {**plan(name)["spec"], "pausd": True}}
    refused = plane.kubectl("apply", "-f", "-", stdin=json.dumps(document))
    assert refused.returncode != 0
    assert 'unknown field "spec.pausd"' in refused.stderr
    taken = plane.admin.create(PLANS, document, fieldValidation="Ignore").object()
    assert "pausd" not in taken["spec"]
    warned = plane.admin.patch(f"{PLANS}/{name}", {"spec": {"pausd": True}}, fieldValidation="Warn")
    assert any("unknown field" in warning and "spec.pausd" in warning for warning in warned.warnings)


def test_status_is_a_resource_of_its_own(plane: ControlPlane, name: str):
    made = plane.admin.create(PLANS, {**plan(name), "status": {"reason": "Held"}}).object()
    assert "status" not in made
    by_status = {"spec": {"paused": True}, "status": {"observedGeneration": 1, "reason": "Paused"}}
    seen = plane.admin.patch(f"{PLANS}/{name}/status", by_status).object()
    assert (seen["spec"]["paused"], seen["status"]["reason"]) == (False, "Paused")
    assert seen["metadata"]["generation"] == 1
    seen = plane.admin.patch(f"{PLANS}/{name}", {"spec": {"paused": True}, "status": {"reason": "x"}}).object()
    assert (seen["metadata"]["generation"], seen["status"]["reason"]) == (2, "Paused")


def test_wait_returns_on_a_condition_of_this_generation_only(plane: ControlPlane, name: str):
    plane.admin.create(PLANS, plan(name)).object()
    ready = {"status": {"observedGeneration": 1, "conditions": [condition("Ready")]}}
    plane.admin.patch(f"{PLANS}/{name}/status", ready).object()
    wait = ("wait", "--for=condition=Ready", f"gpp/{name}")
    assert plane.kubectl(*wait, "--timeout=5s").returncode == 0
    plane.admin.patch(f"{PLANS}/{name}", {"spec": {"priority": 1}}).object()
    assert plane.kubectl(*wait, "--timeout=1s").returncode != 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"type": "Happy"}, "status.conditions[0].type: Unsupported value"),
        ({"reason": "BecauseISaidSo"}, "status.conditions[0].reason: Unsupported value"),
        ({"status": "true"}, "status.conditions[0].status: Unsupported value"),
        ({"observedGeneration": None}, "status.conditions[0].observedGeneration: Required value"),
        ({"message": "x" * 4097}, "status.conditions[0].message: Too long"),
        ({"lastTransitionTime": "yesterday"}, "status.conditions[0].lastTransitionTime"),
    ],
)
def test_a_condition_is_of_the_closed_lists(plane: ControlPlane, name: str, changes: dict[str, Any], said: str):
    plane.admin.create(PLANS, plan(name)).object()
    answer = plane.admin.patch(f"{PLANS}/{name}/status", {"status": {"conditions": [condition("Ready") | changes]}})
    assert answer.code == 422
    assert said in answer.message


def test_the_largest_status_fits_its_bound(plane: ControlPlane, name: str):
    plane.admin.create(PLANS, plan(name)).object()
    groups = [_group(n) for n in range(50)]
    preview = {"digest": "a" * 64, "observedGeneration": 1, "totals": {"gpus": 8000}, "groups": groups}
    assert len(json.dumps(preview)) <= 256 * 1024
    history = [
        {"generation": n, "startedAt": "2026-01-01T00:00:00Z", "result": "Succeeded", "evicted": 7} for n in range(10)
    ]
    counted = {"generation": 1, "evicted": 1_000_000, "pending": [f"{n:036}" for n in range(256)]}
    status = {"preview": preview, "history": history, "evictions": counted}
    plane.admin.patch(f"{PLANS}/{name}/status", {"status": status}, MERGE).object()
    for more in (
        {"preview": {**preview, "groups": [*groups, _group(50)]}},
        {"history": [*history, history[0]]},
        {"evictions": {**counted, "pending": [*counted["pending"], "x"]}},
    ):
        answer = plane.admin.patch(f"{PLANS}/{name}/status", {"status": more})
        assert answer.code == 422
        assert "Too many" in answer.message


def test_kubectl_shows_how_a_plan_stands(plane: ControlPlane, name: str):
    plane.admin.create(PLANS, plan(name, priority=7)).object()
    status = {
        "nodes": {"summary": "3/4"},
        "gpus": {"summary": "24/32"},
        "reason": "InUse",
        "message": "one GPU is in use",
        "conditions": [condition("Ready", "False", "InUse")],
    }
    plane.admin.patch(f"{PLANS}/{name}/status", {"status": status}).object()
    head, row = plane.kubectl("get", "gpp", name).stdout.splitlines()
    assert head.split() == ["NAME", "NODES", "GPUS", "READY", "REASON", "AGE"]
    assert row.split()[:5] == [name, "3/4", "24/32", "False", "InUse"]
    head, row = plane.kubectl("get", "gpupartitionplans", name, "-o", "wide").stdout.splitlines()
    assert head.split()[-3:] == ["PRIORITY", "PAUSED", "MESSAGE"]
    assert row.split()[6:] == ["7", "false", "one", "GPU", "is", "in", "use"]
    assert name in plane.kubectl("get", "migd").stdout


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("gpp", "How GPUs should be cut into MIG instances"),
        ("gpp.spec.disruption.policy", "WaitForIdle never ends a pod."),
        ("gpp.spec.disruption.protect", "Pods that are never evicted, by their labels."),
        ("gpp.spec.rules.instances.count", "How many. Default 1."),
        ("gpp.status.preview.digest", "The annotation migd.dev/approved takes it."),
        ("gpart.spec", "nodeUID\t<string> -required-"),
        ("gpart.status.observed", "How the GPU is now."),
        ("gpart.status.evictions.code", "Absent where none was asked for."),
    ],
)
def test_explain_reads_well(plane: ControlPlane, path: str, said: str):
    assert said in " ".join(plane.kubectl("explain", path).stdout.split(" "))


def test_an_edit_of_a_full_plan_keeps_what_it_does_not_name(plane: ControlPlane, name: str):
    spec = {key: value for key, value in FULL.items() if key != "rules"}
    plane.admin.create(PLANS, plan(name, *FULL["rules"], **spec)).object()
    seen = plane.admin.patch(f"{PLANS}/{name}", {"spec": {"rules": [OFF]}}).object()
    assert plan_of(seen).spec == plan_of(plan(name, OFF, **spec)).spec
    refused = plane.admin.patch(f"{PLANS}/{name}", {"spec": {"rules": []}})
    assert refused.causes == (
        ("spec.rules", "Invalid value: must not be empty: a list of {gpus, instances} or {gpus, mig: Disabled}"),
    )


def _group(number: int) -> dict[str, Any]:
    counts = [{"profile": f"{n}g.{n}0gb+me.all", "count": 7} for n in range(1, 10)]
    return {
        "model": "NVIDIA A100-SXM4-80GB",
        "from": f"{number}×1g.10gb " * 8,
        "to": "3g.40gb 3×1g.10gb " * 8,
        "nodes": 1000,
        "gpus": 8000,
        "exampleNodes": [f"{'n' * 248}-{n}" for n in range(5)],
        "keep": counts,
        "destroy": counts,
        "create": counts,
        "message": "m" * 1024,
    }
