"""A whole cluster, as `make cluster` has it: real controllers make migd's pods, simulated kubelets run the processes.

What migd does in every situation is tried elsewhere; here it is that the cluster is an honest stage for it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from controlplane.clusters import CONTROL, Cluster, Process
from controlplane.processes import until
from integration.texts import plan

CLUSTER = {"nodes": ("node-1", "node-2"), "spec": "2xa100-80gb", "forking": None}
"""Every program is started with a Python of its own, here and in the background."""
WITHIN_S = 60.0
REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
PODS = "/api/v1/namespaces/default/pods"
LARGE, SMALL = "nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb"


def who(cluster: Cluster, process: Process) -> Any:
    """Whom the API server sees in the token that the process was given."""
    token = process.program.token.file.read_text()
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    return cluster.plane.as_token(token).create(REVIEWS, review).object()["status"]["userInfo"]


def test_every_program_has_a_token_that_is_bound_to_its_pod_and_node(cluster: Cluster):
    for process, account, node in (
        (cluster.agent("node-1"), "migd-agent", "node-1"),
        (cluster.agent("node-2"), "migd-agent", "node-2"),
        (cluster.operator(), "migd-operator", CONTROL),
    ):
        seen = who(cluster, process)
        assert seen["username"] == f"system:serviceaccount:migd-system:{account}"
        assert seen["extra"]["authentication.kubernetes.io/node-name"] == [node]
        assert seen["extra"]["authentication.kubernetes.io/pod-name"] == [process.pod]
    tokens = [r for r in cluster.plane.audit.requests() if r.resource == "serviceaccounts/token"]
    assert {r.user for r in tokens if r.namespace == "migd-system"} == {
        f"system:node:{name}" for name in (CONTROL, "node-1", "node-2")
    }


def test_a_plan_is_carried_out_and_a_pod_runs_on_a_new_instance(cluster: Cluster, name: str):
    before = cluster.plane.audit.requests()
    wish = {
        "gpus": {"indices": [0]},
        "instances": [{"profile": "3g.40gb", "count": 1}, {"profile": "1g.10gb", "count": 2}],
    }
    done = cluster.kubectl("apply", "-f", "-", stdin=json.dumps(plan(name, nodeSelector={}, rules=[wish])))
    assert done.returncode == 0, done.stderr
    done = cluster.kubectl("wait", "--for=condition=Ready", f"gpp/{name}", "--timeout=50s")
    assert done.returncode == 0, f"{done.stderr}\n{cluster.kubectl('get', 'gpp,gpart').stdout}"
    for node in cluster.nodes:
        assert cluster.allocatable(node) == {"nvidia.com/gpu": 1, LARGE: 1, SMALL: 2}
        assert "taints" not in cluster.node(node)["spec"]
    assert run_pod(cluster, name, {LARGE: 1})["status"]["phase"] == "Running"
    held = [one for node in cluster.nodes.values() for one in node.kubelet.held()]
    assert [(one.pod, one.resource, len(one.device_ids)) for one in held] == [(name, LARGE, 1)]
    cluster.plane.admin.delete(f"{PODS}/{name}").object()
    mine = [r for r in cluster.plane.audit.since(before) if r.user.startswith("system:serviceaccount:migd-system:")]
    assert [r for r in mine if r.code in (401, 403, 422)] == [], "rights and policies suffice"
    assert {r.user.rpartition(":")[2] for r in mine if r.writes} == {"migd-agent", "migd-operator"}


def run_pod(cluster: Cluster, name: str, limits: Mapping[str, int]) -> Any:
    resources = {"limits": {resource: str(number) for resource, number in limits.items()}}
    spec = {"terminationGracePeriodSeconds": 1, "containers": [{"name": "m", "image": "train", "resources": resources}]}
    cluster.plane.admin.create(PODS, {"metadata": {"name": name}, "spec": spec}).object()

    def pod() -> Any:
        return cluster.plane.admin.get(f"{PODS}/{name}").object()

    assert until(lambda: pod()["status"]["phase"] in ("Running", "Failed"), WITHIN_S), pod()
    return pod()


def test_a_program_that_is_killed_comes_back_and_one_that_is_stopped_stays_away(cluster: Cluster):
    agent = cluster.agent("node-1")
    pid, restarts = agent.pid, agent.restarts
    agent.kill()
    assert until(lambda: agent.pid not in (None, pid), WITHIN_S)
    assert agent.restarts == restarts + 1
    agent.stop()
    looked = cluster.nodes["node-1"].object.looks
    assert until(lambda: cluster.nodes["node-1"].object.looks > looked + 3, WITHIN_S)
    assert agent.pid is None
    agent.start()
    assert until(lambda: ready(cluster, agent), WITHIN_S)


def test_a_reboot_ends_every_process_of_the_node_and_its_pods_start_again(cluster: Cluster):
    agent, other = cluster.agent("node-2"), cluster.agent("node-1")
    pid, kept = agent.pid, other.pid
    cluster.nodes["node-2"].kubelet.reboot()
    assert until(lambda: agent.exists and agent.pid not in (None, pid) and ready(cluster, agent), WITHIN_S)
    assert other.pid == kept


def ready(cluster: Cluster, process: Process) -> bool:
    seen = cluster.plane.admin.get(f"/api/v1/namespaces/migd-system/pods/{process.pod}").object()
    return {"Ready": "True"}.items() <= {c["type"]: c["status"] for c in seen["status"]["conditions"]}.items()


@pytest.fixture
def command(tmp_path: Path) -> Any:
    """`python -m controlplane WORDS`, with a state folder of the test's own; whatever it started is ended."""
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "controlplane", *words]
        return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120, check=False)

    yield run
    run("cluster-down")


