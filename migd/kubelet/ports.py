"""What the agent asks the kubelet, as a small protocol; there is a real and a simulated side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, order=True)
class PodDevices:
    """Devices that one pod holds, as the kubelet's pod-resources API tells. It tells no uid: join by name.

    resource: as `nvidia.com/mig-1g.10gb`; of a resource claim its driver's name. device_ids: `GPU-…` or `MIG-…` UUIDs
    as the plugin advertised them, a replica's `::n` cut off; empty where a claim's devices cannot be told: it may be
    any of them.
    """

    namespace: str
    pod: str
    resource: str
    device_ids: tuple[str, ...]


class KubeletError(Exception):
    """The kubelet could not be asked; the text says where and why."""


class PodResources(Protocol):
    """The kubelet's pod-resources API."""

    async def held(self) -> tuple[PodDevices, ...]:
        """What every active pod of this node holds, in order; KubeletError where it cannot be asked."""
        ...
