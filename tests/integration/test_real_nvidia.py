"""NVIDIA's own device plugin and GPU feature discovery on a real node, strategy mixed, while migd changes the GPUs.

Their programs are unmodified; they and migd's agent find the simulated GPUs as they would real ones: by a driver's
library, its files and device nodes. Containers get devices by CDI, as the plugin describes them.
"""

from __future__ import annotations

import os
import signal

from controlplane.processes import until
from controlplane.real_clusters import NODE, RealCluster
from controlplane.real_nvidia import Ways, configuration
from controlplane.real_overlays import deployment
from integration.acting import apply, edit, eventually, instances, introduced, plan, quiet, ready
from integration.driver_calls import logged
from integration.nvidia_programs import DISCOVERY, PLUGIN, configured, pids, pods_of, restarts_of
from integration.promises import Promise
from integration.real_pods import computing, counts, identity, running, settled

REAL_CLUSTER = {"spec": "2xa100-80gb"}
LARGE, SMALL = "nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb"


def test_a_plan_is_what_nvidias_programs_then_offer_and_label_and_pods_keep_what_stays(real_cluster: RealCluster):
    introduced(real_cluster, NODE)
    assert real_cluster.allocatable() == {"nvidia.com/gpu": 2}
    promise = Promise(real_cluster, "real", [NODE])
    promise.said(apply(real_cluster, plan("real", [NODE], instances(_3g_40gb=1, _1g_10gb=3))))
    ready(real_cluster, "real")
    promise.kept()
    quiet(real_cluster, NODE)
    assert real_cluster.allocatable() == {"nvidia.com/gpu": 0, LARGE: 2, SMALL: 6}
    eventually(lambda: counts(real_cluster), {"3g.40gb": 2, "1g.10gb": 6})

    real_cluster.apply(deployment("train", 3, {SMALL: 1}), deployment("wide", 2, {LARGE: 1}))
    before = [identity(real_cluster, pod) for pod in running(real_cluster, "train", 3)]
    wide = [identity(real_cluster, pod) for pod in running(real_cluster, "wide", 2)]
    has_its_slice_and_no_other(real_cluster, [*before, *wide])
    real_cluster.apply(deployment("wide", 0, {LARGE: 1}))
    running(real_cluster, "wide", 0)

    edit(real_cluster, "real", rules=[instances(_1g_10gb=7)])
    ready(real_cluster, "real")
    quiet(real_cluster, NODE)
    assert real_cluster.allocatable() == {"nvidia.com/gpu": 0, LARGE: 0, SMALL: 14}
    eventually(lambda: counts(real_cluster), {"1g.10gb": 14})
    assert [identity(real_cluster, pod) for pod in running(real_cluster, "train", 3)] == before

    real_cluster.apply(deployment("train", 14, {SMALL: 1}))
    after = [identity(real_cluster, pod) for pod in running(real_cluster, "train", 14)]
    assert all(one in after for one in before)
    has_its_slice_and_no_other(real_cluster, after)
    real_cluster.apply(deployment("train", 3, {SMALL: 1}))


def has_its_slice_and_no_other(real_cluster: RealCluster, pods: list[dict[str, object]]) -> None:
    """Each pod has a slice of its own, by the kubelet's word, by its device nodes, and by NVML's list of processes."""
    held = [uuid for one in pods for uuid in one["held"]]
    assert len(held) == len(set(held)) == len(pods)
    assert [one["nodes"] for one in pods] == [real_cluster.nodes_of(one["held"]) for one in pods]
    wanted = {str(one["container"]).removeprefix("containerd://"): one["held"][0] for one in pods}
    eventually(lambda: computing(real_cluster), wanted)


def test_the_plugin_never_looks_at_gpus_that_are_half_changed(real_cluster: RealCluster):
    """Feature discovery looks when its time has come, and is started anew where a call of it fails by that."""
    before, discoveries = restarts_of(real_cluster, PLUGIN), pods_of(real_cluster, DISCOVERY)
    with logged(real_cluster, DISCOVERY) as log:
        edit(real_cluster, "real", rules=[instances(_2g_20gb=1, _1g_10gb=5)])
        ready(real_cluster, "real")
    assert len({call.pid for call in log.changes}) == 1
    assert pids(real_cluster, PLUGIN) & {call.pid for call in log.calls}, "the log shows it at all"
    assert log.half_seen() == []
    assert pods_of(real_cluster, DISCOVERY).keys() == discoveries.keys()
    assert set(restarts_of(real_cluster, PLUGIN).values()) == {0}, "it was started anew, and never failed"
    assert restarts_of(real_cluster, PLUGIN).keys().isdisjoint(before)


def test_the_plugin_looks_again_when_it_is_told_to(real_cluster: RealCluster):
    before, offered, resources = restarts_of(real_cluster, PLUGIN), real_cluster.allocatable(), real_cluster.usable()
    ((uid, plugin),) = pods_of(real_cluster, PLUGIN).items()
    for pid in real_cluster.real.pids(uid):
        os.kill(pid, signal.SIGHUP)
    eventually(lambda: "Received SIGHUP, restarting" in real_cluster.log(plugin), True)
    eventually(lambda: real_cluster.log(plugin).count("Registered device plugin for"), 2 * len(resources))
    settled(real_cluster, offered)
    assert restarts_of(real_cluster, PLUGIN) == before


def test_devices_stay_healthy_though_the_driver_crashes_and_comes_back(real_cluster: RealCluster):
    before, usable = restarts_of(real_cluster, PLUGIN), real_cluster.usable()
    ((_, plugin),) = pods_of(real_cluster, PLUGIN).items()
    told = len(real_cluster.log(plugin))
    real_cluster.real.driver.server.kill()
    real_cluster.real.driver.start()
    assert not until(lambda: real_cluster.usable() != usable, 8.0), "longer than its wait for events takes"
    assert len(real_cluster.log(plugin)) - told < 2000, "it does not complain without end"
    assert restarts_of(real_cluster, PLUGIN) == before
    edit(real_cluster, "real", rules=[instances(_1g_10gb=7)])
    ready(real_cluster, "real")
    assert real_cluster.allocatable()[SMALL] == 14


def test_a_plugin_that_is_told_to_share_slices_offers_them_so_and_feature_discovery_says_so(real_cluster: RealCluster):
    shared = Ways(shares={SMALL: 2})
    before = real_cluster.allocatable()
    configured(real_cluster, configuration(shared), PLUGIN, DISCOVERY)
    eventually(lambda: real_cluster.allocatable()[SMALL], 2 * before[SMALL])
    replicas = "nvidia.com/mig-1g.10gb.replicas"
    eventually(lambda: real_cluster.node()["metadata"]["labels"].get(replicas), "2")
