"""Who may ask for what: a row per right and per rule, each a request that changes nothing (dryRun).

The stage that the names in angle brackets stand for is made by `integration.conftest.stage`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from controlplane.api import APPLY, JSON_PATCH, MERGE, Answer, Api
from integration.deployed import NAMESPACE, PLUGIN_NAMESPACE
from integration.texts import NOW, PARTITIONS, PLANS, condition, desired, partition, plan

NODES: Final = "/api/v1/nodes"
LEASES: Final = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
EVENTS: Final = "/apis/events.k8s.io/v1/namespaces/default/events"
PODS: Final = f"/api/v1/namespaces/{PLUGIN_NAMESPACE}/pods"
TIME: Final = "2026-01-01T00:00:00.000000Z"
OK: Final = ""
RBAC: Final = "is forbidden: User"  # so begins the answer of RBAC; a policy names itself and its rule
MANAGERS: Final = {"agent": "migd-agent", "shut": "migd-agent", "operator": "migd-operator"}


@dataclass(frozen=True, slots=True)
class Row:
    """One request.

    who: "agent" of node <open>, "shut" of node <closed> (an agent too), "operator". says: what the refusal says; OK
    where it is allowed. body: a function makes it from the object as it is. query: besides dryRun.
    """

    name: str
    who: str
    method: str
    path: str
    body: Any = None
    says: str = OK
    content: str = MERGE
    query: dict[str, str] = field(default_factory=dict)

    def ask(self, api: Api, admin: Api, names: dict[str, str]) -> Answer:
        """Ask for it, for the stage's names."""
        path = filled(self.path, names)
        body = self.body(admin.get(path).object()) if callable(self.body) else filled(self.body, names)
        writes = {"dryRun": "All"} if self.method != "GET" else {}
        manager = {"fieldManager": MANAGERS[self.who], "force": "true"} if self.content == APPLY else {}
        content = self.content if self.method == "PATCH" else "application/json"
        return api.request(self.method, path, body, content, {**writes, **manager, **self.query})

    def __str__(self) -> str:
        return f"{self.who}: {self.name}"


def filled(value: Any, names: dict[str, str]) -> Any:
    """The value with the stage's names in it."""
    if isinstance(value, str):
        for word, name in names.items():
            value = value.replace(f"<{word}>", name)
        return value
    if isinstance(value, dict):
        return {filled(key, names): filled(inner, names) for key, inner in value.items()}
    return [filled(inner, names) for inner in value] if isinstance(value, list) else value


def label(key: str, value: str | None) -> dict[str, Any]:
    return {"metadata": {"labels": {key: value}}}


def note(key: str, value: str | None) -> dict[str, Any]:
    return {"metadata": {"annotations": {key: value}}}


def taint(key: str, effect: str = "NoSchedule", **more: str) -> list[dict[str, Any]]:
    return [{"op": "add", "path": "/spec/taints/-", "value": {"key": key, "effect": effect, **more}}]


def applied(name: str, **parts: Any) -> dict[str, Any]:
    return {"apiVersion": "migd.dev/v1alpha1", "kind": "GPUPartition", "metadata": {"name": name}, **parts}


def lease(name: str, **metadata: Any) -> dict[str, Any]:
    spec = {"holderIdentity": "h", "leaseDurationSeconds": 180, "acquireTime": TIME, "renewTime": TIME}
    return {"metadata": {"name": name, "namespace": NAMESPACE, **metadata}, "spec": spec}


def event(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "default"},
        "eventTime": TIME,
        "reportingController": "migd.dev/tests",
        "reportingInstance": "t",
        "regarding": {"kind": "Node", "name": "n", "uid": "u"},
        "type": "Normal",
        "reason": "AsWished",
        "action": "Try",
    }


