"""Brute force as the other side: the tests' twin, asked the planner's questions, and its answers as plain values.

Generous to the twin: its index by wish and its V of each set are warm, so it only walks sets and ranks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proof.twin import Twin, Wish

from migd.mig.geometry import Geometry, GpuInstance
from migd.mig.profiles import Placement
from migd.mig.transition import Refusal, Transition

Answer = tuple[object, ...]
"""("way", target, destroyed) or (reason, blockers, their slices, slices left over, distances of the nearest)."""


class Brute:
    """The twin of one board, and the bits of the planner's instances in it."""

    def __init__(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        self.twin = Twin(rows)
        self.places = {GpuInstance(n, Placement(a, z)): bit for (n, a, z), bit in self.twin.bit.items()}
        self.wishes = {bits: self.twin.wish(bits) for bits in self.twin.sets}
        self.width = {name: row["placements"][0][1] for name, row in rows.items() if row["placements"]}

    def bits(self, instances: Geometry) -> int:
        """The twin's bits of the planner's instances."""
        return sum(self.places[i] for i in instances)

    def describe(self) -> dict[int, tuple[int, int]]:
        """V and Phi of every set: what a table holds of each, and the work that building one is."""
        return {bits: (self.twin.value(bits), self.twin.openness(bits)) for bits in self.twin.sets}

    def answer(self, current: int, busy: int, wish: Wish) -> Answer:
        """The best way by looking at every set of the wish; where there is none, why."""
        ever = self.twin.by_wish.get(wish, [])
        ranked = [
            ((current & ~s).bit_count(), -self.twin.value(s), -self.twin.openness(s), self.twin.starts(s), s)
            for s in ever
            if not busy & ~s
        ]
        if ranked:
            lost, *_, best = min(ranked)
            return "way", best, lost
        going = min(((busy & ~s).bit_count(), len(self.twin.slices(busy & ~s))) for s in ever) if ever else (0, 0)
        around = {self.wishes[s] for s in self.twin.around(busy if ever else 0)}
        asked = dict(wish)
        least = min(self._slices(wish) - self._shared(asked, fits) for fits in around)
        nearest = sorted(self._apart(asked, dict(fits)) for fits in around if fits)[:3]
        return "InUse" if ever else "Infeasible", *going, least, tuple(nearest)

    def told(self, found: Transition | Refusal, wish: Wish) -> Answer:
        """The planner's answer in the same terms, to be compared."""
        if isinstance(found, Transition):
            return "way", self.bits(found.target), len(found.destroy)
        slices = sum(i.placement.size for i in found.blocked_by)
        nearest = tuple(self._apart(dict(wish), dict(fits)) for fits in found.nearest)
        return found.reason, len(found.blocked_by), slices, self._slices(found.left_over), nearest

    def _slices(self, wish: Wish) -> int:
        return sum(self.width[name] * number for name, number in wish)

    def _shared(self, asked: dict[str, int], fits: Wish) -> int:
        return sum(self.width[name] * min(number, asked.get(name, 0)) for name, number in fits)

    def _apart(self, one: dict[str, int], other: dict[str, int]) -> int:
        return sum(wide * abs(one.get(name, 0) - other.get(name, 0)) for name, wide in self.width.items())


def seen_anew(geometry: Geometry) -> Geometry:
    """The same instances as other objects, as a look at a GPU makes them: nothing is equal by being identical."""
    return frozenset(GpuInstance(str(i.profile), Placement(i.placement.start, i.placement.size)) for i in geometry)
