"""migd as pods on a real node, with the image of the Dockerfile and `kubectl apply -k`; GPUs and driver are simulated.

What migd does in every situation is tried elsewhere; here it is that it does so in life: also a drain, and one in the
middle of which its agent and its operator are killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from controlplane import real_cgroups
from controlplane.api import Json
from controlplane.building import cache_home
from controlplane.processes import until
from controlplane.real_clusters import NODE, RealCluster
from controlplane.real_images import Keys, archive_of
from controlplane.real_layers import Base
from controlplane.real_overlays import deployment
from controlplane.real_roots import FOLDER
from integration.acting import (
    PODS,
    apply,
    condition,
    edit,
    eventually,
    instances,
    introduced,
    partitions,
    plan,
    quiet,
    ready,
    status,
)
from integration.deployed import AGENT, OPERATOR, PLUGIN_NAMESPACE
from integration.promises import Promise
from integration.real_pods import identity, running
from integration.witnesses import evicted

REAL_CLUSTER = {"spec": "2xa100-80gb"}
LARGE, SMALL = "nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb"
REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
WITHIN_S = 60.0
EVICT: Json = {"policy": "Evict", "timeout": "5m"}


def program(real_cluster: RealCluster, name: str) -> tuple[Json, int]:
    """The pod of a program of ours, and its process."""
    pod = real_cluster.program(name)
    (pid,) = real_cluster.real.pids(pod["metadata"]["uid"])
    return pod, pid


@pytest.mark.parametrize(("name", "user", "uid"), [("migd-operator", OPERATOR, "65532"), ("migd-agent", AGENT, "0")])
def test_a_program_is_a_pod_of_the_built_image_with_a_token_of_its_own(
    real_cluster: RealCluster, name: str, user: str, uid: str
):
    pod, pid = program(real_cluster, name)
    (container,) = pod["spec"]["containers"]
    assert container["image"] == real_cluster.real.keys.name
    token = Path(f"/proc/{pid}/root/run/secrets/kubernetes.io/serviceaccount/token").read_text()
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    seen = real_cluster.plane.as_token(token).create(REVIEWS, review).object()["status"]["userInfo"]
    assert seen["username"] == user
    assert seen["extra"]["authentication.kubernetes.io/node-name"] == [NODE]
    assert seen["extra"]["authentication.kubernetes.io/pod-name"] == [pod["metadata"]["name"]]
    status = Path(f"/proc/{pid}/status").read_text()
    assert re.search(rf"^Uid:\t{uid}\t{uid}\t", status, re.MULTILINE)
    (root,) = re.findall(r"^\S+ \S+ \S+ \S+ / (\S+)", Path(f"/proc/{pid}/mountinfo").read_text(), re.MULTILINE)
    assert "ro" in root.split(","), "the root file system is read-only"
    assert "kopf ended" not in real_cluster.log(pod), "nobody has a name where it runs"


def test_every_gpu_has_a_partition_and_the_plugin_offers_what_is_there(real_cluster: RealCluster):
    introduced(real_cluster, NODE)
    assert [one["metadata"]["name"] for one in partitions(real_cluster, NODE)] == [
        uuid.lower() for uuid in real_cluster.real.machine().gpu_uuids()
    ]
    assert real_cluster.allocatable() == {"nvidia.com/gpu": 2}


def test_pods_are_scheduled_on_new_instances_and_keep_them_through_an_edit(real_cluster: RealCluster):
    introduced(real_cluster, NODE)
    promise = Promise(real_cluster, "real", [NODE])
    promise.said(apply(real_cluster, plan("real", [NODE], instances(_3g_40gb=1, _1g_10gb=3))))
    ready(real_cluster, "real")
    promise.kept()
    quiet(real_cluster, NODE)
    assert real_cluster.allocatable() == {"nvidia.com/gpu": 0, LARGE: 2, SMALL: 6}

    real_cluster.apply(deployment("train", 3, {SMALL: 1}))
    pods = running(real_cluster, "train", 3)
    eventually(lambda: len(real_cluster.real.machine().snapshot().processes), 3)
    before = [identity(real_cluster, pod) for pod in pods]
    uuids = [uuid for one in before for uuid in one["held"]]
    assert len(set(uuids)) == 3, "each has its own instance"
    assert all(one["nodes"] == real_cluster.nodes_of(one["held"]) for one in before)

    begun = real_cluster.audit.requests()
    promise = Promise(real_cluster, "real", [NODE])
    said = promise.said(edit(real_cluster, "real", rules=[instances(_1g_10gb=7)]))["totals"]
    assert (said["keep"], said["destroy"], said["create"], said["modeChanges"]) == (6, 2, 8, 0)
    ready(real_cluster, "real")
    promise.kept()
    quiet(real_cluster, NODE)
    assert real_cluster.allocatable() == {"nvidia.com/gpu": 0, LARGE: 0, SMALL: 14}
    assert [identity(real_cluster, pod) for pod in running(real_cluster, "train", 3)] == before

    real_cluster.apply(deployment("train", 14, {SMALL: 1}))
    all_of_them = running(real_cluster, "train", 14)
    assert {one["uid"] for one in before} < {pod["metadata"]["uid"] for pod in all_of_them}
    real_cluster.apply(deployment("train", 3, {SMALL: 1}))

    requests = real_cluster.audit.since(begun)
    deletes = [r for r in requests if r.verb == "delete" and r.user == AGENT]
    assert {(r.resource, r.namespace, r.code) for r in deletes} == {("pods", PLUGIN_NAMESPACE, 200)}
    ours = [r for r in real_cluster.audit.requests() if r.user in (AGENT, OPERATOR)]
    assert [(r.user, r.verb, r.uri, r.code) for r in ours if r.code in (401, 403, 422)] == []


def test_a_drain_evicts_the_fewest_and_they_are_scheduled_again_on_the_new_layout(real_cluster: RealCluster):
    """Six small pods on one GPU, of which three stay; the others find room on the second GPU, beside large ones."""
    crowded(real_cluster, "train", 6, grace_s=2)
    real_cluster.apply(deployment("wide", 2, {LARGE: 1}))
    pods = {pod["metadata"]["name"]: pod for pod in running(real_cluster, "train", 6)}
    before = {name: identity(real_cluster, pod) for name, pod in pods.items()}
    begun = real_cluster.audit.requests()
    promise = Promise(real_cluster, "real", [NODE])
    generation = edit(real_cluster, "real", rules=[instances(_3g_40gb=1, _1g_10gb=3)], disruption=EVICT)
    assert promise.said(generation)["totals"]["evict"] == 3
    ready(real_cluster, "real")
    promise.kept()
    quiet(real_cluster, NODE)
    gone = evicted(real_cluster.audit.since(begun), *pods)
    assert [(one.code, one.user) for one in gone] == [(201, OPERATOR)] * 3
    assert {one.pod: one.uid for one in gone} == {one.pod: before[one.pod]["uid"] for one in gone}
    after = {pod["metadata"]["name"]: identity(real_cluster, pod) for pod in running(real_cluster, "train", 6)}
    kept = before.keys() - {one.pod for one in gone}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    held = [uuid for pod in running(real_cluster, "wide", 2) for uuid in identity(real_cluster, pod)["held"]]
    held += [uuid for one in after.values() for uuid in one["held"]]
    assert len(set(held)) == 8, "each has an instance of its own, on the new layout"
    real_cluster.apply(deployment("wide", 0, {LARGE: 1}))
    running(real_cluster, "wide", 0)


def test_a_drain_goes_on_though_agent_and_operator_are_killed_while_pods_are_evicted(real_cluster: RealCluster):
    real_cluster.apply(deployment("train", 0, {SMALL: 1}))
    running(real_cluster, "train", 0)
    edit(real_cluster, "real", rules=[instances(_1g_10gb=7)])
    ready(real_cluster, "real")
    crowded(real_cluster, "slow", 6, grace_s=10)  # which takes it, so that somebody can die meanwhile
    before = {pod["metadata"]["name"]: identity(real_cluster, pod) for pod in running(real_cluster, "slow", 6)}
    begun = real_cluster.audit.requests()
    promise = Promise(real_cluster, "real", [NODE])
    generation = edit(real_cluster, "real", rules=[instances(_3g_40gb=1, _1g_10gb=3)], disruption=EVICT)
    promise.said(generation)
    assert until(lambda: evicted(real_cluster.audit.since(begun), *before) != [], WITHIN_S)
    for name in ("migd-operator", "migd-agent"):
        real_cluster.kill(program(real_cluster, name)[0])
    ready(real_cluster, "real")
    promise.kept()
    quiet(real_cluster, NODE)
    gone = [one.uid for one in evicted(real_cluster.audit.since(begun), *before) if one.code == 201]
    assert len(gone) == len(set(gone)) == 3
    after = {pod["metadata"]["name"]: identity(real_cluster, pod) for pod in running(real_cluster, "slow", 6)}
    kept = [name for name, one in before.items() if one["uid"] not in gone]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert status(real_cluster, "real")["evictions"] == {"generation": generation, "evicted": 3}
    real_cluster.apply(deployment("slow", 0, {SMALL: 1}))
    running(real_cluster, "slow", 0)


def crowded(real_cluster: RealCluster, name: str, number: int, grace_s: int) -> None:
    """So many pods of a Deployment, all of them on the first GPU, and told to be so. The GPUs are cut in seven each."""
    gpus = real_cluster.real.machine().snapshot().gpus
    first = {compute.uuid for one in gpus[0].instances for compute in one.compute}
    real_cluster.apply(deployment(name, 14, {SMALL: 1}, grace_s=grace_s))
    for pod in running(real_cluster, name, 14):
        if set(real_cluster.mig_uuids(pod)) <= first:
            note = {"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "100"}}}
            real_cluster.plane.admin.patch(f"{PODS}/{pod['metadata']['name']}", note).object()
    real_cluster.apply(deployment(name, number, {SMALL: 1}, grace_s=grace_s))
    assert all(set(real_cluster.mig_uuids(pod)) <= first for pod in running(real_cluster, name, number))
    used = [f"{number}/7", "0/7"]
    eventually(lambda: [one["status"]["observed"].get("inUse") for one in partitions(real_cluster, NODE)], used)


def test_pods_outlive_their_kubelet_and_an_agent_that_is_killed_comes_back(real_cluster: RealCluster):
    agent, pid = program(real_cluster, "migd-agent")
    restarts = agent["status"]["containerStatuses"][0]["restartCount"]
    operators = real_cluster.program("migd-operator")["status"]["containerStatuses"][0]["restartCount"]
    real_cluster.real.kubelet.kill()
    real_cluster.kill(agent)
    assert until(lambda: not Path(f"/proc/{pid}").exists(), WITHIN_S)
    real_cluster.real.kubelet.start()

    def back() -> bool:
        now = real_cluster.program("migd-agent")
        (container,) = now["status"]["containerStatuses"]
        return now["metadata"]["uid"] == agent["metadata"]["uid"] and (
            container["restartCount"],
            container["ready"],
        ) == (
            restarts + 1,
            True,
        )

    assert until(back, WITHIN_S), real_cluster.program("migd-agent")["status"]
    assert real_cluster.program("migd-operator")["status"]["containerStatuses"][0]["restartCount"] == operators
    eventually(lambda: condition(real_cluster, "real", "Ready"), ("True", "AsWished"))


def test_what_a_killed_process_computed_on_is_let_go(real_cluster: RealCluster):
    real_cluster.apply(deployment("short", 1, {SMALL: 1}))
    (pod,) = running(real_cluster, "short", 1)

    def held() -> set[str]:
        container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        there = real_cluster.real.machine().snapshot().processes.values()
        return {one.command for one in there if one.container == container}

    eventually(held, {"python3 -m controlplane.computing"})
    real_cluster.apply(deployment("short", 0, {SMALL: 1}))
    real_cluster.kill(pod)
    eventually(held, set())


def test_the_image_runs_as_nobody_and_has_no_compiler_and_no_installer(able_to_have_a_real_node: None):
    archive = archive_of(Keys.of())
    base = Base.of(archive)
    config = base.config["config"]
    assert (config["User"], config["Entrypoint"], config.get("Cmd")) == ("65532:65532", ["migd"], None)
    assert config["Labels"]["org.opencontainers.image.title"] == "migd"
    names: set[str] = set()
    with tarfile.open(archive) as file:
        for layer in base.manifest["layers"]:
            blob = file.extractfile(f"blobs/{layer['digest'].replace(':', '/')}")
            assert blob is not None
            with tarfile.open(fileobj=blob, mode="r|*") as contents:
                names |= {member.name.rpartition("/")[2] for member in contents if "/bin/" in f"/{member.name}"}
    assert {"migd", "migd-operator", "python3"} <= names
    assert not names & {"cc", "gcc", "c++", "ld", "make", "pip", "pip3", "git", "curl", "wget"}


SPACE = """
import sys, time
from pathlib import Path
from controlplane.processes import until
from controlplane.real_config import Place
from controlplane.real_images import overlays
from controlplane.real_roots import copied, found_root
from controlplane.real_space import Space

