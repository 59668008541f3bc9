"""The program migd-operator as a process of its own, on a real API server: nodes, GPUs and agents are made by hand.

It has a control plane for itself, since it decides on all that there is. What it wrote is read from the audit log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from controlplane.api import APPLY
from controlplane.audit import Request
from controlplane.processes import Child, Ports, until
from controlplane.running import ControlPlane
from integration.texts import PARTITIONS, PLANS, plan
from unit.migd_operator.fleets import answered, complete, gpu, gpu_name

from migd.kube.leases import micro_time
from migd.plans.partitions import Partition, partition_document, partition_of

LEASES = "/apis/coordination.k8s.io/v1/namespaces/migd-system/leases"
HALVES = {"gpus": {"all": True}, "instances": [{"profile": "3g.40gb", "count": 2}]}
AS_THEY_ARE = {"gpus": {"all": True}, "instances": [{"profile": "7g.80gb"}]}
WITHIN_S = 60.0


class Cluster:
    """A control plane with what a test makes in it by hand."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.admin = plane.admin

    def add_node(self, name: str, gpus: int) -> None:
        made = self.admin.create(
            "/api/v1/nodes", {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name}}
        ).object()
        self.beat(name)
        for index in range(gpus):
            self._add_gpu(name, made["metadata"]["uid"], index)
        self.renew(name)

    def _add_gpu(self, node: str, uid: str, index: int) -> None:
        name = gpu_name(node, index)
        owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
        body = {
            "apiVersion": "migd.dev/v1alpha1",
            "kind": "GPUPartition",
            "metadata": {"name": name, "ownerReferences": [owner], "labels": {"migd.dev/node": node}},
            "spec": {"nodeName": node, "nodeUID": uid},
        }
        self.admin.apply(f"{PARTITIONS}/{name}", body, "migd-agent").object()
        self.tell(gpu(node, index, "7g.80gb"))

    def beat(self, name: str) -> None:
        """The kubelet's heartbeat."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": now}
        body = {"status": {"conditions": [ready | {"reason": "KubeletReady", "message": ""}]}}
        self.admin.patch(f"/api/v1/nodes/{name}/status", body, "application/strategic-merge-patch+json").object()

    def renew(self, node: str) -> None:
        """The agent renews its lease."""
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": node},
            "spec": {"holderIdentity": node, "leaseDurationSeconds": 180, "renewTime": micro_time(datetime.now(UTC))},
        }
        self.admin.apply(f"{LEASES}/{node}", body, "migd-agent", force=True).object()

    def tell(self, one: Partition) -> None:
        """The agent writes its part of a GPU's status."""
        status = partition_document(one)["status"]
        status["conditions"] = [c for c in status.get("conditions", ()) if c["type"] not in ("Assigned", "AgentAlive")]
        kind = {"apiVersion": "migd.dev/v1alpha1", "kind": "GPUPartition"}
        body = {**kind, "metadata": {"name": one.name}, "status": status}
        self.admin.request(
            "PATCH", f"{PARTITIONS}/{one.name}/status", body, APPLY, {"fieldManager": "migd-agent", "force": "true"}
        ).object()

    def partitions(self) -> list[Partition]:
        return [partition_of(one) for one in self.admin.get(PARTITIONS).object()["items"]]

    def obey(self) -> None:
        """All agents answer Ready to a complete turn."""
        found = self.partitions()
        turns = complete(found)
        for one in found:
            if one.spec.node_name in turns and one.spec.assignment is not None:
                self.tell(answered(one, "Ready"))

    def status(self, name: str) -> dict[str, Any]:
        return dict(self.admin.get(f"{PLANS}/{name}").object().get("status") or {})

    def said(self, name: str, kind: str) -> tuple[str, str]:
        found = {c["type"]: c for c in self.status(name).get("conditions") or ()}
        return (found[kind]["status"], found[kind]["reason"]) if kind in found else ("", "")