WATCH: Final = {"watch": "true", "timeoutSeconds": "1"}
SERIES: Final = {"series": {"count": 2, "lastObservedTime": TIME}}
PAUSED: Final = "paused-for-mig-change"
CLIENT: Final = "nvidia.com/gpu.deploy."
OPEN, CLOSED, OTHER = f"{NODES}/<open>", f"{NODES}/<closed>", f"{NODES}/<other>"
MINE, WISHED, THEIRS, NEW = (f"{PARTITIONS}/<{which}>" for which in ("gpu", "wished gpu", "other gpu", "new gpu"))
PLAN: Final = f"{PLANS}/<plan>"
OWN: Final = [{"apiVersion": "v1", "kind": "Node", "name": "<open>", "uid": "<open uid>"}]
NOT_OWN: Final = [{"apiVersion": "v1", "kind": "Node", "name": "<other>", "uid": "<other uid>"}]
TURN: Final = {"id": "0123456789abcdef", "gpus": 1}
VICTIM: Final = {"namespace": "default", "name": "p", "uid": "u"}
EVICTED: Final = {"podUID": "u", "code": 201, "at": NOW}
COUNTED: Final = {"evictions": {"generation": 1, "evicted": 1, "pending": ["u"]}}
CIDR: Final = {"spec": {"podCIDR": "10.9.0.0/24", "podCIDRs": ["10.9.0.0/24"]}}
OWN_GPUS: Final = "GPUPartitions of its own node only"
OWN_LEASE: Final = "Lease of its own node"
WORDS: Final = "from true to paused-for-mig-change and back only"
ITS_OWN_ONLY: Final = "the operator writes evictions and the conditions AgentAlive and Assigned only"
NAMES_UID: Final = "an eviction names the uid of its pod"
FORBIDDEN: Final[list[tuple[str, str, str, Any]]] = [
    ("reads secrets", "GET", "/api/v1/secrets", None),
    ("reads a secret of its namespace", "GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/x", None),
    ("makes a token", "POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/migd-operator/token", {"spec": {}}),
    ("runs a command in a pod", "POST", f"{PODS}/<plugin>/exec?command=id&stdout=true", None),
    ("attaches to a pod", "POST", f"{PODS}/<plugin>/attach?stdout=true", None),
    ("forwards a port", "POST", f"{PODS}/<plugin>/portforward", None),
    ("reads a pod's log", "GET", f"{PODS}/<plugin>/log", None),
    ("reaches a kubelet", "GET", f"{OPEN}/proxy/pods", None),
    ("makes a pod", "POST", PODS, {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}),
    ("changes a pod", "PATCH", f"{PODS}/<plugin>", label("x", "y")),
    ("changes the agents' DaemonSet", "PATCH", f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/migd-agent",
     label("x", "y")),
    ("reads ConfigMaps", "GET", f"/api/v1/namespaces/{NAMESPACE}/configmaps", None),
    ("gives rights", "POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
     {"metadata": {"name": "x"}, "roleRef": {"kind": "ClusterRole", "name": "view"}}),
    ("lifts a policy", "DELETE",
     "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/migd-agent-nodes", None),
    ("changes a definition", "PATCH", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/gpupartitions.migd.dev",
     label("x", "y")),
    ("makes a plan", "POST", PLANS, plan("x")),
]  # fmt: skip


def eviction(uid: str | None = None, **options: Any) -> dict[str, Any]:
    """The eviction of the stage's bare pod; with this uid as its precondition, if any."""
    options |= {} if uid is None else {"preconditions": {"uid": uid}}
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "<bare>", "namespace": PLUGIN_NAMESPACE},
        "deleteOptions": options,
    }


def new_gpu() -> dict[str, Any]:
    """A GPUPartition as its agent applies it first."""
    document = partition("<new gpu>", "<open>")
    return {
        **document,
        "metadata": {"name": "<new gpu>", "labels": {"migd.dev/node": "<open>"}, "ownerReferences": OWN},
    }


def status(**parts: Any) -> dict[str, Any]:
    return applied("<gpu>", status=parts)


def renewed(lease: dict[str, Any]) -> dict[str, Any]:
    return {**lease, "spec": {**lease["spec"], "renewTime": "2026-01-01T00:01:00.000000Z"}}


def lease_without_a_name() -> dict[str, Any]:
    return {**lease("x"), "metadata": {"generateName": "<open>"}}


