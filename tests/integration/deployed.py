"""deploy/ on a real API server, and the two programs' tokens as their pods get them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from controlplane.api import JSON_PATCH, Api
from controlplane.audit import Request
from controlplane.processes import until
from controlplane.running import ControlPlane

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
NAMESPACE: Final = "migd-system"
PLUGIN_NAMESPACE: Final = "nvidia-device-plugin"
AGENT: Final = f"system:serviceaccount:{NAMESPACE}:migd-agent"
OPERATOR: Final = f"system:serviceaccount:{NAMESPACE}:migd-operator"
EVERYTHING: Final = [{"operator": "Exists"}]
_WITHIN_S: Final = 30.0


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One thing that somebody may do. namespace: "" for all. name: "" for any. resource: with its subresource."""

    user: str
    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""

    def covers(self, request: Request) -> bool:
        """Whether the request needs this right."""
        made = request.verb == "patch" and request.code == 201  # an apply that makes an object needs create as well
        return (
            (self.user, self.group, self.resource) == (request.user, request.group, request.resource)
            and (self.verb == request.verb or (made and self.verb == "create"))
            and self.namespace in ("", request.namespace)
            and self.name in ("", request.name)
        )


def rendered(plane: ControlPlane, overlay: str) -> list[dict[str, Any]]:
    """The objects of a folder under deploy/, as `kubectl kustomize` puts them together."""
    done = plane.kubectl("kustomize", str(DEPLOY / overlay))
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def rights_in(documents: Iterable[Mapping[str, Any]]) -> frozenset[Right]:
    """Every right that the roles among these objects give, one verb on one resource each."""
    found = list(documents)
    roles = {
        (d["kind"], d["metadata"].get("namespace", ""), d["metadata"]["name"]): d["rules"]
        for d in found
        if d["kind"] in ("Role", "ClusterRole")
    }
    rights: set[Right] = set()
    for binding in found:
        if binding["kind"] not in ("RoleBinding", "ClusterRoleBinding"):
            continue
        namespace = binding["metadata"].get("namespace", "")
        role = binding["roleRef"]
        for subject in binding["subjects"]:
            user = f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
            for rule in roles[role["kind"], namespace if role["kind"] == "Role" else "", role["name"]]:
                rights |= {
                    Right(user, verb, group, resource, namespace, name)
                    for verb in rule["verbs"]
                    for group in rule["apiGroups"]
                    for resource in rule["resources"]
                    for name in rule.get("resourceNames", [""])
                }
    return frozenset(rights)


def unused(rights: Iterable[Right], requests: Iterable[Request]) -> list[Right]:
    """The rights that none of these requests needed, of those that the API server did not refuse."""
    allowed = [request for request in requests if request.code not in (401, 403)]
    return sorted(right for right in rights if not any(right.covers(request) for request in allowed))


class Deployed:
    """A control plane with deploy/ applied. Nodes and pods are made by the admin: no kubelet confirms anything."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.admin = plane.admin

    def apply(self) -> None:
        """Apply what a cluster without the GPU Operator gets, and wait until every policy refuses an unbound token."""
        self.admin.create("/api/v1/namespaces", {"metadata": {"name": PLUGIN_NAMESPACE}})
        done = self.plane.kubectl("apply", "--server-side", "-k", str(DEPLOY / "overlays/helm-plugin"))
        assert done.returncode == 0, done.stderr

    def node(self, name: str, labels: Mapping[str, str], annotations: Mapping[str, str], closed: bool = False) -> None:
        """A node with somebody else's taints, that pods which tolerate everything can be bound to."""
        metadata = {"name": name, "labels": dict(labels), "annotations": dict(annotations)}
        kept = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
        kept += [{"key": "migd.dev/changing", "effect": "PreferNoSchedule"}]
        self.admin.create("/api/v1/nodes", {"metadata": metadata, "spec": {"taints": kept}}).object()
        room = {"cpu": "8", "memory": "8Gi", "pods": "20"}
        status = {"status": {"capacity": room, "allocatable": room}}
        self.admin.patch(f"/api/v1/nodes/{name}/status", status).object()
        if closed:
            taint = {
                "op": "add",
                "path": "/spec/taints/-",
                "value": {"key": "migd.dev/changing", "effect": "NoSchedule"},
            }
            self.admin.patch(f"/api/v1/nodes/{name}", [taint], JSON_PATCH).object()

    def uid_of(self, node: str) -> str:
        """The node's uid."""
        return str(self.admin.get(f"/api/v1/nodes/{node}").object()["metadata"]["uid"])

    def token(self, account: str, pod: str, node: str) -> str:
        """The token of a pod of a ServiceAccount on a node; the pod is made."""
        spec = {
            "serviceAccountName": account,
            "nodeName": node,
            "containers": [{"name": "c", "image": "none"}],
            "tolerations": EVERYTHING,
        }
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        self.admin.create(pods, {"metadata": {"name": pod}, "spec": spec}).object()
        return self.plane.bound_token(NAMESPACE, account, pod)

    def unbound(self, account: str) -> Api:
        """The API server as the holder of a token of that account which belongs to no pod."""
        at = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        return self.plane.as_token(str(self.admin.create(at, body).object()["status"]["token"]))

    def plugin(self, name: str, nodes: Mapping[str, str]) -> dict[str, str]:
        """A DaemonSet in the plugin's namespace on the nodes with these labels; node -> its pod."""
        labels = {"app": name}
        template = {
            "metadata": {"labels": labels},
            "spec": {
                "containers": [{"name": "nvidia-device-plugin-ctr", "image": "none"}],
                "tolerations": EVERYTHING,
                "nodeSelector": dict(nodes),
            },
        }
        spec = {"selector": {"matchLabels": labels}, "template": template}
        sets = f"/apis/apps/v1/namespaces/{PLUGIN_NAMESPACE}/daemonsets"
        self.admin.create(sets, {"metadata": {"name": name}, "spec": spec}).object()
        found: dict[str, str] = {}

        def bound() -> bool:
            pods = self.admin.get(f"/api/v1/namespaces/{PLUGIN_NAMESPACE}/pods", labelSelector=f"app={name}").object()
            found.update(
                {p["spec"]["nodeName"]: p["metadata"]["name"] for p in pods["items"] if "nodeName" in p["spec"]}
            )
            selected = self.admin.get("/api/v1/nodes", labelSelector=",".join(f"{k}={v}" for k, v in nodes.items()))
            return len(found) == len(selected.object()["items"])

        assert until(bound, _WITHIN_S), f"pods of {name} were bound on {sorted(found)} only"
        return found


def owed(**labels: str) -> dict[str, str]:
    """The annotation of a debt of these clients' labels, as migd/kube/owed.py writes it."""
    old = {f"nvidia.com/gpu.deploy.{client.replace('_', '-')}": value for client, value in labels.items()}
    return {"migd.dev/owed": json.dumps({"turn": "t1", "labels": old}, sort_keys=True)}