def test_a_cluster_in_the_background_outlives_its_command_and_leaves_nothing_when_it_is_ended(command, tmp_path):
    up = command("cluster", "--bare", "--nodes", "1", "--gpus", "2xa100-80gb")
    assert up.returncode == 0, up.stderr
    *said, path, config = up.stdout.splitlines()
    assert said[0].startswith("starting etcd")
    assert path.startswith('export PATH="')
    kubectl, kubeconfig = Path(path.split('"')[1].split(":")[0]) / "kubectl", config.removeprefix("export KUBECONFIG=")
    seen = {"KUBECONFIG": kubeconfig, "HOME": str(tmp_path)}
    shown = subprocess.run([kubectl, "get", "nodes", "-o", "json"], env=seen, capture_output=True, check=True)
    assert [item["metadata"]["name"] for item in json.loads(shown.stdout)["items"]] == [CONTROL, "node-1"]

    again = command("cluster")
    assert again.returncode == 0
    assert "runs already, with node-1; `make cluster-down` ends it" in again.stdout
    assert again.stdout.splitlines()[-1] == config

    told = json.loads((tmp_path / "migd/cluster/cluster.json").read_text())
    children = descendants(told["pid"])
    assert len(children) >= 5, "the control plane, and a plugin"
    down = command("cluster-down")
    assert (down.returncode, down.stdout) == (0, "the cluster has ended\n")
    assert [pid for pid in children if alive(pid)] == []
    assert not Path(told["roots"]).exists()
    assert command("cluster-down").stdout == "no cluster runs here\n"


def test_what_a_killed_cluster_left_is_cleared_away_and_its_processes_are_gone(command, tmp_path):
    assert command("cluster", "--bare", "--nodes", "1", "--gpus", "2xa100-80gb").returncode == 0
    told = json.loads((tmp_path / "migd/cluster/cluster.json").read_text())
    children = descendants(told["pid"])
    os.kill(told["pid"], signal.SIGKILL)
    assert until(lambda: not any(map(alive, children)), WITHIN_S), "they are leashed"
    assert Path(told["roots"]).exists()
    down = command("cluster-down")
    assert down.stdout == "no cluster runs here; what a crash left of one is cleared away\n"
    assert not Path(told["roots"]).exists()


def descendants(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return children + [deeper for child in children for deeper in descendants(child)]


def alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
