"""Plans, good and bad, for whoever must agree on them: the strict values and the API server.

`said` is a part of what the API server answers to a bad one. `DIFFERENCES` are the documents on which the two do not
agree, each with the sentence of docs/plans.md that says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from integration.texts import OFF, plan

ROOT: Final = Path(__file__).parents[2]
ALL: Final = {"all": True}
UUID: Final = "GPU-5c89852c-8268-c4e4-41f0-2e1dd3a7d26a"

FULL: Final[dict[str, Any]] = yaml.safe_load("""
nodeSelector:
  matchLabels: {pool: inference, example.com/zone: ""}
  matchExpressions:
  - {key: zone, operator: In, values: [a, b]}
  - {key: old, operator: NotIn, values: ["yes"]}
  - {key: gpu, operator: Exists}
  - {key: bad, operator: DoesNotExist, values: []}
priority: 5
rules:
- gpus: {models: ["*A100*80GB*"], pciDeviceIds: ["0x20B210DE", 20b510de]}
  instances: [{profile: 3g.40gb, count: 1}, {memoryGB: 10, computeSlices: 1, count: 3}, {memoryGB: 10}]
- gpus: {indices: [7, 0]}
  mig: Disabled
- gpus: {uuids: [GPU-5c89852c-0000-1111-2222-333344445555]}
  instances: []
  allowEmpty: true
disruption: {policy: Evict, timeout: 1h30m, gracePeriodSeconds: 30,
  maxEvictions: 4, protect: {matchLabels: {keep: "yes"}}, allow: [EmptyDir, Unmanaged]}
rollout: {maxUnavailable: 25%, pauseOnFailure: false}
approval: Manual
paused: true
onFailure: Hold
drift: Observe
foreignInstances: Adopt
owner: TakeOver
""")


@dataclass(frozen=True)
class Doc:
    """One plan. said: what the API server's refusal has in it, path first; "" for a good one."""

    id: str
    document: dict[str, Any]
    said: str = ""


def _spec(identity: str, said: str = "", /, *rules: Any, **spec: Any) -> Doc:
    return Doc(identity, plan("test", *rules, **spec), said)


def _instances(identity: str, said: str = "", /, *instances: Any) -> Doc:
    return _spec(identity, said, {"gpus": ALL, "instances": list(instances)})


def _gpus(identity: str, said: str = "", /, **gpus: Any) -> Doc:
    return _spec(identity, said, {"gpus": gpus, "mig": "Disabled"})


def _two(identity: str, said: str, first: Any, second: Any) -> Doc:
    return _spec(identity, said, {"gpus": first, "mig": "Disabled"}, {"gpus": second, "instances": [{"memoryGB": 5}]})


def _in_docs() -> list[Doc]:
    """Every plan that a page of docs/, the README or a file of examples/ shows."""
    texts = [
        (f"{page.name}-{at}", text)
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
        for at, text in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL))
    ]
    texts += [(path.name, path.read_text()) for path in sorted((ROOT / "examples").rglob("*.yaml"))]
    return [
        Doc(f"{where}-{at}", document)
        for where, text in texts
        for at, document in enumerate(yaml.safe_load_all(text))
        if isinstance(document, dict) and document.get("kind") == "GPUPartitionPlan"
    ]


