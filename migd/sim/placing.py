"""Where a new instance may go on one GPU, and which of the free places the simulated driver takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from migd.sim.catalog import Model, Place, SimProfile
from migd.sim.machine import GpuInstance


def occupied(instances: Iterable[GpuInstance]) -> int:
    """The memory slices in use, as a bit mask."""
    mask = 0
    for instance in instances:
        mask |= ((1 << instance.size) - 1) << instance.start
    return mask


def free_places(model: Model, instances: Sequence[GpuInstance], profile: SimProfile) -> tuple[Place, ...]:
    """Where one more instance of the profile fits now: no overlap, its count not reached, engines left in the pool."""
    if room(model, instances, profile) < 1:
        return ()
    taken = occupied(instances)
    return tuple(p for p in profile.places if not p.mask & taken)


def room(model: Model, instances: Sequence[GpuInstance], profile: SimProfile) -> int:
    """How many more instances of the profile its count and the engine pool allow, wherever they may lie."""
    same = sum(1 for i in instances if i.profile_id == profile.profile_id)
    most = profile.count_max - same
    if model.engine_pool is not None and most > 0:
        by_id = {p.profile_id: p.engines for p in model.profiles}
        for kind, pool in enumerate(model.engine_pool):
            need = profile.engines[kind]
            if need:
                most = min(most, (pool - sum(by_id[i.profile_id][kind] for i in instances)) // need)
    return max(most, 0)


def capacity(model: Model, instances: Sequence[GpuInstance], profile: SimProfile) -> int:
    """How many more instances of the profile fit side by side now."""
    taken = occupied(instances)
    fitting = 0
    for candidate in sorted(profile.places, key=lambda p: p.start + p.size):
        if not candidate.mask & taken:
            taken |= candidate.mask
            fitting += 1
    return min(fitting, room(model, instances, profile))


def gi_id(model: Model, where: Place, swapped: bool) -> int:
    """The GPU instance id of a place: a code of the physical span. swapped: the board shows its halves exchanged."""
    assert model.gi_ids is not None
    start = where.start
    if swapped and where.size < model.memory_slices:
        start = (start + model.memory_slices // 2) % model.memory_slices
    return model.gi_ids[start, where.size]


def choose(
    policy: str, model: Model, instances: Sequence[GpuInstance], profile: SimProfile, swapped: bool
) -> Place | None:
    """The place that the driver takes where none was asked for; None where there is none."""
    free = free_places(model, instances, profile)
    if not free:
        return None
    taken = occupied(instances)

    def loss(candidate: Place) -> int:
        return sum(
            1 for p in model.profiles for other in p.places if not other.mask & taken and other.mask & candidate.mask
        )

    def by_id(candidate: Place) -> int:
        return gi_id(model, candidate, swapped)

    rank: Callable[[Place], tuple[int, int]] = {
        "least-loss": lambda p: (loss(p), by_id(p)),
        "adversarial": lambda p: (-loss(p), by_id(p)),
        "first-fit": lambda p: (p.start, 0),
        "highest": lambda p: (-p.start, 0),
        "mixed-high": lambda p: (-p.start if profile.slices in _HIGH else p.start, 0),
    }[policy]
    return min(free, key=rank)


_HIGH: Final = (1, 3)  # "mixed-high": 1g and 3g take the highest free start, the rest the lowest
