"""NVIDIA's stack on a node, as it is installed: which DaemonSets there are, and by which labels they are known.

Source: Helm chart 0.19 of the device plugin, GPU Operator 25: labels, container names, selectors, tolerations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from migd.sim.cluster.fields import Json
from migd.sim.nodes.daemonsets import daemonset

_GPU_TAINT: Final = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
_CRITICAL: Final = {"key": "CriticalAddonsOnly", "operator": "Exists"}
_EVERYTHING: Final = {"operator": "Exists"}


@dataclass(frozen=True, slots=True)
class Style:
    """A way to install it. plugin: there is a device plugin at all."""

    namespace: str
    plugin: bool = True
    tolerates_everything: bool = False


STYLES: Final = {
    "helm": Style("nvidia-device-plugin"),
    "helm-tolerant": Style("nvidia-device-plugin", tolerates_everything=True),
    "operator": Style("gpu-operator"),
    "none": Style("", plugin=False),
}
"""helm: the chart, which has no label to pause by. helm-tolerant: and its pods tolerate every taint. none: no stack."""


class _Spec(Protocol):
    """What of a node's specification matters here."""

    @property
    def name(self) -> str: ...
    @property
    def style(self) -> str: ...
    @property
    def mig_manager(self) -> bool: ...


def stack(nodes: Sequence[_Spec]) -> list[Json]:
    """The DaemonSets of a cluster with these nodes."""
    found: list[Json] = []
    for style in ("helm", "helm-tolerant", "operator"):
        names = tuple(sorted(node.name for node in nodes if node.style == style))
        if names:
            found += _operator(names) if style == "operator" else _helm(style, names)
    managed = tuple(sorted(node.name for node in nodes if node.mig_manager))
    if managed:
        found.append(_operand("nvidia-mig-manager", "mig-manager", "mig-manager", managed))
    return found


def _helm(style: str, names: tuple[str, ...]) -> list[Json]:
    """The chart labels plugin and feature discovery alike: they are told apart by their containers."""
    tolerations = [_EVERYTHING] if STYLES[style].tolerates_everything else [_GPU_TAINT, _CRITICAL]
    tail = "-tolerant" if STYLES[style].tolerates_everything else ""
    labels = {"app.kubernetes.io/name": "nvidia-device-plugin", "app.kubernetes.io/instance": f"nvdp{tail}"}
    parts = (
        (f"nvdp{tail}-nvidia-device-plugin", "nvidia-device-plugin-ctr", "device-plugin"),
        (f"nvdp{tail}-gpu-feature-discovery", "gpu-feature-discovery-ctr", "gpu-feature-discovery"),
    )
    return [
        daemonset(name, STYLES[style].namespace, labels, container, program, tolerations=tolerations, only_on=names)
        for name, container, program in parts
    ]


def _operator(names: tuple[str, ...]) -> list[Json]:
    parts = (
        ("nvidia-device-plugin-daemonset", "nvidia-device-plugin", "device-plugin", "device-plugin"),
        ("gpu-feature-discovery", "gpu-feature-discovery", "gpu-feature-discovery", "gpu-feature-discovery"),
        ("nvidia-dcgm", "nvidia-dcgm-ctr", "dcgm", "dcgm"),
        ("nvidia-dcgm-exporter", "nvidia-dcgm-exporter", "dcgm-exporter", "dcgm-exporter"),
    )
    return [_operand(name, client, program, names, container) for name, container, program, client in parts]


def _operand(name: str, client: str, program: str, names: tuple[str, ...], container: str = "") -> Json:
    """A DaemonSet of the GPU Operator: it runs where the client's label says `true`."""
    return daemonset(
        name,
        "gpu-operator",
        {"app": name},
        container or name,
        program,
        tolerations=[_GPU_TAINT],
        selector={f"nvidia.com/gpu.deploy.{client}": "true"},
        only_on=names,
    )
