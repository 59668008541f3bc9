"""Simulated nodes under the real scheduler and controllers: kubelet, sockets, plugin and pods do what real ones do.

Left out: what the agent makes of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from controlplane.nodes_pods import CRASHES_AFTER_S, HANGS, LASTS_S, PROGRAM, STOPS_IN_S
from controlplane.nodes_styles import HELM, OPERATOR, TOLERANT
from controlplane.nursery import Nursery
from controlplane.processes import until
from controlplane.running import ControlPlane
from integration.sites import LARGE, PODS, SMALL, TAINT, WITHIN_S, Site, sited

from migd.kubelet.ports import PodDevices


@pytest.fixture(scope="module")
def plane(own_plane: ControlPlane) -> ControlPlane:
    """A control plane without migd: where other tests have put deploy/, its agents come and open what we closed."""
    return own_plane


@pytest.fixture(scope="module")
def shared(plane: ControlPlane, nursery: Nursery) -> Iterator[Site]:
    yield from sited(plane, HELM, nursery)


@pytest.fixture
def helm(shared: Site) -> Iterator[Site]:
    """The node that tests share; what one of them leaves there, as where it failed, is gone before the next."""
    yield shared
    shared.clear()


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
    helm.run(stubborn, {SMALL: 1}, grace_s=8, stops_in_s="60")
    helm.wait_phase(stubborn, "Running")
    helm.plane.admin.delete(f"{PODS}/{stubborn}").object()
    assert helm.pod(stubborn)["metadata"]["deletionTimestamp"]
    assert helm.held() != (), "it holds its device until it has really ended"
    helm.remove(name, stubborn)
    words = ("lasts-s", "stops-in-s", "program", "crashes-after-s", "hangs")
    assert {LASTS_S, STOPS_IN_S, PROGRAM, CRASHES_AFTER_S, HANGS} == {f"sim.migd.dev/{word}" for word in words}


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


def test_an_evicted_pod_keeps_its_device_while_it_ends_and_its_budget_waits_for_the_next_one(helm: Site, name: str):
    # a grace so long that also a busy machine looks before it is over
    helm.serve(name, 2, {SMALL: 1}, grace_s=15, stops_in_s="60")
    helm.budget(name, 2)
    helm.wait_counted(name, currentHealthy=2, disruptionsAllowed=0)
    first, second = helm.pods_of(name)
    assert (helm.evict(first).code, helm.evict(second).code) == (429, 429)
    helm.budget(name, 1)
    helm.wait_counted(name, disruptionsAllowed=1)
    assert helm.evict(first).code == 201
    assert helm.evict(second).code == 429
    # the one that replaces it may have come already: there is a third instance
    assert {first, second} <= {one.pod for one in helm.held()}, "what is asked to end has not ended"
    assert helm.computing() >= 2
    assert helm.pod(first)["metadata"]["deletionGracePeriodSeconds"] == 15
    assert until(lambda: helm.plane.admin.get(f"{PODS}/{first}").code == 404, WITHIN_S)
    assert until(lambda: first not in helm.pods_of(name) and len(helm.pods_of(name)) == 2, WITHIN_S)
    (other,) = set(helm.pods_of(name)) - {second}
    helm.wait_phase(other, "Running")
    helm.wait_counted(name, currentHealthy=2, disruptionsAllowed=1)
    assert {one.pod for one in helm.held()} == {second, other}
    assert until(lambda: helm.computing() == 2, WITHIN_S)
    helm.retire(name)
    assert (helm.held(), helm.computing()) == ((), 0)


def test_h13_a_pod_that_crashes_over_and_over_keeps_its_device_and_counts_as_unwell(helm: Site, name: str):
    helm.serve(name, 1, {SMALL: 1}, crashes_after_s="0.1")
    helm.budget(name, 2)
    (crashing,) = helm.pods_of(name)

    def looping() -> bool:
        (container,) = helm.pod(crashing)["status"].get("containerStatuses", ({"state": {}},))
        reason = container["state"].get("waiting", {}).get("reason")
        return reason == "CrashLoopBackOff" and container["restartCount"] >= 3

    assert until(looping, WITHIN_S), helm.pod(crashing)["status"]
    assert helm.pod(crashing)["status"]["phase"] == "Running"
    assert [one.pod for one in helm.held()] == [crashing]
    assert helm.computing() == 0, "and runs nothing on it meanwhile"
    helm.wait_counted(name, currentHealthy=0, expectedPods=1)
    assert helm.evict(crashing).code == 429
    helm.budget(name, 2, unhealthyPodEvictionPolicy="AlwaysAllow")
    assert until(lambda: helm.evict(crashing).code == 201, WITHIN_S), "429 only where the pod changes at that moment"
    assert until(lambda: crashing not in helm.pods_of(name), WITHIN_S)
    helm.retire(name)


def test_a_pod_that_hangs_stays_terminating_with_its_device_until_it_is_let_go(helm: Site, name: str):
    helm.run(name, {SMALL: 1}, grace_s=1, hangs="true")
    helm.wait_phase(name, "Running")
    assert helm.evict(name).code == 201
    looked = helm.node.object.looks
    assert until(lambda: helm.node.object.looks > looked + 6, WITHIN_S), "its grace is over"
    assert (helm.pod(name)["status"]["phase"], [one.pod for one in helm.held()]) == ("Running", [name])
    assert helm.evict(name).code == 201, "also of a pod that is going"
    helm.plane.admin.patch(f"{PODS}/{name}", {"metadata": {"annotations": {HANGS: None}}}).object()
    assert until(lambda: helm.plane.admin.get(f"{PODS}/{name}").code == 404, WITHIN_S)
    assert (helm.held(), helm.computing()) == ((), 0)


def test_a_pod_removed_by_force_gives_its_device_back_before_its_process_has_ended(fresh: Site, name: str):
    fresh.run(name, {SMALL: 1}, grace_s=1, hangs="true")
    fresh.wait_phase(name, "Running")
    fresh.plane.admin.delete(f"{PODS}/{name}", gracePeriodSeconds="0").object()
    assert fresh.plane.admin.get(f"{PODS}/{name}").code == 404
    assert until(lambda: fresh.held() == (), WITHIN_S)
    assert fresh.computing() == 1, "NVML still shows who computes there"
    fresh.node.kubelet.reboot()
    assert fresh.computing() == 0


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
