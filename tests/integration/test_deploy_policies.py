"""The admission policies alone: both programs are given every right there is, and still write only what is theirs.

So a role that somebody widens by mistake does not give an agent other nodes. Left out: reading, which admission does
not see, and kinds that the policies are not about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from controlplane.api import JSON_PATCH, MERGE
from controlplane.processes import until
from integration.deploy_rows import (
    LEASES,
    MAY_NOT,
    NEW,
    NODES,
    OPEN,
    OWN_GPUS,
    OWN_LEASE,
    PAUSED,
    PLAN,
    PODS,
    RBAC,
    THEIRS,
    Row,
    label,
    lease,
    note,
    paid,
    renewed,
    taint,
)
from integration.deployed import NAMESPACE, rendered
from integration.stage import UNBOUND, Stage
from integration.texts import PARTITIONS, PLANS, partition, plan

_WITHIN_S = 20.0
ROLES = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
NODE_RULES = "nothing else of nodes"
POD_RULES = "neither makes, changes nor evicts pods"
EVICTS_ONLY = "neither makes, changes nor deletes them"
PLAN_RULES = "the status of plans only"
CAPACITY = {"status": {"capacity": {"x.dev/y": "1"}}}
NEW_POD = {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
ALONE = [
    Row("writes its node's status", "agent", "PATCH", f"{OPEN}/status", CAPACITY, NODE_RULES),
    Row("makes a node", "agent", "POST", NODES, {"metadata": {"name": "<new>"}}, NODE_RULES),
    Row("deletes its node", "agent", "DELETE", OPEN, says=NODE_RULES),
    Row("reaches a kubelet", "agent", "GET", f"{OPEN}/proxy/pods", says=NODE_RULES),
    Row("deletes another node's GPU", "agent", "DELETE", THEIRS, says=OWN_GPUS),
    Row("deletes another node's Lease", "agent", "DELETE", f"{LEASES}/<closed>", says=OWN_LEASE),
    Row("takes its Lease elsewhere", "agent", "POST", LEASES.replace(NAMESPACE, "default"),
        {**lease("<open>"), "metadata": {"name": "<open>"}}, OWN_LEASE),
    Row("makes a pod", "agent", "POST", PODS, NEW_POD, POD_RULES),
    Row("changes a pod", "agent", "PATCH", f"{PODS}/<plugin>", label("x", "y"), POD_RULES),
    Row("evicts a pod", "agent", "POST", f"{PODS}/<plugin>/eviction", {"metadata": {"name": "<plugin>"}}, POD_RULES),
    Row("runs a command in a pod", "agent", "POST", f"{PODS}/<plugin>/exec?command=id&stdout=true", says=POD_RULES),
    Row("attaches to a pod", "agent", "POST", f"{PODS}/<plugin>/attach?stdout=true", says=POD_RULES),
    Row("forwards a port", "agent", "GET", f"{PODS}/<plugin>/portforward", says=POD_RULES),
    Row("stops an unmanaged pod", "agent", "DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/<agent pod>",
        says="pods of DaemonSets only"),
    Row("writes a node's status", "operator", "PATCH", f"{OPEN}/status", CAPACITY, NODE_RULES),
    Row("makes a node", "operator", "POST", NODES, {"metadata": {"name": "<new>"}}, NODE_RULES),
    Row("deletes a node", "operator", "DELETE", OPEN, says=NODE_RULES),
    Row("reaches a kubelet", "operator", "GET", f"{OPEN}/proxy/pods", says=NODE_RULES),
    Row("makes a pod", "operator", "POST", PODS, NEW_POD, EVICTS_ONLY),
    Row("changes a pod", "operator", "PATCH", f"{PODS}/<bare>", label("x", "y"), EVICTS_ONLY),
    Row("deletes a pod", "operator", "DELETE", f"{PODS}/<bare>", says=EVICTS_ONLY),
    Row("deletes a pod by its uid", "operator", "DELETE", f"{PODS}/<bare>",
        {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": "<bare uid>"}}, EVICTS_ONLY),
    Row("runs a command in a pod", "operator", "POST", f"{PODS}/<bare>/exec?command=id&stdout=true", says=EVICTS_ONLY),
    Row("registers a GPU", "operator", "POST", PARTITIONS, partition("<new gpu>", "<open>"), "made by the agent"),
    Row("changes a plan", "operator", "PATCH", PLAN, {"spec": {"paused": True}}, PLAN_RULES),
    Row("approves a plan", "operator", "PATCH", PLAN, note("migd.dev/approved", "x"), PLAN_RULES),
    Row("makes a plan", "operator", "POST", PLANS, plan("x"), PLAN_RULES),
    Row("deletes a plan", "operator", "DELETE", PLAN, says=PLAN_RULES),
    Row("renews an agent's Lease", "operator", "PUT", f"{LEASES}/<closed>", renewed, "its own Lease only"),
]  # fmt: skip


@pytest.fixture(scope="module")
def mighty(stage: Stage) -> Iterator[Stage]:
    """Both programs are cluster-admin, for as long as these tests run."""
    admin = stage.deployed.admin
    binding = {
        "metadata": {"name": "migd-tests-mighty"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [
            {"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE} for name in ("migd-agent", "migd-operator")
        ],
    }
    admin.create(ROLES, binding).object()
    try:
        assert until(lambda: all(api.get("/api/v1/secrets").ok for api in stage.who.values()), _WITHIN_S)
        yield stage
    finally:
        admin.delete(f"{ROLES}/migd-tests-mighty").object()
        assert until(lambda: not any(api.get("/api/v1/secrets").ok for api in stage.who.values()), _WITHIN_S)


@pytest.mark.parametrize("row", ALONE, ids=str)
def test_a_policy_holds_whatever_rights_are_given(mighty: Stage, row: Row):
    answer = mighty.ask(row)
    assert answer.code == 403, f"{answer.code}: {answer.message}"
    assert f"ValidatingAdmissionPolicy 'migd-{row.who}" in answer.message
    assert row.says in answer.message


def test_what_policies_refuse_they_refuse_with_every_right_too(mighty: Stage):
    rows = [row for row in MAY_NOT if row.says != RBAC and row.path != NEW]
    assert len(rows) > 50
    for row in rows:
        answer = mighty.ask(row)
        assert answer.code == 403, f"{row}: {answer.code} {answer.message}"
        assert row.says in answer.message


def test_every_rule_of_every_policy_refuses_a_row(mighty: Stage):
    said = [mighty.ask(row).message for row in (*MAY_NOT, *ALONE) if row.says != RBAC]
    said += [row.says for row in UNBOUND]
    silent = []
    for document in rendered(mighty.deployed.plane, "base"):
        if document["kind"] != "ValidatingAdmissionPolicy":
            continue
        begins = f"ValidatingAdmissionPolicy '{document['metadata']['name']}' with binding"
        for rule in document["spec"]["validations"]:
            words = re.match(r"'([^']+)'|$", rule.get("messageExpression", ""))
            text = words[1] if words and words[1] else rule["message"].removesuffix(" on a node")
            silent += [] if any(begins in one and text in one for one in said) else [f"{begins}: {text}"]
    assert silent == []


@pytest.mark.parametrize("taints", [1000])
@pytest.mark.parametrize("labels", [6000])
def test_a_node_with_as_much_on_it_as_fits_is_within_the_cost(stage: Stage, name: str, taints: int, labels: int):
    """CEL may cost only so much; beyond it a request is refused, so a full node could never be closed."""
    deployed = stage.deployed
    at = f"{NODES}/{name}"
    full = {
        "metadata": {"labels": {f"example.com/label-{i:04}": f"value-{i:04}" for i in range(labels)}},
        "spec": {"taints": [{"key": f"example.com/taint-{i:04}", "effect": "NoSchedule"} for i in range(taints)]},
    }
    deployed.node(name, {"nvidia.com/gpu.deploy.dcgm": "true"}, {"kept": "x"})
    agent = deployed.plane.as_token(deployed.token("migd-agent", name, name))
    deployed.admin.patch(at, full, MERGE).object()
    close = [
        *taint("migd.dev/changing"),
        {"op": "replace", "path": "/metadata/labels/nvidia.com~1gpu.deploy.dcgm", "value": PAUSED},
        {"op": "add", "path": "/metadata/annotations/migd.dev~1owed",
         "value": '{"labels": {"nvidia.com/gpu.deploy.dcgm": "true"}, "turn": "t"}'},
    ]  # fmt: skip
    agent.patch(at, close, JSON_PATCH).object()
    foreign = agent.patch(at, label("example.com/label-0000", "x"))
    assert (foreign.code, "does not write the label example.com/label-0000" in foreign.message) == (403, True)
    all_of_them = agent.patch(at, {"metadata": {"labels": dict.fromkeys(full["metadata"]["labels"], "x")}})
    assert all_of_them.code == 403, all_of_them.message
    operator = stage.who["operator"]
    assert operator.patch(at, label("example.com/label-0000", "x")).code == 403
    operator.patch(at, paid(deployed.admin.get(at).object()), JSON_PATCH).object()
    after = deployed.admin.get(at).object()
    assert "migd.dev/owed" not in after["metadata"].get("annotations", {})
    assert "migd.dev/changing" not in {found["key"] for found in after["spec"]["taints"]}
    deployed.admin.delete(at)
