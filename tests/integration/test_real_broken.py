"""NVIDIA's own device plugin is broken while migd changes the GPUs of a real node: what is told, and nothing twice.

The plugin alone is given another configuration, as by an admin's mistake: feature discovery keeps its own. The agent's
clock runs faster, so that it gives up waiting for the plugin after 45 seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from controlplane.api import Json
from controlplane.real_clusters import NODE, RealCluster
from controlplane.real_overlays import deployment
from integration.acting import (
    HALF,
    SMALL,
    apply,
    condition,
    edit,
    eventually,
    instances,
    introduced,
    partitions,
    phases,
    plan,
    quiet,
    ready,
    said_of,
)
from integration.driver_calls import logged
from integration.nvidia_programs import DISCOVERY, PLUGIN, configured, pods_of, restarts, restarts_of
from integration.promises import Machines
from integration.real_pods import identity, running

REAL_CLUSTER = {"spec": "2xa100-80gb", "instead": Path(__file__).with_name("hurried.py")}
GPU, ONE, TWO = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb"
STRATEGY = "nvidia.com/mig.strategy"
MIXED: Final = instances(_2g_20gb=1, _1g_10gb=5)
SHORT: Final = ("False", "NotAdvertised")
_CHANGES: Final = (
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
    "nvmlDeviceCreateGpuInstance",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlDeviceSetMigMode",
)


def strategy(name: str) -> Json:
    """A configuration with this MIG strategy."""
    return {"version": "v1", "flags": {"migStrategy": name}}


@pytest.fixture(scope="module")
def kept(real_cluster: RealCluster) -> list[dict[str, object]]:
    """A plan that is carried out, and pods on slices that stay whatever the tests change; they as they are."""
    introduced(real_cluster, NODE)
    apply(real_cluster, plan("real", [NODE], HALF))
    ready(real_cluster, "real")
    real_cluster.apply(deployment("train", 3, {ONE: 1}))
    return [identity(real_cluster, pod) for pod in running(real_cluster, "train", 3)]


@contextmanager
def changed_once(real_cluster: RealCluster, destroyed: int, created: int) -> Iterator[None]:
    """Within, the hardware is changed by this much and no more: by NVML's log of calls, and by what is there.

    destroyed, created: how many instances, over all GPUs.
    """
    before = Machines.seen(real_cluster, [NODE]).made[NODE]
    with logged(real_cluster) as log:
        yield
    calls = log.changes
    wanted = dict(zip(_CHANGES, (destroyed, destroyed, created, created, 0), strict=True))
    found = Counter(next(name for name in _CHANGES if call.name.startswith(name)) for call in calls)
    assert {name: found[name] for name in _CHANGES} == wanted, calls
    assert len({call.pid for call in calls}) == 1, "the agent's"
    assert Machines.seen(real_cluster, [NODE]).made[NODE] - before == 2 * created


def said(real_cluster: RealCluster) -> str:
    """What the plugin has logged."""
    return "".join(real_cluster.log(pod) for pod in pods_of(real_cluster, PLUGIN).values())


def told(real_cluster: RealCluster, *resources: str) -> None:
    """Wait until every GPU says that it is not advertised, and the plan that it stalls; each names these resources."""
    eventually(lambda: said_of(real_cluster, NODE, "Advertised"), SHORT)
    eventually(lambda: condition(real_cluster, "real", "Stalled"), ("True", "NotAdvertised"))
    assert condition(real_cluster, "real", "Ready") == SHORT
    assert phases(real_cluster, NODE) == ["Failed", "Failed"]
    for partition in partitions(real_cluster, NODE):
        says = {one["type"]: one for one in partition["status"]["conditions"]}
        assert says["Applied"]["status"] == "True", "the GPU itself is as wished"
        assert (says["Advertised"]["status"], says["Advertised"]["reason"]) == SHORT
        assert all(one in says["Advertised"]["message"] for one in resources), says["Advertised"]["message"]
    assert real_cluster.node()["metadata"]["labels"]["migd.dev/state"] == "failed"
    quiet(real_cluster, NODE)


def mended(real_cluster: RealCluster) -> None:
    """Give the plugin the right configuration again: nothing else is done, and all is well by itself."""
    configured(real_cluster, strategy("mixed"), PLUGIN)
    ready(real_cluster, "real")
    assert {said_of(real_cluster, NODE, kind) for kind in ("Advertised", "Ready")} == {("True", "AsWished")}
    assert real_cluster.node()["metadata"]["labels"]["migd.dev/state"] == "ready"
    quiet(real_cluster, NODE)


def same(real_cluster: RealCluster, kept: list[dict[str, object]]) -> None:
    """The pods on slices that stayed are what they were."""
    assert [identity(real_cluster, pod) for pod in running(real_cluster, "train", 3)] == kept


def test_a_plugin_that_crashes_at_each_start_is_told_of_and_the_gpus_are_changed_once(
    real_cluster: RealCluster, kept: list[dict[str, object]]
):
    configured(real_cluster, {"version": "v9"}, PLUGIN)
    eventually(lambda: sum(restarts_of(real_cluster, PLUGIN).values()) > 0, True)
    with changed_once(real_cluster, destroyed=2, created=8):
        edit(real_cluster, "real", rules=[SMALL])
        told(real_cluster, f"{ONE} is 0, not 14")
        assert "unknown version: v9" in said(real_cluster)
        same(real_cluster, kept)
        agent = real_cluster.program("migd-agent")
        real_cluster.kill(agent)
        eventually(lambda: restarts(real_cluster.program("migd-agent")), restarts(agent) + 1)
        asked = "have the device plugin look at the GPUs again"
        before = real_cluster.log(agent).count(asked)
        eventually(lambda: real_cluster.log(agent).count(asked) > before, True)
        told(real_cluster, f"{ONE} is 0, not 14")
        mended(real_cluster)
    assert real_cluster.allocatable()[ONE] == 14
    same(real_cluster, kept)


def test_a_plugin_that_refuses_what_strategy_single_cannot_offer_is_told_of_and_the_gpus_are_changed_once(
    real_cluster: RealCluster, kept: list[dict[str, object]]
):
    """The strategy was changed behind our back: the node's label still says mixed, so nothing spoke against it."""
    configured(real_cluster, strategy("single"), PLUGIN)
    eventually(lambda: real_cluster.allocatable().get(GPU), 14)
    with changed_once(real_cluster, destroyed=4, created=2):
        edit(real_cluster, "real", rules=[MIXED])
        told(real_cluster, f"{ONE} is 0, not 10", f"{TWO} is 0, not 2")
        assert "more than one MIG device type present on node" in said(real_cluster)
        same(real_cluster, kept)
        mended(real_cluster)
    assert (real_cluster.allocatable()[ONE], real_cluster.allocatable()[TWO]) == (10, 2)
    same(real_cluster, kept)


