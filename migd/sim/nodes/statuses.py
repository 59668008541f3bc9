"""What a simulated kubelet tells of its node: capacity and allocatable by its device manager, and its lease."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from migd.sim.cluster.fields import Json
from migd.sim.nodes.devices import advertised
from migd.sim.nodes.documents import ready, resources_in

if TYPE_CHECKING:
    from migd.sim.nodes.kubelet import Kubelet

STATUS_S: Final = 10.0
"""So often the kubelet looks whether the node's status has changed."""
REPORT_S: Final = 300.0
"""So often it tells where nothing has."""
LEASE_S: Final = 10.0
LEASES: Final = "kube-node-lease"
_PLAIN: Final = {"cpu": "128", "memory": "1056489924Ki", "pods": "110", "ephemeral-storage": "1843269236Ki"}


class Telling:
    """One kubelet's telling. labels: of the node, at its first registration. leases: its Lease is renewed."""

    def __init__(self, kubelet: Kubelet, labels: Mapping[str, str], leases: bool) -> None:
        self._kubelet = kubelet
        self._labels = labels
        self._leases = leases
        self._told_s = 0.0

    def begin(self) -> None:
        """The kubelet starts: register the node where it is not there, and tell at once."""
        kubelet = self._kubelet
        if kubelet.read("nodes", kubelet.node) is None:
            labels = {"kubernetes.io/hostname": kubelet.node, "kubernetes.io/os": "linux", **self._labels}
            metadata = {"name": kubelet.node, "labels": labels}
            kubelet.create("nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}})
        self._tell(beginning=True)
        kubelet.every(STATUS_S * (0.2 + 0.8 * kubelet.dice.random()), self._again)
        if self._leases:
            self._renew()

    def _again(self) -> None:
        self._tell()
        self._kubelet.every(STATUS_S, self._again)

    def _tell(self, beginning: bool = False) -> None:
        kubelet = self._kubelet
        node = kubelet.read("nodes", kubelet.node)
        if node is None:
            return
        status = node.get("status") or {}
        now_s = kubelet.stage.now_s()
        report = kubelet.manager.report(now_s)
        before = resources_in(status.get("capacity"))
        capacity, allocatable = advertised(before, report)
        same = capacity == before and allocatable == resources_in(status.get("allocatable")) and ready(node)
        if same and not beginning and now_s - self._told_s < REPORT_S:
            return
        if kubelet.lost_statuses:
            kubelet.lost_statuses -= 1
            kubelet.say("its status update is lost")
            return
        self._told_s = now_s
        if not same:
            kubelet.say(f"tells allocatable {_text(allocatable)}")
        body: Json = {
            "capacity": {**_PLAIN, **_texts(capacity)},
            "allocatable": {**_PLAIN, **_texts(allocatable)},
            "conditions": [self._ready()],
        }
        if beginning:
            body["nodeInfo"] = {"bootID": kubelet.host.boot_id(), "kubeletVersion": "v1.37.2"}
        kubelet.merge("nodes", kubelet.node, {"status": body}, sub="status")

    def _ready(self) -> Json:
        told = self._kubelet.stage.cluster.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": told}

    def _renew(self) -> None:
        kubelet = self._kubelet
        renewed = {"renewTime": kubelet.stage.cluster.now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")}
        if kubelet.merge("leases", kubelet.node, {"spec": renewed}, LEASES) is None:
            spec = {"holderIdentity": kubelet.node, "leaseDurationSeconds": 40, **renewed}
            metadata = {"name": kubelet.node, "namespace": LEASES}
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
            kubelet.create("leases", lease)
        kubelet.every(LEASE_S, self._renew)


def _texts(numbers: Mapping[str, int]) -> dict[str, str]:
    return {name: str(number) for name, number in sorted(numbers.items())}


def _text(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(numbers.items())) or "nothing"
