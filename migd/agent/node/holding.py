"""Who holds which GPU instance of a node: processes as NVML tells, and pods as the kubelet tells. Unknown is busy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from migd.agent.node.advertising import MIG, resource_of
from migd.agent.node.seeing import NodeSeen
from migd.kube.pods import Pod
from migd.kube.stored import Stored
from migd.kubelet.ports import PodDevices
from migd.mig.geometry import GpuInstance
from migd.mig.observed import Holder, SeenGpu, SeenInstance

Place = tuple[str, GpuInstance | None]
"""A GPU's UUID, and the instance; None for the GPU as a whole."""

PodName = tuple[str, str]
"""A pod's namespace and name."""

_OLD_ID: Final = re.compile(r"MIG-(GPU-[0-9A-Za-z-]+)/(\d+)/\d+")
"""A MIG device's id as drivers before R470 write it: GPU, GPU instance, compute instance."""
_PCI: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class Held:
    """Who holds what. gpus: as seen, with what pods hold counted as in use. pods: by place, those that hold it."""

    gpus: tuple[SeenGpu, ...]
    pods: Mapping[Place, tuple[PodName, ...]] = field(default_factory=dict)

    def gpu(self, uuid: str) -> SeenGpu | None:
        """This GPU, or None where NVML does not show it."""
        return next((gpu for gpu in self.gpus if gpu.uuid.lower() == uuid.lower()), None)


def held(seen: NodeSeen) -> Held:
    """Processes and pods together.

    Where the kubelet cannot be asked all is in use. A pod that has ended holds nothing, whatever the kubelet lists.
    A device that is none of those that are there may be any of them. So may be that of a pod that runs and is not
    listed: an init container's, which the kubelet keeps for the pod and never names.
    """
    if seen.devices is None:
        why = Holder(None, f"an unknown pod: {seen.kubelet_trouble or 'the kubelet does not answer'}")
        return Held(tuple(_all_used(gpu, why) for gpu in seen.gpus))
    ended = {(pod.namespace, pod.name) for pod in seen.pods if pod.value.terminal}
    places = _places(seen.gpus)
    pods: dict[Place, list[PodName]] = {}
    for one in seen.devices:
        name = (one.namespace, one.pod)
        if name in ended or not _of_nvidia(one):
            continue
        for place in _held_by(one, places):
            pods.setdefault(place, []).append(name)
    for pod in _unlisted(seen):
        for place in _of_resources(pod.value, places):
            pods.setdefault(place, []).append((pod.namespace, pod.name))
    found = {place: tuple(dict.fromkeys(names)) for place, names in pods.items()}
    return Held(tuple(_used(gpu, found) for gpu in seen.gpus), found)


def unadmitted(seen: NodeSeen) -> tuple[Stored[Pod], ...]:
    """Pods bound here that ask for devices and have none yet: the kubelet would fail them while the plugin is away.

    One that runs was admitted, also where only an init container asked: pod-resources never names that one's devices.
    """
    admitted = {(one.namespace, one.pod) for one in seen.devices or ()}
    return tuple(
        pod
        for pod in seen.pods
        if pod.value.gpus
        and not pod.value.terminal
        and pod.value.phase != "Running"
        and (pod.namespace, pod.name) not in admitted
    )


def owner_of(seen: NodeSeen, holder: Holder, pods: Iterable[PodName]) -> Stored[Pod] | None:
    """The pod that a process runs in, by its container; pods: those that hold the place where it was seen.

    Where its container is not known yet, the only pod that holds the place is it. None for a process of the host.
    """
    if not holder.container:
        return None
    for pod in seen.pods:
        if holder.container in pod.value.container_ids:
            return pod
    names = tuple(pods)
    return next((p for p in seen.pods if (p.namespace, p.name) == names[0]), None) if len(names) == 1 else None


def _unlisted(seen: NodeSeen) -> Iterable[Stored[Pod]]:
    listed = {(one.namespace, one.pod) for one in seen.devices or ()}
    return (p for p in seen.pods if p.value.gpus and p.value.phase == "Running" and (p.namespace, p.name) not in listed)


def _of_resources(pod: Pod, places: Mapping[str, Place]) -> Iterable[Place]:
    """Where the devices may lie that a pod asks for: of a profile's resource, on its instances; of others, anywhere."""
    asked = {resource for resource, _ in pod.gpus}
    anywhere = not all(resource.startswith(MIG) for resource in asked)
    return (
        (uuid, there)
        for uuid, there in dict.fromkeys(places.values())
        if anywhere or (there is not None and resource_of(there.profile) in asked)
    )


def _of_nvidia(one: PodDevices) -> bool:
    """Whether these may be GPUs. NVIDIA's network devices have PCI addresses for ids; a GPU's is its UUID."""
    if one.device_ids and all(_PCI.fullmatch(device) for device in one.device_ids):
        return False
    return "nvidia.com" in one.resource or any(i.startswith(("GPU-", "MIG-")) for i in one.device_ids)


def _places(gpus: Iterable[SeenGpu]) -> dict[str, Place]:
    """Where each device id lies."""
    found: dict[str, Place] = {}
    for gpu in gpus:
        found[gpu.uuid] = (gpu.uuid, None)
        for there in gpu.instances:
            found[f"MIG-{gpu.uuid}/{there.gi_id}"] = (gpu.uuid, there.instance)
            for compute in there.compute_instances:
                if compute.mig_uuid is not None:
                    found[compute.mig_uuid] = (gpu.uuid, there.instance)
    return found


def _held_by(one: PodDevices, places: Mapping[str, Place]) -> Iterable[Place]:
    """Where a pod's devices lie. A whole GPU that is not there is none that is."""
    everywhere = tuple(dict.fromkeys(places.values()))
    if not one.device_ids:
        return everywhere
    found: list[Place] = []
    for device in one.device_ids:
        old = _OLD_ID.fullmatch(device)
        place = places.get(f"MIG-{old[1]}/{old[2]}" if old else device)
        if place is not None:
            found.append(place)
        elif not device.startswith("GPU-"):
            return everywhere
    return found


def _used(gpu: SeenGpu, pods: Mapping[Place, tuple[PodName, ...]]) -> SeenGpu:
    if not any(uuid == gpu.uuid for uuid, _ in pods):
        return gpu
    instances = tuple(_instance_used(there, pods.get((gpu.uuid, there.instance), ())) for there in gpu.instances)
    whole = pods.get((gpu.uuid, None), ())
    if not whole:
        return replace(gpu, instances=instances)
    return replace(gpu, instances=instances, in_use=True, holders=gpu.holders or _holders(whole))


def _instance_used(there: SeenInstance, pods: tuple[PodName, ...]) -> SeenInstance:
    return replace(there, in_use=True, holders=there.holders or _holders(pods)) if pods else there


def _holders(pods: Iterable[PodName]) -> tuple[Holder, ...]:
    return tuple(Holder(None, f"pod {namespace}/{name}") for namespace, name in pods)


def _all_used(gpu: SeenGpu, why: Holder) -> SeenGpu:
    instances = tuple(replace(i, in_use=True, holders=i.holders or (why,)) for i in gpu.instances)
    return replace(gpu, instances=instances, in_use=True, holders=gpu.holders or (why,))
