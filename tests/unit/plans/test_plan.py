"""The plan as strict values: what is taken, and every refusal with its path and what to do."""

from __future__ import annotations

import pytest
from unit.plans.texts import document, everywhere, plan, problems

from migd.plans.plan import LabelExpression, LabelSelector, Plan, cluster_notes, document_of, plan_of
from migd.plans.problems import BadInput
from migd.plans.reading import read

OFF = {"gpus": {"all": True}, "mig": "Disabled"}
FULL = """
apiVersion: migd.dev/v1alpha1
kind: GPUPartitionPlan
metadata: {name: inference, labels: {team: a}, uid: 6a3, resourceVersion: "7", creationTimestamp: 2026-01-01T00:00:00Z}
spec:
  nodeSelector: {matchLabels: {pool: inference}, matchExpressions: [{key: zone, operator: In, values: [a, b]}]}
  priority: 5
  rules:
  - gpus: {models: ["*A100*80GB*"], pciDeviceIds: ["0x20B210DE", 20b510de]}
    instances: [{profile: 3g.40gb, count: 1}, {memoryGB: 10, computeSlices: 1, count: 3}]
  - gpus: {indices: [7]}
    mig: Disabled
  - gpus: {uuids: [GPU-5c89852c-0000-1111-2222-333344445555]}
    instances: []
    allowEmpty: true
  disruption: {policy: Evict, timeout: 1h30m, gracePeriodSeconds: 30,
    maxEvictions: 4, protect: {matchLabels: {keep: "yes"}}, allow: [EmptyDir]}
  rollout: {maxUnavailable: 25%, pauseOnFailure: false}
  approval: Manual
  paused: true
  onFailure: Hold
  drift: Observe
  foreignInstances: Adopt
  owner: TakeOver
status: {conditions: [{type: whatever}]}
"""


def test_every_field_of_the_api_is_read_and_written_back():
    found = read(FULL)
    assert isinstance(found, Plan)
    assert found.name == "inference"
    assert found.spec.disruption.timeout_s == 5400
    assert found.spec.rules[0].instances is not None
    assert [str(i) for i in found.spec.rules[0].instances] == ["3g.40gb", "10 GB and 1 compute slices"]
    assert found.spec.rollout.max_unavailable == "25%"
    assert found.spec.disruption.protect is not None
    assert plan_of(document_of(found)) == found


def test_defaults_are_those_of_the_design():
    spec = plan(OFF).spec
    assert (spec.disruption.policy, spec.disruption.timeout_s, spec.rollout.max_unavailable) == ("WaitForIdle", 1800, 1)
    assert (spec.on_failure, spec.drift, spec.foreign_instances, spec.owner) == (
        "Rollback",
        "Correct",
        "Refuse",
        "Refuse",
    )


def test_null_for_an_optional_part_means_left_out():
    assert plan(OFF, disruption={"gracePeriodSeconds": None, "maxEvictions": None, "protect": None}) == plan(OFF)


def test_no_pods_and_all_pods_are_two_things_to_protect():
    none, every = plan(OFF, disruption={"protect": None}), plan(OFF, disruption={"protect": {}})
    assert (none.spec.disruption.protect, every.spec.disruption.protect) == (None, LabelSelector())
    assert plan_of(document_of(every)) == every != none


def test_equal_selectors_are_one_key_in_whatever_order_their_labels_were_written():
    one, same = (LabelSelector(match_labels=labels) for labels in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}))
    need = LabelExpression(key="a", operator="Exists")
    others = (LabelSelector(), LabelSelector(match_labels={"a": "1"}), LabelSelector(match_expressions=(need,)))
    assert len({one, same, *others}) == 4


