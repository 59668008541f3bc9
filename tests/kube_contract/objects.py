"""Our objects as documents: what a test needs, as short as it may be."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
API = "migd.dev/v1alpha1"
UID = "11111111-2222-3333-4444-555555555555"
NOW = "2026-01-01T00:00:00Z"


def partition(name: str, node: str = "node-a", **spec: Any) -> Json:
    return {
        "apiVersion": API,
        "kind": "GPUPartition",
        "metadata": {"name": name},
        "spec": {"nodeName": node, "nodeUID": UID, **spec},
    }


def plan(name: str, **spec: Any) -> Json:
    rules = [{"gpus": {"all": True}, "mig": "Disabled"}]
    return {
        "apiVersion": API,
        "kind": "GPUPartitionPlan",
        "metadata": {"name": name},
        "spec": {"nodeSelector": {}, "rules": rules, **spec},
    }


def desired(summary: str = "3g.40gb 2×1g.10gb", generation: int = 4) -> Json:
    return {
        "summary": summary,
        "mig": "Enabled",
        "instances": [{"profile": "3g.40gb", "count": 1}, {"memoryGB": 10, "count": 2}],
        "plan": {"name": "inference", "uid": UID, "generation": generation},
        "disruption": {"policy": "Evict", "timeout": "30m", "protect": {}, "allow": ["EmptyDir"]},
    }


def condition(kind: str, status: str = "True", reason: str = "AsWished") -> Json:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": NOW,
    }


def node(name: str, **metadata: Any) -> Json:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, **metadata}}


def pod(name: str, node_name: str = "", gpus: int = 0, **metadata: Any) -> Json:
    container: Json = {"name": "main", "image": "none"}
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/mig-1g.10gb": str(gpus)}}
    spec: Json = {"containers": [container], **({"nodeName": node_name} if node_name else {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", **metadata},
        "spec": spec,
    }


BOARD: Json = {
    "index": 3,
    "uuid": "GPU-5c89852c-8268-c4e4-41f0-2e1dd3a7d26a",
    "model": "NVIDIA A100-SXM4-80GB",
    "architecture": "Ampere",
    "pciDeviceId": "0x20B210DE",
    "memoryMiB": 81920,
    "driver": "570.86.15",
    "migCapable": True,
    "modeChangeResets": True,
    "profiles": [
        {
            "name": "3g.40gb",
            "id": 9,
            "computeSlices": 3,
            "memoryMiB": 40192,
            "instancesMax": 2,
            "engines": {"copy": 3, "decoder": 2, "encoder": 0, "jpeg": 0, "ofa": 0},
            "placements": [{"start": 0, "size": 4}, {"start": 4, "size": 4}],
        },
    ],
}
OBSERVED: Json = {
    "summary": "3g.40gb",
    "inUse": "1/1",
    "mig": {"current": "Enabled", "pending": "Enabled"},
    "instances": [
        {
            "profile": "3g.40gb",
            "placement": {"start": 4, "size": 4},
            "gi": 2,
            "ci": 0,
            "migUUID": "MIG-aaaa",
            "inUse": True,
            "foreign": True,
        }
    ],
}
