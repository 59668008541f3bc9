"""The figures of docs/planning.md, counted by the planner's table and by the twin; and the table against the twin."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
from boards import DOUBLE, ME, VARIANTS, board_of, listings, rows
from proof.twin import Twin

from migd.mig.boards import Board
from migd.mig.geometry import GpuInstance
from migd.mig.profiles import Placement
from migd.mig.table import Table, table_of


class Figures(NamedTuple):
    """What one board counts; wishes are multisets, the empty one included."""

    pairs: int
    sets: int
    maximal_sets: int
    wishes: int
    maximal_wishes: int
    states: int
    orders_served: int
    orders: int
    sets_without_pool: int


FIGURES = {
    "basic": Figures(14, 298, 19, 38, 12, 4_377, 100, 114, 298),
    "double": Figures(18, 723, 78, 78, 28, 11_593, 394, 425, 723),
    "media": Figures(25, 2_319, 239, 128, 44, 47_375, 1_232, 1_323, 2_319),
    "a30": Figures(7, 26, 5, 10, 4, 123, 13, 13, 26),
    "a30-media": Figures(13, 76, 17, 20, 8, 431, 39, 39, 84),
    "twelve": Figures(30, 717, 302, 115, 64, 6_417, 462, 462, 1_249),
}

EIGHT_SLICES = ("a100-40gb", "a100-80gb", "h100-sxm-80gb", "h100-pcie-80gb", "h100-nvl-94gb", "gh200-96gb", "h200")


@lru_cache(maxsize=8)
def twin_of(name: str) -> Twin:
    return Twin(rows(*VARIANTS[name]))


def without_engines(listed: Mapping[str, Mapping[str, Any]]) -> Board:
    return board_of({name: {**row, "engines": [0, 0, 0, 0, 0]} for name, row in listed.items()})


def place(instance: GpuInstance) -> tuple[str, int, int]:
    return instance.profile, instance.placement.start, instance.placement.size


def sets_of(table: Table) -> set[frozenset[tuple[str, int, int]]]:
    return {frozenset(map(place, table.geometry(found.bits))) for found in table.sets}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_twin_counts_the_published_figures(name: str) -> None:
    twin, unlimited = twin_of(name), Twin(rows(*VARIANTS[name]), pooled=False)
    assert FIGURES[name] == Figures(
        len(twin.places),
        len(twin.sets),
        twin.maximal_sets(),
        len(twin.by_wish),
        twin.maximal_wishes(),
        sum(1 for _ in twin.states()),
        twin.value(0),
        twin.orders(),
        len(unlimited.sets),
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_the_planners_table_counts_the_published_figures(name: str) -> None:
    table, expected = table_of(board_of(rows(*VARIANTS[name]))), FIGURES[name]
    every = [found.bits for found in table.sets]
    wishes = [dict(counts) for counts in table.multisets()]
    empty = table.find(0)
    assert empty is not None
    assert len(table.instances) == expected.pairs
    assert len(every) == len(set(every)) == expected.sets
    assert sum(not any(one != other and one & other == one for other in every) for one in every) == (
        expected.maximal_sets
    )
    assert len(wishes) == expected.wishes
    assert sum(
        not any(one != o and all(n <= o.get(p, 0) for p, n in one.items()) for o in wishes) for one in wishes
    ) == (expected.maximal_wishes)
    assert sum(2 ** bits.bit_count() for bits in every) == expected.states
    assert empty.value == expected.orders_served
    assert len(table_of(without_engines(rows(*VARIANTS[name]))).sets) == expected.sets_without_pool


@pytest.mark.parametrize("name", VARIANTS)
def test_every_set_of_the_table_is_what_the_twin_says_of_it(name: str) -> None:
    twin, table = twin_of(name), table_of(board_of(rows(*VARIANTS[name])))
    for found in table.sets:
        bits = sum(twin.bit[place(i)] for i in table.geometry(found.bits))
        assert bits in set(twin.by_wish[found.counts])
        assert found.mask == sum(1 << s for s in twin.slices(bits))
        assert (found.value, found.openness) == (twin.value(bits), twin.openness(bits))
        assert list(found.starts) == twin.starts(bits)
    assert {found.bits for found in table.sets} == {
        found.bits for c in table.multisets() for found in table.with_counts(c)
    }


@pytest.mark.parametrize("model", EIGHT_SLICES)
@pytest.mark.parametrize("without", [ME + DOUBLE, ME, ()], ids=["basic", "double", "media"])
def test_all_eight_slice_boards_have_the_sets_of_the_one_that_is_proven(model: str, without: tuple[str, ...]) -> None:
    """So the proof for one is a proof for all: the planner sees names, and never compares memory."""
    kinds = {row["name"]: row["kind"] for row in listings()[model]["profiles"]}
    proven = {row["name"]: row["kind"] for row in listings()["a100-40gb"]["profiles"]}

    def by_kind(table: Table, names: dict[str, str]) -> set[frozenset[tuple[str, int, int]]]:
        return {frozenset((names[n], start, size) for n, start, size in found) for found in sets_of(table)}

    one, other = table_of(board_of(rows(model, without))), table_of(board_of(rows("a100-40gb", without)))
    assert by_kind(one, kinds) == by_kind(other, proven)


def test_the_first_small_instance_goes_where_it_costs_least() -> None:
    """Measured by V: any start but 4 and 5 on the basic board, and just those once double-memory 1g is on offer."""
    assert best_first_starts("basic", "1g.5gb") == {0, 1, 2, 3, 6}
    assert best_first_starts("double", "1g.5gb") == {4, 5}
    assert best_first_starts("basic", "3g.20gb") == {4}


def best_first_starts(name: str, profile: str) -> set[int]:
    table = table_of(board_of(rows(*VARIANTS[name])))
    sets = table.with_counts(((profile, 1),))
    return {found.starts[0] for found in sets if found.value == sets[0].value}


def test_a_listing_that_would_explode_is_refused() -> None:
    listed = {f"p{k:02}": {**rows("a30")["1g.6gb"], "profile_id": k, "placements": [[k, 1]]} for k in range(18)}
    with pytest.raises(ValueError, match="more than 200000 placement sets"):
        table_of(without_engines(listed))


def test_a_board_without_placements_has_just_the_empty_set() -> None:
    table = table_of(board_of({"1g.6gb": {**rows("a30")["1g.6gb"], "placements": []}}))
    assert [found.bits for found in table.sets] == [0]
    assert table.bits_of([GpuInstance("1g.6gb", Placement(0, 1))]) is None
