"""The fewest evictions: which pods must go so that a node's GPUs can get their wished layouts, by exact search.

A pod may hold instances of several GPUs, so this is a question of the node. The order of goals: fewest pods; then
fewest instances destroyed; then the best layouts, as a transition ranks them, GPU by GPU in the order given. Two
choices that are equal in all of these are one, so equal input gives equal output whatever pods are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from migd.mig.boards import Board
from migd.mig.choosing import Choice, Option, cheapest
from migd.mig.geometry import Counts, Geometry, GpuInstance
from migd.mig.table import table_of


@dataclass(frozen=True, slots=True)
class Occupied:
    """One GPU as the search sees it.

    current: its instances. wanted: the whole multiset afterwards; None where every instance goes, as when MIG mode
    changes, and then the board is not asked.
    fixed: the part of current that must stay: held by what may not be evicted, or not known to be idle.
    held: the pods on each other instance in use, by keys such as their uids. An instance is free once all of them go.
    whole: pods that go in any case, such as those on the GPU as a whole where its MIG mode changes.
    What is neither fixed nor held is idle.
    """

    board: Board | None
    current: Geometry
    wanted: Counts | None
    fixed: Geometry
    held: tuple[tuple[GpuInstance, frozenset[str]], ...]
    whole: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        held = frozenset(instance for instance, _ in self.held)
        assert self.fixed | held <= self.current, "what is in use must exist"
        assert len(held) == len(self.held), "an instance is listed once, with all pods on it"
        assert not self.fixed & held, "what must stay is not freed by pods that go"
        assert all(pods for _, pods in self.held), "what no pod holds is idle, or must stay"

    @property
    def busy(self) -> Geometry:
        """All that is in use."""
        return self.fixed.union(instance for instance, _ in self.held)

    def free_without(self, pods: frozenset[str]) -> Geometry:
        """The held instances that are free once these pods are gone."""
        return frozenset(instance for instance, holders in self.held if holders <= pods)


@dataclass(frozen=True, slots=True)
class Eviction:
    """Who must go, and what that frees.

    pods: all that go, from whichever GPU. freed: for each GPU in the order given, its held instances that are free
    then; None where it cannot be cut so, whoever is evicted, and so nobody is evicted for it.
    destroyed: how many instances the others' transitions destroy, idle ones included.
    proven: no choice is better. Else the search met its bound, and this is the best that it came across.
    """

    pods: frozenset[str]
    freed: tuple[Geometry | None, ...]
    destroyed: int
    proven: bool = True


def fewest(gpus: Sequence[Occupied]) -> Eviction:
    """The fewest pods of one node that must go, so that each of these GPUs that can be cut as wished can be.

    A pod that goes frees all its instances, on all of these GPUs. For each GPU with freed instances, also none of
    them, `transition` around what is in use without them finds a way and destroys as counted here. For the others,
    which are None, `transition` around what is fixed says why not.
    """
    ways = [_ways(gpu) for gpu in gpus]
    able = [found for found in ways if found]
    pods = sorted({pod for found in able for way in found for pod in way.pods})
    chosen = _cheapest(able, pods)
    gone = frozenset(pod for k, pod in enumerate(pods) if chosen.items >> k & 1)
    return Eviction(
        gone,
        tuple(gpu.free_without(gone) if found else None for gpu, found in zip(gpus, ways, strict=True)),
        sum(min(way.destroyed for way in found if way.pods <= gone) for found in able),
        chosen.proven,
    )


class _Way(NamedTuple):
    """The best layouts of one GPU for which just these pods must go. rank: among all layouts of the wish, 0 first."""

    pods: frozenset[str]
    destroyed: int
    rank: int


def _ways(gpu: Occupied) -> tuple[_Way, ...]:
    """One way for each set of pods that a layout may need to go; none where no layout keeps what is fixed."""
    if gpu.wanted is None:
        every = gpu.whole.union(*(pods for _, pods in gpu.held))
        return () if gpu.fixed else (_Way(every, len(gpu.current), 0),)
    assert gpu.board is not None, "a wish with profiles is of a board"
    table = table_of(gpu.board)
    there, unlisted = table.split(gpu.current)
    fixed, stuck = table.split(gpu.fixed)
    if stuck:
        return ()
    always = gpu.whole.union(*(pods for instance, pods in gpu.held if instance in unlisted))
    held = [(bits, pods) for instance, pods in gpu.held if (bits := table.bits_of([instance]))]
    in_use = sum(bits for bits, _ in held)
    least: dict[int, tuple[int, int]] = {}
    for rank, layout in enumerate(table.with_counts(gpu.wanted)):
        if not fixed & ~layout.bits:
            going, destroyed = in_use & ~layout.bits, (there & ~layout.bits).bit_count()
            if going not in least or destroyed < least[going][0]:  # of equal ones the first is the best
                least[going] = destroyed, rank
    best: dict[frozenset[str], tuple[int, int]] = {}
    for going, found in least.items():
        pods = always.union(*(holders for bits, holders in held if bits & going))
        best[pods] = min(found, best.get(pods, found))
    return tuple(_Way(pods, destroyed + len(unlisted), rank) for pods, (destroyed, rank) in best.items())


def _cheapest(able: Sequence[Sequence[_Way]], pods: Sequence[str]) -> Choice:
    """The best choice of one way a GPU; items are pods, by position.

    All goals are one whole number, whose digits they are: pods, instances destroyed, and each GPU's rank.
    """
    bit = {pod: 1 << k for k, pod in enumerate(pods)}
    digits = [1 + max(way.rank for way in found) for found in able]
    instance = place = prod(digits)
    groups = []
    for found, digit in zip(able, digits, strict=True):
        place //= digit
        groups.append([Option(sum(bit[p] for p in w.pods), w.destroyed * instance + w.rank * place) for w in found])
    most_destroyed = sum(max(way.destroyed for way in found) for found in able)
    return cheapest(groups, (most_destroyed + 1) * instance)