def test_a_plan_cannot_be_changed():
    with pytest.raises(ValueError):
        plan(OFF).spec.priority = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "path", "said"),
    [
        ({"count": 0}, "count", "must be at least 1, not 0"),
        ({"count": -1}, "count", "must be at least 1, not -1"),
        ({"count": 65}, "count", "must be at most 64, not 65"),
        ({"count": True}, "count", "must be a whole number, not true"),
        ({"count": "2"}, "count", 'must be a whole number, not "2" | without quotes'),
        ({"count": 2.0}, "count", "must be a whole number, not 2.0"),
        ({"count": None}, "count", "must be a whole number, not null"),
        ({"profile": 3}, "profile", "must be text, not 3"),
        ({"profile": "3g"}, "profile", '"3g" is not a profile name | a profile name looks like 3g.40gb'),
        ({"profile": "1g.5gb.me"}, "profile", "did you mean 1g.5gb+me?"),
        ({"profile": "MIG 3G.40GB"}, "profile", "did you mean 3g.40gb?"),
        ({"profile": "1c.3g.40gb"}, "profile", "not in v1alpha1: 1c.3g.40gb | 3g.40gb is the whole one"),
        ({"memoryGB": 5}, "", "needs exactly one of profile and memoryGB"),
        ({"computeSlices": 2}, "", "computeSlices goes with memoryGB only"),
        ({"cuont": 2}, "cuont", "unknown key | did you mean count?"),
    ],
)
def test_a_wrong_instance_is_refused_at_its_path(wrong, path, said):
    rule = {"gpus": {"all": True}, "instances": [{"profile": "1g.10gb"}, {"profile": "3g.40gb", **wrong}]}
    found = problems(document([rule]))
    where = "spec.rules[0].instances[1]" + (f".{path}" if path else "")
    assert list(found) == [where]
    assert said in found[where]


@pytest.mark.parametrize("need", [0, -1, 10_001, True, "5", 2.5])
def test_a_need_is_a_whole_number_of_gb(need):
    rule = {"gpus": {"all": True}, "instances": [{"memoryGB": need}]}
    assert list(problems(document([rule]))) == ["spec.rules[0].instances[0].memoryGB"]


@pytest.mark.parametrize(
    ("gpus", "path", "said"),
    [
        ({}, "", "selects nothing"),
        ({"all": False}, ".all", "must be true, not false | leave it out"),
        ({"all": 1}, ".all", "must be true, not 1"),
        ({"all": 1.0}, ".all", "must be true, not 1.0"),
        ({"indices": []}, ".indices", "must not be empty"),
        ({"indices": 7}, ".indices", "must be a list, not 7 | write [7]"),
        ({"indices": [-1]}, ".indices[0]", "must be at least 0"),
        ({"indices": [True]}, ".indices[0]", "must be a whole number, not true"),
        ({"indices": ["1"]}, ".indices[0]", "must be a whole number"),
        ({"indices": [3, 1, 3]}, ".indices", "GPU index 3 is named twice: at [0] and [2]"),
        ({"uuids": ["GPU-aa-1", "gpu-AA-1"]}, ".uuids", "named twice: at [0] and [1]"),
        ({"uuids": ["MIG-aa-1"]}, ".uuids[0]", "that is a MIG device"),
        ({"uuids": ["GPU-\u212a"]}, ".uuids[0]", "is not a GPU's UUID"),  # the sign for kelvin, a K in any case
        ({"models": [" "]}, ".models[0]", "must not be empty"),
        ({"models": "*"}, ".models", "must be a list"),
        ({"pciDeviceIds": [0x20B210DE]}, ".pciDeviceIds[0]", 'write "0x20B210DE" in quotes'),
        ({"pciDeviceIds": ["0x20B2"]}, ".pciDeviceIds[0]", "is not an NVIDIA PCI device id"),
        ({"pciDeviceIds": ["0x20B210DE", "20b210de"]}, ".pciDeviceIds", "named twice"),
        ({"index": [1]}, ".index", "did you mean indices?"),
    ],
)
def test_a_wrong_selection_is_refused_at_its_path(gpus, path, said):
    found = problems(document([{"gpus": gpus, "mig": "Disabled"}]))
    where = f"spec.rules[0].gpus{path}"
    assert said in found[where]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({}, "needs exactly one of instances and mig: Disabled"),
        ({"mig": "Disabled", "instances": [{"profile": "1g.5gb"}]}, "needs exactly one of instances and mig: Disabled"),
        ({"mig": "Disabled", "allowEmpty": True}, "allowEmpty goes with instances only"),
        ({"instances": []}, "allowEmpty: true says it is meant"),
        ({"instances": [], "allowEmpty": False}, "allowEmpty: true says it is meant"),
        ({"instances": [{"profile": "1g.5gb"}] * 2}, "1g.5gb is named twice: instances[0] and instances[1]"),
        ({"instances": [{"memoryGB": 5}, {"memoryGB": 5, "count": 2}]}, "5 GB is named twice"),
    ],
)
def test_a_rule_with_no_single_meaning_is_refused(rule, said):
    found = problems(document([{"gpus": {"all": True}, **rule}]))
    assert said in found["spec.rules[0]"]


