"""A real node's configuration as values: what of the machine is its own, containerd's file, and the kubelet's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controlplane.api import Json

CGROUP: Final = "migd-real-node"
"""The cgroup that all pods of the node are in, in every hierarchy."""
SOCKET: Final = "/run/containerd/containerd.sock"
PAUSE: Final = "localhost/migd-pause:1"
CDI: Final = "/var/run/cdi"
"""Where containerd looks for what a device is, as the device plugin writes it."""
DRIVER: Final = "/run/nvidia/driver"
"""Where the driver's root is, as the GPU Operator's driver container has it: here it is a simulated one's."""
OWN: Final[Mapping[str, str]] = {
    "kubelet": "/var/lib/kubelet",
    "containerd": "/var/lib/containerd",
    "run": "/run/containerd",
    "pods": "/var/log/pods",
    "containers": "/var/log/containers",
    "migd": "/var/lib/migd",
    "cdi": CDI,
    "driver": DRIVER,
}
"""Folder of the node -> where programs in it see that: device plugins, shims and readers of logs know these paths."""
TUNABLES: Final[Mapping[str, str]] = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What a kubelet sets of its machine's kernel. It finds these set, and sets none. Source: setupKernelTunables."""
_IMAGES: Final = '"io.containerd.cri.v1.images"'
_RUNTIME: Final = '"io.containerd.cri.v1.runtime"'
_NEEDLESS: Final = tuple(
    f"io.containerd.{name}"
    for name in (
        *(f"snapshotter.v1.{kind}" for kind in ("blockfile", "btrfs", "devmapper", "erofs", "zfs")),
        "internal.v1.opt",
        "nri.v1.nri",
        "tracing.processor.v1.otlp",
    )
)
_NETWORKS: Final[Json] = {"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "loopback"}]}


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of one node, and what is where in it."""

    folder: Path

    @property
    def kubelet(self) -> Path:
        """What is /var/lib/kubelet in the node."""
        return self.folder / "kubelet"

    @property
    def pod_logs(self) -> Path:
        """What is /var/log/pods in the node."""
        return self.folder / "pods"

    @property
    def machine_file(self) -> Path:
        """The simulated GPUs: their driver's memory, which no program of the node sees."""
        return self.folder / "gpus.json"

    @property
    def driver(self) -> Path:
        """What is /run/nvidia/driver in the node."""
        return self.folder / "driver"

    @property
    def socket(self) -> Path:
        """Containerd's, from outside of the node."""
        return self.folder / "run" / "containerd.sock"

    @property
    def networks(self) -> Path:
        """The folder of CNI's configuration."""
        return self.folder / "networks"

    @property
    def kubeconfig(self) -> Path:
        """The kubelet's."""
        return self.folder / "kubelet.kubeconfig"


def mounts(place: Place, has: Mapping[str, bool]) -> list[tuple[str, str]]:
    """What is mounted where in the node's own mount namespace, in order. has: which of TUNABLES this kernel has."""
    own = [(str(place.folder / name), target) for name, target in OWN.items()]
    return own + [(str(place.folder / "tunables" / name), f"/proc/sys/{name}") for name in TUNABLES if has[name]]


def networks_config() -> str:
    """CNI's configuration: there must be one for the node to be Ready; pods use the host's network, and none of it."""
    return json.dumps(_NETWORKS)


def snapshotter(overlays: bool) -> str:
    """What keeps containers' file systems. overlays: whether overlayfs works in the node's folder."""
    return "overlayfs" if overlays else "native"


def containerd_config(place: Place, overlays: bool) -> str:
    """Containerd's configuration. overlays: whether overlayfs works in the node's folder."""
    return "\n".join(
        (
            "version = 3",
            f"disabled_plugins = {json.dumps(_NEEDLESS)}",
            f"[plugins.{_IMAGES}]",
            f"snapshotter = {json.dumps(snapshotter(overlays))}",
            f"[plugins.{_IMAGES}.pinned_images]",
            f"sandbox = {json.dumps(PAUSE)}",
            f"[plugins.{_RUNTIME}]",
            # without CAP_SYS_RESOURCE no oom_score_adj below our own may be set, and runc fails
            "restrict_oom_score_adj = true",
            f"cdi_spec_dirs = {json.dumps([CDI])}",
            f"[plugins.{_RUNTIME}.cni]",
            f"conf_dir = {json.dumps(str(place.networks))}",
            "",
        )
    )


def kubelet_config(authority: Path, port: int) -> Json:
    """The kubelet's configuration. authority: of its callers' certificates; port: of its own API, on loopback."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "127.0.0.1",
        "port": port,
        "healthzPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "AlwaysAllow"},  # whoever has a certificate of this run
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "failCgroupV1": False,
        "enforceNodeAllocatable": [],
        "evictionHard": {"memory.available": "10Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "failSwapOn": False,
        "imageGCHighThresholdPercent": 100,  # images come from here and cannot be pulled again
        "makeIPTablesUtilChains": False,  # the network is the machine's
        "nodeStatusUpdateFrequency": "1s",  # else what a device plugin offers shows after ten
        "resolvConf": "",
        "shutdownGracePeriod": "0s",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
    }
