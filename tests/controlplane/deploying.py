"""`deploy/` as simulated nodes run it: the overlay of a style, and what is different where nothing is a container."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from controlplane.api import Json
from controlplane.running import ControlPlane

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"
NAMESPACE: Final = "migd-system"
OVERLAYS: Final[Mapping[str, str]] = {
    "helm": "overlays/simulated",
    "tolerant": "overlays/simulated",
    "operator": "overlays/gpu-operator",
}
"""Style of the device plugin -> the overlay that goes with it."""
_SIMULATE: Final = ("--simulate=$(MIGD_SIMULATE)", "--state=/var/lib/migd/gpus.json")


class DeployError(Exception):
    """Something could not be applied; the text is what kubectl said."""


def applied(plane: ControlPlane, documents: Sequence[Json], what: str) -> None:
    """Apply these objects as the admin, server-side; DeployError where one is refused."""
    text = "\n---\n".join(json.dumps(document) for document in documents)
    done = plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    if done.returncode != 0:
        raise DeployError(f"cannot apply {what}: {done.stderr.strip()}")


def rendered(plane: ControlPlane, overlay: str) -> list[Json]:
    """The objects of an overlay, as kustomize puts them together, in its order."""
    done = plane.kubectl("kustomize", str(DEPLOY / overlay))
    if done.returncode != 0:
        raise DeployError(f"cannot render deploy/{overlay}: {done.stderr.strip()}")
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def for_simulated_nodes(documents: Sequence[Json], operators: int, host: str) -> list[Json]:
    """The same with every agent on its node's simulated GPUs, and so many operators, on the node with this name."""
    return [_adapted(document, operators, host) for document in documents]


def _adapted(document: Json, operators: int, host: str) -> Json:
    name = (document["kind"], document["metadata"]["name"])
    if name == ("Deployment", "migd-operator"):
        document["spec"]["replicas"] = operators
        _pod(document)["nodeSelector"] = {"kubernetes.io/hostname": host}
    if name == ("DaemonSet", "migd-agent"):
        (container,) = _pod(document)["containers"]
        container["args"] += [word for word in _SIMULATE if word not in container["args"]]
        names = {one["name"] for one in container.setdefault("env", [])}
        if "MIGD_SIMULATE" not in names:  # the node's own word counts; this one lets it be named in the arguments
            container["env"].append({"name": "MIGD_SIMULATE", "value": ""})
    return document


def _pod(document: Json) -> dict[str, Any]:
    spec: dict[str, Any] = document["spec"]["template"]["spec"]
    return spec
