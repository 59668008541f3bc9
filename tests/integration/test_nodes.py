"""Simulated nodes under the real scheduler and controllers: kubelet, sockets, plugin and pods do what real ones do.

Left out: what the agent makes of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from controlplane.api import JSON_PATCH, MERGE
from controlplane.nodes import SimNode
from controlplane.nodes_pods import LASTS_S, PROGRAM, STOPS_IN_S
from controlplane.nodes_styles import HELM, OPERATOR, TOLERANT, Style, node_labels, plugin_manifests
from controlplane.nursery import Nursery
from controlplane.processes import until
from controlplane.running import ControlPlane
from staging import make, stranger

from migd.kubelet.podresources import KubeletPodResources
from migd.kubelet.ports import PodDevices
from migd.mig.operations import SetMode

SMALL = "nvidia.com/mig-1g.10gb"
LARGE = "nvidia.com/mig-3g.40gb"
PODS = "/api/v1/namespaces/default/pods"
TAINT = {"key": "migd.dev/changing", "effect": "NoSchedule"}
WITHIN_S = 30.0


class Site:
    """A node on a shared control plane, with a plugin of its own style, and what tests do to it."""

    def __init__(self, plane: ControlPlane, folder: Path, style: Style, nursery: Nursery) -> None:
        self.plane = plane
        self.style = style
        self.name = f"t-{uuid.uuid4().hex[:8]}"
        labels = {**node_labels(style, "mixed", "NVIDIA A100-SXM4-80GB"), "t": self.name}
        self.node = SimNode(
            plane, self.name, folder / "n", "2xa100-80gb", labels=labels, status_every_s=0.5, forking=nursery
        )

    def install(self) -> None:
        """Cut GPU 0 by hand, then let the plugin come."""
        self.cut(0, "3g@4 1g@0 1g@1")
        for document in plugin_manifests(self.style, "mixed"):
            if document["kind"] == "DaemonSet":
                document["metadata"]["name"] = self.name
                document["spec"]["template"]["spec"]["nodeSelector"]["t"] = self.name
            done = self.plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(document))
            assert done.returncode == 0, done.stderr
        self.wait_allocatable({"nvidia.com/gpu": 1, SMALL: 2, LARGE: 1})

    def close(self) -> None:
        path = f"/apis/apps/v1/namespaces/{self.style.namespace}/daemonsets/{self.name}"
        self.plane.admin.delete(path, propagationPolicy="Background")
        assert until(lambda: not self.plugin_pods(), WITHIN_S), "the plugin's pod does not go"
        self.node.stop()
        self.plane.admin.delete(f"/api/v1/nodes/{self.name}")

    # ---- what is there

    def object(self) -> Any:
        return self.plane.admin.get(f"/api/v1/nodes/{self.name}").object()

    def allocatable(self) -> dict[str, int]:
        found = self.object()["status"].get("allocatable") or {}
        return {name: int(number) for name, number in found.items() if name.startswith("nvidia.com/")}

    def wait_allocatable(self, expected: dict[str, int]) -> None:
        went = until(lambda: self.allocatable() == expected, WITHIN_S)
        assert went, (self.allocatable(), self.taints(), [pod["metadata"]["name"] for pod in self.plugin_pods()])

    def plugin_pods(self) -> list[Any]:
        where = {"fieldSelector": f"spec.nodeName={self.name}"}
        found = self.plane.admin.get(f"/api/v1/namespaces/{self.style.namespace}/pods", **where).object()
        return list(found["items"])

    def plugin_pid(self) -> int | None:
        programs = self.node.kubelet.programs()
        return next((program.pid for _, program in programs.values() if program.image == "k8s-device-plugin"), None)

    def pod(self, name: str) -> Any:
        return self.plane.admin.get(f"{PODS}/{name}").object()

    def held(self) -> tuple[PodDevices, ...]:
        return asyncio.run(KubeletPodResources(self.node.kubelet_folder).held())

    def uuids(self, gpu: int = 0) -> list[str]:
        """MIG UUIDs of a GPU, by place."""
        found = self.node.machine().snapshot().gpus[gpu].instances
        return [instance.compute[0].uuid for instance in sorted(found, key=lambda i: i.start)]

    def computing(self) -> int:
        return len(self.node.machine().snapshot().processes)

    # ---- what is done to it

    def cut(self, gpu: int, text: str) -> None:
        with stranger(self.node.machine()) as gpus:
            seen = gpus.look()[gpu]
            if not seen.mig_on:
                gpus.perform(SetMode(seen.uuid, True))
            make(gpus, gpus.look()[gpu], text)

    def run(self, name: str, limits: dict[str, int], grace_s: int = 5, **annotations: str) -> None:
        container: dict[str, Any] = {"name": "main", "image": "train"}
        container["resources"] = {"limits": {k: str(v) for k, v in limits.items()}}
        notes = {f"sim.migd.dev/{key.replace('_', '-')}": value for key, value in annotations.items()}
        document = {
            "metadata": {"name": name, "annotations": notes},
            "spec": {
                "nodeSelector": {"t": self.name},
                "terminationGracePeriodSeconds": grace_s,
                "containers": [container],
            },
        }
        self.plane.admin.create(PODS, document).object()

    def wait_phase(self, name: str, phase: str) -> Any:
        assert until(lambda: self.pod(name).get("status", {}).get("phase") == phase, WITHIN_S), self.pod(name)["status"]
        return self.pod(name)

    def remove(self, *names: str) -> None:
        for name in names:
            self.plane.admin.delete(f"{PODS}/{name}", gracePeriodSeconds="1")
        for name in names:
            assert until(lambda name=name: self.plane.admin.get(f"{PODS}/{name}").code == 404, WITHIN_S), name

    def taints(self) -> list[Any]:
        return self.object()["spec"].get("taints") or []

    def let_settle(self) -> None:
        """Wait until the DaemonSet controller has heard of the taint: with a stale node it makes a pod.

        It counts anew at changes of the DaemonSet only, so we make one each time that we ask.
        """
        path = f"/apis/apps/v1/namespaces/{self.style.namespace}/daemonsets/{self.name}"

        def heard() -> bool:
            asked = {"metadata": {"annotations": {"test.migd.dev/asked": uuid.uuid4().hex}}}
            found = self.plane.admin.patch(path, asked, MERGE).object()
            return bool(found["status"]["desiredNumberScheduled"] == 0)

        assert until(heard, WITHIN_S), "the DaemonSet controller does not hear of the taint"

    def delete_plugin(self) -> str:
        """Delete the plugin's pod; its uid."""
        (pod,) = self.plugin_pods()
        metadata = pod["metadata"]
        self.plane.admin.delete(f"/api/v1/namespaces/{self.style.namespace}/pods/{metadata['name']}").object()
        return str(metadata["uid"])

    def close_node(self) -> None:
        change = [{"op": "add", "path": "/spec/taints", "value": [*self.taints(), TAINT]}]
        self.plane.admin.patch(f"/api/v1/nodes/{self.name}", change, JSON_PATCH).object()

    def open_node(self) -> None:
        left = [taint for taint in self.taints() if taint["key"] != TAINT["key"]]
        change = [{"op": "add", "path": "/spec/taints", "value": left}]
        self.plane.admin.patch(f"/api/v1/nodes/{self.name}", change, JSON_PATCH).object()