def test_a_plugin_with_an_old_configuration_that_knows_of_no_mig_is_told_of_and_the_gpus_are_changed_once(
    real_cluster: RealCluster, kept: list[dict[str, object]]
):
    """It is well in its own eyes, and offers whole GPUs that nobody can use as such."""
    configured(real_cluster, strategy("none"), PLUGIN)
    eventually(lambda: real_cluster.allocatable().get(GPU), 2)
    with changed_once(real_cluster, destroyed=2, created=4):
        edit(real_cluster, "real", rules=[SMALL])
        told(real_cluster, f"{ONE} is 0, not 14", f"{GPU} is 2, but there is none")
        assert set(restarts_of(real_cluster, PLUGIN).values()) == {0}
        same(real_cluster, kept)
        mended(real_cluster)
    assert (real_cluster.allocatable()[ONE], real_cluster.allocatable()[GPU]) == (14, 0)
    same(real_cluster, kept)


def test_a_plan_that_strategy_single_cannot_offer_is_refused_before_anything_is_touched(
    real_cluster: RealCluster, kept: list[dict[str, object]]
):
    configured(real_cluster, strategy("single"), PLUGIN, DISCOVERY)
    eventually(lambda: real_cluster.node()["metadata"]["labels"].get(STRATEGY), "single")
    eventually(lambda: real_cluster.allocatable().get(GPU), 14)
    before = Machines.seen(real_cluster, [NODE])
    edit(real_cluster, "real", rules=[MIXED])
    eventually(lambda: condition(real_cluster, "real", "Ready"), ("False", "Infeasible"))
    eventually(lambda: said_of(real_cluster, NODE, "Assigned"), ("False", "Infeasible"))
    eventually(lambda: phases(real_cluster, NODE), ["Blocked", "Blocked"])
    edit(real_cluster, "real", rules=[SMALL])
    ready(real_cluster, "real")
    assert real_cluster.allocatable()[GPU] == 14
    assert Machines.seen(real_cluster, [NODE]) == before
    same(real_cluster, kept)