folder, cache = map(Path, sys.argv[1:])
keys, _, root = found_root(cache)
copied(root, folder / "containerd")
space = Space(Place(folder), folder, overlays(folder), cgroup=False)
space.open()
one = ("--cgroup=/migd-real-node-dies/one", keys.name, "one", "/bin/sleep", "infinity")
starting = space.child("one", "ctr", "--namespace=k8s.io", "run", "--detach", *one)  # it mounts, so inside
starting.start()
assert until(lambda: not starting.running, 30.0) and starting.exit_status == 0, starting.tail()
print("up", flush=True)
sys.stdin.read()
"""


def test_a_test_run_that_is_killed_leaves_no_process_of_its_node(able_to_have_a_real_node: None, tmp_path: Path):
    command = [sys.executable, "-c", SPACE, str(tmp_path), str(cache_home() / FOLDER)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        before = descendants(child.pid)
        assert {"unshare", "containerd", "containerd-shim", "sleep"} <= {comm(pid) for pid in before}
        child.send_signal(signal.SIGKILL)
    assert until(lambda: not [pid for pid in before if comm(pid)], WITHIN_S), [comm(pid) for pid in before]
    assert until(lambda: real_cgroups.remove("migd-real-node-dies"), WITHIN_S)
    assert not any(str(tmp_path) in line for line in Path("/proc/self/mountinfo").read_text().splitlines())


def descendants(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return children + [deeper for child in children for deeper in descendants(child)]


def comm(pid: int) -> str:
    """The name of a process that lives; "" where it does not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
    found = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return "" if found["State"].startswith("Z") else found["Name"]