def sited(plane: ControlPlane, style: Style, nursery: Nursery) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="migd-") as folder:
        site = Site(plane, Path(folder), style, nursery)
        with site.node:
            site.install()
            yield site
            site.close()


@pytest.fixture(scope="module")
def plane(own_plane: ControlPlane) -> ControlPlane:
    """A control plane without migd: where other tests have put deploy/, its agents come and open what we closed."""
    return own_plane


@pytest.fixture(scope="module")
def helm(plane: ControlPlane, nursery: Nursery) -> Iterator[Site]:
    yield from sited(plane, HELM, nursery)


@pytest.fixture
def fresh(plane: ControlPlane, nursery: Nursery, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A node of the test's own."""
    yield from sited(plane, getattr(request, "param", HELM), nursery)


def test_a_pod_bound_by_the_scheduler_gets_the_device_that_pod_resources_names(helm: Site, name: str):
    helm.run(name, {LARGE: 1})
    pod = helm.wait_phase(name, "Running")
    assert pod["spec"]["nodeName"] == helm.name
    assert helm.held() == (PodDevices("default", name, LARGE, (helm.uuids()[-1],)),)
    assert helm.computing() == 1, "NVML shows the instance in use"
    waiting = f"{name}-b"
    helm.run(waiting, {LARGE: 1})

    def refused() -> bool:
        conditions = helm.pod(waiting).get("status", {}).get("conditions", ())
        return any(c.get("reason") == "Unschedulable" for c in conditions)

    assert until(refused, WITHIN_S), "the scheduler has nothing left to give"
    helm.remove(name, waiting)
    assert helm.held() == ()
    assert helm.computing() == 0


def test_annotations_say_how_a_simulated_pod_behaves(helm: Site, name: str):
    helm.run(name, {SMALL: 1}, program="idle", lasts_s="0.5")
    helm.wait_phase(name, "Succeeded")
    assert helm.held() == ()
    stubborn = f"{name}-b"
    helm.run(stubborn, {SMALL: 1}, grace_s=2, stops_in_s="60")
    helm.wait_phase(stubborn, "Running")
    helm.plane.admin.delete(f"{PODS}/{stubborn}").object()
    assert helm.pod(stubborn)["metadata"]["deletionTimestamp"]
    assert helm.held() != (), "it holds its device until it has really ended"
    helm.remove(name, stubborn)
    assert {LASTS_S, STOPS_IN_S, PROGRAM} == {f"sim.migd.dev/{word}" for word in ("lasts-s", "stops-in-s", "program")}


def test_a_plugin_sees_new_instances_only_when_it_is_told_to(helm: Site):
    before = helm.allocatable()
    pid = helm.plugin_pid()
    assert pid is not None
    assert Path(f"/proc/{pid}/comm").read_text().strip() == "nvidia-device-p"  # as the kernel cuts it
    helm.cut(0, "1g@2")
    looked = helm.node.object.looks
    assert until(lambda: helm.node.object.looks > looked + 3, WITHIN_S)
    assert helm.allocatable() == before
    os.kill(pid, signal.SIGHUP)
    helm.wait_allocatable({**before, SMALL: before[SMALL] + 1})
    assert helm.plugin_pid() == pid


def test_a_plugin_is_found_in_the_simulated_machine_by_the_uid_of_its_pod(helm: Site):
    (pod,) = helm.plugin_pods()
    clients = helm.node.machine().snapshot().clients.values()
    found = [c for c in clients if pod["metadata"]["uid"] in c.container]
    assert [(c.pid, c.command) for c in found] == [(helm.plugin_pid(), "nvidia-device-plugin")]


def test_a_plugin_pod_deleted_under_our_taint_stays_away_and_comes_back_after_it(fresh: Site, name: str):
    fresh.run(name, {SMALL: 1})
    fresh.wait_phase(name, "Running")
    before = fresh.allocatable()
    fresh.close_node()
    fresh.let_settle()
    fresh.delete_plugin()
    fresh.wait_allocatable(dict.fromkeys(before, 0))
    looked = fresh.node.object.looks
    assert until(lambda: fresh.node.object.looks > looked + 4, WITHIN_S)
    assert fresh.plugin_pods() == [], fresh.taints()
    assert [held.pod for held in fresh.held()] == [name], "who runs goes on"
    fresh.open_node()
    fresh.wait_allocatable(before)
    assert [held.pod for held in fresh.held()] == [name]
    fresh.remove(name)


@pytest.mark.parametrize("fresh", [TOLERANT], indirect=True)
def test_a_plugin_that_tolerates_everything_comes_straight_back(fresh: Site):
    fresh.close_node()
    before = fresh.delete_plugin()
    assert until(lambda: {p["metadata"]["uid"] for p in fresh.plugin_pods()} - {before}, WITHIN_S)
    fresh.wait_allocatable({"nvidia.com/gpu": 1, SMALL: 2, LARGE: 1})


@pytest.mark.parametrize("fresh", [OPERATOR], indirect=True)
def test_a_label_of_the_gpu_operator_starts_and_stops_the_plugin(fresh: Site):
    before = fresh.allocatable()
    label = "nvidia.com/gpu.deploy.device-plugin"
    node = f"/api/v1/nodes/{fresh.name}"
    fresh.plane.admin.patch(node, {"metadata": {"labels": {label: "paused-for-mig-change"}}}).object()
    fresh.wait_allocatable(dict.fromkeys(before, 0))
    assert until(lambda: fresh.plugin_pods() == [], WITHIN_S)
    fresh.plane.admin.patch(node, {"metadata": {"labels": {label: "true"}}}).object()
    fresh.wait_allocatable(before)


def test_a_kubelet_that_restarts_has_its_plugin_back_and_lost_no_pod(fresh: Site, name: str):
    fresh.run(name, {LARGE: 1})
    running = fresh.wait_phase(name, "Running")
    held, pid = fresh.held(), fresh.plugin_pid()
    fresh.cut(0, "1g@2")
    fresh.node.kubelet.crash()
    fresh.node.kubelet.restart()
    fresh.wait_allocatable({"nvidia.com/gpu": 1, SMALL: 3, LARGE: 1})  # it looked anew when the socket was
    assert fresh.plugin_pid() == pid
    assert fresh.held() == held
    assert fresh.pod(name)["status"]["containerStatuses"] == running["status"]["containerStatuses"]
    fresh.remove(name)


def test_a_pod_bound_but_not_admitted_when_the_plugin_goes_dies_of_it(fresh: Site, name: str):
    fresh.node.kubelet.pods.admit_after_s = 600.0
    fresh.run(name, {SMALL: 1})
    assert until(lambda: fresh.pod(name)["spec"].get("nodeName") == fresh.name, WITHIN_S)
    assert fresh.held() == ()
    assert fresh.pod(name)["status"]["phase"] == "Pending"
    fresh.close_node()
    (pod,) = fresh.plugin_pods()
    fresh.plane.admin.delete(f"/api/v1/namespaces/{fresh.style.namespace}/pods/{pod['metadata']['name']}").object()
    assert until(lambda: fresh.plugin_pid() is None, WITHIN_S)
    fresh.node.kubelet.pods.admit_after_s = 0.0
    failed = fresh.wait_phase(name, "Failed")
    assert failed["status"]["reason"] == "UnexpectedAdmissionError"
    assert "no healthy devices present" in failed["status"]["message"]
    fresh.remove(name)


def test_a_plugin_that_crashes_at_every_start_offers_nothing_until_it_is_mended(fresh: Site):
    kubelet, before, pid = fresh.node.kubelet, fresh.allocatable(), fresh.plugin_pid()
    assert pid is not None
    kubelet.pods.broken.add("k8s-device-plugin")
    os.kill(pid, signal.SIGKILL)

    def looping() -> bool:
        (pod,) = fresh.plugin_pods()
        (container,) = pod["status"]["containerStatuses"]
        reason = container["state"].get("waiting", {}).get("reason")
        return reason == "CrashLoopBackOff" and container["restartCount"] >= 2

    assert until(looping, WITHIN_S)
    fresh.wait_allocatable(dict.fromkeys(before, 0))
    kubelet.pods.broken.clear()
    fresh.wait_allocatable(before)


def test_a_plugin_whose_image_is_gone_never_comes_back(fresh: Site):
    kubelet, before = fresh.node.kubelet, fresh.allocatable()
    kubelet.pods.missing.add("k8s-device-plugin")
    (pod,) = fresh.plugin_pods()
    fresh.plane.admin.delete(f"/api/v1/namespaces/{fresh.style.namespace}/pods/{pod['metadata']['name']}").object()

    def waits() -> bool:
        states = [c["state"] for p in fresh.plugin_pods() for c in p["status"].get("containerStatuses", ())]
        return [state.get("waiting", {}).get("reason") for state in states] == ["ImagePullBackOff"]

    assert until(waits, WITHIN_S)
    fresh.wait_allocatable(dict.fromkeys(before, 0))
    kubelet.pods.missing.clear()
    fresh.wait_allocatable(before)


def test_after_a_reboot_instances_are_gone_pods_with_devices_fail_and_the_others_start_again(fresh: Site, name: str):
    plain = f"{name}-plain"
    fresh.run(name, {LARGE: 1})
    fresh.run(plain, {})
    fresh.wait_phase(name, "Running")
    fresh.wait_phase(plain, "Running")
    boot, pid = fresh.object()["status"]["nodeInfo"]["bootID"], fresh.plugin_pid()
    fresh.node.kubelet.reboot()
    assert fresh.wait_phase(name, "Failed")["status"]["reason"] == "UnexpectedAdmissionError"
    fresh.wait_allocatable({"nvidia.com/gpu": 1, SMALL: 0, LARGE: 0})  # an A100 keeps its mode, and no instance
    assert fresh.object()["status"]["nodeInfo"]["bootID"] != boot
    assert fresh.plugin_pid() not in (None, pid)
    assert fresh.wait_phase(plain, "Running")
    assert fresh.computing() == 0
    fresh.remove(name, plain)


def test_a_kubelet_may_write_its_own_node_and_not_its_taints_nor_another_node(helm: Site, plane: ControlPlane):
    taint = {"spec": {"taints": [TAINT]}}
    answer = helm.node.api.patch(f"/api/v1/nodes/{helm.name}", taint)
    assert (answer.code, "is not allowed to modify taints" in answer.message) == (403, True), answer.message
    other = plane.admin.create("/api/v1/nodes", {"metadata": {"name": f"{helm.name}-other"}}).object()
    path = f"/api/v1/nodes/{other['metadata']['name']}"
    assert helm.node.api.patch(path, {"metadata": {"labels": {"a": "b"}}}).code == 403
    plane.admin.delete(path).object()


def users(requests: Sequence[Any]) -> set[str]:
    return {request.user for request in requests}


def test_everything_a_node_writes_is_written_with_its_own_credentials(helm: Site, name: str):
    before = helm.plane.audit.requests()
    helm.run(name, {SMALL: 1})
    helm.wait_phase(name, "Running")
    helm.remove(name)
    mine = [r for r in helm.plane.audit.since(before) if r.name == name and r.writes]
    assert users([r for r in mine if r.resource == "pods/status"]) == {f"system:node:{helm.name}"}
    assert users([r for r in mine if r.verb == "delete"]) == {"migd-tests-admin", f"system:node:{helm.name}"}