NOT_DISABLED: Final = (False, "off", "disabled", "Enabled", True)
GOOD: Final = (
    *_in_docs(),
    _spec("the-least"),
    _spec("full", "", *FULL["rules"], **{key: value for key, value in FULL.items() if key != "rules"}),
    *(_instances(f"profile-{p}", "", {"profile": p}) for p in ("1g.5gb", "1g.10gb+me", "7g.80gb-me", "4g.48gb+me.all")),
    _instances("counts", "", {"profile": "1g.5gb", "count": 64}, {"memoryGB": 10_000, "computeSlices": 64}),
    _instances("needs-that-differ", "", {"memoryGB": 5}, {"memoryGB": 5, "computeSlices": 1}),
    _instances("32-kinds", "", *({"memoryGB": n} for n in range(1, 33))),
    _gpus("all-and-more", "", all=True, indices=[0]),
    _gpus("uuids-in-any-case", "", uuids=[UUID, "gpu-AA-1"]),
    _gpus("pci-in-any-form", "", pciDeviceIds=["0X20b210dE", "20B010DE"]),
    _gpus("indices", "", indices=[0, 1023]),
    *(
        _spec(f"timeout-{t}", "", disruption={"timeout": t})
        for t in ("1s", "168h", "604800s", "10080m", "1h0m0s", "167h59m60s", "000001s")
    ),
    *(_spec(f"max-unavailable-{n}", "", rollout={"maxUnavailable": n}) for n in (0, 1_000_000, "0%", "100%", "007%")),
    _spec("priority-least", "", priority=-1_000_000_000),
    _spec("priority-most", "", priority=1_000_000_000),
    _spec("protect-everything", "", disruption={"protect": {}}),
    _spec("grace-longest", "", disruption={"gracePeriodSeconds": 604_800}),
    _spec("evictions-none", "", disruption={"policy": "Evict", "maxEvictions": 0}),
    _spec("evictions-allowed", "", disruption={"policy": "Evict", "maxEvictions": 1_000_000, "allow": []}),
    _spec("nulls", "", disruption={"gracePeriodSeconds": None, "maxEvictions": None, "protect": None}),
    _two("all-last", "", {"indices": [7]}, ALL),
    _two("all-narrowed-first", "", {"all": True, "indices": [7]}, ALL),
    _two("narrowed-first", "", {"indices": [7], "models": ["*A100*"]}, {"indices": [7]}),
    _two("overlap-narrowed", "", {"indices": [0, 1]}, {"indices": [1, 2], "models": ["*A100*"]}),
    _spec("256-rules", "", *({"gpus": {"indices": [n]}, "mig": "Disabled"} for n in range(256))),
)

