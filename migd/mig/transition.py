"""The least-disruption transition: from what is there to what is wished, by exact search over the board's table.

The order of goals: instances in use keep profile, placement and identity; fewest idle ones destroyed; then the
least fragmentation of what is left (greatest V, then greatest Phi); then lowest starts, widest profile first.
Equal input gives equal output to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nsmallest
from typing import Final, Literal

from migd.mig.boards import Board
from migd.mig.geometry import Counts, Geometry, GpuInstance, by_start, counts
from migd.mig.profiles import ProfileName
from migd.mig.table import PlacementSet, Table, table_of

NEAREST_MAX: Final = 3
"""How many of the nearest layouts a refusal names."""


@dataclass(frozen=True, slots=True)
class Transition:
    """How one GPU gets from its current geometry to the wished one.

    target: the geometry afterwards. keep, destroy, create: in order of start; keep and create make up the target.
    Destroying all of `destroy` before creating anything is legal in every order within each.
    """

    target: Geometry
    keep: tuple[GpuInstance, ...]
    destroy: tuple[GpuInstance, ...]
    create: tuple[GpuInstance, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a wish cannot be met, ready to be shown.

    reason: "Infeasible" where this board can never be cut so; "InUse" where it could, but for instances in use.
    left_over: what finds no place once as many memory slices of the wish as possible are served.
    nearest: layouts that do fit (around what is in use, where that is the reason), nearest first.
    blocked_by: the fewest instances in use whose going would make room; empty for "Infeasible".
    """

    reason: Literal["Infeasible", "InUse"]
    message: str
    left_over: Counts
    nearest: tuple[Counts, ...]
    blocked_by: tuple[GpuInstance, ...] = ()


def transition(board: Board, current: Geometry, busy: Geometry, wanted: Counts) -> Transition | Refusal:
    """The least disruptive way from `current` to exactly `wanted`, or why there is none.

    busy: the part of `current` that must keep profile, placement and identity; unknown counts as busy.
    wanted: profile names as this board spells them; ValueError for a name it does not offer.
    An instance of `current` that the board does not list is destroyed when idle and blocks when busy.
    """
    table = table_of(board)
    there, unlisted = table.split(current)
    held, stuck = table.split(busy)
    assert not held & ~there, "what is busy must exist"
    assert not stuck or set(stuck) <= set(unlisted), "what is busy must exist"
    candidates = table.with_counts(wanted)
    if not candidates:
        _check(board, wanted)
        return _infeasible(board, wanted)
    best = None if stuck else _least_destroyed(candidates, held, there)
    if best is None:
        return _in_use(board, held, frozenset(stuck), wanted)
    target = best.bits
    gone = table.members(there & ~target)
    return Transition(
        table.geometry(target),
        table.members(target & there),
        by_start((*gone, *unlisted)) if unlisted else gone,
        table.members(target & ~there),
    )


def fit(board: Board, wanted: Counts, staying: Geometry = frozenset()) -> Geometry | Refusal:
    """Place `wanted` on a GPU around instances that stay and count towards it; the least fragmenting arrangement.

    wanted: the whole multiset afterwards, `staying` included. Errors as for `transition`.
    """
    found = transition(board, staying, staying, wanted)
    return found if isinstance(found, Refusal) else found.target


def _check(board: Board, wanted: Counts) -> None:
    """What no set of the board has may be no wish at all; what some set has needs no check."""
    for name, _ in wanted:
        if not board.offers(name):
            raise ValueError(f"{name} is not a profile of this board")
    assert wanted == counts(dict(wanted)), "Counts are ascending by name, each name once and above 0"


def _least_destroyed(candidates: Sequence[PlacementSet], held: int, there: int) -> PlacementSet | None:
    """The candidate with all of `held` that loses the fewest of `there`; candidates come best first."""
    best, lost_least = None, there.bit_count() + 1
    fewest = max(0, there.bit_count() - candidates[0].bits.bit_count())  # no set keeps more than it has
    for candidate in candidates:
        if held & ~candidate.bits:
            continue
        lost = (there & ~candidate.bits).bit_count()
        if lost < lost_least:
            best, lost_least = candidate, lost
            if lost == fewest:
                break
    return best


@lru_cache(maxsize=4096)
def _infeasible(board: Board, wanted: Counts) -> Refusal:
    table = table_of(board)
    left_over, nearest = _closest(table, board, 0, wanted)
    return Refusal(
        "Infeasible",
        f"{say(wanted)} does not fit on this GPU: no place is left for {say(left_over)}. "
        f"Nearest that fits: {_options(nearest)}.",
        left_over,
        nearest,
    )


@lru_cache(maxsize=4096)
def _in_use(board: Board, held: int, unlisted: Geometry, wanted: Counts) -> Refusal:
    table = table_of(board)
    must_go = min(
        {held & ~candidate.bits for candidate in table.with_counts(wanted)},
        key=lambda bits: (bits.bit_count(), _width(table, bits), bits),
    )
    blockers = by_start((*table.members(must_go), *unlisted))
    left_over, nearest = _closest(table, board, held, wanted)
    fits = f" Nearest that fits around what is in use: {_options(nearest)}." if nearest and not unlisted else ""
    return Refusal(
        "InUse",
        f"{_must_go(blockers)} before this GPU can be {f'cut into {say(wanted)}' if wanted else 'emptied'}.{fits}",
        left_over,
        nearest if not unlisted else (),
        blockers,
    )


def _closest(table: Table, board: Board, held: int, wanted: Counts) -> tuple[Counts, tuple[Counts, ...]]:
    """What of the wish finds no place around `held`, and the nearest multisets that fit there."""
    width = {p.name: p.memory_slices for p in board.profiles}
    wish = {name: (number, width[name]) for name, number in wanted}
    wish_slices = sum(number * wide for number, wide in wish.values())
    near: list[tuple[int, int, Counts]] = []
    for multiset in table.around(held):
        served = sum(wish[name][1] * min(number, wish[name][0]) for name, number in multiset if name in wish)
        apart = wish_slices + sum(width[name] * number for name, number in multiset) - 2 * served
        near.append((apart, -served, multiset))
    most = dict(min(near, key=lambda found: (found[1], found[0], found[2]))[2]) if near else {}
    left_over = tuple((name, number - most.get(name, 0)) for name, number in wanted if number > most.get(name, 0))
    return left_over, tuple(
        multiset for _, _, multiset in nsmallest(NEAREST_MAX, (found for found in near if found[2]))
    )


def _width(table: Table, bits: int) -> int:
    return sum(i.placement.size for i in table.members(bits))


def say(counts: Counts) -> str:
    """Counts as a person writes them, largest first: "2×3g.40gb + 1g.10gb"; "nothing" for none."""
    ordered = sorted(counts, key=lambda pair: _by_size(pair[0]))
    return " + ".join(name if number == 1 else f"{number}×{name}" for name, number in ordered) or "nothing"


def _by_size(name: str) -> tuple[int, int, str]:
    """Memory before compute slices, as names tell them; what is no profile's name comes last."""
    parsed = ProfileName.parse(name)
    return (-parsed.memory_gb, -parsed.compute_slices, name) if parsed else (0, 0, name)


def _must_go(blockers: tuple[GpuInstance, ...]) -> str:
    names = ", ".join(map(str, blockers))
    return f"{names} is in use and has to go" if len(blockers) == 1 else f"{names} are in use and have to go"


def _options(nearest: Iterable[Counts]) -> str:
    return " or ".join(say(multiset) for multiset in nearest) or "nothing"
