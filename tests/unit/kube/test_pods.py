"""What is read of a pod: who keeps it where it is, and by what its processes are known."""

from __future__ import annotations

from typing import Any

import pytest

from migd.kube.nodes import NODES
from migd.kube.pods import PODS, Pod
from migd.kube.stored import Interner


def read(**spec: Any) -> Pod:
    status = spec.pop("status", {})
    body = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}], **spec}, "status": status}
    return PODS.parse(body, Interner())


@pytest.mark.parametrize(
    ("toleration", "stays"),
    [
        ({"operator": "Exists"}, True),
        ({"operator": "Exists", "effect": "NoSchedule"}, True),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, False),
        ({"key": "migd.dev/changing", "operator": "Exists"}, True),
        ({"key": "migd.dev/changing", "operator": "Equal", "effect": "NoSchedule"}, True),
        ({"key": "migd.dev/changing", "value": "other"}, False),
        ({"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_a_toleration_is_for_our_taint_or_is_not(toleration: dict[str, str], stays: bool) -> None:
    assert read(tolerations=[toleration]).tolerates == stays
    assert not read().tolerates


def test_processes_are_joined_by_container_without_the_runtimes_name() -> None:
    started = [{"containerID": "containerd://0123abcd"}, {"name": "not started"}]
    initial = [{"containerID": "cri-o://4567"}]
    found = read(status={"containerStatuses": started, "initContainerStatuses": initial})
    assert found.container_ids == ("0123abcd", "4567")
    assert read().container_ids == ()


def test_a_client_of_the_gpu_operators_is_known_by_what_it_selects() -> None:
    selector = {"nvidia.com/gpu.deploy.dcgm": "true", "kubernetes.io/os": "linux"}
    assert read(nodeSelector=selector).clients == ("nvidia.com/gpu.deploy.dcgm",)


def test_of_foreign_annotations_of_a_node_those_of_other_owners_are_read() -> None:
    annotations = {
        "hami.io/node-nvidia-register": "[]",
        "nvidia.com/gpu-driver-upgrade.driver-wait-for-safe-load": "1",
        "a": "b",
    }
    node = NODES.parse({"metadata": {"name": "n", "annotations": annotations}}, Interner())
    assert dict(node.others) == {key: value for key, value in annotations.items() if key != "a"}
    assert dict(NODES.parse({"metadata": {"name": "n"}}, Interner()).others) == {}
