"""Races on a real node: of migd's agent, NVIDIA's own device plugin and other NVML clients any two at a time.

What comes in between is put there by a delay in the simulated driver: a call waits before its effect while others act.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from controlplane.api import Json
from controlplane.nodes_programs import python_path
from controlplane.processes import until
from controlplane.real_clusters import NODE, RealCluster
from controlplane.real_config import DRIVER
from controlplane.real_nvidia import LIBRARIES
from controlplane.real_overlays import pod_template
from controlplane.real_space import Inside
from integration.acting import apply, edit, eventually, instances, introduced, partitions, phases, plan, quiet, ready
from integration.acting import labels as our_labels
from integration.nvidia_programs import PLUGIN, pods_of, restarts_of
from integration.real_pods import settled

from migd.sim import Fault
from migd.sim.cface.client import ControlClient
from migd.sim.cface.records import Call
from migd.sim.machine import Gpu, GpuInstance

REAL_CLUSTER = {"spec": "2xa100-80gb"}
LARGE, SMALL, WHOLE = "nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-7g.80gb"
CUT: Final = instances(_3g_40gb=1, _1g_10gb=3)
DESTROY_CI, DESTROY_GI = "nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy"
CREATE_GI, CREATE_CI = "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance"
IN_USE: Final = 19
SOON_S: Final = 60.0


# ---- who is in the race


def changes(client: ControlClient, after: int) -> dict[str, list[tuple[str, int]]]:
    """Every call that changes instances, with what came of it, by GPU; whoever made it."""
    found: dict[str, list[tuple[str, int]]] = {}
    for call in client.calls(after=after):
        if call.name in (DESTROY_CI, DESTROY_GI, CREATE_GI, CREATE_CI):
            found.setdefault(call.gpu, []).append((call.name, call.code))
    return found


def by_place(gpu: Gpu) -> list[GpuInstance]:
    """Its instances, in order of their places."""
    return sorted(gpu.instances, key=lambda one: one.start)


def identities(gpus: Sequence[Gpu]) -> list[tuple[int, int, int]]:
    """Id, serial number and place of every GPU instance: a serial number is never given twice."""
    return [(one.gi_id, one.serial, one.start) for gpu in gpus for one in by_place(gpu)]


def struck(client: ControlClient, gpu: int) -> bool:
    """Whether the fault on this GPU has struck: its call waits now."""
    return any(fault.gpu == gpu and fault.fired for fault in client.snapshot().faults)


def program(real_cluster: RealCluster, name: str, *words: str) -> Inside:
    """A program of ours as a process of the node, in no pod."""
    environment = {"PYTHONPATH": python_path(), "MIGD_DRIVER_ROOT": DRIVER, "LD_LIBRARY_PATH": f"{DRIVER}/{LIBRARIES}"}
    return real_cluster.real.space.child(name, sys.executable, *words, environment=environment)


# ---- migd and another client


def test_an_instance_taken_between_recheck_and_destroy_is_kept_and_its_taker_named(real_cluster: RealCluster):
    """On one GPU a process of the node takes it, on the other one in a pod that asked for no GPU."""
    introduced(real_cluster, NODE)
    apply(real_cluster, plan("races", [NODE], CUT))
    ready(real_cluster, "races")
    offered, labels = real_cluster.allocatable(), our_labels(real_cluster, NODE)
    assert offered == {"nvidia.com/gpu": 0, LARGE: 2, SMALL: 6}
    words = [f"{DRIVER}/run/take-{name}" for name in ("process", "pod")]
    files = [real_cluster.real.place.driver / Path(word).relative_to(DRIVER) for word in words]
    runs = ["python3", "-m", "controlplane.taking", words[1]]
    spec = pod_template({}, {}, runs=runs)["spec"]
    metadata = {"name": "taker", "namespace": "default"}
    real_cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    process = program(real_cluster, "taker", "-m", "controlplane.taking", words[0])
    process.start()
    eventually(lambda: [pod["status"]["phase"] for pod in real_cluster.pods()], ["Running"])
    (pod,) = real_cluster.pods()
    assert process.inner is not None
    pids = [real_cluster.real.inner(process.inner)]
    pids += [real_cluster.real.inner(pid) for pid in real_cluster.real.pids(pod["metadata"]["uid"])]

    with real_cluster.real.driver.client() as client:
        before, begun = client.snapshot(), client.newest()
        for gpu in before.gpus:  # the second destroy: by then something has been done that is to be undone
            client.inject(Fault(DESTROY_CI, "delay", gpu=gpu.index, nth=2, delay_s=3.0))
        edit(real_cluster, "races", rules=[instances(_7g_80gb=1)])
        taken = [by_place(gpu)[1].compute[0].uuid for gpu in before.gpus]
        for gpu, file, uuid in zip(before.gpus, files, taken, strict=True):
            assert until(lambda gpu=gpu: struck(client, gpu.index), SOON_S, 0.05), f"GPU {gpu.index} is not changed"
            file.write_text(uuid)
            assert until(lambda uuid=uuid: uuid in held(client), 2.5, 0.05), "it is taken while the destroy waits"
        eventually(lambda: phases(real_cluster, NODE), ["Blocked", "Blocked"], every_s=0.2)
        eventually(lambda: real_cluster.allocatable(), offered)
        quiet(real_cluster, NODE)
        assert our_labels(real_cluster, NODE) == {**labels, "migd.dev/state": "blocked"}
        assert list(restarts_of(real_cluster, PLUGIN).values()) == [0]

        after = client.snapshot()
        assert identities(after.gpus) == identities(before.gpus)
        assert [by_place(gpu)[1].compute[0] for gpu in after.gpus] == [
            by_place(gpu)[1].compute[0] for gpu in before.gpus
        ]
        story = [(DESTROY_CI, 0), (DESTROY_CI, IN_USE), (CREATE_CI, 0)]
        assert changes(client, begun) == {gpu.uuid: story for gpu in before.gpus}

        found = [one["status"] for one in partitions(real_cluster, NODE)]
        assert [one["reason"] for one in found] == ["InUse", "InUse"]
        blockers = [next(by for by in one["blockers"] if "pid" in by) for one in found]
        assert [by["pid"] for by in blockers] == pids
        assert all("controlplane.taking" in by["command"] for by in blockers)
        named = {"namespace": "default", "name": "taker", "uid": pod["metadata"]["uid"]}
        assert [by.get("pod") for by in blockers] == [None, named]
        assert all(f"pid {pid}" in one["message"] for pid, one in zip(pids, found, strict=True))

        begun = client.newest()
        for file in files:
            file.unlink()
        ready(real_cluster, "races")
        quiet(real_cluster, NODE)
        assert real_cluster.allocatable() == {"nvidia.com/gpu": 0, LARGE: 0, SMALL: 0, WHOLE: 2}
        story = [*[(DESTROY_CI, 0)] * 4, *[(DESTROY_GI, 0)] * 4, (CREATE_GI, 0), (CREATE_CI, 0)]
        assert changes(client, begun) == {gpu.uuid: story for gpu in before.gpus}
    process.stop()


def held(client: ControlClient) -> set[str]:
    """The MIG devices that some process is on."""
    machine = client.snapshot()
    uuids = {c.serial: c.uuid for gpu in machine.gpus for one in gpu.instances for c in one.compute}
    return {uuids[one.ci_serial] for one in machine.processes.values() if one.ci_serial in uuids}


# ---- migd and the plugin


def test_a_plugin_that_is_killed_while_gpus_change_and_sees_them_half_done_ends_up_right(real_cluster: RealCluster):
    """It tolerates everything, so nothing keeps it away meanwhile: it comes back at once and looks."""
    tolerating = {"spec": {"template": {"spec": {"tolerations": [{"operator": "Exists"}]}}}}
    before = restarts_of(real_cluster, PLUGIN)
    (daemons,) = {pod["metadata"]["ownerReferences"][0]["name"] for pod in pods_of(real_cluster, PLUGIN).values()}
    where, how = real_cluster.style.namespace, json.dumps(tolerating)
    patched = real_cluster.kubectl("patch", "daemonset", daemons, "-n", where, "-p", how)
    assert patched.returncode == 0, patched.stderr
    eventually(lambda: set(restarts_of(real_cluster, PLUGIN)) - set(before) != set(), True)
    settled(real_cluster, {"nvidia.com/gpu": 0, LARGE: 0, SMALL: 0, WHOLE: 2})
    (pod,) = pods_of(real_cluster, PLUGIN).values()
    with real_cluster.real.driver.client() as client:
        client.clear_faults()
        begun, gpus = client.newest(), client.snapshot().gpus
        client.inject(Fault(CREATE_GI, "delay", gpu=1, nth=3, delay_s=8.0))
        edit(real_cluster, "races", rules=[CUT])
        assert until(lambda: struck(client, 1), SOON_S, 0.05)
        real_cluster.kill(pod)
        assert until(lambda: looked(real_cluster, client, pod, begun), 7.5, 0.1), "it looked while the call waited"
        assert len(client.snapshot().gpus[1].instances) == 2, "half done, as it saw them"
        ready(real_cluster, "races")
        quiet(real_cluster, NODE)
        assert real_cluster.allocatable() == {"nvidia.com/gpu": 0, LARGE: 2, SMALL: 6, WHOLE: 0}
        assert restarts_of(real_cluster, PLUGIN) == {pod["metadata"]["uid"]: 1}
        story = [(DESTROY_CI, 0), (DESTROY_GI, 0), *[(CREATE_GI, 0)] * 4, *[(CREATE_CI, 0)] * 4]
        assert changes(client, begun) == {gpu.uuid: story for gpu in gpus}


def looked(real_cluster: RealCluster, client: ControlClient, pod: Json, after: int) -> list[Call]:
    """What the processes that the plugin's pod has now have asked of MIG devices since."""
    pids = {real_cluster.real.inner(pid) for pid in real_cluster.real.pids(pod["metadata"]["uid"])}
    asked = ("nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetMaxMigDeviceCount")
    return [call for call in client.calls(after=after) if call.pid in pids and call.name in asked]


