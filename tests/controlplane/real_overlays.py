"""What is applied to a real node: an overlay of one's own on `deploy/`, the device plugin, and pods that want GPUs.

The overlay is thin, and made as docs/install.md has it: the image's name, and what follows from a machine without a
cluster's network: pods have the machine's, find the API server by its own address, and take ports that are free.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from controlplane.api import Json
from controlplane.deploying import DEPLOY
from controlplane.real_config import DRIVER
from controlplane.real_node import TOOLS, TOOLS_AT

HELM_PLUGIN: Final = "helm-plugin"
GPU_OPERATOR: Final = "gpu-operator"
"""Overlays, by how NVIDIA's programs are installed."""
_PORT: Final = 8080
_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Program:
    """A program of deploy/ as its manifest has it. listens: where among its arguments the one about listening is."""

    kind: str
    name: str
    container: str
    listens: int


OPERATOR: Final = Program("Deployment", "migd-operator", "operator", 2)
AGENT: Final = Program("DaemonSet", "migd-agent", "agent", 6)


def overlay(
    folder: Path,
    image: str,
    server: tuple[str, int],
    ports: Mapping[Program, int],
    base: str = HELM_PLUGIN,
    instead: str = "",
) -> Json:
    """The kustomization of a folder. image: its whole name; server: the API server.

    ports: on which the programs answer probes, on loopback. base: which of deploy/overlays. instead: the file in the
    image TOOLS that runs as the agent; "" for the agent.
    """
    name, _, tag = image.rpartition(":")
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "sortOptions": {"order": "fifo"},
        "resources": [os.path.relpath(DEPLOY / "overlays" / base, folder)],
        "images": [{"name": "migd", "newName": name, "newTag": tag}],
        "patches": [
            *(
                _patch(program, json.dumps(_on_the_machines_network(program, server, port)))
                for program, port in ports.items()
            ),
            _patch(AGENT, json.dumps(_driven())),
            *([_patch(AGENT, json.dumps(_instead(instead)))] if instead else ()),
        ],
    }


def _patch(program: Program, text: str) -> Json:
    return {"target": {"kind": program.kind, "name": program.name}, "patch": text}


def _on_the_machines_network(program: Program, server: tuple[str, int], port: int) -> list[Json]:
    """A JSON patch; its tests fail where the manifest is no longer as it says."""
    pod, container = "/spec/template/spec", "/spec/template/spec/containers/0"
    listens = f"{container}/args/{program.listens}"
    found = {"KUBERNETES_SERVICE_HOST": server[0], "KUBERNETES_SERVICE_PORT": str(server[1])}
    return [
        {"op": "add", "path": f"{pod}/hostNetwork", "value": True},
        {"op": "add", "path": f"{container}/imagePullPolicy", "value": "Never"},
        *({"op": "add", "path": f"{container}/env/-", "value": {"name": k, "value": v}} for k, v in found.items()),
        {"op": "test", "path": listens, "value": f"--listen=0.0.0.0:{_PORT}"},
        {"op": "replace", "path": listens, "value": f"--listen={_LOOPBACK}:{port}"},
        {"op": "test", "path": f"{container}/ports/0/containerPort", "value": _PORT},
        {"op": "replace", "path": f"{container}/ports/0/containerPort", "value": port},
        *(
            {"op": "add", "path": f"{container}/{probe}/httpGet/host", "value": _LOOPBACK}
            for probe in ("livenessProbe", "readinessProbe", "startupProbe")
        ),
    ]


def _driven() -> Json:
    """Where the driver's root is, as an admin says it whose driver is not the host's own."""
    volume = {"name": "driver", "hostPath": {"path": DRIVER, "type": "Directory"}}
    return {
        "apiVersion": "apps/v1",
        "kind": AGENT.kind,
        "metadata": {"name": AGENT.name, "namespace": "migd-system"},
        "spec": {"template": {"spec": {"volumes": [volume]}}},
    }


def _instead(file: str) -> list[Json]:
    container = "/spec/template/spec/containers/0"
    return [
        {"op": "replace", "path": f"{container}/image", "value": TOOLS},
        {"op": "replace", "path": f"{container}/command", "value": ["python3", f"{TOOLS_AT}/{file}"]},
    ]


def pod_template(
    limits: Mapping[str, int],
    labels: Mapping[str, str],
    grace_s: int = 5,
    runs: Sequence[str] = (),
) -> Json:
    """A pod that computes on what it asks for. limits: resource -> how many; runs: another command in its place.

    It sees the driver's root, by which it asks NVML of its devices, and says that it is on them.
    """
    container: Json = {
        "name": "main",
        "image": TOOLS,
        "imagePullPolicy": "Never",
        "resources": {"limits": {resource: str(number) for resource, number in limits.items()}},
        "env": [{"name": "MIGD_DRIVER_ROOT", "value": DRIVER}],
        "volumeMounts": [{"name": "driver", "mountPath": DRIVER}],
    }
    if runs:
        container["command"] = list(runs)
    spec: Json = {
        "hostNetwork": True,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace_s,
        "containers": [container],
        "volumes": [{"name": "driver", "hostPath": {"path": DRIVER, "type": "Directory"}}],
    }
    return {"metadata": {"labels": dict(labels)}, "spec": spec}


def deployment(name: str, replicas: int, limits: Mapping[str, int], **options: Any) -> Json:
    """So many pods that compute on what each asks for, labelled `app: NAME`."""
    labels = {"app": name}
    template = pod_template(limits, labels, **options)
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }
