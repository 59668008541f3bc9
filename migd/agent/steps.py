"""The next operation that brings one GPU closer to a layout: pure, one at a time, from a fresh look.

The order is fixed: compute instances that must go, their GPU instances, the MIG mode, new GPU instances, new compute
instances. Everything in use is found while it can still be put back by creating a compute instance again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from migd.mig.geometry import Geometry, Layout, by_start
from migd.mig.observed import SeenGpu, SeenInstance
from migd.mig.operations import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstances,
    DestroyGpuInstance,
    Operation,
    SetMode,
)


@dataclass(frozen=True, slots=True)
class InTheWay:
    """Something in use must go first; nothing was touched by finding out."""

    what: SeenInstance | SeenGpu

    def __str__(self) -> str:
        who = ", ".join(map(str, self.what.holders)) or "an unknown client"
        if not isinstance(self.what, SeenInstance):
            return f"the GPU is in use by {who}"
        return f"{self.what.instance} " + (f"is in use by {who}" if self.what.in_use else "was not made by migd")


def next_operation(seen: SeenGpu, goal: Layout, ours: Geometry, undoing: bool = False) -> Operation | InTheWay | None:
    """The one operation to do now, what is in the way of it, or None where the GPU is as `goal` says.

    None means verified: mode settled, the goal's instances there and none of ours besides, each of ours with one
    compute instance spanning it. ours: all that may be destroyed, wholly or in part; nothing else ever is.
    undoing: this goes back. Then MIG goes off again also under a process that is on the GPU outside every instance:
    it came before MIG was on, because afterwards nothing can compute there.
    A mode that was asked for and is not active yet yields SetMode again: asking an idle GPU again activates it.
    """
    mine = [s for s in _in_order(seen.instances) if s.instance in ours]
    surplus = [s for s in mine if s.instance not in goal.instances]
    odd = [s for s in mine if s.instance in goal.instances and not s.whole and s.compute_instances]
    for there in (*surplus, *odd):
        if there.in_use:
            return InTheWay(there)
    for there in (*surplus, *odd):
        if there.compute_instances:
            return DestroyComputeInstances(seen.uuid, there.instance)
    for there in surplus:
        return DestroyGpuInstance(seen.uuid, there.instance)
    if seen.mode is not None and not (seen.mode.settled and seen.mode.current == goal.mig):
        return _against_mode(seen, goal, undoing) or SetMode(seen.uuid, goal.mig)
    for missing in by_start(goal.instances - seen.geometry):
        return CreateGpuInstance(seen.uuid, missing)
    for bare in _in_order(s for s in seen.instances if s.instance in goal.instances and not s.compute_instances):
        return CreateComputeInstance(seen.uuid, bare.instance)
    return None


def _against_mode(seen: SeenGpu, goal: Layout, undoing: bool) -> InTheWay | None:
    """A change of the current mode needs nobody and nothing on the GPU; taking back a pending one disturbs nobody."""
    assert seen.mode is not None
    if seen.mode.current == goal.mig:
        return None
    for there in _in_order(seen.instances):
        return InTheWay(there)  # a GPU reset, which may follow, would end it
    return InTheWay(seen) if seen.in_use and not (undoing and not goal.mig) else None


def _in_order(found: Iterable[SeenInstance]) -> list[SeenInstance]:
    return sorted(found, key=lambda s: (s.instance.placement, s.instance.profile, s.gi_id))
