"""What a simulated kubelet gives to a container that runs as a process: words, variables, paths, and its token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from controlplane.api import Answer
from controlplane.nodes_pods import ContainerState, address_of, same_status, status_of
from controlplane.nodes_programs import Program, is_program, words_of
from controlplane.nodes_tokens import TOKEN_S, Ground, Token

UID = "11111111-2222-3333-4444-555555555555"


class Tokens:
    """An API server that gives tokens, or answers with what it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.code = 201
        self.away = False

    def create(self, path: str, body: Any) -> Answer:
        if self.away:
            raise ConnectionRefusedError
        self.asked.append((path, body))
        return Answer(self.code, {"status": {"token": f"token-{len(self.asked)}"}} if self.code == 201 else {})


def ground(folder: Path) -> Ground:
    return Ground("n1", folder, "https://127.0.0.1:1", folder / "ca.crt", folder / "logs", {"MIGD_SIMULATE": "h200"})


def pod(container: dict[str, Any], **spec: Any) -> dict[str, Any]:
    metadata = {"name": "p", "namespace": "ns", "uid": UID, "labels": {"a/b": "c"}}
    return {
        "metadata": metadata,
        "spec": {"nodeName": "n1", "serviceAccountName": "sa", "containers": [container], **spec},
    }


def program(folder: Path, container: dict[str, Any], **spec: Any) -> Program:
    given = {"name": "main", "image": "registry.example/x/migd:1@sha256:0", **container}
    return Program(ground(folder), pod(given, **spec), given, Tokens())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("image", "runs"),
    [
        ("migd", True),
        ("localhost:5000/migd:0.1.0", True),
        ("nvcr.io/nvidia/k8s-device-plugin:v0.20.0", True),
        ("migd-other", False),
        ("train", False),
    ],
)
def test_an_image_is_known_by_its_name_alone(image: str, runs: bool):
    assert is_program({"image": image}) is runs


def test_the_command_is_our_program_with_the_pods_words_and_the_way_to_the_api_server():
    program, given = words_of({"image": "migd", "command": ["/usr/bin/migd-operator"], "args": ["--a", "b"]})
    assert program[1:] == ["-m", "migd_operator"]
    assert given == ["--a", "b", "--kubeconfig=$(KUBECONFIG)"]
    program, given = words_of({"image": "migd", "args": ["agent"]})
    assert (program[1:], given[0]) == (["-m", "migd"], "agent")


def test_a_volume_hides_nothing_of_what_runs_the_program(tmp_path):
    """A clone of ours under /tmp, where the pods have a volume, is on this machine, not in the volume."""
    here = f"/{Path(sys.executable).parts[1]}"
    volume = {"volumes": [{"name": "scratch", "emptyDir": {}}]}
    mount = {"name": "scratch", "mountPath": here}
    made = program(tmp_path, {"volumeMounts": [mount], "args": ["agent", f"--state-dir={here}/a"]}, **volume)
    words = made.command({"KUBECONFIG": "/k"})
    assert words[:4] == [sys.executable, "-m", "migd", "agent"]
    assert words[4:] == [f"--state-dir={tmp_path}/pods/{UID}/scratch/a", "--kubeconfig=/k"]


@pytest.mark.parametrize(
    ("word", "outside"),
    [
        ("--state-dir=/var/lib/migd", "--state-dir=ROOT/var/lib/migd"),
        ("/var/lib/migd/x", "ROOT/var/lib/migd/x"),
        ("/var/lib/migdx", "/var/lib/migdx"),
        ("--kubelet-dir=/var/lib/kubelet", "--kubelet-dir=ROOT/var/lib/kubelet"),  # a folder above what is mounted
        ("--root=/", "--root=/"),
        ("--other=/inside", "--other=ROOT/outside"),
        ("--above=/in", "--above=/in"),
        ("/tmp/a", f"ROOT/pods/{UID}/scratch/a"),
        ("--listen=0.0.0.0:80", f"--listen={address_of(UID)}:80"),
        ("--plain", "--plain"),
    ],
)
def test_paths_in_volumes_and_the_pods_network_are_where_they_are_outside(tmp_path, word: str, outside: str):
    volumes = [
        {"name": "state", "hostPath": {"path": "/var/lib/migd"}},
        {"name": "sockets", "hostPath": {"path": "/var/lib/kubelet/pod-resources"}},
        {"name": "moved", "hostPath": {"path": "/outside"}},
        {"name": "scratch", "emptyDir": {}},
    ]
    mounts = [
        {"name": "state", "mountPath": "/var/lib/migd"},
        {"name": "sockets", "mountPath": "/var/lib/kubelet/pod-resources"},
        {"name": "moved", "mountPath": "/inside"},
        {"name": "scratch", "mountPath": "/tmp"},
    ]
    made = program(tmp_path, {"volumeMounts": mounts}, volumes=volumes)
    assert made.outside(word) == outside.replace("ROOT", str(tmp_path))


