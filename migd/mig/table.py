"""The table of all placement sets of a board: what makes planning an exact search instead of a heuristic.

A set is a geometry written as bits: bit k stands for the k-th (profile, placement) pair of the board. An 8-slice
board has at most 2,319 of them, so everything here is enumerated once and then looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import add, le
from typing import Final

from migd.mig.boards import Board
from migd.mig.geometry import Counts, Geometry, GpuInstance, by_start

SETS_MAX: Final = 200_000
"""More than any board known (2,319); a report that would explode is refused instead of filling the memory."""


@dataclass(frozen=True, slots=True)
class PlacementSet:
    """One legal geometry of a board, with what planning asks of it.

    bits: the set itself. mask: occupied memory slices. counts: its multiset of profiles.
    value: V, how many ways of going on one profile at a time stay open, as a count of request orders.
    openness: Phi, memory slices times free places, summed over the board's profiles.
    starts: of its instances, widest profile first; the last tie-break.
    """

    bits: int
    mask: int
    counts: Counts
    value: int
    openness: int
    starts: tuple[int, ...]


class Table:
    """All placement sets of one board, and lookups in them. Equal boards have equal ones; build it with `table_of`."""

    __slots__ = ("_bit", "_by_bits", "_by_counts", "_geometries", "board", "instances", "sets")

    def __init__(self, board: Board) -> None:
        self.board = board
        self.instances: tuple[GpuInstance, ...] = by_start(
            GpuInstance(p.name, place) for p in board.profiles for place in p.placements
        )
        # Keys are flat tuples: hashing and comparing them takes less than of GpuInstances.
        self._bit = {_key(instance): 1 << k for k, instance in enumerate(self.instances)}
        described = _describe(board, self.instances, _enumerate(board, self.instances))
        self.sets: tuple[PlacementSet, ...] = tuple(described)
        self._by_bits = {s.bits: s for s in described}
        self._geometries: dict[int, Geometry] = {}
        by_counts: dict[Counts, list[PlacementSet]] = {}
        for found in described:
            by_counts.setdefault(found.counts, []).append(found)
        self._by_counts = {
            key: tuple(sorted(group, key=lambda s: (-s.value, -s.openness, s.starts)))
            for key, group in by_counts.items()
        }

    def bits_of(self, instances: Iterable[GpuInstance]) -> int | None:
        """The bits of these instances; None where one of them is not a pair of this board."""
        bits, unlisted = self.split(instances)
        return None if unlisted else bits

    def split(self, instances: Iterable[GpuInstance]) -> tuple[int, tuple[GpuInstance, ...]]:
        """The bits of those instances that are pairs of this board, and the others."""
        bits, unlisted = 0, []
        for instance in instances:
            bit = self._bit.get(_key(instance))
            if bit is None:
                unlisted.append(instance)
            else:
                bits |= bit
        return bits, tuple(unlisted)

    def members(self, bits: int) -> tuple[GpuInstance, ...]:
        """The instances that bits stand for, in order of start."""
        found = []
        while bits:
            low = bits & -bits
            found.append(self.instances[low.bit_length() - 1])
            bits ^= low
        return tuple(found)

    def geometry(self, bits: int) -> Geometry:
        """The instances that bits stand for; those of a legal set are made once."""
        found = self._geometries.get(bits)
        if found is None:
            found = frozenset(self.members(bits))
            if bits in self._by_bits:
                self._geometries[bits] = found
        return found

    def with_counts(self, counts: Counts) -> tuple[PlacementSet, ...]:
        """Every set with exactly this multiset, best first: greatest V, greatest Phi, lowest starts."""
        return self._by_counts.get(counts, ())

    def around(self, held: int) -> Iterator[Counts]:
        """Every multiset that some set with all of these bits has, in no particular order."""
        for counts, group in self._by_counts.items():
            for found in group:
                if not held & ~found.bits:
                    yield counts
                    break

    def multisets(self) -> tuple[Counts, ...]:
        """Every feasible multiset of profiles, the empty one included, in ascending order."""
        return tuple(sorted(self._by_counts))

    def find(self, bits: int) -> PlacementSet | None:
        """The set with exactly these bits, or None where they are no legal set."""
        return self._by_bits.get(bits)


def _key(instance: GpuInstance) -> tuple[str, int, int]:
    return instance.profile, instance.placement.start, instance.placement.size


@lru_cache(maxsize=64)
def table_of(board: Board) -> Table:
    """The table of a board; built once for all GPUs with equal boards."""
    return Table(board)


def openness(board: Board, mask: int) -> int:
    """Phi of an occupied mask: for each profile its memory slices times its wholly free places, summed.

    Source: the fragmentation measure that chooses between GPUs; greater means less fragmented.
    """
    return sum(place.size for p in board.profiles for place in p.placements if not place.mask & mask)


def _enumerate(board: Board, instances: tuple[GpuInstance, ...]) -> dict[int, tuple[int, Counts]]:
    """All legal sets, as bits, with their masks and multisets.

    Legal: no two overlap, engines within the pool, no profile above its reported count.
    """
    pool = board.engine_pool
    masks = [i.placement.mask for i in instances]
    engines = [board.profile(i.profile).engines.kinds() for i in instances]
    limits = {p.name: p.instance_count_max for p in board.profiles}
    names = [i.profile for i in instances]
    found: dict[int, tuple[int, Counts]] = {}

    def extend(first: int, bits: int, mask: int, used: tuple[int, ...], had: dict[str, int]) -> None:
        found[bits] = mask, tuple(sorted(had.items()))
        if len(found) > SETS_MAX:
            raise ValueError(f"this board reports more than {SETS_MAX} placement sets; its listing cannot be right")
        for k in range(first, len(instances)):
            if mask & masks[k]:
                continue
            name = names[k]
            number = had.get(name, 0)
            if number >= limits[name]:
                continue
            now = tuple(map(add, used, engines[k]))
            if all(map(le, now, pool)):
                extend(k + 1, bits | 1 << k, mask | masks[k], now, {**had, name: number + 1})

    extend(0, 0, 0, (0,) * len(pool), {})
    return found


def _describe(
    board: Board, instances: tuple[GpuInstance, ...], every: dict[int, tuple[int, Counts]]
) -> list[PlacementSet]:
    values = _values(instances, every)
    phi = {mask: openness(board, mask) for mask in {mask for mask, _ in every.values()}}
    widest_first = sorted(
        ((i.placement, i.profile, 1 << k) for k, i in enumerate(instances)),
        key=lambda found: (-found[0].size, found[1], found[0].start),
    )
    starts = [(bit, place.start) for place, _, bit in widest_first]
    return [
        PlacementSet(bits, mask, counts, values[bits], phi[mask], tuple(start for bit, start in starts if bit & bits))
        for bits, (mask, counts) in sorted(every.items())
    ]


def _values(instances: tuple[GpuInstance, ...], every: Iterable[int]) -> dict[int, int]:
    """V of each set: 1, and for each profile that could still be added somewhere the best V after adding it.

    V(S) = 1 + sum over profiles p of max over places of V(S + place). A profile that fits the multiset but no free
    place adds 0. V of the empty set counts the request orders that the best online placement serves.
    """
    profile = [i.profile for i in instances]
    best: dict[int, dict[str, int]] = {bits: {} for bits in every}
    values: dict[int, int] = {}
    for bits in sorted(best, key=int.bit_count, reverse=True):  # so that all larger ones have told this one
        value = values[bits] = 1 + sum(best[bits].values())
        rest = bits
        while rest:
            one = rest & -rest
            rest ^= one
            name = profile[one.bit_length() - 1]
            without = best[bits ^ one]  # every part of a legal set is legal
            if value > without.get(name, 0):
                without[name] = value
    return values
