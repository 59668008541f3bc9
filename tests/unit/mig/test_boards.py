"""Boards: built from what a GPU reports, in any order, with the engines that the reports imply."""

from __future__ import annotations

from dataclasses import replace

import pytest
from boards import ME, board, board_of, listings, rows

from migd.mig.boards import Board
from migd.mig.profiles import Engines


@pytest.mark.parametrize("model", [key for key, listed in listings().items() if listed["engine_pool"]])
def test_the_engine_pool_is_the_one_a_source_lists(model: str) -> None:
    assert board(model).engine_pool == tuple(listings()[model]["engine_pool"])


def test_nine_models_have_a_listed_engine_pool() -> None:
    assert sum(listed["engine_pool"] is not None for listed in listings().values()) == 9


def test_a_count_above_what_fits_does_not_enlarge_the_pool() -> None:
    """Drivers have reported 2 of a profile that has one place, and the pool must not double for it."""
    listed = rows("a30")
    listed["4g.24gb"] = {**listed["4g.24gb"], "count": 2}
    assert board_of(listed).engine_pool == board("a30").engine_pool == (4, 4, 0, 1, 1)


def test_a_profile_without_places_takes_no_part_in_the_pool() -> None:
    listed = rows("a30") | {
        "9g.99gb": {**rows("a30")["4g.24gb"], "profile_id": 9, "engines": [9] * 5, "placements": []}
    }
    assert board_of(listed).engine_pool == board("a30").engine_pool


def test_an_empty_board_is_a_board() -> None:
    assert Board(()).engine_pool == (0, 0, 0, 0, 0)
    assert Board(()).memory_slices == 0


@pytest.mark.parametrize(("model", "slices"), [("a100-40gb", 8), ("a30", 4), ("rtx-pro-6000-blackwell", 12)])
def test_memory_slices_are_read_off_the_places(model: str, slices: int) -> None:
    assert board(model).memory_slices == slices


def test_equal_reports_make_equal_boards_in_any_order() -> None:
    one = board("h200")
    other = Board.of(reversed(board("h200").profiles))
    assert one == other
    assert hash(one) == hash(other)
    assert one != board("h100-sxm-80gb")
    assert [p.name for p in other.profiles] == sorted(p.name for p in other.profiles)


def test_profiles_are_found_by_name_and_by_id() -> None:
    found = board("h200")
    assert found.profile("3g.71gb").profile_id == 9
    assert found.by_id(9) == found.profile("3g.71gb")
    assert found.by_id(99) is None
    assert found.offers("3g.71gb")
    assert not found.offers("3g.40gb")
    with pytest.raises(KeyError):
        found.profile("3g.40gb")


def test_a_name_or_an_id_twice_is_refused() -> None:
    first, second, *_ = board("a30", ME).profiles
    with pytest.raises(ValueError, match="unique"):
        Board.of([first, replace(second, name=first.name)])
    with pytest.raises(ValueError, match="unique"):
        Board.of([first, replace(second, profile_id=first.profile_id)])


def test_engines_come_in_a_fixed_order() -> None:
    assert Engines(copy=1, decoder=2, encoder=3, jpeg=4, ofa=5).kinds() == (1, 2, 3, 4, 5)