def opened(node: dict[str, Any]) -> list[dict[str, Any]]:
    """Our taint, and no other, taken away: the one with another effect is somebody else's."""
    ours = ("migd.dev/changing", "NoSchedule")
    kept = [taint for taint in node["spec"]["taints"] if (taint["key"], taint["effect"]) != ours]
    return [{"op": "replace", "path": "/spec/taints", "value": kept}]


def bared(node: dict[str, Any]) -> list[dict[str, Any]]:
    """Every taint of our name taken away."""
    kept = [taint for taint in node["spec"]["taints"] if taint["key"] != "migd.dev/changing"]
    return [{"op": "replace", "path": "/spec/taints", "value": kept}]


def paid(node: dict[str, Any]) -> list[dict[str, Any]]:
    """All that is owed, given back in one request."""
    resumed = {"op": "add", "path": "/metadata/labels/nvidia.com~1gpu.deploy.dcgm", "value": "true"}
    return [*opened(node), resumed, {"op": "remove", "path": "/metadata/annotations/migd.dev~1owed"}]


def taken_over() -> dict[str, Any]:
    return {"metadata": {"labels": {f"{CLIENT}mig-manager": "false"}, "annotations": {"migd.dev/taken-over": "true"}}}


def given_back(value: str | None) -> dict[str, Any]:
    return {"metadata": {"labels": {f"{CLIENT}mig-manager": value}, "annotations": {"migd.dev/taken-over": None}}}


def reads(who: str, what: str, path: str, name: str = "", verbs: str = "get list watch") -> list[Row]:
    asked = {
        "get": Row(f"gets a {what}", who, "GET", f"{path}/{name}"),
        "list": Row(f"lists {what}s", who, "GET", path),
        "watch": Row(f"watches {what}s", who, "GET", path, query=WATCH),
    }
    return [asked[verb] for verb in verbs.split()]


AGENT_MAY = [
    *reads("agent", "node", NODES, "<open>"),
    *reads("agent", "GPUPartition", PARTITIONS, "<gpu>"),
    *reads("agent", "pod", "/api/v1/pods", verbs="list watch"),
    Row("closes its node", "agent", "PATCH", OPEN, taint("migd.dev/changing"), content=JSON_PATCH),
    Row("opens its node", "shut", "PATCH", CLOSED, opened, content=JSON_PATCH),
    Row("says its state", "agent", "PATCH", OPEN, label("migd.dev/state", "ready")),
    Row("counts its instances", "agent", "PATCH", OPEN, label("migd.dev/mig-3g.40gb.count", "1")),
    Row("pauses a GPU client", "agent", "PATCH", OPEN, label(f"{CLIENT}device-plugin", PAUSED)),
    Row("resumes a GPU client", "shut", "PATCH", CLOSED, label(f"{CLIENT}dcgm", "true")),
    Row("notes what it owes", "agent", "PATCH", OPEN, note("migd.dev/owed", "{}")),
    Row("pays what it owes", "shut", "PATCH", CLOSED, note("migd.dev/owed", None)),
    Row("mirrors mig-manager's state", "agent", "PATCH", OPEN, label("nvidia.com/mig.config.state", "success")),
    Row("takes the mirror away", "shut", "PATCH", CLOSED, label("nvidia.com/mig.config.state", None)),
    Row("registers a GPU", "agent", "PATCH", NEW, new_gpu(), content=APPLY),
    Row("renews a GPU's object", "agent", "PATCH", MINE, partition("<gpu>", "<open>"), content=APPLY),
    Row("removes a retry", "agent", "PATCH", MINE, note("migd.dev/retry", None)),
    Row("says how a GPU is", "agent", "PATCH", f"{MINE}/status", status(phase="Ready"), content=APPLY),
    Row(
        "names who must go",
        "agent",
        "PATCH",
        f"{MINE}/status",
        status(phase="Draining", victims=[VICTIM]),
        content=APPLY,
    ),
    Row("takes its Lease", "agent", "POST", LEASES, lease("<open>", ownerReferences=OWN)),
    Row("reads its Lease", "shut", "GET", f"{LEASES}/<closed>"),
    Row("renews its Lease", "shut", "PUT", f"{LEASES}/<closed>", renewed),
    Row("tells an event", "agent", "POST", EVENTS, event("<open>.new")),
    Row("counts an event", "agent", "PATCH", f"{EVENTS}/<event>", SERIES),
    Row("stops the plugin's pod on its node", "agent", "DELETE", f"{PODS}/<plugin>"),
]

