"""The twin itself: its sets are those of the power set of all places, and its rules refuse what hardware refuses."""

from __future__ import annotations

import pytest
from boards import DOUBLE, ME, rows
from proof.twin import Twin, overlapping, submasks


@pytest.mark.parametrize(
    ("model", "without"), [("a30", ME), ("a30", ()), ("a100-40gb", ME + DOUBLE), ("h200", ME + DOUBLE)]
)
def test_the_twin_misses_no_subset_of_all_places(model: str, without: tuple[str, ...]) -> None:
    twin = Twin(rows(model, without))
    lawful = {bits for bits in range(1 << len(twin.places)) if twin.lawful(twin.members(bits))}
    assert lawful == set(twin.sets)
    assert len(lawful) == len(twin.sets)


def test_neighbours_do_not_overlap_and_a_shared_slice_does() -> None:
    assert not overlapping((("a", 0, 4), ("b", 4, 2), ("c", 6, 1)))
    assert overlapping((("a", 0, 4), ("b", 4, 2), ("c", 5, 1)))
    assert overlapping((("a", 0, 8), ("b", 3, 1)))


def test_two_wide_profiles_and_a_narrow_one_are_no_set() -> None:
    twin = Twin(rows("a100-40gb"))
    assert (("3g.20gb", 2),) in twin.by_wish
    assert (("1g.5gb", 1), ("3g.20gb", 2)) not in twin.by_wish


def test_engines_limit_what_the_places_allow() -> None:
    free, pooled = Twin(rows("rtx-pro-6000-blackwell"), pooled=False), Twin(rows("rtx-pro-6000-blackwell"))
    wish = (("1g.24gb", 1), ("1g.24gb+me.all", 1))  # the second takes every decoder, encoder and JPEG engine
    assert wish in free.by_wish
    assert wish not in pooled.by_wish
    assert (("1g.24gb+me.all", 1), ("1g.24gb-me", 3)) in pooled.by_wish


def test_parts_of_a_set_are_all_its_subsets() -> None:
    assert sorted(submasks(0b1011)) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert list(submasks(0)) == [0]
