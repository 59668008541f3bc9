"""NVIDIA's own programs on a real node: device plugin, GPU feature discovery, NFD's master, and who else holds GPUs.

As their Helm charts or the GPU Operator install them. What differs follows from a driver that is simulated: it lies
under a root of its own, and its files of /proc are mounted by the container itself, since runc mounts nothing there.
Source: k8s-device-plugin 0.19.0, deployments/helm; gpu-operator, assets/state-*; node-feature-discovery 0.18.3.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from controlplane.api import Json
from controlplane.building import REAL_NODE, found_programs
from controlplane.nodes_styles import OPERATOR, Style, plugin_manifests
from controlplane.real_config import CDI, DRIVER
from controlplane.real_node import TOOLS
from controlplane.real_roots import GPU_PROGRAMS

ROOT: Final = "/driver-root"
"""Where these programs see the driver. Source: k8s-device-plugin, DefaultContainerDriverRoot."""
LIBRARIES: Final = f"usr/lib/{platform.machine()}-linux-gnu"
NFD: Final = "node-feature-discovery"
NODE_FEATURES: Final = "/apis/nfd.k8s-sigs.io/v1alpha1/nodefeatures"
_DEPLOY: Final = "nvidia.com/gpu.deploy."
_PROC: Final = f"mount --rbind {ROOT}/proc/driver /proc/driver\n"
_NO_FEATURES: Final = {"GDRCOPY_ENABLED": "false", "GDS_ENABLED": "false", "MOFED_ENABLED": "false"}


@dataclass(frozen=True, slots=True)
class Ways:
    """How the programs are set up.

    strategy: single or mixed. cdi: whether containers get devices by CDI, and not one by one from the kubelet.
    shares: resource -> how many pods share one of it, by time slicing.
    """

    strategy: str = "mixed"
    cdi: bool = True
    shares: Mapping[str, int] = field(default_factory=dict)


def nvidia_manifests(style: Style, ways: Ways, server: tuple[str, int], port: int) -> list[Json]:
    """All of it. server: the API server's address and port, since pods have the machine's network; port: NFD's."""
    found = [*device_plugin(style, ways), *feature_discovery(style, ways, server), *nfd(server, port)]
    return [*found, exporter()] if style is OPERATOR else found


def device_plugin(style: Style, ways: Ways) -> list[Json]:
    """The plugin's namespace, DaemonSet and configuration."""
    namespace, daemons = plugin_manifests(style, ways.strategy)
    template = daemons["spec"]["template"]["spec"]
    template |= {"hostNetwork": True, "automountServiceAccountToken": False}
    (container,) = template["containers"]
    devices = {"DEVICE_LIST_STRATEGY": "cdi-cri"} if ways.cdi else {"PASS_DEVICE_SPECS": "true"}
    container |= _program(f"{_PROC}exec nvidia-device-plugin")
    container["env"] = _variables(
        CONFIG_FILE="/config/config.yaml",
        NVIDIA_DRIVER_ROOT=DRIVER,
        NVIDIA_DEV_ROOT=DRIVER,
        NVIDIA_CDI_HOOK_PATH="/bin/true",  # what hooks do is for libraries, and there are none
        **devices,
        **_NO_FEATURES,
    )
    container["securityContext"] = {"privileged": True}
    _mount(template, "driver-root", DRIVER, ROOT, "HostToContainer")
    _mount(template, "cdi-root", CDI, CDI)
    return [namespace, _configured(style, template, ways), daemons]


def configuration(ways: Ways) -> Json:
    """What device plugin and feature discovery are told; they read it at their start and on SIGHUP."""
    shared = [{"name": name, "replicas": number} for name, number in ways.shares.items()]
    config: Json = {"version": "v1", "flags": {"migStrategy": ways.strategy}}
    if shared:  # a list without any is refused
        config["sharing"] = {"timeSlicing": {"resources": shared}}
    return config


def config_map(style: Style, container: str, config: Json) -> Json:
    """Where a program, by its container's name, finds what it is told.

    A chart gives all of them the same one. Here each has its own, since any of them may be started anew by itself, and
    tests give a wrong one to one alone.
    """
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{container}-config", "namespace": style.namespace},
        "data": {"config.yaml": json.dumps(config)},
    }


