"""NVIDIA's own programs on a real node, as tests look at them: their pods, their restarts, their processes."""

from __future__ import annotations

from typing import Final

from controlplane.api import Json
from controlplane.deploying import applied
from controlplane.real_clusters import RealCluster
from controlplane.real_nvidia import config_map

PLUGIN: Final = "nvidia-device-plugin-ctr"
DISCOVERY: Final = "gpu-feature-discovery-ctr"


def pods_of(real_cluster: RealCluster, container: str) -> dict[str, Json]:
    """The pods of a program, by its container's name: uid -> pod; without those on their way out."""
    pods = real_cluster.pods(namespace=real_cluster.style.namespace)
    mine = [pod for pod in pods if pod["spec"]["containers"][0]["name"] == container]
    return {pod["metadata"]["uid"]: pod for pod in mine if "deletionTimestamp" not in pod["metadata"]}


def restarts(pod: Json) -> int:
    """How often a pod's program was started anew."""
    return sum(one["restartCount"] for one in pod.get("status", {}).get("containerStatuses", ()))


def restarts_of(real_cluster: RealCluster, container: str) -> dict[str, int]:
    """The same of a program's pods that were started at all, by uid."""
    pods = pods_of(real_cluster, container)
    return {uid: restarts(pod) for uid, pod in pods.items() if pod["status"].get("containerStatuses")}


def pids(real_cluster: RealCluster, *containers: str) -> set[int]:
    """The processes of these programs, as the node and so the driver numbers them."""
    real, uids = real_cluster.real, [uid for container in containers for uid in pods_of(real_cluster, container)]
    return {real.inner(pid) for uid in uids for pid in real.pids(uid)}


def configured(real_cluster: RealCluster, config: Json, *containers: str) -> None:
    """Tell these programs of NVIDIA's this, and have them start with it."""
    for container in containers:
        applied(real_cluster.plane, [config_map(real_cluster.style, container, config)], f"what {container} is told")
        for pod in pods_of(real_cluster, container).values():
            metadata = pod["metadata"]
            gone = real_cluster.kubectl("delete", "pod", "-n", metadata["namespace"], metadata["name"])
            assert gone.returncode == 0, gone.stderr
