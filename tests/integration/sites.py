"""A simulated node on a shared control plane, with a device plugin of its own, and what tests do to it."""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from controlplane.api import JSON_PATCH, MERGE, Answer
from controlplane.nodes import SimNode
from controlplane.nodes_styles import Style, node_labels, plugin_manifests
from controlplane.nursery import Nursery
from controlplane.processes import until
from controlplane.running import ControlPlane
from staging import make, stranger

from migd.kubelet.podresources import KubeletPodResources
from migd.kubelet.ports import PodDevices
from migd.mig.operations import SetMode

SMALL = "nvidia.com/mig-1g.10gb"
LARGE = "nvidia.com/mig-3g.40gb"
PODS = "/api/v1/namespaces/default/pods"
REPLICA_SETS = "/apis/apps/v1/namespaces/default/replicasets"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
TAINT = {"key": "migd.dev/changing", "effect": "NoSchedule"}
WITHIN_S = 30.0


class Site:
    """A node on a shared control plane, with a plugin of its own style, and what tests do to it."""

    def __init__(self, plane: ControlPlane, folder: Path, style: Style, nursery: Nursery) -> None:
        self.plane = plane
        self.style = style
        self.name = f"t-{uuid.uuid4().hex[:8]}"
        labels = {**node_labels(style, "mixed", "NVIDIA A100-SXM4-80GB"), "t": self.name}
        self.node = SimNode(
            plane, self.name, folder / "n", "2xa100-80gb", labels=labels, status_every_s=0.5, forking=nursery
        )

    def install(self) -> None:
        """Cut GPU 0 by hand, then let the plugin come."""
        self.cut(0, "3g@4 1g@0 1g@1")
        for document in plugin_manifests(self.style, "mixed"):
            if document["kind"] == "DaemonSet":
                document["metadata"]["name"] = self.name
                document["spec"]["template"]["spec"]["nodeSelector"]["t"] = self.name
            done = self.plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(document))
            assert done.returncode == 0, done.stderr
        self.wait_allocatable({"nvidia.com/gpu": 1, SMALL: 2, LARGE: 1})

    def close(self) -> None:
        path = f"/apis/apps/v1/namespaces/{self.style.namespace}/daemonsets/{self.name}"
        self.plane.admin.delete(path, propagationPolicy="Background")
        assert until(lambda: not self.plugin_pods(), WITHIN_S), "the plugin's pod does not go"
        self.node.stop()
        self.plane.admin.delete(f"/api/v1/nodes/{self.name}")

    # ---- what is there

    def object(self) -> Any:
        return self.plane.admin.get(f"/api/v1/nodes/{self.name}").object()

    def allocatable(self) -> dict[str, int]:
        found = self.object()["status"].get("allocatable") or {}
        return {name: int(number) for name, number in found.items() if name.startswith("nvidia.com/")}

    def wait_allocatable(self, expected: dict[str, int]) -> None:
        went = until(lambda: self.allocatable() == expected, WITHIN_S)
        assert went, (self.allocatable(), self.taints(), [pod["metadata"]["name"] for pod in self.plugin_pods()])

    def plugin_pods(self) -> list[Any]:
        where = {"fieldSelector": f"spec.nodeName={self.name}"}
        found = self.plane.admin.get(f"/api/v1/namespaces/{self.style.namespace}/pods", **where).object()
        return list(found["items"])

    def plugin_pid(self) -> int | None:
        programs = self.node.kubelet.programs()
        return next((program.pid for _, program in programs.values() if program.image == "k8s-device-plugin"), None)

    def pod(self, name: str) -> Any:
        return self.plane.admin.get(f"{PODS}/{name}").object()

    def held(self) -> tuple[PodDevices, ...]:
        return asyncio.run(KubeletPodResources(self.node.kubelet_folder).held())

    def uuids(self, gpu: int = 0) -> list[str]:
        """MIG UUIDs of a GPU, by place."""
        found = self.node.machine().snapshot().gpus[gpu].instances
        return [instance.compute[0].uuid for instance in sorted(found, key=lambda i: i.start)]

    def computing(self) -> int:
        return len(self.node.machine().snapshot().processes)

    # ---- what is done to it

    def cut(self, gpu: int, text: str) -> None:
        with stranger(self.node.machine()) as gpus:
            seen = gpus.look()[gpu]
            if not seen.mig_on:
                gpus.perform(SetMode(seen.uuid, True))
            make(gpus, gpus.look()[gpu], text)

    def run(self, name: str, limits: dict[str, int], grace_s: int = 5, **annotations: str) -> None:
        document = self._described(limits, grace_s, annotations)
        document["metadata"]["name"] = name
        self.plane.admin.create(PODS, document).object()

    def _described(self, limits: Mapping[str, int], grace_s: int, annotations: Mapping[str, str]) -> Any:
        container: dict[str, Any] = {"name": "main", "image": "train"}
        container["resources"] = {"limits": {k: str(v) for k, v in limits.items()}}
        notes = {f"sim.migd.dev/{key.replace('_', '-')}": value for key, value in annotations.items()}
        return {
            "metadata": {"annotations": notes},
            "spec": {
                "nodeSelector": {"t": self.name},
                "terminationGracePeriodSeconds": grace_s,
                "containers": [container],
            },
        }

    def serve(self, name: str, replicas: int, limits: dict[str, int], grace_s: int = 5, **annotations: str) -> None:
        """So many pods of a ReplicaSet, once they run."""
        template = self._described(limits, grace_s, annotations)
        template["metadata"]["labels"] = {"app": name}
        spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
        self.plane.admin.create(REPLICA_SETS, {"metadata": {"name": name}, "spec": spec}).object()
        assert until(lambda: len(self.pods_of(name)) == replicas, WITHIN_S), "the ReplicaSet's controller makes none"
        for one in self.pods_of(name):
            self.wait_phase(one, "Running")

    def retire(self, name: str) -> None:
        """Remove a ReplicaSet with its pods, and its budget."""
        self.plane.admin.delete(f"{BUDGETS}/{name}")
        self.plane.admin.delete(f"{REPLICA_SETS}/{name}", propagationPolicy="Background")
        where = {"labelSelector": f"app={name}"}
        assert until(lambda: not self.plane.admin.get(PODS, **where).object()["items"], WITHIN_S), f"{name} does not go"

    def clear(self) -> None:
        """Remove every pod, ReplicaSet and budget of the namespace: the control plane is the module's own."""
        for path in (BUDGETS, REPLICA_SETS, PODS):
            found = self.plane.admin.get(path).object()["items"]
            for name in (one["metadata"]["name"] for one in found):
                more = {"gracePeriodSeconds": "0"} if path == PODS else {"propagationPolicy": "Background"}
                self.plane.admin.delete(f"{path}/{name}", **more)
        assert until(lambda: not self.plane.admin.get(PODS).object()["items"] and self.held() == (), WITHIN_S)

    def pods_of(self, name: str) -> list[str]:
        """The pods of a ReplicaSet that are not on their way out."""
        found = self.plane.admin.get(PODS, labelSelector=f"app={name}").object()["items"]
        return sorted(one["metadata"]["name"] for one in found if "deletionTimestamp" not in one["metadata"])

    def budget(self, name: str, least: int, **more: str) -> None:
        """A budget for the pods of a ReplicaSet, once its controller has counted them."""
        spec = {"minAvailable": least, "selector": {"matchLabels": {"app": name}}, **more}
        document = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name}, "spec": spec}
        made = self.plane.admin.apply(f"{BUDGETS}/{name}", document, "tests", force=True).object()
        self.wait_counted(name, observedGeneration=made["metadata"]["generation"])

    def wait_counted(self, name: str, **numbers: int) -> None:
        def counted() -> dict[str, int]:
            told = self.plane.admin.get(f"{BUDGETS}/{name}").object().get("status") or {}
            return {key: told.get(key, 0) for key in numbers}

        assert until(lambda: counted() == numbers, WITHIN_S), (counted(), numbers)

    def evict(self, name: str) -> Answer:
        """Ask for the eviction of a pod; the answer."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": "default"}}
        return self.plane.admin.create(f"{PODS}/{name}/eviction", body)

    def wait_phase(self, name: str, phase: str) -> Any:
        assert until(lambda: self.pod(name).get("status", {}).get("phase") == phase, WITHIN_S), self.pod(name)["status"]
        return self.pod(name)

    def remove(self, *names: str) -> None:
        """Delete pods, until the API server and the kubelet know them no more.

        One that is bound in the moment of its deletion is gone from the API server before the kubelet hears of it.
        """
        kubelet = self.node.kubelet

        def known() -> set[str]:
            return kubelet.do(lambda: {pod.document["metadata"]["name"] for pod in kubelet.pods.known.values()})

        for name in names:
            self.plane.admin.delete(f"{PODS}/{name}", gracePeriodSeconds="1")
        for name in names:
            assert until(lambda name=name: self.plane.admin.get(f"{PODS}/{name}").code == 404, WITHIN_S), name
        assert until(lambda: known().isdisjoint(names), WITHIN_S), names

    def taints(self) -> list[Any]:
        return self.object()["spec"].get("taints") or []

    def let_settle(self) -> None:
        """Wait until the DaemonSet controller has heard of the taint: with a stale node it makes a pod.

        It counts anew at changes of the DaemonSet only, so we make one each time that we ask.
        """
        path = f"/apis/apps/v1/namespaces/{self.style.namespace}/daemonsets/{self.name}"

        def heard() -> bool:
            asked = {"metadata": {"annotations": {"test.migd.dev/asked": uuid.uuid4().hex}}}
            found = self.plane.admin.patch(path, asked, MERGE).object()
            return bool(found["status"]["desiredNumberScheduled"] == 0)

        assert until(heard, WITHIN_S), "the DaemonSet controller does not hear of the taint"

    def delete_plugin(self) -> str:
        """Delete the plugin's pod; its uid."""
        (pod,) = self.plugin_pods()
        metadata = pod["metadata"]
        self.plane.admin.delete(f"/api/v1/namespaces/{self.style.namespace}/pods/{metadata['name']}").object()
        return str(metadata["uid"])

    def close_node(self) -> None:
        change = [{"op": "add", "path": "/spec/taints", "value": [*self.taints(), TAINT]}]
        self.plane.admin.patch(f"/api/v1/nodes/{self.name}", change, JSON_PATCH).object()

    def open_node(self) -> None:
        left = [taint for taint in self.taints() if taint["key"] != TAINT["key"]]
        change = [{"op": "add", "path": "/spec/taints", "value": left}]
        self.plane.admin.patch(f"/api/v1/nodes/{self.name}", change, JSON_PATCH).object()


def sited(plane: ControlPlane, style: Style, nursery: Nursery) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="migd-") as folder:
        site = Site(plane, Path(folder), style, nursery)
        with site.node:
            site.install()
            yield site
            site.close()
