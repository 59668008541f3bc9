"""`migd agent` as a process on a real API server: what it writes, and that it writes nothing when nothing differs.

The kubelet of this node says that nobody holds a device, and there is no device plugin: what more they are for is
tested with simulated nodes.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from controlplane.audit import Request
from controlplane.processes import Child, until
from controlplane.running import ControlPlane
from integration.texts import PARTITIONS, desired

from migd.kubelet.podresources_v1_pb2 import ListPodResourcesResponse
from migd.kubelet.podresources_v1_pb2_grpc import PodResourcesListerServicer, add_PodResourcesListerServicer_to_server

ROOT = Path(__file__).parents[2]
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ROW = {"apiVersion": "v1"}


def made_up(plane: ControlPlane, name: str) -> Path:
    """A node, and a pod's token on it; what is allowed is more than `deploy/` gives, which is tested elsewhere."""
    admin = plane.admin
    admin.create("/api/v1/nodes", {**ROW, "kind": "Node", "metadata": {"name": name}}).object()
    admin.create("/api/v1/namespaces", {**ROW, "kind": "Namespace", "metadata": {"name": name}}).object()
    account = {**ROW, "kind": "ServiceAccount", "metadata": {"name": name}}
    admin.create(f"/api/v1/namespaces/{name}/serviceaccounts", account).object()
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": name}],
    }
    admin.create(f"{RBAC}/clusterrolebindings", binding).object()
    containers = [{"name": "main", "image": "none"}]
    spec = {"serviceAccountName": name, "nodeName": name, "containers": containers}
    pod = {**ROW, "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    admin.create(f"/api/v1/namespaces/{name}/pods", pod).object()
    return plane.kubeconfig_of(f"{name}.kubeconfig", token=plane.bound_token(name, name, pod=name))


class IdleKubelet(PodResourcesListerServicer):
    """A kubelet whose pods hold nothing."""

    def List(self, request: Any, context: Any) -> ListPodResourcesResponse:
        return ListPodResourcesResponse()


@contextmanager
def kubelet() -> Iterator[Path]:
    """The folder of such a kubelet, short enough for a socket's path."""
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    add_PodResourcesListerServicer_to_server(IdleKubelet(), server)
    with TemporaryDirectory(prefix="k-") as folder:
        at = Path(folder) / "pod-resources"
        at.mkdir()
        server.add_insecure_port(f"unix:{at / 'kubelet.sock'}")
        server.start()
        try:
            yield Path(folder)
        finally:
            server.stop(None).wait()


class Agent:
    """One agent's process, and what it answers."""

    def __init__(self, plane: ControlPlane, name: str, kubeconfig: Path, folder: Path, kubelet_dir: Path) -> None:
        words = ["agent", "--node", name, "--namespace", name, "--pod", name, "--kubeconfig", str(kubeconfig)]
        words += ["--simulate", "2xa100-80gb", "--state", str(folder / "gpus.json"), "--kubelet-dir", str(kubelet_dir)]
        words += ["--listen", "127.0.0.1:0"]
        environment = ["/usr/bin/env", f"PYTHONPATH={ROOT}"]
        self.plane, self.name = plane, name
        self.child = Child("agent", [*environment, sys.executable, "-m", "migd", *words], folder / "agent.log")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.child.log.read_text().splitlines()]

    def ask(self, path: str) -> str:
        """What it answers by HTTP; "" where it does not answer with 200."""
        ports = [line["port"] for line in self.lines() if line["event"] == "listening"]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[-1]}{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except (IndexError, OSError):
            return ""

    def turns(self) -> float:
        found = [line for line in self.ask("/metrics").splitlines() if line.startswith("migd_agent_turns_total ")]
        return float(found[0].split()[1]) if found else 0.0

    def partitions(self) -> list[dict[str, Any]]:
        query = {"fieldSelector": f"spec.nodeName={self.name}"}
        return list(self.plane.admin.get(PARTITIONS, **query).object()["items"])

    def writes(self, since: tuple[Request, ...]) -> list[Request]:
        user = f"system:serviceaccount:{self.name}:{self.name}"
        return [r for r in self.plane.audit.since(since) if r.user == user and r.writes]


@contextmanager
def running(agent: Agent) -> Iterator[None]:
    """From its start to its end by SIGTERM."""
    agent.child.log.write_text("")
    agent.child.start()
    try:
        assert until(lambda: agent.ask("/readyz") == "ok\n", 60), agent.child.tail()
        yield
    finally:
        agent.child.stop()


def test_it_registers_its_gpus_makes_a_wish_true_and_writes_nothing_more(
    plane: ControlPlane, name: str, tmp_path: Path
) -> None:
    with kubelet() as kubelet_dir:
        _lives(Agent(plane, name, made_up(plane, name), tmp_path, kubelet_dir))


def _lives(agent: Agent) -> None:
    plane, name = agent.plane, agent.name
    with running(agent):
        assert until(lambda: [p.get("status", {}).get("phase") for p in agent.partitions()] == ["Idle"] * 2, 60)
        for one in agent.partitions():
            body = {
                "apiVersion": "migd.dev/v1alpha1",
                "kind": "GPUPartition",
                "metadata": {"name": one["metadata"]["name"]},
                "spec": {"desired": desired(), "assignment": {"id": "0123456789abcdef", "gpus": 2}},
            }
            plane.admin.apply(f"{PARTITIONS}/{one['metadata']['name']}", body, "migd-operator").object()
        wished = "3g.40gb 3×1g.10gb"
        assert until(lambda: [p["status"]["observed"]["summary"] for p in agent.partitions()] == [wished] * 2, 120), (
            agent.child.tail()
        )
        assert until(lambda: agent.turns() > 0 and _at_rest(plane, agent), 240), agent.child.tail()
    before = plane.audit.requests()
    with running(agent):
        turns = agent.turns()
        assert until(lambda: agent.turns() > turns, 120), "it looks again"
    wrote = agent.writes(before)
    assert {(r.resource, r.name) for r in wrote} <= {("leases", name), ("leases", "")}, wrote
    assert not [line for line in agent.lines() if "is not as applied" in line["event"]]
    told = [line for line in agent.lines() if line["level"] != "info"]
    assert not told, told


def _at_rest(plane: ControlPlane, agent: Agent) -> bool:
    """Nothing of the agent's is on the node but labels, and every change has ended."""
    node = plane.admin.get(f"/api/v1/nodes/{agent.name}").object()
    owed = "migd.dev/owed" in (node["metadata"].get("annotations") or {})
    return not owed and all("result" in p["status"].get("lastTransition", {}) for p in agent.partitions())
