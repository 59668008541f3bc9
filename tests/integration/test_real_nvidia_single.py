"""NVIDIA's own programs on a real node with the strategy single: all GPUs get one profile, and its slices are GPUs."""

from __future__ import annotations

from controlplane.real_clusters import NODE, RealCluster
from controlplane.real_nvidia import Ways
from controlplane.real_overlays import deployment
from integration.acting import apply, edit, eventually, instances, introduced, plan, quiet, ready
from integration.driver_calls import logged
from integration.nvidia_programs import DISCOVERY
from integration.promises import Promise
from integration.real_pods import computing, identity, running

REAL_CLUSTER = {"spec": "2xa100-80gb", "ways": Ways("single", cdi=False)}
GPU = "nvidia.com/gpu"


def said(real_cluster: RealCluster) -> tuple[str, str]:
    """What GPU feature discovery tells of GPUs: how many, and what they are."""
    labels = real_cluster.node()["metadata"]["labels"]
    return labels.get("nvidia.com/gpu.count", ""), labels.get("nvidia.com/gpu.product", "")


def test_slices_of_one_profile_are_offered_and_labelled_as_gpus_and_pods_keep_what_stays(real_cluster: RealCluster):
    introduced(real_cluster, NODE)
    eventually(lambda: real_cluster.node()["metadata"]["labels"].get("nvidia.com/mig.strategy"), "single")
    assert real_cluster.allocatable() == {GPU: 2}
    promise = Promise(real_cluster, "real", [NODE])
    promise.said(apply(real_cluster, plan("real", [NODE], instances(_1g_10gb=7))))
    ready(real_cluster, "real")
    promise.kept()
    quiet(real_cluster, NODE)
    assert real_cluster.allocatable() == {GPU: 14}
    eventually(lambda: said(real_cluster), ("14", "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"))

    real_cluster.apply(deployment("train", 3, {GPU: 1}))
    before = [identity(real_cluster, pod) for pod in running(real_cluster, "train", 3)]
    assert [one["nodes"] for one in before] == [real_cluster.nodes_of(one["held"]) for one in before]
    held = {str(one["container"]).removeprefix("containerd://"): one["held"][0] for one in before}
    eventually(lambda: computing(real_cluster), held)

    with logged(real_cluster, DISCOVERY) as log:
        edit(real_cluster, "real", rules=[instances(_1g_10gb=4)])
        ready(real_cluster, "real")
    assert log.half_seen() == []
    quiet(real_cluster, NODE)
    assert real_cluster.allocatable() == {GPU: 8}
    eventually(lambda: said(real_cluster)[0], "8")
    assert [identity(real_cluster, pod) for pod in running(real_cluster, "train", 3)] == before
