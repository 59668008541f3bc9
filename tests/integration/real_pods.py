"""Pods on a real node, as tests look at them: who runs, what of them must not change, which labels their GPUs have."""

from __future__ import annotations

import re
from typing import Any

from controlplane.api import Json
from controlplane.real_clusters import RealCluster
from integration.acting import eventually


def running(real_cluster: RealCluster, name: str, number: int) -> list[Json]:
    """Wait until so many pods of a Deployment run, and no other, not even on its way out; they by name."""

    def phases() -> list[str]:
        pods = real_cluster.pods(f"app={name}")
        return ["Going" if "deletionTimestamp" in pod["metadata"] else pod["status"]["phase"] for pod in pods]

    eventually(phases, ["Running"] * number)
    return real_cluster.pods(f"app={name}")


def settled(real_cluster: RealCluster, offered: dict[str, int]) -> None:
    """Wait until the node offers exactly this, to pods and in its status.

    While a plugin starts anew nothing is offered, and the status tells of neither at once: it alone may be an old one.
    """
    devices = {resource: number for resource, number in offered.items() if number}
    eventually(lambda: (real_cluster.usable(), real_cluster.allocatable()), (devices, offered))


def identity(real_cluster: RealCluster, pod: Json) -> dict[str, Any]:
    """What of a pod must not change while its instances are kept."""
    (container,) = pod["status"]["containerStatuses"]
    return {
        "uid": pod["metadata"]["uid"],
        "restarts": container["restartCount"],
        "container": container["containerID"],
        "pids": real_cluster.real.pids(pod["metadata"]["uid"]),
        "held": real_cluster.mig_uuids(pod),
        "nodes": real_cluster.device_nodes(pod),
    }


def computing(real_cluster: RealCluster) -> dict[str, str]:
    """Container id -> UUID of the MIG device that a process of it is on, by NVML's own word."""
    machine = real_cluster.real.machine().snapshot()
    uuids = {c.serial: c.uuid for gpu in machine.gpus for one in gpu.instances for c in one.compute}
    return {one.container: uuids[one.ci_serial] for one in machine.processes.values() if one.ci_serial is not None}


def counts(real_cluster: RealCluster) -> dict[str, int]:
    """What GPU feature discovery tells of MIG devices by profile: `1g.10gb` -> how many."""
    labels = real_cluster.node()["metadata"]["labels"]
    found = ((re.fullmatch(r"nvidia\.com/mig-(.+)\.count", key), value) for key, value in labels.items())
    return {matched[1]: int(value) for matched, value in found if matched}
