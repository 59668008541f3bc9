"""Reads who holds a GPU and each of its instances, as far as NVML tells; where it will not tell, all is in use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import pynvml

from migd.mig.observed import Holder, SeenInstance
from migd.nvml.calls import Calls, Handle
from migd.nvml.errors import DriverError, GpuError, LostError

UNKNOWN_CLIENT: Final = Holder(None)
_NO_INSTANCE: Final = 0xFFFFFFFF  # NVML's gpuInstanceId for a process of the whole GPU

_COMPUTE: Final = "nvmlDeviceGetComputeRunningProcesses"
_OTHERS: Final = ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")


@dataclass(frozen=True, slots=True)
class Holders:
    """Process ids by GPU instance id; the whole GPU under None. known: every query was answered."""

    by_instance: dict[int | None, frozenset[int]]
    known: bool

    def on(self, gi_id: int | None) -> tuple[Holder, ...]:
        """Who holds one GPU instance (None: the GPU outside every instance), by pid; the unnamed come last."""
        pids = self.by_instance.get(gi_id, frozenset())
        if self.known and not pids:
            return ()
        named = tuple(Holder(pid) for pid in sorted(pids) if pid)
        # A pid of 0 is a process that the driver cannot name in our pid namespace.
        return named if self.known and 0 not in pids else (*named, UNKNOWN_CLIENT)


def read_holders(calls: Calls, device: Handle, gpu_uuid: str) -> Holders:
    """The processes on one GPU by instance. An empty list proves little: monitors do not appear in it.

    Source: nvml.h, nvmlProcessInfo_t; needs the mig/monitor capability where MIG is on.
    """
    found: dict[int | None, set[int]] = {}
    known = True
    for call in (_COMPUTE, *_OTHERS):
        try:
            processes = calls(call, gpu_uuid, device)
        except (LostError, DriverError):
            raise
        except GpuError as error:
            # Only the compute query exists everywhere: without an answer to it nothing is known.
            known = known and call != _COMPUTE and error.code == pynvml.NVML_ERROR_NOT_SUPPORTED
            continue
        for process in processes:
            gi_id = None if process.gpuInstanceId in (None, _NO_INSTANCE) else process.gpuInstanceId
            found.setdefault(gi_id, set()).add(process.pid)
    return Holders({gi_id: frozenset(pids) for gi_id, pids in found.items()}, known)


def with_holders(instances: Iterable[SeenInstance], holders: Holders) -> tuple[SeenInstance, ...]:
    """The instances, each with who holds it."""
    if holders.known and not holders.by_instance:
        return tuple(instances)
    return tuple(
        SeenInstance(s.instance, s.gi_id, s.compute_instances, True, by) if (by := holders.on(s.gi_id)) else s
        for s in instances
    )


def outside(instances: Iterable[SeenInstance], holders: Holders) -> tuple[Holder, ...]:
    """Who holds the GPU outside every instance: also processes of an instance that is not there (any more)."""
    if not holders.by_instance:
        return holders.on(None)
    there = {s.gi_id for s in instances}
    elsewhere = frozenset().union(*(pids for gi_id, pids in holders.by_instance.items() if gi_id not in there))
    return Holders({None: elsewhere}, holders.known).on(None)
