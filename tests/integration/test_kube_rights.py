"""A bound token with few rights, and a policy: what is refused is said as what it is, and the rest works."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from controlplane.processes import until
from controlplane.running import ControlPlane
from integration.texts import PARTITIONS as AT
from integration.texts import gpu_name, partition
from kube_contract.real import Real
from kube_contract.worlds import World

from migd.kube.connecting import ConnectError, HttpTransport
from migd.kube.errors import ConflictError, DeniedError
from migd.kube.nodes import NODES, NodeChange
from migd.kube.partitions import PARTITIONS, PLANS

RULES: list[dict[str, Any]] = [
    {"apiGroups": ["migd.dev"], "resources": ["gpupartitions"], "verbs": ["get", "list", "watch", "patch"]},
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]},
]
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"


def few_rights(plane: ControlPlane, name: str) -> Path:
    """A kubeconfig with the bound token of a ServiceAccount that has RULES only."""
    admin = plane.admin
    admin.create("/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": name}}).object()
    pod = {"serviceAccountName": name, "nodeName": name, "containers": [{"name": "c", "image": "none"}]}
    admin.create("/api/v1/namespaces/default/pods", {"metadata": {"name": name}, "spec": pod}).object()
    admin.create(f"{RBAC}/clusterroles", {"metadata": {"name": name}, "rules": RULES}).object()
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "default"}],
    }
    admin.create(f"{RBAC}/clusterrolebindings", binding).object()
    return plane.kubeconfig_of(f"{name}.kubeconfig", token=plane.bound_token("default", name, pod=name))


def test_a_bound_token_follows_what_it_may_and_is_told_what_it_may_not(plane: ControlPlane, name: str):
    gpu = gpu_name()
    plane.admin.create(AT, partition(gpu)).object()

    async def test(world: World) -> None:
        transport = await HttpTransport.connect("migd-tests", few_rights(plane, name))
        async with transport, world.cluster(name, transport=transport) as cluster:
            following = cluster.follow(PARTITIONS, lambda _change: None)
            await following.wait_synced()
            assert following.cache.get(gpu)
            barred = cluster.follow(PLANS, lambda _change: None)
            await world.until(lambda: barred.trouble)
            assert "403" in barred.trouble
            assert not barred.cache.synced
            idle = {"status": {"phase": "Idle"}}
            with pytest.raises(DeniedError, match="gpupartitions/status"):
                await cluster.apply(PARTITIONS, gpu, idle, following.cache.get(gpu), "status")

    Real(plane).run(test)


@pytest.mark.parametrize("reason", ["Forbidden", "Invalid"])
def test_a_policy_that_refuses_a_node_is_a_denial_whatever_reason_it_gives(plane: ControlPlane, name: str, reason: str):
    expression = f"request.name != '{name}' || !('migd.dev/state' in object.metadata.?labels.orValue({{}}))"
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["nodes"]}
            ]
        },
        "validations": [{"expression": expression, "message": "foreign label", "reason": reason}],
    }
    policy = {"metadata": {"name": name}, "spec": spec}
    plane.admin.create(f"{ADMISSION}/validatingadmissionpolicies", policy).object()
    binding = {"metadata": {"name": name}, "spec": {"policyName": name, "validationActions": ["Deny"]}}
    plane.admin.create(f"{ADMISSION}/validatingadmissionpolicybindings", binding).object()
    plane.admin.create("/api/v1/nodes", {"metadata": {"name": name}}).object()
    dry = {"metadata": {"labels": {"migd.dev/state": "x"}}}
    assert until(lambda: plane.admin.patch(f"/api/v1/nodes/{name}", dry, dryRun="All").code in (403, 422), 30)

    async def test(world: World) -> None:
        async with world.cluster() as cluster:
            with pytest.raises(DeniedError, match="foreign label"):
                for _ in range(20):
                    seen = await cluster.get(NODES, name)
                    with contextlib.suppress(ConflictError):  # the node's controllers write it too
                        await cluster.change_node(seen, NodeChange(labels={"migd.dev/state": "ready"}))

    try:
        Real(plane).run(test)
    finally:
        plane.admin.delete(f"{ADMISSION}/validatingadmissionpolicybindings/{name}")
        plane.admin.delete(f"{ADMISSION}/validatingadmissionpolicies/{name}")


@pytest.mark.parametrize("kubeconfig", [Path("/nowhere/kubeconfig"), None], ids=["no file", "no pod"])
def test_missing_credentials_are_said_with_where_they_were_looked_for(kubeconfig: Path | None):
    with pytest.raises(ConnectError, match=r"kubeconfig /nowhere|ServiceAccount"):
        asyncio.run(HttpTransport.connect("migd-tests", kubeconfig))
