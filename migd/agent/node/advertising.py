"""What the kubelet should advertise of a node's GPUs as they are now, and what it does. Pure.

Source: NVIDIA's device plugin, MIG strategies none, single and mixed; GPU Feature Discovery's labels for sharing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from migd.kube.nodes import Node
from migd.mig.observed import SeenGpu

MIG: Final = "nvidia.com/mig-"
"""What the resources of all profiles begin with."""
GPU: Final = "nvidia.com/gpu"
STRATEGY: Final = "nvidia.com/mig.strategy"
_SHARED: Final = ".shared"


def resource_of(profile: str) -> str:
    """The resource of a profile: nvidia.com/mig-1g.10gb.me for 1g.10gb+me."""
    return f"{MIG}{profile.replace('+', '.')}"


def of_plugin(resource: str) -> bool:
    """Whether a resource is the device plugin's; other plugins of NVIDIA's have theirs beside it."""
    return resource.removesuffix(_SHARED) == GPU or resource.startswith(MIG)


def expected(gpus: Iterable[SeenGpu], strategy: str | None, sliced: Collection[str] = ()) -> dict[str, int]:
    """How many of each resource the plugin should show of these GPUs. A GPU that cannot be read is not counted.

    strategy: none, single or mixed; None counts as mixed. Only whole instances count. sliced: UUIDs of GPUs whose
    instances somebody wishes for: with the strategy none too they are expected, though that plugin shows none.
    """
    there = [gpu for gpu in gpus if not gpu.out_of_reach]
    if strategy == "single" and there and all(gpu.mig_on for gpu in there):
        return _without_zeros({GPU: sum(i.whole for gpu in there for i in gpu.instances)})
    cut = [gpu for gpu in there if gpu.mig_on and (strategy != "none" or gpu.uuid in sliced)]
    found = {GPU: len(there) - len(cut)}
    for gpu in cut:
        for instance in gpu.instances:
            if instance.whole:
                resource = resource_of(instance.instance.profile)
                found[resource] = found.get(resource, 0) + 1
    return _without_zeros(found)


def advertised(node: Node) -> dict[str, int]:
    """What the kubelet says can be allocated of the plugin's resources, zeros left out."""
    told = {key: _number(text) for key, text in node.allocatable.items() if of_plugin(key)}
    return _without_zeros(told)


def differing(node: Node, gpus: Iterable[SeenGpu], sliced: Collection[str] = ()) -> str:
    """In a sentence, what is advertised otherwise than expected; "" for nothing. Shared ones count in multiples.

    sliced: as `expected` has it.
    """
    wanted = expected(gpus, node.labels.get(STRATEGY), sliced)
    found = advertised(node)
    odd: list[str] = []
    for resource in sorted(wanted):
        number, replicas = wanted[resource], _replicas(node.labels, resource)
        here, renamed = found.pop(resource, 0), f"{resource}{_SHARED}"
        if not here and replicas > 1 and renamed in found:
            here = found.pop(renamed)
        if here not in (number, number * replicas):
            odd.append(f"{resource} is {here}, not {number * replicas}")
    odd += [f"{resource} is {number}, but there is none" for resource, number in sorted(found.items())]
    return "; ".join(odd)


def _replicas(labels: Mapping[str, str], resource: str) -> int:
    text = labels.get(f"{resource}.replicas", "")
    return max(1, int(text)) if text.isdecimal() else 1


def _number(text: str) -> int:
    """A quantity of a device: devices are whole, so anything but a number of them counts as none."""
    return int(text) if text.isdecimal() else 0


def _without_zeros(found: Mapping[str, int]) -> dict[str, int]:
    return {resource: number for resource, number in found.items() if number}
