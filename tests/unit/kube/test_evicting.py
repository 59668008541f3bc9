"""Which pods may be evicted, what is asked for, which budget has a pod, and what the answers mean."""

from __future__ import annotations

from typing import Any

import pytest

from migd.kube.budgets import BUDGETS, selects
from migd.kube.errors import (
    BudgetError,
    DeniedError,
    EndingError,
    KubeError,
    UnavailableError,
    error_of,
)
from migd.kube.pods import PODS, Pod, eviction, may_not_go
from migd.kube.stored import Interner, Stored
from migd.plans.plan import LabelSelector

EVERY = LabelSelector()
LOCKED = LabelSelector(matchLabels={"keep": "yes"})
DELETING_NAMESPACE = {"reason": "NamespaceTerminating", "message": "namespace team-a is being terminated"}


def pod(owner: str = "ReplicaSet", phase: str = "Running", *, mirror: bool = False, **spec: Any) -> Pod:
    owners = [{"kind": owner, "uid": "u-1", "controller": True}, {"kind": "Node", "uid": "u-2"}] if owner else []
    metadata: dict[str, Any] = {"name": "p", "labels": {"app": "infer", "keep": "yes"}, "ownerReferences": owners}
    if mirror:
        metadata["annotations"] = {"kubernetes.io/config.mirror": "0123"}
    body = {"metadata": metadata, "spec": {"containers": [{"name": "c"}], **spec}, "status": {"phase": phase}}
    return PODS.parse(body, Interner())


EMPTY_DIR = {"volumes": [{"name": "scratch", "emptyDir": {}}]}


@pytest.mark.parametrize(
    ("of", "protect", "allow", "why"),
    [
        (pod(), None, (), ""),
        (pod("Job"), None, (), ""),
        (pod("DaemonSet"), None, ("EmptyDir", "Unmanaged"), "comes straight back"),
        (pod("DaemonSet", "Succeeded"), None, (), ""),
        (pod("", mirror=True), None, ("EmptyDir", "Unmanaged"), "static pod"),
        (pod("Node", "Failed", mirror=True), None, (), "static pod"),
        (pod(""), None, ("EmptyDir",), "allow: [Unmanaged]"),
        (pod(""), None, ("Unmanaged",), ""),
        (pod("", "Failed"), EVERY, (), ""),
        (pod(**EMPTY_DIR), None, ("Unmanaged",), "allow: [EmptyDir]"),
        (pod(**EMPTY_DIR), None, ("EmptyDir",), ""),
        (pod("", **EMPTY_DIR), None, ("Unmanaged", "EmptyDir"), ""),
        (pod(phase="Succeeded", **EMPTY_DIR), None, (), ""),
        (pod(), EVERY, ("EmptyDir", "Unmanaged"), "protect"),
        (pod(), LOCKED, (), "protect"),
        (pod(), LabelSelector(matchLabels={"keep": "no"}), (), ""),
    ],
)
def test_pods_go_as_kubectl_drain_lets_them(of: Pod, protect: LabelSelector | None, allow: tuple[str, ...], why: str):
    said = may_not_go(of, protect, allow)
    assert why in said
    assert bool(said) == bool(why)


def test_a_pod_is_made_again_by_its_controller_and_by_no_other_owner():
    assert (pod().owner, pod().owner_uid) == ("ReplicaSet", "u-1")
    assert (pod("").owner, pod("").owner_uid) == ("", "")


def test_an_eviction_is_of_this_very_pod():
    stored = Stored("infer-1", "team-a", "u-9", "7", 0, False, {}, {}, pod())
    assert eviction(stored, None) == {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "infer-1", "namespace": "team-a"},
        "deleteOptions": {"preconditions": {"uid": "u-9"}},
    }
    assert eviction(stored, 0)["deleteOptions"] == {"preconditions": {"uid": "u-9"}, "gracePeriodSeconds": 0}


@pytest.mark.parametrize(
    ("selector", "has"),
    [
        (None, False),
        ({}, True),
        ({"matchLabels": {"app": "infer"}}, True),
        ({"matchLabels": {"app": "infer", "tier": "1"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["infer", "train"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["infer"]}]}, False),
        ({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["1"]}]}, True),
        ({"matchExpressions": [{"key": "tier", "operator": "In", "values": ["1"]}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Gt", "values": ["1"]}]}, False),
        ({"matchLabels": {"app": "infer"}, "matchExpressions": [{"key": "x", "operator": "Exists"}]}, False),
    ],
)
def test_a_budget_has_the_pods_that_its_selector_matches(selector: dict[str, Any] | None, has: bool):
    spec = {} if selector is None else {"selector": selector}
    budget = BUDGETS.parse({"metadata": {"name": "b"}, "spec": spec}, Interner())
    assert selects(budget, {"app": "infer"}) is has
    assert budget.allowed == 0


def answered(code: int, said: str, *causes: dict[str, str]) -> KubeError:
    body = {"message": said, "details": {"causes": list(causes)}} if causes else {"message": said}
    return error_of("POST /x/eviction", code, {}, body)


def test_a_budget_that_refuses_is_told_from_an_api_server_that_is_busy():
    needs = {"reason": "DisruptionBudget", "message": "The disruption budget infer needs 2 healthy pods and has 2"}
    for code in (429, 403):
        refused = answered(code, "Cannot evict pod.", needs)
        assert isinstance(refused, BudgetError)
        assert not refused.several
        assert refused.message == needs["message"]
        assert "infer needs 2" in str(refused)
    assert type(answered(429, "too many requests")) is UnavailableError
    assert type(answered(500, "leader changed")) is UnavailableError
    several = answered(500, "This pod has more than one PodDisruptionBudget, which is not supported.")
    assert isinstance(several, BudgetError)
    assert several.several
    assert several.message.startswith("This pod has more than one")


def test_a_namespace_that_is_being_deleted_is_told_from_missing_rights():
    assert type(answered(403, "forbidden", DELETING_NAMESPACE)) is EndingError
    assert issubclass(EndingError, DeniedError)
    assert type(answered(403, "forbidden")) is DeniedError