@pytest.mark.parametrize("written", [False, "off", "disabled", "Enabled", True])
def test_mig_is_disabled_or_not_said_at_all(written):
    found = problems(document([{"gpus": {"all": True}, "mig": written}]))
    assert "must be Disabled" in found["spec.rules[0].mig"]


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        ({"indices": [7, 1]}, {"indices": [7]}, True),
        ({"indices": [7]}, {"indices": [6, 7]}, True),
        ({"uuids": ["GPU-a-1"]}, {"uuids": ["gpu-A-1"]}, True),
        ({"all": True}, {"indices": [7]}, True),
        ({"all": True}, {"all": True}, True),
        ({"indices": [7]}, {"all": True}, False),
        ({"indices": [7], "models": ["*A100*"]}, {"indices": [7]}, False),
        ({"indices": [0, 1]}, {"indices": [1, 2], "models": ["*A100*"]}, False),
        ({"indices": [0, 1]}, {"indices": [1], "models": ["*A100*"]}, True),
        ({"models": ["*A100*"]}, {"models": ["*"]}, False),
    ],
)
def test_a_gpu_named_in_two_rules_is_refused_where_the_second_can_never_decide(first, second, refused):
    found = problems(
        document([{"gpus": first, "mig": "Disabled"}, {"gpus": second, "instances": [{"profile": "1g.5gb"}]}])
    )
    assert bool(found) == refused
    assert not refused or "rules[1] can never decide" in found["spec"]


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("force", "force delete"),
        ("hooks", "hooks"),
        ("preHook", "hooks"),
        ("reboot", "a reboot by migd"),
        ("vGPU", "vGPU"),
        ("sharing", "sharing"),
        ("timeSlicing", "time-slicing"),
        ("time-slicing", "time-slicing"),
        ("mps", "MPS"),
        ("replicas", "sharing by replicas"),
    ],
)
def test_what_v1alpha1_does_not_have_is_refused_with_a_sentence(key, what):
    for at, spec in (("spec", {key: {"a": 1}}), ("spec.disruption", {"disruption": {key: 1}})):
        found = problems(document([OFF], **spec))
        assert found[f"{at}.{key}"] == f"{what} is not in v1alpha1 | leave it out"
    found = problems(document([{**OFF, key: 1}]))
    assert f"{what} is not in v1alpha1" in found[f"spec.rules[0].{key}"]


