"""How good plans are: what first-fit cannot place although it fits, and what clearing the GPU destroys without need."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from boards import VARIANTS, board_of, rows

from benchmarks.planning import BOARDS, SEED, some_case
from migd.mig.geometry import Counts, counts_of
from migd.mig.table import Table, table_of
from migd.mig.transition import Transition, transition


@dataclass(frozen=True, slots=True)
class Orders:
    """Every distinct order of every multiset that fits the empty board, one request at a time.

    fails_*: the share of orders (largest first: of multisets, which have one such order) where a request finds no
    place. first_fit: the lowest start that is free. best: the best that any rule without foresight can do, which V
    gives. ours: of multisets, which are placed whole.
    """

    board: str
    orders: int
    multisets: int
    fails_first_fit: float
    fails_best: float
    fails_largest_first: float
    fails_ours: float


@dataclass(frozen=True, slots=True)
class Recuts:
    """Seeded (state, wish) pairs that can be met, planned by us and by simpler ways; n with nothing in use, n with.

    fails_greedy, fails_greedy_busy: share where keeping all that is still wished, destroying what is not, and
    first-fit of the rest, largest first, leaves something without a place. Ours fails in none.
    destroyed_*: idle instances destroyed a recut, nothing being in use. clear: destroy all and create anew, as
    mig-parted does unless the counts are as wished already; with anything in use it cannot begin.
    """

    board: str
    n: int
    fails_greedy: float
    fails_greedy_busy: float
    destroyed_ours: float
    destroyed_clear: float


def orders(variant: str) -> Orders:
    """First-fit over all orders of all multisets of one board."""
    board = board_of(rows(*VARIANTS[variant]))
    table = table_of(board)
    served = every = 0
    for wish in table.multisets():
        for order in _orders(dict(wish)):
            every += 1
            served += first_fit(table, 0, order) is not None
    largest = sum(first_fit(table, 0, _largest_first(table, wish)) is None for wish in table.multisets())
    placed = sum(isinstance(transition(board, frozenset(), frozenset(), w), Transition) for w in table.multisets())
    empty, many = table.find(0), len(table.multisets())
    assert empty is not None
    return Orders(
        BOARDS[variant],
        every,
        many,
        1 - served / every,
        1 - empty.value / every,
        largest / many,
        1 - placed / many,
    )


def recuts(variant: str, n: int) -> Recuts:
    """All ways on the same seeded pairs of one board."""
    board = board_of(rows(*VARIANTS[variant]))
    table = table_of(board)
    dice = random.Random(f"{SEED} quality {variant}")
    stuck = {False: 0, True: 0}
    ours = cleared = 0
    for in_use in stuck:
        met = 0
        while met < n:
            case = some_case(dice, table)
            busy = case.busy if in_use else frozenset()
            found = transition(board, case.current, busy, case.wish)
            if in_use == (not busy) or not isinstance(found, Transition):
                continue
            met += 1
            there, held = table.bits_of(case.current), table.bits_of(busy)
            assert there is not None
            assert held is not None
            stuck[in_use] += greedy(table, there, held, case.wish) is None
            if not in_use:
                ours += len(found.destroy)
                cleared += 0 if counts_of(case.current) == case.wish else len(case.current)
    return Recuts(BOARDS[variant], n, stuck[False] / n, stuck[True] / n, ours / n, cleared / n)


def first_fit(table: Table, bits: int, requests: Iterable[str]) -> int | None:
    """Place requests one by one, each at the lowest start where the set stays legal; None where one finds no place."""
    for name in requests:
        free = (bits | 1 << k for k, i in enumerate(table.instances) if i.profile == name and not bits >> k & 1)
        fits = next((bigger for bigger in free if table.find(bigger) is not None), None)
        if fits is None:
            return None
        bits = fits
    return bits


def greedy(table: Table, there: int, held: int, wish: Counts) -> int | None:
    """Keep what is in use, then what is still wished from the lowest start on; first-fit the rest, largest first."""
    missing, kept = dict(wish), 0
    for part in (held, there & ~held):
        for k, instance in enumerate(table.instances):
            if part >> k & 1 and missing.get(instance.profile, 0):
                missing[instance.profile] -= 1
                kept |= 1 << k
    assert not held & ~kept, "the wish counts what is in use"
    return first_fit(table, kept, _largest_first(table, tuple(missing.items())))


def _largest_first(table: Table, wish: Counts | Sequence[tuple[str, int]]) -> list[str]:
    width = {i.profile: i.placement.size for i in table.instances}
    slices = {p.name: p.compute_slices for p in table.board.profiles}
    names = sorted(wish, key=lambda pair: (-width[pair[0]], -slices[pair[0]], pair[0]))
    return [name for name, number in names for _ in range(number)]


def _orders(left: dict[str, int]) -> Iterable[tuple[str, ...]]:
    """Every distinct order of a multiset."""
    if not any(left.values()):
        yield ()
        return
    for name in sorted(name for name, number in left.items() if number):
        for rest in _orders({**left, name: left[name] - 1}):
            yield (name, *rest)
