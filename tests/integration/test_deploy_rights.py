"""What deploy/ lets the two programs do, asked of a real API server with the tokens of their pods.

Each right that is given is used by a row, and each rule of a policy refuses one. Left out: that policies hold whatever
RBAC gives (test_deploy_policies), and that a whole transaction passes (test_deploy_working).
"""

from __future__ import annotations

import pytest
from controlplane.api import Answer
from controlplane.processes import until
from integration.deploy_rows import MAY, MAY_NOT, NAMES_UID, PODS, Row, eviction, filled
from integration.deployed import AGENT, EVERYTHING, OPERATOR, Right, rendered, rights_in, unused
from integration.stage import UNBOUND, Stage

_WITHIN_S = 20.0  # a role just made may take a moment
BASIC = {"selfsubjectaccessreviews", "selfsubjectrulesreviews", "selfsubjectreviews", "clustertrustbundles"}
"""What every user may ask. Source: the built-in roles system:basic-user, system:cluster-trust-bundle-discovery."""


@pytest.mark.parametrize("row", MAY, ids=str)
def test_what_migd_does_is_allowed(stage: Stage, row: Row):
    answer = stage.ask(row)
    passed = answer.ok or (row.method, answer.code) in (("GET", 404), ("POST", 409))  # not there; there already
    assert passed, f"{answer.code}: {answer.message}"


@pytest.mark.parametrize("row", MAY_NOT, ids=str)
def test_what_migd_never_does_is_refused_by_name(stage: Stage, row: Row):
    answer = stage.ask(row)
    assert answer.code == 403, f"{answer.code}: {answer.message}"
    assert row.says in answer.message
    assert row.says.startswith(("is forbidden", "cannot")) or "ValidatingAdmissionPolicy 'migd-" in answer.message


def test_no_two_rows_are_the_same():
    names = [str(row) for row in (*MAY, *MAY_NOT, *UNBOUND)]
    assert len(names) == len(set(names))


def test_every_policy_refuses_a_token_that_belongs_to_no_pod(stage: Stage):
    """That they do was waited for when the stage was set up; here, that no policy was left out."""
    documents = rendered(stage.deployed.plane, "base")
    policies = {d["metadata"]["name"] for d in documents if d["kind"] == "ValidatingAdmissionPolicy"}
    assert {row.says.split("'")[1] for row in UNBOUND} == policies


def test_the_token_of_a_pod_that_is_gone_is_none(stage: Stage, name: str):
    deployed = stage.deployed
    token = deployed.token("migd-agent", name, stage.names["open"])
    gone = deployed.plane.as_token(token)
    at = f"/api/v1/nodes/{stage.names['open']}"
    assert gone.get(at).ok
    deployed.admin.delete(f"/api/v1/namespaces/migd-system/pods/{name}", gracePeriodSeconds="0")
    assert until(lambda: gone.get(at).code == 401, _WITHIN_S)


def test_an_eviction_ends_the_pod_of_its_uid_and_no_other_of_its_name(stage: Stage, name: str):
    """In earnest: without a uid, or with that of the pod before it that had the name, it ends nothing."""
    admin, operator = stage.deployed.admin, stage.who["operator"]
    spec = {"nodeName": stage.names["open"], "containers": [{"name": "c", "image": "i"}], "tolerations": EVERYTHING}
    uid = admin.create(PODS, {"metadata": {"name": name}, "spec": spec}).object()["metadata"]["uid"]

    def evict(uid: str | None) -> Answer:
        return operator.create(f"{PODS}/{name}/eviction", filled(eviction(uid), {"bare": name}))

    def going() -> bool:
        return "deletionTimestamp" in admin.get(f"{PODS}/{name}").object()["metadata"]

    for nobodys in (None, ""):
        answer = evict(nobodys)
        assert (answer.code, NAMES_UID in answer.message) == (403, True), answer.message
    assert evict("00000000-1111-2222-3333-444444444444").code == 409
    assert not going()
    assert evict(uid).code == 201
    assert going(), "its kubelet would end it now"
    admin.delete(f"{PODS}/{name}", gracePeriodSeconds="0").object()


def test_no_right_is_given_that_no_row_uses(stage: Stage):
    rights = rights_in(rendered(stage.deployed.plane, "overlays/helm-plugin"))
    before = stage.deployed.plane.audit.requests()
    for row in MAY:
        stage.ask(row)
    assert unused(rights, stage.deployed.plane.audit.since(before)) == []


@pytest.mark.parametrize("namespace", ["default", "kube-system", "migd-system", "nvidia-device-plugin"])
@pytest.mark.parametrize(("who", "user"), [("agent", AGENT), ("operator", OPERATOR)])
def test_nobody_has_a_right_that_deploy_does_not_give(stage: Stage, who: str, user: str, namespace: str):
    """As the API server sums it up, over all roles there are, those of every authenticated user included."""
    given = rights_in(rendered(stage.deployed.plane, "overlays/helm-plugin"))
    expected = {r for r in given if r.user == user and r.namespace in ("", namespace)}
    review = {"spec": {"namespace": namespace}}
    at = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    rules = stage.who[who].create(at, review).object()["status"]["resourceRules"]
    found = {
        Right(user, verb, group, resource, "", name)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames") or [""]
        if resource not in BASIC
    }
    assert found == {Right(r.user, r.verb, r.group, r.resource, "", r.name) for r in expected}