def feature_discovery(style: Style, ways: Ways, server: tuple[str, int]) -> list[Json]:
    """GPU feature discovery: its account, and a DaemonSet. It writes a NodeFeature, and NFD's master the labels."""
    name = "gpu-feature-discovery"
    operated = style is OPERATOR
    labels = {"app": name} if operated else dict(style.pods)  # the chart gives both of its DaemonSets the same labels
    container: Json = {
        "name": name if operated else f"{name}-ctr",
        **_program(f"exec {name}"),
        "env": [
            *_variables(
                CONFIG_FILE="/config/config.yaml",
                GFD_SLEEP_INTERVAL="5s",
                LD_LIBRARY_PATH=f"{ROOT}/{LIBRARIES}",  # it takes no other root; NVIDIA's runtime mounts them
                **_found(server),
            ),
            _field("NODE_NAME", "spec.nodeName"),
            _field("NAMESPACE", "metadata.namespace"),
            _field("POD_NAME", "metadata.name"),
        ],
        "securityContext": {"privileged": True},
    }
    template: Json = {
        "serviceAccountName": name,
        "hostNetwork": True,
        "nodeSelector": {f"{_DEPLOY}{name}": "true"} if operated else dict(style.selector),
        "tolerations": list(style.tolerations),
        "priorityClassName": "system-node-critical",
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": [],
    }
    _mount(template, "driver-root", DRIVER, ROOT, "HostToContainer")
    _mount(template, "host-sys", f"{DRIVER}/sys", "/sys")
    rules = [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
        {
            "apiGroups": ["nfd.k8s-sigs.io"],
            "resources": ["nodefeatures"],
            "verbs": ["get", "list", "watch", "create", "update"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
    ]
    account = _account(name, style.namespace, rules)
    return [*account, _configured(style, template, ways), _daemons(name, style.namespace, labels, template)]


def nfd(server: tuple[str, int], port: int) -> list[Json]:
    """NFD's kinds, and its master, which labels nodes by what others have found. port: of its probes and metrics."""
    folder = found_programs(group=REAL_NODE)
    kinds = [one for one in yaml.safe_load_all((folder / "nfd-kinds.yaml").read_text()) if one]
    role = yaml.safe_load((folder / "nfd-role.yaml").read_text())
    name, labels = "nfd-master", {"app": "nfd-master"}
    container = {
        "name": name,
        **_program(f"exec {name} --extra-label-ns=nvidia.com --port={port}"),
        "env": [*_variables(**_found(server)), _field("NODE_NAME", "spec.nodeName")],
    }
    template = {
        "serviceAccountName": name,
        "hostNetwork": True,
        "tolerations": [{"operator": "Exists"}],  # there is one node, and its labels are to follow while it is closed
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NFD, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "Recreate"},
            "template": {"metadata": {"labels": labels}, "spec": template},
        },
    }
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NFD}}
    return [*kinds, namespace, *_account(name, NFD, role["rules"]), deployment]


def exporter() -> Json:
    """What stands for the GPU Operator's DCGM exporter: it holds NVML open, and asks of every device each second."""
    name, labels = "nvidia-dcgm-exporter", {"app": "nvidia-dcgm-exporter"}
    container: Json = {
        "name": name,
        "image": TOOLS,
        "imagePullPolicy": "Never",
        "command": ["python3", "-m", "controlplane.exporter"],
        "env": _variables(MIGD_DRIVER_ROOT=ROOT),
        "securityContext": {"privileged": True},
    }
    template: Json = {
        "hostNetwork": True,
        "automountServiceAccountToken": False,
        "nodeSelector": {f"{_DEPLOY}dcgm-exporter": "true"},
        "tolerations": list(OPERATOR.tolerations),
        "priorityClassName": "system-node-critical",
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": [],
    }
    _mount(template, "driver-root", DRIVER, ROOT, "HostToContainer")
    return _daemons(name, OPERATOR.namespace, labels, template)


def _program(script: str) -> Json:
    return {"image": GPU_PROGRAMS, "imagePullPolicy": "Never", "command": ["/bin/sh", "-ec", script]}


def _variables(**values: str) -> list[Json]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _found(server: tuple[str, int]) -> dict[str, str]:
    """How a pod finds the API server where there is no kube-proxy."""
    return {"KUBERNETES_SERVICE_HOST": server[0], "KUBERNETES_SERVICE_PORT": str(server[1])}


def _configured(style: Style, template: dict[str, Any], ways: Ways) -> Json:
    """Let the only container of a pod have its configuration; the ConfigMap with that."""
    (container,) = template["containers"]
    found = config_map(style, container["name"], configuration(ways))
    container.setdefault("volumeMounts", []).append({"name": "config", "mountPath": "/config"})
    template["volumes"].append({"name": "config", "configMap": {"name": found["metadata"]["name"]}})
    return found


def _mount(template: dict[str, Any], name: str, host: str, inside: str, propagation: str = "None") -> None:
    """A folder of the node in the only container of a pod."""
    (container,) = template["containers"]
    at = {"name": name, "mountPath": inside, "mountPropagation": propagation}
    container.setdefault("volumeMounts", []).append(at)
    template["volumes"].append({"name": name, "hostPath": {"path": host, "type": "Directory"}})


def _account(name: str, namespace: str, rules: list[Json]) -> list[Json]:
    api = "rbac.authorization.k8s.io"
    whom = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    role = {"apiGroup": api, "kind": "ClusterRole", "name": name}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}},
        {"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": f"{api}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": role,
            "subjects": [whom],
        },
    ]


def _daemons(name: str, namespace: str, labels: Mapping[str, str], template: Json) -> Json:
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels)},
        "spec": {
            "selector": {"matchLabels": dict(labels)},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": {"metadata": {"labels": dict(labels)}, "spec": template},
        },
    }
