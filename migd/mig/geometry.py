"""Geometries: what one GPU is cut into, without ids; and layouts: a geometry with its MIG mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from migd.mig.profiles import Placement

Counts = tuple[tuple[str, int], ...]
"""How many of each profile: (name, count) pairs, ascending by name, counts above 0."""


class GpuInstance(NamedTuple):  # and no dataclass, because it is compared and hashed at every look
    """A GPU instance as it should be: its profile and its place. What *is* carries ids too: see `observed`."""

    profile: str
    placement: Placement

    def __str__(self) -> str:
        return f"{self.profile}@{self.placement.start}"


Geometry = frozenset[GpuInstance]
"""One GPU's instances; order carries no meaning."""

EMPTY: Geometry = frozenset()


@dataclass(frozen=True, slots=True)
class Layout:
    """How one GPU is or should be: MIG on or off, and cut into what. With MIG off there are no instances."""

    mig: bool
    instances: Geometry = EMPTY

    def __post_init__(self) -> None:
        assert self.mig or not self.instances, "instances exist only with MIG on"

    def __str__(self) -> str:
        if not self.mig:
            return "MIG off"
        return summary(self.instances) or "MIG on, empty"


def by_start(instances: Iterable[GpuInstance]) -> tuple[GpuInstance, ...]:
    """Instances in order of their start, wide ones first, then by name: the order in which all lists are shown."""
    return tuple(sorted(instances, key=lambda i: (i.placement.start, -i.placement.size, i.profile)))


def counts_of(instances: Iterable[GpuInstance]) -> Counts:
    """How many instances there are of each profile."""
    totals: dict[str, int] = {}
    for instance in instances:
        totals[instance.profile] = totals.get(instance.profile, 0) + 1
    return counts(totals)


def counts(totals: Mapping[str, int]) -> Counts:
    """A mapping of profile name to number as Counts: sorted, zeros dropped; ValueError below zero."""
    if any(number < 0 for number in totals.values()):
        raise ValueError(f"a count below zero: {dict(totals)}")
    return tuple(sorted((name, number) for name, number in totals.items() if number))


def occupied(instances: Iterable[GpuInstance]) -> int:
    """The memory slices that instances occupy, as a bit mask."""
    mask = 0
    for instance in instances:
        mask |= instance.placement.mask
    return mask


def summary(instances: Iterable[GpuInstance]) -> str:
    """A geometry in one line, widest first: "3g.40gb 3×1g.10gb"; empty for nothing."""
    instances = tuple(instances)
    widths = {i.profile: i.placement.size for i in instances}
    found = sorted(counts_of(instances), key=lambda pair: (-widths[pair[0]], pair[0]))
    return " ".join(name if number == 1 else f"{number}×{name}" for name, number in found)