@pytest.mark.parametrize(
    ("spec", "path", "said"),
    [
        ({"disruption": {"timeout": 30}}, "spec.disruption.timeout", "write it as 30m, 90s or 1h30m"),
        ({"disruption": {"timeout": "30"}}, "spec.disruption.timeout", "is not a duration"),
        ({"disruption": {"timeout": ""}}, "spec.disruption.timeout", "is not a duration"),
        ({"disruption": {"timeout": "0s"}}, "spec.disruption.timeout", "between 1s and 168h"),
        ({"disruption": {"timeout": "200h"}}, "spec.disruption.timeout", "between 1s and 168h"),
        ({"disruption": {"timeout": "-5m"}}, "spec.disruption.timeout", "is not a duration"),
        ({"disruption": {"timeout": "٣m"}}, "spec.disruption.timeout", "is not a duration"),
        ({"rules": [{"gpus": {"indices": [n]}, "mig": "Disabled"} for n in range(257)]}, "spec.rules", "more than 256"),
        ({"nodeSelector": {"matchLabels": {f"a{n}": "" for n in range(65)}}}, "spec.nodeSelector.matchLabels", "64"),
        ({"disruption": {"gracePeriodSeconds": 0}}, "spec.disruption.gracePeriodSeconds", "must be at least 1"),
        ({"disruption": {"policy": "evict"}}, "spec.disruption.policy", "did you mean Evict?"),
        ({"disruption": {"allow": ["EmptyDir", "EmptyDir"]}}, "spec.disruption.allow", "named twice"),
        ({"disruption": {"allow": ["Everything"]}}, "spec.disruption.allow[0]", "must be EmptyDir or Unmanaged"),
        ({"rollout": {"maxUnavailable": "101%"}}, "spec.rollout.maxUnavailable", "a percentage from 0% to 100%"),
        ({"rollout": {"maxUnavailable": "٣%"}}, "spec.rollout.maxUnavailable", "a percentage from 0% to 100%"),
        ({"rollout": {"maxUnavailable": -1}}, "spec.rollout.maxUnavailable", "a number of nodes from 0 on"),
        ({"rollout": {"maxUnavailable": True}}, "spec.rollout.maxUnavailable", "a number of nodes from 0 on"),
        ({"rollout": {"maxUnavailable": "2"}}, "spec.rollout.maxUnavailable", "a number of nodes from 0 on"),
        ({"paused": "true"}, "spec.paused", 'must be true or false, not "true"'),
        ({"priority": "1"}, "spec.priority", "must be a whole number"),
        ({"aproval": "Manual"}, "spec.aproval", "did you mean approval?"),
        ({"nodeSelector": {"matchLabels": {"a b": "c"}}}, "spec.nodeSelector.matchLabels", "is not a label's name"),
        ({"nodeSelector": {"matchLabels": {"a": "b c"}}}, "spec.nodeSelector.matchLabels", "is not a label's value"),
        ({"nodeSelector": {"pool": "a"}}, "spec.nodeSelector.pool", "known here: matchExpressions, matchLabels"),
        (
            {"nodeSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
            "spec.nodeSelector.matchExpressions[0]",
            "operator In needs values",
        ),
        (
            {"nodeSelector": {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}},
            "spec.nodeSelector.matchExpressions[0]",
            "takes no values",
        ),
        ({"rules": []}, "spec.rules", "must not be empty"),
        ({"rules": {}}, "spec.rules", "must be a list"),
        ({"rules": ["a"]}, "spec.rules[0]", "must be a mapping"),
    ],
)
def test_a_wrong_field_is_refused_at_its_path(spec, path, said):
    found = problems(document([OFF], **spec))
    assert list(found) == [path]
    assert said in found[path]


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a..b", "x" * 254])
def test_a_name_is_one_that_kubernetes_takes(name):
    assert list(problems(document([OFF]) | {"metadata": {"name": name}})) == ["metadata.name"]


def test_a_plan_has_no_namespace():
    assert list(problems(document([OFF]) | {"metadata": {"name": "a", "namespace": "b"}})) == ["metadata.namespace"]


def test_all_problems_are_told_at_once():
    bad = document([{"gpus": {"indices": [1, 1]}, "mig": "off"}, everywhere({"x": 0})], paused=1)
    found = problems({**bad, "extra": 1, "apiVersion": "migd.dev/v1"})
    assert set(found) == {
        "apiVersion",
        "extra",
        "spec.paused",
        "spec.rules[0].gpus.indices",
        "spec.rules[0].mig",
        "spec.rules[1].instances[0].profile",
        "spec.rules[1].instances[0].count",
    }


def test_what_is_missing_is_named_with_what_to_write():
    found = problems({"apiVersion": "migd.dev/v1alpha1", "kind": "GPUPartitionPlan", "metadata": {}, "spec": {}})
    assert set(found) == {"metadata.name", "spec.nodeSelector", "spec.rules"}
    assert "nodeSelector: {} is every node" in found["spec.nodeSelector"]


def test_words_of_mig_parted_in_a_plan_are_told_ours():
    found = problems(document([{"gpus": {"all": True}, "mig-devices": {"1g.5gb": 7}}]))
    assert found == {"spec.rules[0].mig-devices": "unknown key | did you mean instances?"}


def test_a_misspelt_required_key_is_reported_once():
    found = problems(document([{"gpu": {"all": True}, "mig": "Disabled"}]))
    assert found == {"spec.rules[0].gpu": "unknown key | did you mean gpus?"}


def test_a_problem_is_told_with_its_source():
    with pytest.raises(BadInput) as caught:
        plan_of(document([{**OFF, "mgi": 1}]), "plan.yaml")
    assert str(caught.value) == "plan.yaml: spec.rules[0].mgi: unknown key (did you mean mig?)"


def test_b109_an_unknown_field_is_refused_at_every_level_with_its_path():
    assert list(problems(document([OFF]) | {"extra": 1})) == ["extra"]
    assert list(problems(document([{**OFF, "extra": 1}]))) == ["spec.rules[0].extra"]
    assert list(problems(document([{"gpus": {"all": True, "extra": 1}, "mig": "Disabled"}]))) == [
        "spec.rules[0].gpus.extra"
    ]
    assert list(problems(document([OFF], sharing={"extra": 1}))) == ["spec.sharing"]


def test_a_single_machine_says_in_one_note_which_fields_concern_clusters():
    found = read(FULL)
    assert isinstance(found, Plan)
    (note,) = cluster_notes(found)
    for field in ("nodeSelector", "priority", "rollout", "approval", "drift", "owner", "disruption.policy: Evict"):
        assert field in note
    for part in ("gracePeriodSeconds", "maxEvictions", "protect", "allow"):
        assert f"disruption.{part}" in note
    assert cluster_notes(plan(OFF)) == ()
    assert cluster_notes(plan(OFF, foreignInstances="Adopt", onFailure="Hold", disruption={"timeout": "5m"})) == ()