_AT: Final = "spec.rules[0].instances[0]"
_MANY_RULES: Final = tuple({"gpus": {"indices": [n]}, "mig": "Disabled"} for n in range(257))
BAD: Final = (
    _instances("count-0", f"{_AT}.count: Invalid value: 0", {"memoryGB": 5, "count": 0}),
    _instances("count-below-0", f"{_AT}.count: Invalid value: -1", {"memoryGB": 5, "count": -1}),
    _instances("count-65", "should be less than or equal to 64", {"memoryGB": 5, "count": 65}),
    _instances("count-true", "must be of type int32", {"memoryGB": 5, "count": True}),
    _instances("count-text", "must be of type integer", {"memoryGB": 5, "count": "2"}),
    _instances("count-half", "must be of type integer", {"memoryGB": 5, "count": 2.5}),
    _instances("profile-number", "must be of type string", {"profile": 3}),
    *(
        _instances(f"profile-{p}", f'.profile: Invalid value: "{p}": is not a profile name', {"profile": p})
        for p in ("3g", "1g.5gb.me", "MIG 3G.40GB", "0g.5gb", "1g.5GB", "", "1g.5gb ", "1000g.5gb", "1g.123456gb")
    ),
    _instances("narrow-compute-instance", "not in v1alpha1", {"profile": "1c.3g.40gb"}),
    _instances("profile-and-need", "needs exactly one of profile and memoryGB", {"profile": "1g.5gb", "memoryGB": 5}),
    _instances("neither", "needs exactly one of profile and memoryGB", {"count": 2}),
    _instances(
        "slices-of-a-profile", "computeSlices goes with memoryGB only", {"profile": "1g.5gb", "computeSlices": 1}
    ),
    _instances("slices-alone", "needs exactly one of profile and memoryGB", {"computeSlices": 1}),
    _instances("unknown-key", 'unknown field "spec.rules[0].instances[0].cuont"', {"profile": "1g.5gb", "cuont": 2}),
    _instances(
        "profile-twice", "names one profile twice: add", {"profile": "1g.5gb"}, {"profile": "1g.5gb", "count": 2}
    ),
    _instances("need-twice", "names one need twice: add", {"memoryGB": 5}, {"memoryGB": 5, "count": 2}),
    *(_instances(f"need-{n}", f"{_AT}.memoryGB", {"memoryGB": n}) for n in (0, -1, 10_001, True, "5", 2.5)),
    _instances("no-mapping", "must be of type object", "1g.5gb"),
    _gpus("selects-nothing", "selects nothing: give all: true"),
    _gpus("all-false", 'supported values: "true"', all=False),
    _gpus("no-indices", "spec.rules[0].gpus.indices in body should have at least 1 items", indices=[]),
    _gpus("index-no-list", "must be of type array", indices=7),
    _gpus("index-below-0", "should be greater than or equal to 0", indices=[-1]),
    _gpus("index-1024", "should be less than or equal to 1023", indices=[1024]),
    _gpus("index-true", "must be of type int32", indices=[True]),
    _gpus("index-text", "must be of type integer", indices=["1"]),
    _gpus("index-twice", "spec.rules[0].gpus.indices[2]: Duplicate value: 3", indices=[3, 1, 3]),
    _gpus("uuid-twice", "spec.rules[0].gpus.uuids[1]: Duplicate value", uuids=[UUID, UUID]),
    _gpus("uuid-twice-in-another-case", "", uuids=["GPU-aa-1", "gpu-AA-1"]),
    _gpus("uuid-of-a-mig-device", "a MIG- UUID is a MIG device's", uuids=["MIG-aa-1"]),
    _gpus("uuid-with-a-space", "is not a GPU's UUID", uuids=["GPU-aa 1"]),
    _gpus("uuid-too-long", "Too long: may not be more than 68", uuids=["GPU-" + "a" * 65]),
    _gpus("uuid-in-kelvin", "is not a GPU's UUID", uuids=["GPU-\u212a"]),
    _gpus("empty-model", "must not be empty", models=[" "]),
    _gpus("model-no-list", "must be of type array", models="*"),
    _gpus("no-models", "should have at least 1 items", models=[]),
    _gpus("pci-number", "must be of type string", pciDeviceIds=[0x20B210DE]),
    _gpus("pci-short", "is not an NVIDIA PCI device id", pciDeviceIds=["0x20B2"]),
    _gpus("pci-of-another-vendor", "is not an NVIDIA PCI device id", pciDeviceIds=["0x20B28086"]),
    _gpus("pci-twice", "names one device id twice", pciDeviceIds=["0x20B210DE", "20b210de"]),
    _gpus("unknown-selection", 'unknown field "spec.rules[0].gpus.index"', all=True, index=[1]),
    _spec("no-wish", "needs exactly one of instances and mig: Disabled", {"gpus": ALL}),
    _spec("two-wishes", "needs exactly one", {"gpus": ALL, "mig": "Disabled", "instances": [{"memoryGB": 5}]}),
    _spec("empty-off", "allowEmpty goes with instances only", {"gpus": ALL, "mig": "Disabled", "allowEmpty": True}),
    _spec("empty", "allowEmpty: true says it is meant", {"gpus": ALL, "instances": []}),
    _spec("empty-not-allowed", "says it is meant", {"gpus": ALL, "instances": [], "allowEmpty": False}),
    _spec("rule-without-gpus", "spec.rules[0].gpus: Required value", {"mig": "Disabled"}),
    *(
        _spec(f"mig-{m}", "spec.rules[0].mig", {"gpus": ALL, "mig": m})
        for m in (False, "off", "disabled", "Enabled", True)
    ),
    _two("all-first", "put {all: true} last, and once", ALL, {"indices": [7]}),
    _two("all-twice", "put {all: true} last, and once", ALL, ALL),
    _two("index-of-an-earlier-rule", "", {"indices": [7, 1]}, {"indices": [7]}),
    _two("index-among-others", "", {"indices": [0, 1]}, {"indices": [1], "models": ["*A100*"]}),
    _two("uuid-of-an-earlier-rule", "", {"uuids": ["GPU-a-1"]}, {"uuids": ["gpu-A-1"]}),
    *(
        Doc(f"{key}-in-{where}", document, f'unknown field "{path}.{key}"')
        for key in ("force", "hooks", "reboot", "vGPU", "sharing", "timeSlicing", "mps", "replicas")
        for where, path, document in (
            ("spec", "spec", plan("test", **{key: {"a": 1}})),
            ("disruption", "spec.disruption", plan("test", disruption={key: 1})),
            ("rule", "spec.rules[0]", plan("test", {**OFF, key: 1})),
        )
    ),
    _spec("timeout-number", "must be of type string", disruption={"timeout": 30}),
    _spec("timeout-empty", "should be at least 1 chars long", disruption={"timeout": ""}),
    *(
        _spec(f"timeout-{t}", "is not a duration; write it as 30m", disruption={"timeout": t})
        for t in ("30", "-5m", "1.5h", "5m ", "30m1h", "1d", "٣m")
    ),
    _spec("timeout-0s", "must be between 1s and 168h", disruption={"timeout": "0s"}),
    _spec("timeout-200h", "must be between 1s and 168h", disruption={"timeout": "200h"}),
    _spec("timeout-most", "must be between 1s and 168h", disruption={"timeout": "999999h999999m999999s"}),
    _spec("grace-0", "should be greater than or equal to 1", disruption={"gracePeriodSeconds": 0}),
    _spec("grace-long", "should be less than or equal to 604800", disruption={"gracePeriodSeconds": 604_801}),
    _spec("evictions-below-0", "should be greater than or equal to 0", disruption={"maxEvictions": -1}),
    _spec("evictions-most", "should be less than or equal to 1000000", disruption={"maxEvictions": 1_000_001}),
    _spec("policy", 'supported values: "WaitForIdle", "Evict"', disruption={"policy": "evict"}),
    _spec("allow-twice", "Duplicate value", disruption={"allow": ["EmptyDir", "EmptyDir"]}),
    _spec("allow-everything", 'supported values: "EmptyDir", "Unmanaged"', disruption={"allow": ["Everything"]}),
    *(
        _spec(
            f"max-unavailable-{n}",
            "must be a number of nodes from 0 on, or a percentage",
            rollout={"maxUnavailable": n},
        )
        for n in ("101%", -1, 1_000_001, "2", "", "%", "-1%", "1000%", "1.5%", "٣%")
    ),
    _spec("max-unavailable-true", "must be of type integer,string", rollout={"maxUnavailable": True}),
    _spec("max-unavailable-half", "spec.rollout.maxUnavailable", rollout={"maxUnavailable": 1.5}),
    _spec("paused-text", "must be of type boolean", paused="true"),
    _spec("priority-text", "must be of type integer", priority="1"),
    _spec("priority-too-high", "should be less than or equal to 1000000000", priority=1_000_000_001),
    _spec("approval-misspelt", 'unknown field "spec.aproval"', aproval="Manual"),
    *(
        _spec(f"{field}-x", f"spec.{field}: Unsupported value", **{field: "x"})
        for field in ("approval", "onFailure", "drift", "foreignInstances", "owner")
    ),
    _spec("label-name", "not a label's name", nodeSelector={"matchLabels": {"a b": "c"}}),
    _spec("label-prefix", "not a label's name", nodeSelector={"matchLabels": {"A/b": "c"}}),
    _spec("label-name-long", "not a label's name", nodeSelector={"matchLabels": {"a" * 64: "c"}}),
    _spec("label-value", "not a label's value", nodeSelector={"matchLabels": {"a": "b c"}}),
    _spec("label-value-number", "must be of type string", nodeSelector={"matchLabels": {"a": 1}}),
    _spec("label-without-match", 'unknown field "spec.nodeSelector.pool"', nodeSelector={"pool": "a"}),
    *(
        _spec(f"expression-{at}", said, nodeSelector={"matchExpressions": [expression]})
        for at, said, expression in (
            ("in-nothing", "operator In needs values", {"key": "a", "operator": "In"}),
            ("not-in-empty", "operator NotIn needs values", {"key": "a", "operator": "NotIn", "values": []}),
            ("exists-b", "operator Exists takes no values", {"key": "a", "operator": "Exists", "values": ["b"]}),
            ("key", "is not a label's name", {"key": "a b", "operator": "Exists"}),
            ("no-key", "key: Required value", {"operator": "Exists"}),
            ("value", "is not a label's value", {"key": "a", "operator": "In", "values": ["b c"]}),
            ("operator", "Unsupported value", {"key": "a", "operator": "in", "values": ["b"]}),
        )
    ),
    _spec(
        "protect-values",
        "operator In needs values",
        disruption={"protect": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
    ),
    _spec("protect-label", "not a label's name", disruption={"protect": {"matchLabels": {"a b": "c"}}}),
    Doc("no-rules", {**plan("test"), "spec": {"nodeSelector": {}, "rules": []}}, "must not be empty: a list of {gpus"),
    Doc("rules-mapping", {**plan("test"), "spec": {"nodeSelector": {}, "rules": {}}}, "must be of type array"),
    Doc("rules-missing", {**plan("test"), "spec": {"nodeSelector": {}}}, "spec.rules: Required value"),
    Doc("selector-missing", {**plan("test"), "spec": {"rules": [OFF]}}, "spec.nodeSelector: Required value"),
    Doc("spec-missing", {k: v for k, v in plan("test").items() if k != "spec"}, "spec: Required value"),
    _spec("rule-text", "must be of type object", "a"),
    _spec("selector-null", "spec.nodeSelector: Required value", nodeSelector=None),
    *(Doc(f"name-{n[:5]}", plan(n), "metadata.name: Invalid value") for n in ("A", "a_b", "-a", "a..b", "x" * 254)),
    Doc("no-name", {**plan("x"), "metadata": {}}, "name or generateName is required"),
    Doc("unknown-at-the-top", {**plan("test"), "extra": 1}, 'unknown field "extra"'),
    _spec(
        "257-rules",
        "Too many: 257: must have at most 256",
        *_MANY_RULES,
    ),
    _instances("33-kinds", "must have at most 32", *({"memoryGB": n} for n in range(1, 34))),
    _gpus("129-uuids", "must have at most 128", uuids=[f"GPU-{n}" for n in range(129)]),
    _gpus("33-pci-ids", "must have at most 32", pciDeviceIds=[f"20{n:02x}10de" for n in range(33)]),
    _gpus("65-models", "must have at most 64", models=[f"*{n}*" for n in range(65)]),
    _gpus("long-model", "may not be more than 256", models=["*" * 257]),
    _instances("long-profile", "may not be more than 32", {"profile": "1g.5gb" + "+a" * 14}),
    _spec("65-labels", "must have at most 64", nodeSelector={"matchLabels": {f"a{n}": "b" for n in range(65)}}),
    _spec(
        "65-expressions",
        "must have at most 64",
        nodeSelector={"matchExpressions": [{"key": f"a{n}", "operator": "Exists"} for n in range(65)]},
    ),
    _spec(
        "65-values",
        "must have at most 64",
        nodeSelector={"matchExpressions": [{"key": "a", "operator": "In", "values": [f"b{n}" for n in range(65)]}]},
    ),
)

DIFFERENCES: Final = {
    # refused by the strict values only
    "uuid-twice-in-another-case": "one GPU named twice in upper and lower case",
    "index-of-an-earlier-rule": "an index or UUID that an earlier rule has already",
    "index-among-others": "an index or UUID that an earlier rule has already",
    "uuid-of-an-earlier-rule": "an index or UUID that an earlier rule has already",
    "null-for-a-default": "`null` for a field with a default",
    "whole-number-with-a-point": "`2.0` for `2`",
}
DIFFERENT: Final = (
    *(doc for doc in BAD if doc.id in DIFFERENCES),
    _spec("null-for-a-default", "", priority=None),
    _instances("whole-number-with-a-point", "", {"memoryGB": 5, "count": 2.0}),
)