AGENT_MAY_NOT = [
    # another node's objects
    Row("labels another node", "agent", "PATCH", OTHER, label("migd.dev/state", "ready"), "its own node only"),
    Row("closes another node", "agent", "PATCH", OTHER, taint("migd.dev/changing"), "its own node only", JSON_PATCH),
    Row("writes another node's GPU", "agent", "PATCH", f"{THEIRS}/status", {"status": {"phase": "Ready"}}, OWN_GPUS),
    Row("retries another node's GPU", "agent", "PATCH", THEIRS, note("migd.dev/retry", None), OWN_GPUS),
    Row("registers a GPU for another node", "agent", "PATCH", NEW, partition("<new gpu>", "<other>"), OWN_GPUS, APPLY),
    Row("takes another node's Lease", "agent", "POST", LEASES, lease("<other>"), OWN_LEASE),
    Row("renews another node's Lease", "agent", "PUT", f"{LEASES}/<closed>", renewed, OWN_LEASE),
    Row("takes the operator's Lease", "agent", "POST", LEASES, lease("migd-operator"), OWN_LEASE),
    Row("takes a Lease of any name", "agent", "POST", LEASES, lease_without_a_name(), OWN_LEASE),
    Row("takes its Lease elsewhere", "agent", "POST", LEASES.replace(NAMESPACE, "default"),
        lease("<open>", namespace="default"), RBAC),
    Row("has its Lease outlive it", "agent", "POST", LEASES, lease("<open>", finalizers=["migd.dev/x"]),
        "no finalizers"),
    Row("stops another node's plugin", "agent", "DELETE", f"{PODS}/<other plugin>", says="pods of its own node only"),
    Row("stops a pod that stays away", "agent", "DELETE", f"{PODS}/<bare>", says="pods of DaemonSets only"),
    Row("stops a pod of another namespace", "agent", "DELETE", "/api/v1/namespaces/migd-system/pods/<agent pod>",
        says=RBAC),
    # of its own node, what is not its own
    Row("writes a foreign label", "agent", "PATCH", OPEN, label("team", "x"), "label team"),
    Row("changes a foreign label", "agent", "PATCH", OPEN, label("pool", "x"), "label pool"),
    Row("removes a foreign label", "agent", "PATCH", OPEN, label("pool", None), "label pool"),
    Row("writes GFD's label", "agent", "PATCH", OPEN, label("nvidia.com/mig.strategy", "mixed"),
        "label nvidia.com/mig.st"),
    Row("orders mig-manager", "agent", "PATCH", OPEN, label("nvidia.com/mig.config", "x"),
        "label nvidia.com/mig.config"),
    Row("turns mig-manager off", "agent", "PATCH", OPEN, label(f"{CLIENT}mig-manager", "false"),
        "label nvidia.com/gpu.deploy"),
    Row("labels as a restricted node", "agent", "PATCH", OPEN, label("node-restriction.kubernetes.io/x", "y"),
        "label node-"),
    Row("gives a GPU client a word of its own", "agent", "PATCH", OPEN, label(f"{CLIENT}device-plugin", "off"), WORDS),
    Row("forgets a GPU client", "agent", "PATCH", OPEN, label(f"{CLIENT}device-plugin", None), WORDS),
    Row("starts a GPU client that was off", "agent", "PATCH", OPEN, label(f"{CLIENT}nvsm", "true"), WORDS),
    Row("mirrors a state there is not", "agent", "PATCH", OPEN, label("nvidia.com/mig.config.state", "x"),
        "is pending"),
    Row("writes a foreign annotation", "agent", "PATCH", OPEN, note("team", "x"), "annotation team"),
    Row("removes a foreign annotation", "agent", "PATCH", OPEN, note("kept", None), "annotation kept"),
    Row("holds its node", "agent", "PATCH", OPEN, note("migd.dev/hold", "x"), "annotation migd.dev/hold"),
    Row("ends a hold", "shut", "PATCH", CLOSED, note("migd.dev/hold", None), "annotation migd.dev/hold"),
    Row("notes a take-over", "agent", "PATCH", OPEN, note("migd.dev/taken-over", "x"),
        "annotation migd.dev/taken-over"),
    Row("sets a foreign taint", "agent", "PATCH", OPEN, taint("team"), "migd.dev/changing:NoSchedule only", JSON_PATCH),
    Row("takes a taint of another effect away", "shut", "PATCH", CLOSED, bared, "migd.dev/changing:NoSchedule only",
        JSON_PATCH),
    Row("sets another taint of ours", "agent", "PATCH", OPEN, taint("migd.dev/x"),
        "migd.dev/changing:NoSchedule only", JSON_PATCH),
    Row("removes all taints", "agent", "PATCH", OPEN, {"spec": {"taints": None}}, "migd.dev/changing:NoSchedule only"),
    Row("evicts by taint", "agent", "PATCH", OPEN, taint("migd.dev/changing", "NoExecute"),
        "migd.dev/changing:NoSchedule only", JSON_PATCH),
    Row("gives its taint a value", "agent", "PATCH", OPEN, taint("migd.dev/changing", value="x"), "no value",
        JSON_PATCH),
    Row("cordons", "agent", "PATCH", OPEN, {"spec": {"unschedulable": True}}, "a cordon is an admin's"),
    Row("uncordons", "shut", "PATCH", CLOSED, {"spec": {"unschedulable": None}}, "a cordon is an admin's"),
    Row("names its provider", "agent", "PATCH", OPEN, {"spec": {"providerID": "x"}}, "nothing of a node's spec"),
    Row("takes a range of addresses", "agent", "PATCH", OPEN, CIDR, "nothing of a node's spec"),
    Row("keeps its node from going", "agent", "PATCH", OPEN, {"metadata": {"finalizers": ["x.dev/y"]}},
        "no finalizers"),
    Row("has its node owned", "agent", "PATCH", OPEN, {"metadata": {"ownerReferences": OWN}}, "no owners"),
    Row("writes its node's status", "agent", "PATCH", f"{OPEN}/status",
        {"status": {"capacity": {"x.dev/y": "1"}}}, RBAC),
    Row("replaces its node", "agent", "PUT", OPEN, lambda node: node, RBAC),
    Row("deletes its node", "agent", "DELETE", OPEN, says=RBAC),
    Row("makes a node", "agent", "POST", NODES, {"metadata": {"name": "<new>"}}, RBAC),
    # of its GPUs, what is not its own
    Row("wishes", "agent", "PATCH", MINE, {"spec": {"desired": desired()}}, "spec.desired"),
    Row("registers a GPU with a wish", "agent", "PATCH", NEW, partition("<new gpu>", "<open>", desired=desired()),
        "spec.desired", APPLY),
    Row("gives itself a turn", "agent", "PATCH", WISHED, {"spec": {"assignment": TURN}}, "spec.assignment"),
    Row("takes its turn back", "agent", "PATCH", WISHED, {"spec": {"assignment": None}}, "spec.assignment"),
    Row("forgets the wish", "agent", "PATCH", WISHED, {"spec": {"desired": None, "assignment": None}}, "spec.desired"),
    Row("says that it lives", "agent", "PATCH", f"{MINE}/status", status(conditions=[condition("AgentAlive")]),
        "AgentAlive and Assigned are the operator's", APPLY),
    Row("says that it has a turn", "agent", "PATCH", f"{MINE}/status", status(conditions=[condition("Assigned")]),
        "AgentAlive and Assigned are the operator's", APPLY),
    Row("removes what the operator says", "agent", "PATCH", f"{WISHED}/status", {"status": {"conditions": []}},
        "AgentAlive and Assigned are the operator's"),
    Row("answers for evictions", "agent", "PATCH", f"{MINE}/status", status(evictions=[EVICTED]),
        "status.evictions is the operator's", APPLY),
    Row("removes the answers for evictions", "agent", "PATCH", f"{WISHED}/status", {"status": {"evictions": None}},
        "status.evictions is the operator's"),
    Row("labels a GPU for a plan", "agent", "PATCH", MINE, label("migd.dev/plan", "x"), "label migd.dev/node of"),
    Row("labels a GPU for another node", "agent", "PATCH", MINE, label("migd.dev/node", "<other>"),
        "names its own node"),
    Row("holds a GPU", "agent", "PATCH", MINE, note("migd.dev/hold", "x"), "touches no other"),
    Row("retries by itself", "agent", "PATCH", WISHED, note("migd.dev/retry", "x"), "touches no other"),
    Row("has a GPU owned by another node", "agent", "PATCH", MINE, {"metadata": {"ownerReferences": NOT_OWN}},
        "owned by"),
    Row("keeps a GPU's object from going", "agent", "PATCH", MINE, {"metadata": {"finalizers": ["x.dev/y"]}},
        "no finalizers"),
    Row("deletes a GPU's object", "agent", "DELETE", MINE, says=RBAC),
    # what nobody of ours may
    *(Row(f"{words}", "agent", method, path, body, RBAC) for words, method, path, body in FORBIDDEN),
    Row("evicts a pod", "agent", "POST", f"{PODS}/<bare>/eviction", eviction("<bare uid>"), RBAC),
    Row("approves a plan", "agent", "PATCH", PLAN, note("migd.dev/approved", "x"), RBAC),
    Row("counts evictions", "agent", "PATCH", f"{PLAN}/status", {"status": COUNTED}, RBAC),
    Row("reads plans", "agent", "GET", PLANS, says=RBAC),
    Row("lists Leases", "agent", "GET", LEASES, says=RBAC),
]  # fmt: skip

