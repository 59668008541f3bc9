"""Our objects as documents, and where they live."""

from __future__ import annotations

import uuid
from typing import Any

PLANS = "/apis/migd.dev/v1alpha1/gpupartitionplans"
PARTITIONS = "/apis/migd.dev/v1alpha1/gpupartitions"
OFF = {"gpus": {"all": True}, "mig": "Disabled"}
NOW = "2026-01-01T00:00:00Z"


def plan(name: str, *rules: Any, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "migd.dev/v1alpha1",
        "kind": "GPUPartitionPlan",
        "metadata": {"name": name},
        "spec": {"nodeSelector": {}, "rules": list(rules) or [OFF], **spec},
    }


def gpu_name() -> str:
    return f"gpu-{uuid.uuid4()}"


def partition(name: str, node: str = "node-a", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "migd.dev/v1alpha1",
        "kind": "GPUPartition",
        "metadata": {"name": name},
        "spec": {"nodeName": node, "nodeUID": "11111111-2222-3333-4444-555555555555", **spec},
    }


def desired(**changes: Any) -> dict[str, Any]:
    return {
        "summary": "3g.40gb 3×1g.10gb",
        "mig": "Enabled",
        "instances": [{"profile": "3g.40gb"}, {"profile": "1g.10gb", "count": 3}],
        "plan": {"name": "inference", "uid": "aaaaaaaa-2222-3333-4444-555555555555", "generation": 4},
        "disruption": {"policy": "WaitForIdle", "timeout": "30m"},
        **changes,
    }


def condition(kind: str, status: str = "True", reason: str = "AsWished", **changes: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": NOW,
        **changes,
    }
