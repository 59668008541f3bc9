"""The harness itself: what runs is real, and what it says of requests is what was asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from controlplane.building import NotBuiltError, found_programs, kubernetes_version
from controlplane.processes import until
from controlplane.running import ControlPlane
from integration.texts import PLANS, plan

ROLES = "/apis/rbac.authorization.k8s.io/v1"


def test_programs_that_are_not_built_are_named_with_the_command_that_builds_them(tmp_path):
    with pytest.raises(NotBuiltError, match=r"etcd, kube-apiserver.*run `make control-plane` once"):
        found_programs({"XDG_CACHE_HOME": str(tmp_path)})


def test_a_folder_of_ready_made_programs_is_used_only_when_complete(tmp_path):
    (tmp_path / "etcd").touch(mode=0o755)
    with pytest.raises(NotBuiltError, match=r"_ASSETS is .*lacks kube-apiserver, .*kubectl, kubelet: unset it"):
        found_programs({"KUBEBUILDER_ASSETS": str(tmp_path)})
    for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet"):
        (tmp_path / name).touch(mode=0o755)
    assert found_programs({"KUBEBUILDER_ASSETS": str(tmp_path)}) == tmp_path


def test_the_programs_know_their_version(plane: ControlPlane):
    said = json.loads(plane.kubectl("version", "-o", "json").stdout)
    assert said["serverVersion"]["gitVersion"] == said["clientVersion"]["gitVersion"] == kubernetes_version()


def test_the_controllers_and_the_scheduler_work(plane: ControlPlane, name: str):
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    plane.admin.create("/api/v1/namespaces", made).object()
    try:
        assert until(lambda: plane.admin.get(f"/api/v1/namespaces/{name}/serviceaccounts/default").ok, 20)
        plane.admin.create(f"/api/v1/namespaces/{name}/pods", pod("a")).object()

        def refused() -> bool:
            seen = plane.admin.get(f"/api/v1/namespaces/{name}/pods/a").object()
            return any(c["reason"] == "Unschedulable" for c in seen["status"].get("conditions", ()))

        assert until(refused, 20), "the scheduler did not look at the pod"
    finally:
        plane.admin.delete(f"/api/v1/namespaces/{name}")
    assert until(lambda: plane.admin.get(f"/api/v1/namespaces/{name}").code == 404, 30), "the namespace does not go"


def test_a_bound_token_carries_its_node_and_has_only_the_rights_it_was_given(plane: ControlPlane, name: str):
    node = plane.admin.create("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    plane.admin.create("/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": name}}).object()
    plane.admin.create("/api/v1/namespaces/default/pods", pod(name, serviceAccountName=name, nodeName=name)).object()
    role = {"metadata": {"name": name}, "rules": [{"apiGroups": ["migd.dev"], "resources": ["*"], "verbs": ["list"]}]}
    plane.admin.create(f"{ROLES}/clusterroles", role).object()
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "default"}],
    }
    plane.admin.create(f"{ROLES}/clusterrolebindings", binding).object()
    token = plane.bound_token("default", name, name)
    bound = plane.as_token(token)
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    who = bound.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", review).object()["status"]["userInfo"]
    assert who["username"] == f"system:serviceaccount:default:{name}"
    assert who["extra"]["authentication.kubernetes.io/node-name"] == [name]
    assert who["extra"]["authentication.kubernetes.io/node-uid"] == [node.object()["metadata"]["uid"]]
    assert until(lambda: bound.get(PLANS).ok, 10), "the role does not work"
    assert bound.create(PLANS, plan(name)).code == 403
    assert bound.get("/api/v1/secrets").code == 403
    assert (
        plane.kubectl("get", "gpp", kubeconfig=plane.kubeconfig_of(f"{name}.kubeconfig", token=token)).returncode == 0
    )
    plane.admin.delete(f"/api/v1/nodes/{name}")


def test_a_stranger_is_refused(plane: ControlPlane):
    assert plane.as_token("made-up").get(PLANS).code == 401
    nobody = plane.as_client(plane.authority.client("nobody", "nobody"))
    assert nobody.get(PLANS).code == 403


def test_the_audit_log_has_every_request_by_who_what_and_answer(plane: ControlPlane, name: str):
    before = plane.audit.requests()
    made = plane.admin.create(PLANS, plan(name)).object()
    plane.admin.get(f"{PLANS}/{name}").object()
    plane.admin.patch(f"{PLANS}/{name}", {"spec": {"paused": True}}).object()
    assert plane.admin.apply(f"{PLANS}/{name}/status", {"kind": "x"}, "someone").code == 400
    plane.admin.delete(f"{PLANS}/{name}").object()
    mine = [r for r in plane.audit.since(before) if r.name == name]
    assert [(r.verb, r.resource, r.code, r.writes) for r in mine] == [
        ("create", "gpupartitionplans", 201, True),
        ("get", "gpupartitionplans", 200, False),
        ("patch", "gpupartitionplans", 200, True),
        ("patch", "gpupartitionplans/status", 400, True),
        ("delete", "gpupartitionplans", 200, True),
    ]
    assert {r.user for r in mine} == {"migd-tests-admin"}
    assert {r.group for r in mine} == {"migd.dev"}
    assert mine[0].body["spec"] == made["spec"], "what is created is logged with its defaults filled in"
    assert mine[1].body is None
    assert mine[2].body == {"spec": {"paused": True}}


def test_no_secret_is_in_the_audit_log(plane: ControlPlane, name: str):
    before = plane.audit.requests()
    secret = {"metadata": {"name": name}, "stringData": {"a": "hidden"}}
    plane.admin.create("/api/v1/namespaces/default/secrets", secret).object()
    (seen,) = [r for r in plane.audit.since(before) if r.resource == "secrets" and r.user == "migd-tests-admin"]
    assert (seen.verb, seen.code, seen.body) == ("create", 201, None)


@pytest.mark.parametrize("part", ["kube-apiserver", "kube-scheduler", "kube-controller-manager", "etcd"])
def test_every_process_has_a_group_of_its_own(plane: ControlPlane, part: str):
    parts = (plane.api_server, plane.scheduler, plane.controllers, plane.etcd)
    (child,) = [child for child in parts if child.name == part]
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)


def test_a_second_control_plane_survives_the_crash_of_its_api_server_and_leaves_nothing_running(plane, tmp_path):
    second = ControlPlane(tmp_path / "second")
    with second:
        assert second.port != plane.port
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kept"}}
        second.admin.create("/api/v1/namespaces/default/configmaps", made).object()
        second.api_server.kill()
        with pytest.raises(OSError, match="refused"):
            second.admin.get("/readyz")
        second.api_server.start()
        second.wait_ready()
        assert second.admin.get("/api/v1/namespaces/default/configmaps/kept").ok
        groups = [c.pid for c in (second.etcd, second.api_server, second.controllers, second.scheduler)]
    for group in groups:
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)


def test_what_a_killed_test_run_started_dies_with_it(tmp_path):
    code = (
        "import sys; from pathlib import Path; from controlplane.processes import Child;"
        "child = Child('sleeper', ['/bin/sleep', '600'], Path(sys.argv[1])); child.start();"
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with run:
        assert run.stdout is not None
        group = int(run.stdout.readline())
        assert until(lambda: Path(f"/proc/{group}/comm").read_text() == "sleep\n", 10)
        run.kill()
    assert until(lambda: not Path(f"/proc/{group}").exists() or " Z " in Path(f"/proc/{group}/stat").read_text(), 10)


def pod(name: str, **spec: object) -> dict[str, object]:
    container = {"name": "main", "image": "none"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [container], **spec},
    }