OPERATOR_MAY = [
    *reads("operator", "node", NODES, "<open>"),
    *reads("operator", "GPUPartition", PARTITIONS, verbs="list watch"),
    *reads("operator", "plan", PLANS, "<plan>"),
    *reads("operator", "Lease", LEASES, verbs="list watch"),
    *reads("operator", "pod", PODS, "<bare>", verbs="get"),
    *reads("operator", "budget", f"/apis/policy/v1/namespaces/{PLUGIN_NAMESPACE}/poddisruptionbudgets", verbs="list"),
    Row("evicts a pod by its uid", "operator", "POST", f"{PODS}/<bare>/eviction", eviction("<bare uid>")),
    Row("evicts a pod with a grace period", "operator", "POST", f"{PODS}/<bare>/eviction",
        eviction("<bare uid>", gracePeriodSeconds=30)),
    Row("answers for evictions", "operator", "PATCH", f"{MINE}/status", status(evictions=[EVICTED]), content=APPLY),
    Row("forgets evictions", "operator", "PATCH", f"{WISHED}/status", {"status": {"evictions": None}}),
    Row("counts evictions", "operator", "PATCH", f"{PLAN}/status", {"status": COUNTED}),
    *reads("operator", "ResourceSlice", "/apis/resource.k8s.io/v1/resourceslices", verbs="list watch"),
    *reads("operator", "NodeAccelerator", "/apis/inference.redhat.com/v1alpha1/nodeaccelerators", verbs="list watch"),
    *reads("operator", "GPUReset", "/apis/janitor.dgxc.nvidia.com/v1alpha1/gpuresets", verbs="list watch"),
    Row("wishes", "operator", "PATCH", MINE, applied("<gpu>", spec={"desired": desired(), "assignment": TURN}),
        content=APPLY),
    Row("labels a GPU for a plan", "operator", "PATCH", MINE, label("migd.dev/plan", "x")),
    Row("takes a wish back", "operator", "PATCH", WISHED, {"spec": {"desired": None, "assignment": None}}),
    Row("says why a GPU waits", "operator", "PATCH", f"{MINE}/status",
        status(conditions=[condition("Assigned"), condition("AgentAlive")]), content=APPLY),
    Row("deletes the object of a node that went", "operator", "DELETE", THEIRS),
    Row("says how a plan stands", "operator", "PATCH", f"{PLAN}/status",
        {"status": {"observedGeneration": 1}}),
    Row("says that an agent is silent", "operator", "PATCH", OTHER, label("migd.dev/state", "unknown")),
    Row("turns mig-manager off", "operator", "PATCH", OPEN, taken_over()),
    Row("gives a node back to mig-manager", "operator", "PATCH", CLOSED, given_back(None)),
    Row("gives mig-manager its label back", "operator", "PATCH", CLOSED, given_back("true")),
    Row("pays a dead agent's debts", "operator", "PATCH", CLOSED, paid, content=JSON_PATCH),
    Row("takes its Lease", "operator", "POST", LEASES, lease("migd-operator")),
    Row("reads its Lease", "operator", "GET", f"{LEASES}/migd-operator"),
    Row("renews its Lease", "operator", "PUT", f"{LEASES}/migd-operator", renewed),
    Row("tells an event", "operator", "POST", EVENTS, event("<open>.new")),
    Row("counts an event", "operator", "PATCH", f"{EVENTS}/<event>", SERIES),
]  # fmt: skip

