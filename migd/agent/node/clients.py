"""GPU clients of a node, which hold GPUs without asking for any: who they are, how they are paused, who still runs.

Source: the GPU Operator's labels and the names of its pods; the device plugin's Helm chart and static manifest.
"""

from __future__ import annotations

from typing import Final

from migd.agent.node.effects import HangUp
from migd.agent.node.seeing import NodeSeen
from migd.kube.nodes import Node
from migd.kube.owed import PAUSED, owed_of
from migd.kube.pods import Pod
from migd.kube.stored import Stored

_DEPLOY: Final = "nvidia.com/gpu.deploy."
DEVICE_PLUGIN: Final = f"{_DEPLOY}device-plugin"
_GEOMETRY: Final = tuple(f"{_DEPLOY}{client}" for client in ("device-plugin", "dcgm", "dcgm-exporter"))
"""What has to stop while instances change: nothing may be handed out, and DCGM keeps handles of MIG devices."""
_EVERY: Final = (*_GEOMETRY, *(f"{_DEPLOY}{client}" for client in ("gpu-feature-discovery", "nvsm", "client")))
"""What has to stop for a mode change with a reset: every client of the GPU."""
_APPS: Final = {
    DEVICE_PLUGIN: "nvidia-device-plugin-daemonset",
    f"{_DEPLOY}gpu-feature-discovery": "gpu-feature-discovery",
    f"{_DEPLOY}dcgm-exporter": "nvidia-dcgm-exporter",
    f"{_DEPLOY}dcgm": "nvidia-dcgm",
}
_OPERANDS: Final = f"{_DEPLOY}operands"
"""An admin's: `false` says that the GPU Operator runs nothing here, whatever the other labels say."""
_CONTAINER: Final = "nvidia-device-plugin-ctr"


def client_labels(resets: bool) -> tuple[str, ...]:
    """The labels of the clients that a change needs paused. resets: some GPU's mode changes."""
    return _EVERY if resets else _GEOMETRY


def to_pause(node: Node, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Of these, those whose client runs: an admin's `false` stays."""
    if node.labels.get(_OPERANDS) == "false":
        return ()
    return tuple(key for key in keys if node.labels.get(key) == "true")


def by_labels(node: Stored[Node]) -> bool:
    """Whether the GPU Operator runs the device plugin here, so that a label pauses it."""
    says = node.value.labels.get(DEVICE_PLUGIN)
    owed = owed_of(node)
    if node.value.labels.get(_OPERANDS) == "false":
        return False
    return says == "true" or (says == PAUSED and owed is not None and DEVICE_PLUGIN in owed.labels)


def is_plugin(pod: Pod) -> bool:
    """Whether a pod is NVIDIA's device plugin. The Helm chart labels others alike: its container's name tells."""
    labels = pod.labels
    if labels.get("app") == _APPS[DEVICE_PLUGIN] or labels.get("name") == "nvidia-device-plugin-ds":
        return True
    return labels.get("app.kubernetes.io/name") == "nvidia-device-plugin" and _CONTAINER in pod.containers


def plugins(seen: NodeSeen) -> tuple[Stored[Pod], ...]:
    """The device plugin's pods here that have not ended."""
    return tuple(pod for pod in seen.pods if is_plugin(pod.value) and not pod.value.terminal)


def stoppable(seen: NodeSeen) -> tuple[Stored[Pod], ...]:
    """The device plugin's pods that stay away while the node is closed, once deleted."""
    return tuple(p for p in plugins(seen) if p.value.owner == "DaemonSet" and not p.value.tolerates)


def unstoppable(seen: NodeSeen) -> tuple[Stored[Pod], ...]:
    """The device plugin's pods here that nothing of ours stops: no label does, and our taint keeps none away."""
    if by_labels(seen.node):
        return ()
    away = stoppable(seen)
    return tuple(pod for pod in plugins(seen) if pod not in away)


def to_stop(seen: NodeSeen) -> tuple[Stored[Pod], ...]:
    """The device plugin's pods that are deleted to pause it; none where a label does it, or one would run on."""
    return () if by_labels(seen.node) or unstoppable(seen) else stoppable(seen)


def keeps_from_resets(seen: NodeSeen) -> str:
    """Why no GPU of this node can be reset, in a sentence that says what to do; "" where nothing keeps it from that.

    A reset needs every client gone. A plugin that runs on holds all GPUs, though NVML lists it among no processes.
    """
    running = unstoppable(seen)
    if not running:
        return ""
    first = running[0]
    names = ", ".join(sorted(pod.key for pod in running))
    todo = (
        "its DaemonSet tolerates every taint, or migd.dev/changing: take that toleration away"
        if first.value.owner == "DaemonSet"
        else "it is no DaemonSet's pod, so nobody would start it again: run it as a DaemonSet, or end it for the change"
    )
    return (
        "a change of MIG mode takes a reset of this GPU, and the device plugin cannot be stopped for it: "
        f"{names} stays when the node is closed. {todo[0].upper()}{todo[1:]}"
    )


def paused_still_there(seen: NodeSeen) -> tuple[Stored[Pod], ...]:
    """Pods of clients that are paused by labels and not gone yet."""
    owed = owed_of(seen.node)
    keys = {key for key in (owed.labels if owed else {}) if key in _EVERY}
    apps = {app for key, app in _APPS.items() if key in keys}
    return tuple(
        pod
        for pod in seen.pods
        if not pod.value.terminal and (keys & set(pod.value.clients) or pod.value.labels.get("app") in apps)
    )


def hang_up(seen: NodeSeen) -> HangUp | None:
    """Tell the device plugin to look at the GPUs again; None where none runs."""
    running = tuple((p.namespace, p.name, p.uid) for p in plugins(seen) if p.value.phase == "Running")
    return HangUp(running) if running else None
