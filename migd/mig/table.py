"""The table of all placement sets of a board: what makes planning an exact search instead of a heuristic.

A set is a geometry written as bits: bit k stands for the k-th (profile, placement) pair of the board. An 8-slice
board has at most 2,319 of them, so everything here is enumerated once and then looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from migd.mig.boards import Board
from migd.mig.geometry import Counts, Geometry, GpuInstance, by_start, counts_of
from migd.mig.profiles import Placement

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
        # Keys are plain tuples: hashing and comparing them takes a third of what GpuInstances take.
        self._bit = {_key(instance): 1 << k for k, instance in enumerate(self.instances)}
        bits = _enumerate(board, self.instances)
        described = _describe(board, self.instances, bits)
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


def _enumerate(board: Board, instances: tuple[GpuInstance, ...]) -> list[int]:
    """All legal sets as bits: no two overlap, engines within the pool, no profile above its reported count."""
    pool = board.engine_pool
    masks = [i.placement.mask for i in instances]
    engines = [board.profile(i.profile).engines.kinds() for i in instances]
    limits = {p.name: p.instance_count_max for p in board.profiles}
    names = [i.profile for i in instances]
    found: list[int] = []

    def extend(first: int, bits: int, mask: int, used: tuple[int, ...], had: dict[str, int]) -> None:
        found.append(bits)
        if len(found) > SETS_MAX:
            raise ValueError(f"this board reports more than {SETS_MAX} placement sets; its listing cannot be right")
        for k in range(first, len(instances)):
            if mask & masks[k] or had.get(names[k], 0) >= limits[names[k]]:
                continue
            now = tuple(a + b for a, b in zip(used, engines[k], strict=True))
            if all(n <= p for n, p in zip(now, pool, strict=True)):
                counted = {**had, names[k]: had.get(names[k], 0) + 1}
                extend(k + 1, bits | 1 << k, mask | masks[k], now, counted)

    extend(0, 0, 0, (0,) * len(pool), {})
    return found


def _describe(board: Board, instances: tuple[GpuInstance, ...], every: list[int]) -> list[PlacementSet]:
    legal = set(every)
    members = {bits: [instances[k] for k in range(bits.bit_length()) if bits >> k & 1] for bits in every}
    counts = {bits: counts_of(members[bits]) for bits in every}
    values = _values(instances, every, legal, counts)
    masks = {bits: _mask(i.placement for i in members[bits]) for bits in every}
    phi = {mask: openness(board, mask) for mask in set(masks.values())}
    return [
        PlacementSet(
            bits,
            masks[bits],
            counts[bits],
            values[bits],
            phi[masks[bits]],
            tuple(
                i.placement.start
                for i in sorted(members[bits], key=lambda i: (-i.placement.size, i.profile, i.placement.start))
            ),
        )
        for bits in sorted(every)
    ]


def _values(
    instances: tuple[GpuInstance, ...], every: list[int], legal: set[int], counts: dict[int, Counts]
) -> dict[int, int]:
    """V of each set: 1, and for each profile that could still be added somewhere the best V after adding it.

    V(S) = 1 + sum over profiles p of max over places of V(S + place). A profile that fits the multiset but no free
    place adds 0. V of the empty set counts the request orders that the best online placement serves.
    """
    values: dict[int, int] = {}
    for bits in sorted(every, key=int.bit_count, reverse=True):
        best: dict[str, int] = {}
        for k, instance in enumerate(instances):
            bigger = bits | 1 << k
            if bigger != bits and bigger in legal and values[bigger] > best.get(instance.profile, 0):
                best[instance.profile] = values[bigger]
        values[bits] = 1 + sum(best.values())
    return values


def _mask(places: Iterable[Placement]) -> int:
    mask = 0
    for place in places:
        mask |= place.mask
    return mask