def test_variables_come_from_the_pod_and_the_node_knows_its_gpus_best(tmp_path):
    env = [
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a/b']"}}},
        {"name": "BOTH", "value": "$(WHO) on $(NODE), $(NOBODY)"},
        {"name": "MIGD_SIMULATE", "value": "8xa100-80gb"},
    ]
    seen = program(tmp_path, {"env": env}).variables()
    assert {key: seen[key] for key in ("NODE", "WHO", "LABEL", "BOTH", "MIGD_SIMULATE")} == {
        "NODE": "n1",
        "WHO": "p",
        "LABEL": "c",
        "BOTH": "p on n1, $(NOBODY)",
        "MIGD_SIMULATE": "h200",
    }
    assert seen["KUBECONFIG"] == f"{tmp_path}/pods/{UID}/kubeconfig"


def test_a_token_is_bound_to_the_pod_renewed_in_time_and_kept_while_nobody_gives_another(tmp_path):
    api = Tokens()
    token = Token(ground(tmp_path), pod({"name": "main", "image": "migd"}), api)  # type: ignore[arg-type]
    api.code = 403  # the authorizer has not heard of the pod yet
    token.step(0.0)
    assert not token.ready
    api.code = 201
    token.step(0.5)
    assert len(api.asked) == 1, "not before a second is over"
    token.step(1.0)
    assert token.ready
    assert token.file.read_text() == "token-2"
    path, body = api.asked[-1]
    assert path == "/api/v1/namespaces/ns/serviceaccounts/sa/token"
    assert body["spec"]["boundObjectRef"] == {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": UID}
    token.step(0.7 * TOKEN_S)
    assert len(api.asked) == 2
    api.away = True
    token.step(0.85 * TOKEN_S)
    assert token.file.read_text() == "token-2"
    api.away = False
    token.step(0.85 * TOKEN_S + 1)
    assert token.file.read_text() == "token-3"


def test_a_status_keeps_the_conditions_of_others_and_the_time_since_which_ours_hold():
    theirs = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": "t0"}
    old = {"type": "Ready", "status": "True", "lastTransitionTime": "t1"}
    document = pod({"name": "main", "image": "x"}) | {"status": {"conditions": [theirs, old]}}
    running = {"main": ContainerState("running", ready=True, since="t2", container_id="c")}
    status = status_of(document, "Running", running, "127.0.0.2", "t2", None)
    told = {c["type"]: c for c in status["conditions"]}
    assert told["DisruptionTarget"] == theirs
    assert told["Ready"] == old
    ended = status_of(document, "Running", {"main": ContainerState("waiting", "CrashLoopBackOff")}, "", "t2", None)
    assert {c["type"]: c["status"] for c in ended["conditions"]}["Ready"] == "False"
    assert {c["type"]: c for c in ended["conditions"]}["Ready"]["lastTransitionTime"] not in ("t1", "t2"), "as of now"
    lagging = status_of(
        document, "Running", running, "127.0.0.2", "t2", {"conditions": [{**old, "lastTransitionTime": "t9"}]}
    )
    assert {c["type"]: c for c in lagging["conditions"]}["Ready"]["lastTransitionTime"] == "t9", (
        "as was sent, not as seen"
    )
    assert not same_status(status, ended)
    assert same_status(status, {**status, "conditions": status["conditions"][::-1]})
