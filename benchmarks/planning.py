"""How long planning takes: building a table, fitting, transitions and refusals, next to brute force doing the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from boards import VARIANTS, board_of, rows

import migd.mig.transition as planner
from benchmarks.brute import Answer, Brute, seen_anew
from benchmarks.measuring import Times, each
from migd.mig.boards import Board
from migd.mig.geometry import Counts, Geometry
from migd.mig.table import Table, table_of
from migd.mig.transition import Refusal, Transition, fit, transition

T = TypeVar("T")

BOARDS: Final = {
    "basic": "8 slices",
    "double": "+ double memory",
    "media": "+ me",
    "a30-media": "A30",
    "twelve": "RTX PRO 6000",
}
"""Variants of tests/boards.py that are measured, and what they are called."""

SEED: Final = "planning"


@dataclass(frozen=True, slots=True)
class Planning:
    """One piece of planning on one board, ours and brute force's. same: answers compared, all of them equal.

    ratio: brute force's p50 by ours. twin: brute force may be asked fewer of the cases, as it takes long.
    """

    what: str
    board: str
    ours: Times
    twin: Times | None
    ratio: float | None
    same: int


@dataclass(frozen=True, slots=True)
class Case:
    """One question: what is there, the part in use, and the wish."""

    current: Geometry
    busy: Geometry
    wish: Counts


def planning(variant: str, builds: int, cases: int, asked: int) -> Iterator[Planning]:
    """All of planning on one board. builds: of its table; cases: questions a kind; asked: how many brute force gets."""
    board, brute = board_of(rows(*VARIANTS[variant])), Brute(rows(*VARIANTS[variant]))
    yield _table(variant, board, brute, builds)
    table = table_of(board)
    dice = random.Random(f"{SEED} {variant}")
    multisets = [Case(frozenset(), frozenset(), wish) for wish in table.multisets()]
    yield _compared("fit", variant, brute, multisets, [partial(fit, board, c.wish) for c in multisets], asked)
    found: list[Case] = []
    blocked: list[Case] = []
    while len(found) < cases or len(blocked) < cases:
        case = some_case(dice, table)
        kind = found if isinstance(transition(board, case.current, case.busy, case.wish), Transition) else blocked
        if len(kind) < cases:
            kind.append(case)
    yield _compared("transition", variant, brute, found, _asking(board, found), asked)
    never = [Case(frozenset(), frozenset(), ((p.name, n),)) for p in board.profiles for n in _too_many(table, p.name)]
    for what, refused in (("refused, in use", _once(blocked)), ("refused, never fits", never)):
        forget()
        table_of(board)
        yield _compared(what, variant, brute, refused, _asking(board, refused), asked)
        yield _compared(f"{what}, again", variant, brute, refused, _asking(board, refused), 0)


def some_case(dice: random.Random, table: Table) -> Case:
    """A state, each (set, part in use) equally likely, and a multiset that the board can be cut into."""
    there = dice.choices(table.sets, [2 ** s.bits.bit_count() for s in table.sets])[0]
    busy = there.bits & dice.getrandbits(len(table.instances))
    wish = dice.choice(table.multisets())
    return Case(seen_anew(table.geometry(there.bits)), seen_anew(table.geometry(busy)), wish)


def forget() -> None:
    """Empty the planner's caches, so that the next question of each kind is a new one."""
    for value in vars(planner).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def _table(variant: str, board: Board, brute: Brute, builds: int) -> Planning:
    ours, tables = each([partial(Table, board)] * builds)
    listed = rows(*VARIANTS[variant])
    twin, described = each([lambda: Brute(listed).describe()])
    theirs = described[0]
    for found in tables[0].sets:
        bits = brute.bits(tables[0].geometry(found.bits))
        assert theirs[bits] == (found.value, found.openness), "the table and brute force differ"
    assert len(theirs) == len(tables[0].sets), "one side has more sets"
    return Planning("table", BOARDS[variant], ours, twin, twin.p50_s / ours.p50_s, len(theirs))


def _asking(board: Board, cases: list[Case]) -> list[Callable[[], Transition | Refusal]]:
    return [partial(transition, board, c.current, c.busy, c.wish) for c in cases]


def _compared(
    what: str,
    variant: str,
    brute: Brute,
    cases: list[Case],
    ours: list[Callable[[], T]],
    asked: int,
) -> Planning:
    """Time the planner on all cases and brute force on the first `asked`, and compare those answers."""
    ours_took, answers = each(ours)
    if not asked:
        return Planning(what, BOARDS[variant], ours_took, None, None, 0)
    first = cases[:asked]
    questions = [partial(brute.answer, brute.bits(c.current), brute.bits(c.busy), c.wish) for c in first]
    twin_took, theirs = each(questions)
    for case, mine, other in zip(first, answers, theirs, strict=False):
        assert _said(brute, mine, case.wish) == other, f"the planner and brute force differ: {case}"
    return Planning(what, BOARDS[variant], ours_took, twin_took, twin_took.p50_s / ours_took.p50_s, len(first))


def _said(brute: Brute, mine: object, wish: Counts) -> Answer:
    if isinstance(mine, frozenset):
        return "way", brute.bits(mine), 0
    assert isinstance(mine, Transition | Refusal)
    return brute.told(mine, wish)


def _once(cases: list[Case]) -> list[Case]:
    """One case for each (part in use, wish), which is what a refusal depends on: each is asked for the first time."""
    return list({(case.busy, case.wish): case for case in cases}.values())


def _too_many(table: Table, name: str) -> tuple[int, int]:
    most = max(dict(wish).get(name, 0) for wish in table.multisets())
    return most + 1, most + 2
