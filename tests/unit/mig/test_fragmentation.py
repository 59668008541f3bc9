"""Room that is left: how many more of each profile fit, and how badly the free slices are scattered."""

from __future__ import annotations

import pytest
from boards import DOUBLE, ME, at, board, rows
from proof.twin import Twin

from migd.mig.boards import Board
from migd.mig.fragmentation import fragmentation, free
from migd.mig.geometry import EMPTY, GpuInstance, occupied
from migd.mig.profiles import Placement
from migd.mig.table import openness, table_of

BASIC = board("a100-40gb", ME + DOUBLE)


def test_hopper_has_as_much_left_as_the_listing_says() -> None:
    """B12 and h15: slices 0 to 5 are taken; the listing of a real 141 GB board says what is free."""
    h200 = board("h200")
    there = at(h200, "3g@0 2g@4")
    assert occupied(there) == 0b111111
    left = free(h200, there)
    listed = {"1g.18gb": 1, "1g.18gb+me": 1, "1g.35gb": 1, "2g.35gb": 0, "3g.71gb": 0}
    assert {name: left[name] for name in listed} == listed


def test_the_empty_board_has_all_it_can_have() -> None:
    """h15's totals: 7, 1, 4, 3, 2."""
    assert free(board("h200"), EMPTY) == {
        "1g.18gb": 7,
        "1g.18gb+me": 1,
        "1g.35gb": 4,
        "2g.35gb": 3,
        "3g.71gb": 2,
        "4g.71gb": 1,
        "7g.141gb": 1,
    }


def test_a_media_extension_is_used_up_by_the_first() -> None:
    assert free(board("h200"), at(board("h200"), "1g.18gb+me@0"))["1g.18gb+me"] == 0


def test_nothing_is_promised_beside_what_the_board_does_not_list() -> None:
    strange = frozenset({GpuInstance("6g.30gb", Placement(0, 6))})
    assert set(free(BASIC, strange).values()) == {0}
    assert set(free(board("a30"), at(board("a30"), "1g.6gb+me@0 1g.6gb+me@1")).values()) == {0}


@pytest.mark.parametrize(("model", "without"), [("a100-40gb", ME), ("a30", ())])
def test_what_fits_beside_every_set_is_what_brute_force_finds(model: str, without: tuple[str, ...]) -> None:
    twin, offered = Twin(rows(model, without)), board(model, without)
    for bits in twin.sets:
        there = frozenset(GpuInstance(name, Placement(start, size)) for name, start, size in twin.members(bits))
        more = [dict(twin.wish(bigger & ~bits)) for bigger in twin.around(bits)]
        assert free(offered, there) == {name: max(found.get(name, 0) for found in more) for name in sorted(twin.rows)}


@pytest.mark.parametrize(
    ("there", "figure"),
    [
        ("", 0),
        ("7g@0", 0),
        ("3g@0 3g@4", 0),
        ("1g@6", 0),  # Phi 22, and no other single 1g leaves more
        ("3g@4", 0),
        ("1g@4", 1 - 18 / 20),
        ("1g@0", 1 - 14 / 20),
        ("3g@0", 1 - 9 / 16),
        ("1g@0 1g@4", 1 - 7 / 17),
        ("2g@0 2g@4", 1 - 5 / 16),
        ("1g@0 1g@2 1g@4 1g@6", 1 - 3 / 16),
    ],
)
def test_f_of_known_layouts(there: str, figure: float) -> None:
    assert fragmentation(BASIC, at(BASIC, there)) == pytest.approx(figure)


@pytest.mark.parametrize("offered", [BASIC, board("a100-40gb"), board("a30"), board("rtx-pro-6000-blackwell")])
def test_f_lies_between_0_and_1_and_some_layout_of_each_fill_has_0(offered: Board) -> None:
    table = table_of(offered)
    lowest: dict[int, float] = {}
    for found in table.sets:
        figure = fragmentation(offered, table.geometry(found.bits))
        assert 0 <= figure <= 1
        taken = found.mask.bit_count()
        lowest[taken] = min(lowest.get(taken, 1), figure)
    assert set(lowest.values()) == {0}


def test_f_is_not_negative_where_the_board_lists_no_such_place() -> None:
    """A lone 1g at slice 7 would leave more open than any place that the board offers."""
    beyond = at(BASIC, "1g.5gb@7")
    assert openness(BASIC, occupied(beyond)) > max(
        openness(BASIC, occupied(at(BASIC, f"1g@{start}"))) for start in range(7)
    )
    assert fragmentation(BASIC, beyond) == 0
