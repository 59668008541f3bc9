"""A cluster with one real node, on which everything runs as pods; nothing in it is simulated but GPUs and their driver.

It has what `integration.acting` and `integration.promises` use of a cluster of simulated nodes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc
import yaml

from controlplane.api import Json
from controlplane.audit import AuditLog
from controlplane.container_devices import MINORS
from controlplane.deploying import NAMESPACE, DeployError, applied
from controlplane.nodes_styles import HELM, OPERATOR
from controlplane.processes import Ports, StartError, until
from controlplane.real_node import RealNode
from controlplane.real_nvidia import NODE_FEATURES, Ways, nvidia_manifests
from controlplane.real_overlays import AGENT, GPU_OPERATOR, HELM_PLUGIN, overlay
from controlplane.real_overlays import OPERATOR as CONTROLLER
from controlplane.running import ControlPlane
from migd.kubelet.podresources import SOCKET, KubeletPodResources
from migd.kubelet.podresources_v1_pb2 import AllocatableResourcesRequest
from migd.kubelet.podresources_v1_pb2_grpc import PodResourcesListerStub
from migd.kubelet.ports import PodDevices

NODE: Final = "real"
_READY_S: Final = 120.0
_LOOK_S: Final = 0.3
_KUBELET_S: Final = 10.0
_MIGD: Final = "/apis/migd.dev/v1alpha1"
_KINDS: Final = ("gpupartitionplans", "gpupartitions")


class RealCluster:
    """One cluster. Use it as a context, or call `start` and `stop`.

    folder: for the control plane, with all logs. spec: the node's GPUs. base: the overlay of deploy/ that migd is
    installed by, and NVIDIA's programs in the way that goes with it. ways: how those are set up. migd: whether it is
    installed at all. instead: a program in one file that runs as the agent.
    """

    def __init__(
        self,
        folder: Path,
        spec: str = "2xa100-80gb",
        *,
        base: str = HELM_PLUGIN,
        ways: Ways = Ways(),  # noqa: B008  frozen
        migd: bool = True,
        instead: Path | None = None,
        programs: Path | None = None,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.plane = ControlPlane(folder, programs)
        self.style = OPERATOR if base == GPU_OPERATOR else HELM
        labels = {"nvidia.com/gpu.present": "true", **self.style.labels}  # all others GPU feature discovery writes
        self.real = RealNode(self.plane, NODE, spec, labels, tools=[instead] if instead else [])
        self.nodes = {NODE: self.real}
        self.ways = ways
        self._base = base
        self._migd = migd
        self._instead = instead.name if instead else ""
        self._say = say
        self._ports = Ports()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- coming and going

    def start(self) -> None:
        """Start everything and wait until it is ready; StartError or DeployError, with all stopped again."""
        try:
            self._say("starting containerd")
            self.real.begin()
            self._say("starting etcd, API server, controllers and scheduler")
            self.plane.start()
            self._say("starting the kubelet")
            self.real.start()
            self.install_nvidia()
            if self._migd:
                self.install()
            self._wait("the device plugin", lambda: any(self.allocatable().values()))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything; the folder stays, with the logs."""
        self.real.stop()
        self.plane.stop()
        self._ports.close()

    def install_nvidia(self) -> None:
        """Install NVIDIA's programs; the kinds first, until the API server has what a watch of them is served from.

        NFD's master, where its list is older than that, never sees a change: it lists by pages at that version again
        and again, which answers as of then and no newer. Source: NFD 0.18.3, InformerPageSize; client-go, Reflector.
        """
        server = ("127.0.0.1", self.plane.port)
        documents = nvidia_manifests(self.style, self.ways, server, self._ports.take())
        kinds = [document for document in documents if document["kind"] == "CustomResourceDefinition"]
        others = [document for document in documents if document not in kinds]
        applied(self.plane, kinds, "the kinds of node-feature-discovery")
        self._wait("what discovery finds", lambda: self.plane.admin.get(NODE_FEATURES).ok)
        self.plane.admin.watch(NODE_FEATURES, 1).close()
        applied(self.plane, others, "NVIDIA's programs")

    def install(self) -> None:
        """Install migd by `kubectl apply -k`, and wait until its pods are ready."""
        self._say(f"applying deploy/overlays/{self._base}")
        self.apply_k(self.overlay())
        self._say("waiting for migd")
        for program in (CONTROLLER, AGENT):
            self._wait(program.name, lambda name=program.name: self._is_ready(name))

    def overlay(self) -> Path:
        """A folder with the overlay of this cluster."""
        folder = self.plane.folder / "overlay"
        folder.mkdir(exist_ok=True)
        server = ("127.0.0.1", self.plane.port)
        ports = {program: self._ports.take() for program in (CONTROLLER, AGENT)}
        document = overlay(folder.resolve(), self.real.keys.name, server, ports, self._base, self._instead)
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        return folder

    def apply_k(self, folder: Path) -> None:
        """`kubectl apply -k`, as an admin does it; again where kinds were only just defined. DeployError otherwise."""
        said: list[subprocess.CompletedProcess[str]] = []

        def done() -> bool:
            said.append(self.kubectl("apply", "--server-side", "-k", str(folder)))
            return said[-1].returncode == 0

        if not until(done, 30.0, 1.0):
            raise DeployError(f"cannot apply {folder}: {said[-1].stderr.strip()}")

    # ---- what is in it

    @property
    def audit(self) -> AuditLog:
        """Who asked the API server for what."""
        return self.plane.audit

    def kubectl(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """kubectl as the admin; the caller looks at the exit status."""
        return self.plane.kubectl(*words, stdin=stdin)

    def apply(self, *documents: Json) -> None:
        """Apply objects as the admin; DeployError where one is refused."""
        applied(self.plane, documents, ", ".join(f"{one['kind']} {one['metadata']['name']}" for one in documents))

    def node(self, name: str = NODE) -> Any:
        """The Node as it is now."""
        return self.plane.admin.get(f"/api/v1/nodes/{name}").object()

    def allocatable(self, name: str = NODE) -> dict[str, int]:
        """What the node offers under nvidia.com/."""
        found = self.node(name)["status"].get("allocatable") or {}
        return {resource: int(n) for resource, n in found.items() if resource.startswith("nvidia.com/")}

    def usable(self) -> dict[str, int]:
        """What the kubelet would give to pods now, by its own word; the Node's status follows within some seconds."""
        with grpc.insecure_channel(f"unix:{self.real.place.kubelet / SOCKET}") as channel:
            asked = AllocatableResourcesRequest()
            answer = PodResourcesListerStub(channel).GetAllocatableResources(asked, timeout=_KUBELET_S)
        found: Counter[str] = Counter()
        for devices in answer.devices:
            found[devices.resource_name] += len(devices.device_ids)
        return dict(found)

    def pods(self, selector: str = "", namespace: str = "default") -> list[Json]:
        """The pods of a namespace, or those with these labels, by name."""
        where = {"labelSelector": selector} if selector else {}
        found = self.plane.admin.get(f"/api/v1/namespaces/{namespace}/pods", **where).object()["items"]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def program(self, name: str) -> Json:
        """The one pod of `migd-operator` or `migd-agent`."""
        (found,) = self._pods_of(name)
        return found

    def held(self) -> tuple[PodDevices, ...]:
        """What every pod holds, by the kubelet's own word."""
        return asyncio.run(KubeletPodResources(self.real.place.kubelet).held())

    def mig_uuids(self, pod: Json) -> tuple[str, ...]:
        """The devices that a pod holds, by the kubelet's own word."""
        name = (pod["metadata"]["namespace"], pod["metadata"]["name"])
        return tuple(sorted(i for one in self.held() if (one.namespace, one.pod) == name for i in one.device_ids))

    def device_nodes(self, pod: Json) -> tuple[str, ...]:
        """The device nodes of GPUs and their capabilities that a pod's program has, without those that all share."""
        shared = {"nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"}
        folders = {Path(f"/proc/{pid}/root/dev") for pid in self.real.pids(pod["metadata"]["uid"])}
        found = {
            path.relative_to(dev) for dev in folders for at in ("", "nvidia-caps") for path in (dev / at).glob("nv*")
        }
        return tuple(sorted(str(path) for path in found if path.name not in {*shared, "nvidia-caps"}))

    def nodes_of(self, uuids: Collection[str]) -> tuple[str, ...]:
        """The device nodes that these MIG devices consist of, by the driver's own list."""
        minors = dict(line.split() for line in (self.real.place.driver / MINORS).read_text().splitlines())
        found: set[str] = set()
        for gpu in self.real.machine().snapshot().gpus:
            for one in gpu.instances:
                for compute in one.compute:
                    if compute.uuid in uuids:
                        instance = f"gpu{gpu.minor}/gi{one.gi_id}"
                        caps = (f"{instance}/access", f"{instance}/ci{compute.ci_id}/access")
                        found |= {f"nvidia{gpu.minor}", *(f"nvidia-caps/nvidia-cap{minors[cap]}" for cap in caps)}
        return tuple(sorted(found))

    def kill(self, pod: Json) -> None:
        """SIGKILL to every process of a pod, as in a crash; its kubelet starts them again."""
        for pid in self.real.pids(pod["metadata"]["uid"]):
            os.kill(pid, signal.SIGKILL)

    def log(self, pod: Json) -> str:
        """What the containers of a pod said, all starts together."""
        metadata = pod["metadata"]
        folder = self.real.place.pod_logs / f"{metadata['namespace']}_{metadata['name']}_{metadata['uid']}"
        return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("*/*.log")))

    # ---- waiting

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        if until(ready, _READY_S, _LOOK_S):
            return
        pods = self.kubectl("get", "pods", "-A", "-o", "wide").stdout
        ours = self.pods(namespace=NAMESPACE)
        logs = "\n".join(f"{pod['metadata']['name']}:\n{self.log(pod)[-2000:]}" for pod in ours)
        raise StartError(f"{what} did not get ready within {_READY_S:.0f} s; logs: {self.plane.logs}\n{pods}\n{logs}")

    def _is_ready(self, name: str) -> bool:
        return any(
            (condition["type"], condition["status"]) == ("Ready", "True")
            for pod in self._pods_of(name)
            for condition in pod.get("status", {}).get("conditions", ())
        )

    def _pods_of(self, name: str) -> list[Json]:
        found = self.pods(f"app.kubernetes.io/name={name}", NAMESPACE)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