# ---- the plugin and another client


STRANGER: Final = """
import pynvml as n
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
for gi_id in range(1, 15):
    try:
        gi = n.nvmlDeviceGetGpuInstanceById(gpu, gi_id)
    except n.NVMLError:
        continue
    if n.nvmlGpuInstanceGetInfo(gi).profileId == 9:  # the 3g.40gb
        n.nvmlComputeInstanceDestroy(n.nvmlGpuInstanceGetComputeInstanceById(gi, 0))
        n.nvmlGpuInstanceDestroy(gi)
made = n.nvmlDeviceCreateGpuInstance(gpu, 14)  # a 2g.20gb
n.nvmlGpuInstanceCreateComputeInstance(made, 1)
"""


def test_what_a_client_changes_behind_the_plugin_is_told_of_and_not_touched_however_often_that_restarts(
    real_cluster: RealCluster,
):
    edit(real_cluster, "races", drift="Observe")
    ready(real_cluster, "races")
    stranger = program(real_cluster, "stranger", "-c", STRANGER)
    with real_cluster.real.driver.client() as client:
        stranger.start()
        assert until(lambda: not stranger.running, SOON_S)
        begun = client.newest()
        eventually(lambda: phases(real_cluster, NODE), ["Blocked", "Ready"])
        (found, _) = (one["status"] for one in partitions(real_cluster, NODE))
        assert (found["reason"], found["observed"]["summary"]) == ("ForeignInstances", "2g.20gb 3×1g.10gb")
        for _ in range(2):
            (pod,), before = pods_of(real_cluster, PLUGIN).values(), restarts_of(real_cluster, PLUGIN)
            real_cluster.kill(pod)
            eventually(
                lambda before=before: restarts_of(real_cluster, PLUGIN), {uid: n + 1 for uid, n in before.items()}
            )
            settled(real_cluster, {"nvidia.com/gpu": 0, LARGE: 1, "nvidia.com/mig-2g.20gb": 1, SMALL: 6, WHOLE: 0})
        assert phases(real_cluster, NODE) == ["Blocked", "Ready"]
        assert changes(client, begun) == {}
