"""deploy/ as texts: no right too many, no policy without its binding, and the names that the code has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from migd.kube.nodes import LABELS_OF_OTHERS, TAINT
from migd.kube.owed import OWED, PAUSED
from migd.plans.partitions import PartitionStatus

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(DEPLOY.rglob("*.yaml"))
DOCUMENTS = [(path, d) for path in FILES for d in yaml.safe_load_all(path.read_text()) if d]
OBJECTS = [(path, d) for path, d in DOCUMENTS if path.name != "kustomization.yaml"]
PATCHES = {DEPLOY / "overlays/simulated/agent.yaml"}
WHOLE = [d for path, d in OBJECTS if path not in PATCHES]
RULES = [(d["metadata"]["name"], rule) for d in WHOLE for rule in d.get("rules", ())]
POLICIES = {d["metadata"]["name"]: d["spec"] for d in WHOLE if d["kind"] == "ValidatingAdmissionPolicy"}
BINDINGS = {d["metadata"]["name"]: d["spec"] for d in WHOLE if d["kind"] == "ValidatingAdmissionPolicyBinding"}
PODS = {d["metadata"]["name"]: d["spec"] for d in WHOLE if d["kind"] in ("Deployment", "DaemonSet")}
NEVER = {
    "verbs": {"*", "escalate", "bind", "impersonate", "deletecollection", "approve", "sign"},
    "apiGroups": {"*", "rbac.authorization.k8s.io", "admissionregistration.k8s.io", "authentication.k8s.io"},
    "resources": {"*", "secrets", "configmaps", "serviceaccounts/token", "nodes/proxy", "nodes/status", "pods/exec"}
    | {"pods/attach", "pods/portforward", "pods/log", "pods/ephemeralcontainers", "pods/proxy"},
}
WORKLOADS = {"deployments", "daemonsets", "statefulsets", "jobs", "cronjobs", "replicasets"}


@pytest.mark.parametrize(("name", "rule"), RULES)
def test_no_role_gives_what_nobody_of_ours_needs(name: str, rule: dict[str, Any]):
    for part, words in NEVER.items():
        assert not words & set(rule[part])
    assert not WORKLOADS & set(rule["resources"])
    assert "nonResourceURLs" not in rule
    if "pods/eviction" in rule["resources"]:
        assert (name, rule["resources"], rule["verbs"]) == ("migd-operator", ["pods/eviction"], ["create"])
    writes = set(rule["verbs"]) - {"get", "list", "watch"}
    assert "pods" not in rule["resources"] or writes == ({"delete"} if name == "migd-agent-plugin" else set())


def test_roles_are_bound_to_our_two_accounts_only_and_none_is_a_built_in_one():
    roles = {(d["kind"], d["metadata"]["name"]) for d in WHOLE if d["kind"] in ("Role", "ClusterRole")}
    accounts = {d["metadata"]["name"] for d in WHOLE if d["kind"] == "ServiceAccount"}
    assert accounts == {"migd-operator", "migd-agent"}
    bound = set()
    for binding in [d for d in WHOLE if d["kind"] in ("RoleBinding", "ClusterRoleBinding")]:
        bound.add((binding["roleRef"]["kind"], binding["roleRef"]["name"]))
        for subject in binding["subjects"]:
            assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", "migd-system")
            assert binding["metadata"]["name"].startswith(subject["name"])
    assert bound == roles
    assert "cluster-admin" not in "".join(path.read_text() for path in FILES)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_denies_and_says_why(name: str):
    spec = POLICIES[name]
    assert BINDINGS[name] == {"policyName": name, "validationActions": ["Deny"]}
    assert spec["failurePolicy"] == "Fail"
    account = name.rsplit("-", 1)[0]
    assert [c["expression"] for c in spec["matchConditions"]] == [
        f"request.userInfo.username == 'system:serviceaccount:migd-system:{account}'"
    ]
    for rule in spec["matchConstraints"]["resourceRules"]:
        assert "*" not in (*rule["apiGroups"], *rule["apiVersions"], *rule["operations"], *rule["resources"])
        assert {"CREATE", "UPDATE", "DELETE"} <= set(rule["operations"])
    for validation in spec["validations"]:
        assert validation["reason"] == "Forbidden"
        assert len(validation["message"].split()) >= 4
    assert spec["validations"][0]["message"].startswith("the token is not bound to a pod")


def test_every_kind_that_a_program_may_write_has_a_policy_for_it():
    watched = {
        (name.rsplit("-", 1)[0], group, resource)
        for name, spec in POLICIES.items()
        for rule in spec["matchConstraints"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    for name, rule in RULES:
        account = "-".join(name.split("-")[:2])
        if set(rule["verbs"]) <= {"get", "list", "watch"}:
            continue
        for resource in rule["resources"]:
            kind = resource.split("/")[0]
            names = {resource, f"{kind}/*"} if "/" in resource else {kind}
            assert any((account, rule["apiGroups"][0], one) in watched for one in names), (name, resource)


def test_policies_know_the_words_of_the_code():
    agent, operator = (yaml.safe_dump(POLICIES[f"migd-{who}-nodes"], width=10_000) for who in ("agent", "operator"))
    for word in (TAINT, PAUSED, OWED):
        assert word in operator
    assert TAINT in agent
    assert PAUSED in agent
    variables = {v["name"]: v["expression"] for v in POLICIES["migd-agent-nodes"]["variables"]}
    clients = set(re.findall(r"'([^']+)'", variables["clients"]))
    assert clients == LABELS_OF_OTHERS - {"nvidia.com/gpu.deploy.mig-manager", "nvidia.com/mig.config.state"}


def test_the_operators_policy_compares_every_field_of_a_status_that_is_not_its_own():
    crd = yaml.safe_load((ROOT / "crds" / "migd.dev_gpupartitions.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    text = "\n".join(v["expression"] for v in POLICIES["migd-operator-partitions"]["validations"])
    compared = set(re.findall(r"variables\.obj\.\?status\.\?(\w+) == oldObject\.\?status\.\?\1\b", text))
    assert compared | {"conditions", "evictions"} == set(schema)
    assert set(schema) == {field.alias or name for name, field in PartitionStatus.model_fields.items()}


@pytest.mark.parametrize("name", PODS)
def test_labels_select_the_pods_and_tokens_are_short_lived(name: str):
    spec = PODS[name]
    pod = spec["template"]["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert spec["selector"]["matchLabels"] == {"app.kubernetes.io/name": name}
    assert pod["serviceAccountName"] == name
    assert pod["automountServiceAccountToken"] is False
    [token] = [v["projected"]["sources"] for v in pod["volumes"] if v["name"] == "token"]
    assert token[0]["serviceAccountToken"] == {"path": "token", "expirationSeconds": 3600}
    [container] = pod["containers"]
    assert container["image"] == "migd"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    [port] = [p["containerPort"] for p in container["ports"]]
    assert [a for a in container["args"] if a.startswith("--listen=")] == [f"--listen=0.0.0.0:{port}"]
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz"), ("startupProbe", "/healthz")):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}


def test_the_operator_touches_no_host_and_runs_once():
    spec = PODS["migd-operator"]
    pod = spec["template"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert not {"hostPID", "hostNetwork", "hostIPC"} & set(pod)
    assert not [v for v in pod["volumes"] if "hostPath" in v]
    assert pod["securityContext"]["runAsNonRoot"] is True
    [container] = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_agent_sees_of_its_host_what_it_needs_and_survives_its_own_taint():
    pod = PODS["migd-agent"]["template"]["spec"]
    assert not {"hostNetwork", "hostIPC"} & set(pod)
    assert {t["key"] for t in pod["tolerations"] if "key" in t} == {TAINT, "nvidia.com/gpu"}
    paths = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    mounts = {m["name"]: m for m in pod["containers"][0]["volumeMounts"]}
    assert set(paths) == {"state", "pod-resources", "dev", "driver"}
    assert [name for name in paths if not mounts[name].get("readOnly")] == ["state", "dev"]
    assert "nvidia.com/" not in str(pod["containers"][0]["resources"])


def test_no_taint_puts_out_an_agent_that_runs():
    """It would leave the node closed, its clients paused and its GPUs half done, until the operator pays for it."""
    tolerations = PODS["migd-agent"]["template"]["spec"]["tolerations"]
    assert {"operator": "Exists", "effect": "NoExecute"} in tolerations


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("kustomization.yaml")), ids=lambda p: str(p.relative_to(DEPLOY)))
def test_a_kustomization_takes_every_file_beside_it(path: Path):
    document = yaml.safe_load(path.read_text())
    named = [*document.get("resources", ()), *(p["path"] for p in document.get("patches", ()) if "path" in p)]
    beside = {p.name for p in path.parent.glob("*.yaml")} - {"kustomization.yaml"}
    assert {name for name in named if "/" not in name} == beside
    for name in (*named, *document.get("components", ())):
        assert (path.parent / name).exists()


def test_the_definitions_can_be_applied_as_files_and_by_kustomize():
    kustomization = yaml.safe_load((ROOT / "crds" / "Kustomization").read_text())
    assert kustomization["resources"] == sorted(p.name for p in (ROOT / "crds").glob("*.yaml"))