OPERATOR_MAY_NOT = [
    Row("closes a node", "operator", "PATCH", OPEN, taint("migd.dev/changing"), "removes the taint", JSON_PATCH),
    Row("sets a foreign taint", "operator", "PATCH", OPEN, taint("team"), "removes the taint", JSON_PATCH),
    Row("removes all taints", "operator", "PATCH", CLOSED, {"spec": {"taints": None}}, "removes the taint"),
    Row("takes a taint of another effect away", "operator", "PATCH", CLOSED, bared, "removes the taint", JSON_PATCH),
    Row("cordons", "operator", "PATCH", OPEN, {"spec": {"unschedulable": True}}, "a cordon is an admin's"),
    Row("uncordons", "operator", "PATCH", CLOSED, {"spec": {"unschedulable": None}}, "a cordon is an admin's"),
    Row("names a provider", "operator", "PATCH", OPEN, {"spec": {"providerID": "x"}}, "nothing of a node's spec"),
    Row("keeps a node from going", "operator", "PATCH", OPEN, {"metadata": {"finalizers": ["x.dev/y"]}},
        "no finalizers"),
    Row("writes a foreign label", "operator", "PATCH", OPEN, label("team", "x"), "label team"),
    Row("removes a foreign label", "operator", "PATCH", OPEN, label("pool", None), "label pool"),
    Row("counts instances", "operator", "PATCH", OPEN, label("migd.dev/mig-1g.10gb.count", "1"), "label migd.dev/mig"),
    Row("mirrors mig-manager's state", "operator", "PATCH", OPEN, label("nvidia.com/mig.config.state", "failed"),
        "label nvidia.com/mig.config.state"),
    Row("pauses a GPU client", "operator", "PATCH", OPEN, label(f"{CLIENT}device-plugin", PAUSED),
        "label nvidia.com/gpu"),
    Row("resumes a client and leaves the debt", "operator", "PATCH", CLOSED, label(f"{CLIENT}dcgm", "true"),
        "label nvidia.com/gpu.deploy.dcgm"),
    Row("gives back what is not owed", "operator", "PATCH", CLOSED,
        {"metadata": {"labels": {f"{CLIENT}nvsm": "true"}, "annotations": {"migd.dev/owed": None}}},
        "label nvidia.com/gpu.deploy.nvsm"),
    Row("gives back another value", "operator", "PATCH", CLOSED,
        {"metadata": {"labels": {f"{CLIENT}dcgm": "false"}, "annotations": {"migd.dev/owed": None}}},
        "label nvidia.com/gpu.deploy.dcgm"),
    Row("turns mig-manager on", "operator", "PATCH", OPEN, label(f"{CLIENT}mig-manager", "yes"),
        "mig-manager to false"),
    Row("makes debts", "operator", "PATCH", OPEN, note("migd.dev/owed", "{}"), "annotation migd.dev/owed"),
    Row("changes a debt", "operator", "PATCH", CLOSED, note("migd.dev/owed", "{}"), "annotation migd.dev/owed"),
    Row("holds a node", "operator", "PATCH", OPEN, note("migd.dev/hold", "x"), "annotation migd.dev/hold"),
    Row("ends a hold", "operator", "PATCH", CLOSED, note("migd.dev/hold", None), "annotation migd.dev/hold"),
    Row("writes a foreign annotation", "operator", "PATCH", OPEN, note("team", "x"), "annotation team"),
    Row("writes a node's status", "operator", "PATCH", f"{OPEN}/status",
        {"status": {"capacity": {"x.dev/y": "1"}}}, RBAC),
    Row("deletes a node", "operator", "DELETE", OPEN, says=RBAC),
    Row("says how a GPU is", "operator", "PATCH", f"{MINE}/status", status(phase="Ready"), ITS_OWN_ONLY, APPLY),
    Row("says what a GPU is cut into", "operator", "PATCH", f"{MINE}/status", status(observed={"summary": "x"}),
        ITS_OWN_ONLY, APPLY),
    Row("says that a GPU is ready", "operator", "PATCH", f"{MINE}/status", status(conditions=[condition("Ready")]),
        "writes AgentAlive and Assigned only", APPLY),
    Row("registers a GPU", "operator", "PATCH", NEW, partition("<new gpu>", "<open>"), "cannot create resource", APPLY),
    Row("labels a GPU for a node", "operator", "PATCH", MINE, label("migd.dev/node", "<other>"),
        "label migd.dev/plan of"),
    Row("holds a GPU", "operator", "PATCH", MINE, note("migd.dev/hold", "x"), "hold and retry are people's"),
    Row("retries", "operator", "PATCH", WISHED, note("migd.dev/retry", "x"), "hold and retry are people's"),
    Row("has a GPU owned", "operator", "PATCH", MINE, {"metadata": {"ownerReferences": NOT_OWN}}, "no owners"),
    Row("changes a plan", "operator", "PATCH", PLAN, {"spec": {"paused": True}}, RBAC),
    Row("approves a plan", "operator", "PATCH", PLAN, note("migd.dev/approved", "x"), RBAC),
    Row("deletes a plan", "operator", "DELETE", PLAN, says=RBAC),
    Row("takes an agent's Lease", "operator", "POST", LEASES, lease("<other>"), "its own Lease only"),
    Row("renews an agent's Lease", "operator", "PUT", f"{LEASES}/<closed>", renewed, RBAC),
    *(Row(f"{words}", "operator", method, path, body, RBAC) for words, method, path, body in FORBIDDEN),
    Row("names who must go", "operator", "PATCH", f"{MINE}/status", status(victims=[VICTIM]), ITS_OWN_ONLY, APPLY),
    Row("says who is in the way", "operator", "PATCH", f"{MINE}/status", status(blockers=[{"reason": "DrainBlocked"}]),
        ITS_OWN_ONLY, APPLY),
    Row("evicts a pod by its name", "operator", "POST", f"{PODS}/<bare>/eviction", eviction(), NAMES_UID),
    Row("evicts a pod of no uid", "operator", "POST", f"{PODS}/<bare>/eviction", eviction(""), NAMES_UID),
    Row("evicts without options", "operator", "POST", f"{PODS}/<bare>/eviction", {"metadata": {"name": "<bare>"}},
        NAMES_UID),
    Row("evicts at the version of an object", "operator", "POST", f"{PODS}/<bare>/eviction",
        eviction(preconditions={"resourceVersion": "1"}), NAMES_UID),
    Row("lists pods", "operator", "GET", "/api/v1/pods", says=RBAC),
    Row("deletes a pod", "operator", "DELETE", f"{PODS}/<bare>", says=RBAC),
    Row("reads a budget", "operator", "GET",
        f"/apis/policy/v1/namespaces/{PLUGIN_NAMESPACE}/poddisruptionbudgets/x", says=RBAC),
    Row("widens a budget", "operator", "PATCH",
        f"/apis/policy/v1/namespaces/{PLUGIN_NAMESPACE}/poddisruptionbudgets/x", {"spec": {"minAvailable": 0}}, RBAC),
    Row("stops the plugin's pod", "operator", "DELETE", f"{PODS}/<plugin>", says=RBAC),
]  # fmt: skip

MAY: Final = [*AGENT_MAY, *OPERATOR_MAY]
MAY_NOT: Final = [*AGENT_MAY_NOT, *OPERATOR_MAY_NOT]
