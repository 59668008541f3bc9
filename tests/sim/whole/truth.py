"""How things really are: read from the simulated machines and kubelets themselves, past NVML and the API server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from migd.mig.geometry import GpuInstance, Layout
from migd.mig.profiles import Placement
from migd.plans.partitions import Desired
from migd.plans.plan import GpuSelector, Rule
from migd.plans.wishes import Wish
from migd.sim.host import SimHost
from migd.sim.machine import Gpu
from migd.sim.nodes.plugin import device_of
from migd.sim.nodes.world import SimNode


@dataclass(frozen=True, slots=True)
class There:
    """One GPU instance that is there. serial: nothing can forge it. held: by whom, empty for nobody."""

    serial: int
    instance: GpuInstance
    whole: bool
    held: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GpuTruth:
    """One GPU. held: who holds it as a whole, those of NVIDIA's stack left out."""

    uuid: str
    index: int
    mig: bool
    pending: bool
    lost: bool
    there: tuple[There, ...]
    held: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        return Layout(self.mig, frozenset(one.instance for one in self.there))


def truth(node: SimNode) -> dict[str, GpuTruth]:
    """The GPUs of a node by UUID."""
    holders = _pods(node)
    machine = node.host.snapshot()
    holding: dict[tuple[str, int], list[str]] = {}
    for process in machine.processes.values():
        if process.released_at_s is None and not process.silent:
            holding.setdefault((process.gpu_uuid, process.gi_serial), []).append(f"pid {process.pid}")
    return {gpu.uuid: _gpu(node.host, gpu, holders, holding) for gpu in machine.gpus}


def _gpu(
    host: SimHost, gpu: Gpu, pods: Mapping[str, tuple[str, ...]], holding: Mapping[tuple[str, int], list[str]]
) -> GpuTruth:
    names = host.model(gpu.index).by_id()
    there = []
    for one in gpu.instances:
        uuids = [compute.uuid for compute in one.compute]
        held = [pod for uuid in uuids for pod in pods.get(uuid, ())] + holding.get((gpu.uuid, one.serial), [])
        instance = GpuInstance(names[one.profile_id].name, Placement(one.start, one.size))
        there.append(There(one.serial, instance, len(one.compute) == 1, tuple(held)))
    held_whole = (*pods.get(gpu.uuid, ()), *holding.get((gpu.uuid, 0), ()))
    return GpuTruth(gpu.uuid, gpu.index, gpu.mig, gpu.pending, gpu.lost, tuple(there), held_whole)


def _pods(node: SimNode) -> dict[str, tuple[str, ...]]:
    """By device UUID, the pods that hold it, as the device manager has it."""
    found: dict[str, tuple[str, ...]] = {}
    for held in node.kubelet.manager.held():
        for device in {device_of(one) for one in held.device_ids}:
            found[device] = (*found.get(device, ()), f"{held.namespace}/{held.pod}")
    return found


def astray(node: SimNode) -> frozenset[str]:
    """The pods that were given devices which are not there any more: what they hold, nobody can tell."""
    machine = node.host.snapshot()
    there = {one.uuid for gpu in machine.gpus for i in gpu.instances for one in i.compute}
    there |= {gpu.uuid for gpu in machine.gpus}
    return frozenset(pod for device, pods in _pods(node).items() if device not in there for pod in pods)


def counts_of(layout: Layout) -> dict[str, int]:
    """How many instances of each profile there are."""
    found: dict[str, int] = {}
    for one in layout.instances:
        found[one.profile] = found.get(one.profile, 0) + 1
    return found


def as_wished(gpu: GpuTruth, wish: Wish) -> bool:
    """Whether a GPU is as it should be."""
    return gpu.mig == wish.mig and counts_of(gpu.layout) == dict(wish.counts) and all(t.whole for t in gpu.there)


def rule_of(desired: Desired) -> Rule:
    """A wish as the rule that it came from."""
    if desired.mig == "Disabled":
        return Rule(gpus=GpuSelector(every=True), mig="Disabled")
    return Rule(gpus=GpuSelector(every=True), instances=desired.instances, allow_empty=desired.allow_empty)


def offered(node: SimNode) -> dict[str, int]:
    """What a device plugin that starts now would offer under `mixed`, by resource."""
    found: dict[str, int] = {}
    for gpu in truth(node).values():
        if gpu.mig:
            for one in gpu.there:
                name = "nvidia.com/mig-" + one.instance.profile.replace("+", ".")
                found[name] = found.get(name, 0) + one.whole
        else:
            found["nvidia.com/gpu"] = found.get("nvidia.com/gpu", 0) + 1
    return found
