"""How a cluster has NVIDIA's device plugin installed: the DaemonSets and the node labels of each way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from controlplane.api import Json

IMAGE: Final = "nvcr.io/nvidia/k8s-device-plugin:v0.20.0"
_DEPLOY: Final = "nvidia.com/gpu.deploy."
_TAINT: Final = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


@dataclass(frozen=True, slots=True)
class Style:
    """One way. namespace: where the plugin is. labels: what its nodes carry; pods: what its pods carry."""

    name: str
    namespace: str
    pods: Mapping[str, str]
    labels: Mapping[str, str]
    container: str
    selector: Mapping[str, str]
    tolerations: tuple[Json, ...]


HELM: Final = Style(
    "helm",
    "nvidia-device-plugin",
    {"app.kubernetes.io/name": "nvidia-device-plugin", "app.kubernetes.io/instance": "nvdp"},
    {},
    "nvidia-device-plugin-ctr",
    {"nvidia.com/gpu.present": "true"},
    (_TAINT, {"key": "CriticalAddonsOnly", "operator": "Exists"}),
)
"""The Helm chart of the plugin by itself. Source: k8s-device-plugin 0.19, deployments/helm."""
OPERATOR: Final = Style(
    "operator",
    "gpu-operator",
    {"app": "nvidia-device-plugin-daemonset"},
    {f"{_DEPLOY}{name}": "true" for name in ("device-plugin", "gpu-feature-discovery", "dcgm-exporter", "operands")}
    | {f"{_DEPLOY}mig-manager": "false"},
    "nvidia-device-plugin",
    {f"{_DEPLOY}device-plugin": "true"},
    (_TAINT,),
)
"""The GPU Operator, which starts and stops the plugin by a node's label. Source: gpu-operator, state-device-plugin."""
TOLERANT: Final = Style(
    "tolerant",
    "kube-system",
    {"name": "nvidia-device-plugin-ds"},
    {},
    "nvidia-device-plugin-ctr",
    {"nvidia.com/gpu.present": "true"},
    ({"operator": "Exists"},),
)
"""A manifest that tolerates everything: no taint keeps this plugin away."""
STYLES: Final[Mapping[str, Style]] = {style.name: style for style in (HELM, OPERATOR, TOLERANT)}


def node_labels(style: Style, strategy: str, product: str) -> dict[str, str]:
    """What a node with GPUs carries: the labels that GPU feature discovery writes once, and those of the style."""
    return {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": product.replace(" ", "-"),
        "nvidia.com/mig.capable": "true",
        "nvidia.com/mig.strategy": strategy,
        **style.labels,
    }


def plugin_manifests(style: Style, strategy: str) -> list[Json]:
    """The plugin's namespace and DaemonSet."""
    template: Json = {
        "metadata": {"labels": dict(style.pods)},
        "spec": {
            "nodeSelector": dict(style.selector),
            "tolerations": list(style.tolerations),
            "priorityClassName": "system-node-critical",
            "terminationGracePeriodSeconds": 5,
            "containers": [
                {
                    "name": style.container,
                    "image": IMAGE,
                    "env": [{"name": "MIG_STRATEGY", "value": strategy}],
                    "volumeMounts": [{"name": "kubelet", "mountPath": "/var/lib/kubelet/device-plugins"}],
                }
            ],
            "volumes": [{"name": "kubelet", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}],
        },
    }
    metadata = {"name": "nvidia-device-plugin-daemonset", "namespace": style.namespace, "labels": dict(style.pods)}
    daemons = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": dict(style.pods)},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": template,
        },
    }
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": style.namespace}}
    return [daemons] if style.namespace == "kube-system" else [namespace, daemons]
