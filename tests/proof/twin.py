"""A deliberately dumb planner to compare the real one with: it answers everything by looking at every raw set.

It imports nothing of migd and shares no idea with it but the rules of the hardware, written here a second time:
instances must not overlap in memory slices, no profile may exceed its reported count, and no kind of engine may be
used more often than the GPU has it. Profiles are plain rows: {"placements": [[start, size], ...], "count": n,
"engines": [n, ...]} by name. Sets are ints; bit k stands for `places[k]`, in this twin's own order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import combinations
from math import factorial, prod
from typing import Any

Rows = Mapping[str, Mapping[str, Any]]
Place = tuple[str, int, int]
Wish = tuple[tuple[str, int], ...]
"""(profile, how many) pairs, ascending by profile, none of them 0."""


class Twin:
    """All that one board can be cut into, found and searched by brute force."""

    def __init__(self, rows: Rows, *, pooled: bool = True) -> None:
        self.rows = rows
        self.pooled = pooled
        self.places: list[Place] = sorted(
            (name, start, size) for name, row in rows.items() for start, size in row["placements"]
        )
        self.bit = {place: 1 << k for k, place in enumerate(self.places)}
        self.sets = [sum(self.bit[place] for place in found) for found in self._raw() if self.lawful(found)]
        self.by_wish: dict[Wish, list[int]] = {}
        for bits in self.sets:
            self.by_wish.setdefault(self.wish(bits), []).append(bits)

    # --- the rules of the hardware

    def _raw(self) -> Iterator[tuple[Place, ...]]:
        """Every way to fill the slices from left to right; counts and engines are not looked at."""
        end = max((start + size for _, start, size in self.places), default=0)

        def fill(at: int) -> Iterator[tuple[Place, ...]]:
            if at >= end:
                yield ()
                return
            yield from fill(at + 1)
            for place in self.places:
                if place[1] == at:
                    for rest in fill(at + place[2]):
                        yield (place, *rest)

        return fill(0)

    @cached_property
    def pool(self) -> tuple[int, ...]:
        """Engines by kind: the most that any one profile can take, so often as it can really be placed."""
        takes = [
            [self._fits_alone(row) * each for each in row["engines"]] for row in self.rows.values() if row["placements"]
        ]
        return tuple(max(kind) for kind in zip(*takes, strict=True))

    def _fits_alone(self, row: Mapping[str, Any]) -> int:
        spots = [("", start, size) for start, size in row["placements"]]
        most = max(n for n in range(len(spots) + 1) if any(not overlapping(c) for c in combinations(spots, n)))
        return min(most, int(row["count"]))

    def lawful(self, found: tuple[Place, ...]) -> bool:
        """Whether these places can exist together on one GPU."""
        names = [name for name, _, _ in found]
        if overlapping(found) or any(names.count(name) > self.rows[name]["count"] for name in names):
            return False
        if not self.pooled or not found:
            return True
        used = [sum(kind) for kind in zip(*(self.rows[name]["engines"] for name in names), strict=True)]
        return all(use <= have for use, have in zip(used, self.pool, strict=True))

    # --- what a set is

    def members(self, bits: int) -> tuple[Place, ...]:
        """The places that bits stand for."""
        return tuple(place for k, place in enumerate(self.places) if bits >> k & 1)

    def wish(self, bits: int) -> Wish:
        """The multiset of profiles of a set."""
        return tuple(sorted(Counter(name for name, _, _ in self.members(bits)).items()))

    def slices(self, bits: int) -> frozenset[int]:
        """The memory slices that a set occupies."""
        return frozenset(s for _, start, size in self.members(bits) for s in range(start, start + size))

    def states(self) -> Iterator[tuple[int, int]]:
        """Every (set, busy part of it)."""
        for bits in self.sets:
            yield from ((bits, busy) for busy in submasks(bits))

    def around(self, busy: int) -> list[int]:
        """Every set that holds all of `busy`."""
        return [bits for bits in self.sets if bits & busy == busy]

    # --- what a good set is

    def value(self, bits: int) -> int:
        """V: of the orders in which requests can still arrive one by one, how many the best online rule serves.

        1 for stopping here, and for each profile that the multiset still allows what the best place leaves, 0 if none.
        """
        if bits not in self._values:
            open_ways = 1
            for name in self.rows:
                counted = Counter(dict(self.wish(bits)))
                counted[name] += 1
                if tuple(sorted(counted.items())) not in self.by_wish:
                    continue
                after = [bits | bit for (other, _, _), bit in self.bit.items() if other == name and not bits & bit]
                open_ways += max((self.value(bigger) for bigger in after if bigger in self._legal), default=0)
            self._values[bits] = open_ways
        return self._values[bits]

    @cached_property
    def _values(self) -> dict[int, int]:
        return {}

    @cached_property
    def _legal(self) -> frozenset[int]:
        return frozenset(self.sets)

    def openness(self, bits: int) -> int:
        """Phi: the sizes of all places, of whatever profile, that nothing of the set overlaps."""
        there = self.members(bits)
        return sum(place[2] for place in self.places if not any(overlapping((place, other)) for other in there))

    def starts(self, bits: int) -> list[int]:
        """Starts of the set, widest profile first, then by name."""
        return [start for _, _, start in sorted((-size, name, start) for name, start, size in self.members(bits))]

    def ranked(self, wish: Wish) -> list[int]:
        """Every set of this multiset, best first: greatest V, then greatest Phi, then lowest starts."""
        if wish not in self._ranked:
            self._ranked[wish] = sorted(
                self.by_wish.get(wish, []), key=lambda s: (-self.value(s), -self.openness(s), self.starts(s))
            )
        return self._ranked[wish]

    @cached_property
    def _ranked(self) -> dict[Wish, list[int]]:
        return {}

    # --- figures

    def orders(self) -> int:
        """In how many distinct orders the profiles of some feasible multiset can be asked for."""
        return sum(factorial(sum(n for _, n in wish)) // prod(factorial(n) for _, n in wish) for wish in self.by_wish)

    def maximal_sets(self) -> int:
        """Sets to which nothing can be added."""
        return sum(not any(bits != other and bits & other == bits for other in self.sets) for bits in self.sets)

    def maximal_wishes(self) -> int:
        """Multisets that no other feasible one includes."""
        counted = [Counter(dict(wish)) for wish in self.by_wish]
        return sum(not any(one < other for other in counted) for one in counted)

    def most(self, name: str) -> int:
        """How many of one profile fit on the empty GPU."""
        return max(dict(wish).get(name, 0) for wish in self.by_wish)

    def demands(self) -> list[Wish]:
        """Every feasible multiset, and every single profile up to two more than fit."""
        single = {((name, n),) for name in self.rows for n in range(1, self.most(name) + 3)}
        return sorted(single | set(self.by_wish))


def overlapping(places: tuple[Place, ...]) -> bool:
    """Whether any two of the places share a memory slice."""
    return any(a < b + wide and b < a + long for (_, a, long), (_, b, wide) in combinations(places, 2))


def submasks(bits: int) -> Iterator[int]:
    """Every part of a set, itself and the empty one included."""
    part = bits
    while True:
        yield part
        if not part:
            return
        part = (part - 1) & bits
