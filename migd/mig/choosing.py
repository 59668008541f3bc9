"""One option for each group at the least total, where items that several options have are paid for once: exactly.

Groups that share no item are searched apart. Items that are no question, and options that another one beats whatever
the other groups choose, are taken out before. What is left is gone through group by group, with a table of what was
chosen so far by the part of it that later groups may share; rows that cannot beat the best known are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import and_, or_
from typing import Final, NamedTuple

WIDTHS: Final = (64, 1024)
"""How many rows a table may have at first: mostly few rows give a good choice, and with its cost in hand the proof."""

ROWS_MAX: Final = 131_072
"""How many rows all tables of the last try may have together, a bound on time and memory: some seconds, some MiB."""


class Option(NamedTuple):
    """One of the options of a group. items: as bits. cost: its own, without that of its items."""

    items: int
    cost: int


class Choice(NamedTuple):
    """The items of all chosen options, as bits. proven: nothing costs less."""

    items: int
    proven: bool


def cheapest(groups: Sequence[Sequence[Option]], price: int, rows_max: int = ROWS_MAX) -> Choice:
    """The choice of one option for each group with the least total: `price` for each item, and the options' costs.

    Each group has at least one option. Equal input gives equal output, also where totals are equal.
    rows_max: where more rows would be needed for the proof, the best choice found is given, and told to be unproven.
    """
    assert all(groups), "a group without options has no choice"
    left = [[_Left(o.items, o.cost, o.items) for o in options] for options in groups]
    each = dict.fromkeys(_bits(_union(o for options in left for o in options)), price)
    left = _reduced(left, each)
    found = [_search(part, _Prices(each), rows_max) for part in _apart(left)]
    return Choice(reduce(or_, (one.items for one in found), 0), all(one.proven for one in found))


class _Left(NamedTuple):
    """An option with what of it is still a question. every: all items that it had in the beginning."""

    items: int
    cost: int
    every: int


_Groups = list[list[_Left]]


class _Prices(dict[int, int]):
    """What items cost together, by their bits: looked up, and added up once. each: by single item."""

    def __init__(self, each: Mapping[int, int]) -> None:
        super().__init__()
        self.each = each

    def __missing__(self, items: int) -> int:
        self[items] = total = sum(self.each[item] for item in _bits(items))
        return total


def _bits(items: int) -> Iterator[int]:
    while items:
        low = items & -items
        yield low
        items ^= low


def _union(options: Sequence[_Left] | Iterator[_Left]) -> int:
    return reduce(or_, (o.items for o in options), 0)


# --- what needs no search


def _reduced(groups: _Groups, each: dict[int, int]) -> _Groups:
    """The same question without what is none; `each` is told of items that are joined.

    Paid for in any case: items that all options of some group have. The option's own cost: items that one group alone
    has. One item: those that the same options have. Each may show more of the others, so until nothing changes.
    """
    while True:
        before = groups
        prices = _Prices(each)
        groups = [_unbeaten(options, prices) for options in groups]
        sure = reduce(or_, (reduce(and_, (o.items for o in options)) for options in groups), 0)
        once = twice = 0
        for options in groups:
            had = _union(options)
            once, twice = once | had, twice | once & had
        own = once & ~twice & ~sure
        shared = _joined(groups, twice & ~sure, each)
        groups = [[_Left(o.items & shared, o.cost + prices[o.items & own], o.every) for o in g] for g in groups]
        if groups == before:
            return groups


def _unbeaten(options: list[_Left], prices: _Prices) -> list[_Left]:
    """Without options that another one beats even if all that it has besides were paid for just for it."""
    return [
        o for o in options if not any(a.cost < o.cost and a.cost + prices[a.items & ~o.items] < o.cost for a in options)
    ]


def _joined(groups: _Groups, items: int, each: dict[int, int]) -> int:
    """One item for all those that the same options have, at the price of them together."""
    first: dict[tuple[bool, ...], int] = {}
    for item in _bits(items):
        other = first.setdefault(tuple(o.items & item != 0 for options in groups for o in options), item)
        if other != item:
            each[other] += each[item]
            items ^= item
    return items


def _apart(groups: _Groups) -> list[_Groups]:
    """The groups in parts that share no item."""
    parts: list[tuple[int, _Groups]] = []
    for options in groups:
        had, mine = _union(options), [options]
        others = []
        for items, part in parts:
            if items & had:
                had, mine = had | items, part + mine
            else:
                others.append((items, part))
        parts = [*others, (had, mine)]
    return [part for _, part in parts]


# --- what needs one


_Row = tuple[int, int]
"""The cheapest way to one row: its cost so far, and all items chosen; a plain tuple, for there are many."""


def _search(groups: _Groups, prices: _Prices, rows_max: int) -> Choice:
    """Try with narrow tables first: what they find lets the wider ones leave out more."""
    groups, best, proven = _ordered(groups), None, False
    widest = max(1, rows_max // len(groups))
    for width in (*(width for width in WIDTHS if width < widest), widest):
        best, proven = _sweep(groups, prices, width, best)
        if proven:
            break
    assert best is not None, "even the narrowest table reaches the end"
    return Choice(best[1], proven)


def _ordered(groups: _Groups) -> _Groups:
    """The groups in an order in which few items are chosen before the last group that has them."""
    left, ordered, had = list(groups), list[list[_Left]](), 0

    def waiting(k: int) -> tuple[int, int]:
        rest = reduce(or_, (_union(options) for options in left[:k] + left[k + 1 :]), 0)
        return ((had | _union(left[k])) & rest).bit_count(), len(left[k])

    while left:
        ordered.append(left.pop(min(range(len(left)), key=waiting)))
        had |= _union(ordered[-1])
    return ordered


def _sweep(groups: _Groups, prices: _Prices, width: int, best: _Row | None) -> tuple[_Row | None, bool]:
    """The best choice that at most so many rows a group find, `best` included, and whether there can be no better."""
    rows: dict[int, _Row] = {0: (0, 0)}
    cut: int | None = None
    for k, options in enumerate(groups, start=1):
        to_come = groups[k:]
        shared = reduce(or_, map(_union, to_come), 0)
        reached: dict[int, _Row] = {}
        for chosen, (spent, had) in rows.items():
            for items, own, every in options:
                cost = spent + own + prices[items & ~chosen]
                key = (chosen | items) & shared
                if key not in reached or cost < reached[key][0]:
                    reached[key] = cost, had | every
        least = _least(to_come, prices)
        ranked = [(cost + least(key), key) for key, (cost, _) in reached.items()]
        if best is not None:
            limit = best[0]
            ranked = [row for row in ranked if row[0] < limit]
        ranked.sort()
        if len(ranked) > width:
            cut = ranked[width][0] if cut is None else min(cut, ranked[width][0])
        rows = {key: reached[key] for _, key in ranked[:width]}
    for found in rows.values():  # one, since nothing is shared with groups that are not there, or none that is better
        best = found
    return best, cut is None or (best is not None and cut >= best[0])


def _least(groups: _Groups, prices: _Prices) -> Callable[[int], int]:
    """For items that are chosen already: what these groups cost at least, one of the options of each.

    What is not chosen yet is paid for by the groups that may want it, in equal shares. So no choice costs less.
    """
    unions = [_union(options) for options in groups]
    shares = _Prices({i: prices.each[i] // sum(u & i != 0 for u in unions) for i in _bits(reduce(or_, unions, 0))})
    known: list[dict[int, int]] = [{} for _ in groups]

    def least(chosen: int) -> int:
        total = 0
        for options, union, told in zip(groups, unions, known, strict=True):
            part = chosen & union
            cost = told.get(part)
            if cost is None:
                cost = told[part] = min(o.cost + shares[o.items & ~part] for o in options)
            total += cost
        return total

    return least