class Program:
    """migd-operator as a process; user: as whom it connects, so that the audit log tells it apart."""

    def __init__(self, plane: ControlPlane, folder: Path, ports: Ports) -> None:
        self.user = f"operator-{uuid.uuid4().hex[:8]}"
        self.port = ports.take()
        self._plane = plane
        self.config = plane.kubeconfig_of(
            f"{self.user}.kubeconfig", plane.authority.client(self.user, self.user, ["system:masters"])
        )
        words = ["-m", "migd_operator", "--kubeconfig", self.config, "--listen", f"127.0.0.1:{self.port}"]
        self.child = Child(
            self.user, [sys.executable, *words, "--identity", self.user], folder / f"{self.user}.log", leashed=True
        )

    def start(self) -> None:
        self.child.start()
        self.child.wait_until(lambda: self.page("/readyz") == (200, "leader"), WITHIN_S)

    def ended_by(self, number: signal.Signals, within_s: float = 9.0) -> int | None:
        """Its exit code after a signal; None where it has not ended within seconds."""
        os.kill(self.child.pid, number)
        until(lambda: not self.child.running, within_s)
        return self.child.exit_status

    def page(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode().strip()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode().strip()
        except OSError:
            return 0, ""

    def writes(self) -> list[Request]:
        """All that it asked to be changed, leases and events left out."""
        return [
            r
            for r in self._plane.audit.requests()
            if r.user == self.user and r.writes and r.resource not in ("leases", "events")
        ]


@pytest.fixture(scope="module")
def cluster(own_plane: ControlPlane) -> Cluster:
    done = own_plane.kubectl("apply", "-f", str(Path(__file__).parents[2] / "crds"))
    assert done.returncode == 0, done.stderr
    served: Callable[[], bool] = lambda: own_plane.admin.get(PLANS).ok and own_plane.admin.get(PARTITIONS).ok  # noqa: E731
    assert until(served, 30)
    own_plane.admin.create("/api/v1/namespaces", {"metadata": {"name": "migd-system"}}).object()
    return Cluster(own_plane)


@pytest.fixture
def ports() -> Iterator[Ports]:
    found = Ports()
    yield found
    found.close()


def test_a_plan_becomes_a_turn_and_the_program_ends_and_starts_without_a_write(
    cluster: Cluster, tmp_path: Path, ports: Ports
):
    first = Program(cluster.plane, tmp_path, ports)
    first.start()
    try:
        cluster.add_node("n1", 2)
        cluster.admin.create(PLANS, plan("p", HALVES)).object()
        assert until(lambda: all(p.spec.assignment for p in cluster.partitions()), WITHIN_S), first.child.tail()
        writes = first.writes()
        at = next(i for i, r in enumerate(writes) if r.resource == "gpupartitions")
        before = [r.body["status"]["preview"]["totals"] for r in writes[:at] if r.resource.endswith("plans/status")]
        assert {"nodes": 1, "gpus": 2, "destroy": 2, "create": 4} in before
        assert cluster.said("p", "Ready") == ("False", "Waiting")
        cluster.obey()
        assert until(lambda: cluster.said("p", "Ready") == ("True", "AsWished"), WITHIN_S), first.child.tail()
        assert {p.labels["migd.dev/plan"] for p in cluster.partitions()} == {"p"}
        waited = cluster.plane.kubectl("wait", "--for=condition=Ready", "gpp/p", "--timeout=10s")
        assert waited.returncode == 0, waited.stderr

        for path, said in (("/healthz", "ok"), ("/readyz", "leader")):
            assert first.page(path) == (200, said)
        metrics = first.page("/metrics")[1]
        for line in (
            "migd_leader 1.0",
            'migd_plans{condition="Ready",status="True"} 1.0',
            'migd_gpus{phase="Ready"} 2.0',
        ):
            assert line in metrics
    finally:
        began = datetime.now(UTC)
        first.child.stop()
    assert (datetime.now(UTC) - began).total_seconds() < 9  # after 10 s it would have been killed
    log = [json.loads(line) for line in first.child.log.read_text().splitlines()]
    assert [line["event"] for line in log if line["level"] == "error"] == []
    assert log[-1]["event"] != "started"
    ended = [r for r in cluster.plane.audit.requests() if r.user == first.user and r.resource == "leases" and r.writes]
    assert ended[-1].body["spec"]["holderIdentity"] == ""  # it was given up, so the next need not wait

    second = Program(cluster.plane, tmp_path, ports)
    second.start()
    third = Program(cluster.plane, tmp_path, ports)
    try:
        cluster.beat("n1")
        cluster.renew("n1")
        assert until(lambda: 'migd_gpus{phase="Ready"} 2.0' in second.page("/metrics")[1], WITHIN_S)
        second.child.kill()
        third.start()  # once the lease of the one that was killed has expired
        assert until(lambda: 'migd_gpus{phase="Ready"} 2.0' in third.page("/metrics")[1], WITHIN_S)
        assert (second.writes(), third.writes()) == ([], [])
        cluster.admin.patch(f"{PLANS}/p", {"spec": {"paused": True}}).object()
        assert until(lambda: cluster.status("p")["observedGeneration"] == 2, WITHIN_S)
        assert {r.resource for r in third.writes()} <= {"gpupartitionplans/status", "gpupartitions/status"}
    finally:
        second.child.stop()
        third.child.stop()


def test_the_program_ends_within_seconds_also_when_the_api_server_hangs(cluster: Cluster, tmp_path: Path, ports: Ports):
    program = Program(cluster.plane, tmp_path, ports)
    program.start()
    os.kill(cluster.plane.api_server.pid, signal.SIGSTOP)
    try:
        assert program.ended_by(signal.SIGTERM, within_s=20.0) == 0
    finally:
        os.kill(cluster.plane.api_server.pid, signal.SIGCONT)
        program.child.stop()


def test_a_program_that_cannot_listen_or_connect_says_so_and_ends(cluster: Cluster, tmp_path: Path, ports: Ports):
    program = Program(cluster.plane, tmp_path, ports)
    program.start()
    try:
        for words, said in (
            (["--kubeconfig", str(tmp_path / "none"), "--listen", "127.0.0.1:0"], "cannot connect by the kubeconfig"),
            (["--kubeconfig", str(program.config), "--listen", f"127.0.0.1:{program.port}"], "address already in use"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "migd_operator", *words], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 1, done.stderr
            assert said in done.stderr.splitlines()[-1]
    finally:
        program.child.stop()
