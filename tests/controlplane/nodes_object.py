"""The Node object of a simulated kubelet, kept with the kubelet's own credentials: made, reported on, leased."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from controlplane.api import STRATEGIC, Answer, Api, Json
from controlplane.nodes_pods import now_text
from migd.sim.nodes.devices import Report, advertised

LEASE_S: Final = 40
_RENEW_S: Final = 10.0
_LOOK_S: Final = 10.0  # and others' part of it is looked at so often, as a kubelet does
_REPORT_S: Final = 300.0  # a status that does not change is sent so often
_LEASES: Final = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_WELL: Final = {
    "MemoryPressure": ("False", "KubeletHasSufficientMemory"),
    "DiskPressure": ("False", "KubeletHasNoDiskPressure"),
    "PIDPressure": ("False", "KubeletHasSufficientPID"),
    "Ready": ("True", "KubeletReady"),
}


class NodeObject:
    """One node as its kubelet writes it. api: with the certificate of `system:node:NAME`.

    status_every_s: so often the status is looked at; 10 with a real kubelet. After `report` a resource that was there
    stays there, as 0 if need be.
    """

    def __init__(
        self,
        api: Api,
        name: str,
        version: str,
        labels: Mapping[str, str],
        taints: Sequence[Json],
        status_every_s: float,
    ) -> None:
        self._api = api
        self._name = name
        self._version = version
        self._labels = labels
        self._taints = taints
        self._every_s = status_every_s
        self._status_at_s = 0.0
        self._lease_at_s = 0.0
        self._sent: tuple[Json, float] | None = None
        self._seen: tuple[Json, float] | None = None  # the node, and when it was seen
        self._settled: tuple[str, Report, float] | None = None  # what needed no report, and until when
        self._lease: Json | None = None
        self.uid = ""
        self.registered = False
        self.looks = 0  # how often the status was looked at

    def register(self) -> None:
        """Make the node, or take the one that is there, as a kubelet does when it starts."""
        document: Json = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self._name,
                "labels": {
                    "kubernetes.io/hostname": self._name,
                    "kubernetes.io/os": "linux",
                    "kubernetes.io/arch": "amd64",
                    **self._labels,
                },
            },
            "spec": {"taints": list(self._taints)} if self._taints else {},
        }
        made = self._api.create("/api/v1/nodes", document)
        if made.code == 409:
            made = self._api.get(self._path)
        self.uid = str(made.object()["metadata"]["uid"])
        self._status_at_s = self._lease_at_s = 0.0
        self._sent = self._seen = self._settled = None
        self.registered = True

    def step(self, now_s: float, boot_id: Callable[[], str], report: Callable[[float], Report]) -> None:
        """Register, report and renew, as is due; what fails is tried again at the next step. OSError: nobody there."""
        if not self.registered:
            self.register()
        if now_s >= self._status_at_s:
            self._status_at_s = now_s + self._every_s
            self._report(now_s, boot_id(), report(now_s))
            self.looks += 1
        if now_s >= self._lease_at_s and self._renew():
            self._lease_at_s = now_s + _RENEW_S

    def hurry(self) -> None:
        """Report at the next step."""
        self._status_at_s = 0.0
        self._settled = None

    @property
    def _path(self) -> str:
        return f"/api/v1/nodes/{self._name}"

    def _report(self, now_s: float, boot_id: str, report: Report) -> None:
        if self._settled is not None and self._settled[:2] == (boot_id, report) and now_s < self._settled[2]:
            return
        self._settled = None
        if self._seen is None or now_s >= self._seen[1] + _LOOK_S:
            answer = self._api.get(self._path)
            self._seen = (answer.body, now_s) if answer.ok else None
        if self._seen is None:
            return
        status = self._seen[0].get("status") or {}
        capacity, allocatable = advertised(_gpus(status.get("capacity") or {}), report)
        base = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", "pods": "250"}
        told: Json = {
            "capacity": base | _texts(capacity),
            "allocatable": base | _texts(allocatable),
            "addresses": [
                {"type": "InternalIP", "address": "127.0.0.1"},
                {"type": "Hostname", "address": self._name},
            ],
            "nodeInfo": self._info(boot_id),
        }
        before = {c["type"]: c for c in status.get("conditions") or ()}
        ready = all(before.get(kind, {}).get("status") == value for kind, (value, _) in _WELL.items())
        if self._sent is not None and self._sent[0] == told and now_s - self._sent[1] < _REPORT_S and ready:
            self._settled = boot_id, report, self._seen[1] + _LOOK_S
            return
        now = now_text()
        conditions = []
        for kind, (value, reason) in _WELL.items():
            old = before.get(kind, {})
            since = old["lastTransitionTime"] if old.get("status") == value else now
            one = {"type": kind, "status": value, "reason": reason, "message": reason}
            conditions.append({**one, "lastHeartbeatTime": now, "lastTransitionTime": since})
        answer = self._api.patch(f"{self._path}/status", {"status": {**told, "conditions": conditions}}, STRATEGIC)
        self._seen = (answer.body, now_s) if answer.ok else None
        if answer.ok:
            self._sent = told, now_s

    def _info(self, boot_id: str) -> Json:
        return {
            "machineID": self._name,
            "systemUUID": self._name,
            "bootID": boot_id,
            "kernelVersion": "6.8.0",
            "osImage": "simulated",
            "containerRuntimeVersion": "simulated://1",
            "kubeletVersion": self._version,
            "kubeProxyVersion": "",
            "operatingSystem": "linux",
            "architecture": "amd64",
        }

    def _renew(self) -> bool:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self._name, "leaseDurationSeconds": LEASE_S, "renewTime": now}
        owner = {"apiVersion": "v1", "kind": "Node", "name": self._name, "uid": self.uid}
        metadata: Json = {"name": self._name, "namespace": "kube-node-lease", "ownerReferences": [owner]}
        if self._lease is None:
            seen = self._api.get(f"{_LEASES}/{self._name}")
            self._lease = seen.body if seen.ok else None
        if self._lease is None:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
            return self._kept(self._api.create(_LEASES, body))
        return self._kept(self._api.replace(f"{_LEASES}/{self._name}", {**self._lease, "spec": spec}))

    def _kept(self, answer: Answer) -> bool:
        self._lease = answer.body if answer.ok else None
        return answer.ok


def _gpus(quantities: Mapping[str, str]) -> dict[str, int]:
    return {name: int(value) for name, value in quantities.items() if "/" in name}


def _texts(numbers: Mapping[str, int]) -> dict[str, str]:
    return {name: str(number) for name, number in sorted(numbers.items())}
