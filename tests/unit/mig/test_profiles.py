"""Profile names and sizes: taken apart, matched within what drivers round, and chosen by memory."""

from __future__ import annotations

import pytest
from boards import DOUBLE, ME, board
from hypothesis import given
from hypothesis import strategies as st

from migd.mig.profiles import (
    Engines,
    Placement,
    Profile,
    ProfileName,
    match_name,
    nearest_names,
    smallest_enough,
)


def offered(*names: str) -> tuple[Profile, ...]:
    """Profiles with these names; the rest of them is of no interest here."""
    return tuple(Profile(name, k, 1, 1024, Engines(), 1, (Placement(0, 1),)) for k, name in enumerate(names))


def matches(wanted: str, *names: str) -> tuple[str, ...]:
    return tuple(p.name for p in match_name(wanted, offered(*names)))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1g.5gb", (1, 5, (), None)),
        ("7g.141gb", (7, 141, (), None)),
        ("1g.24gb+me", (1, 24, ("+me",), None)),
        ("1g.24gb-me", (1, 24, ("-me",), None)),
        ("2g.48gb+me.all", (2, 48, ("+me.all",), None)),
        ("4g.96gb+gfx", (4, 96, ("+gfx",), None)),
        ("1g.24gb+gfx+me", (1, 24, ("+gfx", "+me"), None)),
        ("1c.3g.20gb", (3, 20, (), 1)),
        ("1c.1g.10gb+me", (1, 10, ("+me",), 1)),
    ],
)
def test_a_name_is_taken_apart(text: str, parts: tuple[int, int, tuple[str, ...], int | None]) -> None:
    assert ProfileName.parse(text) == ProfileName(*parts)


NO_NAMES = (
    *("", "1g", "5gb", "1g5gb", "g.5gb", "0g.5gb", "01g.5gb", "1g.5", "1g.5GB", "1G.5gb", "1g.5gb+", "1g.5gb+ME"),
    *(" 1g.5gb", "1g.5gb ", "1g.5gb\n", "-1g.5gb", "1g.5.5gb", "1g.123456gb", "1000g.5gb", "MIG 1g.5gb"),
    "1g.\N{ARABIC-INDIC DIGIT FIVE}gb",
)


@pytest.mark.parametrize("text", NO_NAMES)
def test_what_is_no_name_is_not_taken_apart(text: str) -> None:
    assert ProfileName.parse(text) is None


@given(st.text(alphabet="0123456789gbcm.+-e al", max_size=20))
def test_taking_apart_never_fails(text: str) -> None:
    name = ProfileName.parse(text)
    assert name is None or name.compute_slices > 0


@pytest.mark.parametrize(
    ("wanted", "there", "same"),
    [
        ("7g.80gb", "7g.79gb", True),
        ("7g.79gb", "7g.80gb", True),
        ("3g.40gb", "3g.39gb", True),
        ("1g.34gb", "1g.35gb", True),  # one name of a B300 by driver
        ("1g.33gb", "1g.34gb", True),  # 1 is still within 3 % of 34
        ("1g.32gb", "1g.33gb", False),  # 3 % of 33 is less than 1
        ("1g.24gb", "1g.23gb", False),
        ("1g.6gb", "1g.5gb", False),
        ("7g.80gb", "7g.78gb", False),
        ("7g.141gb", "7g.143gb", False),  # within 3 %, but not within 1 GB
        ("7g.80gb", "4g.80gb", False),
        ("7g.80gb", "7g.79gb+me", False),
        ("7g.80gb+me", "7g.79gb", False),
        ("7g.80gb+me", "7g.79gb+me", True),
        ("7g.80gb+me", "7g.79gb-me", False),
        ("1c.7g.80gb", "7g.80gb", False),
        ("7g.80gb", "1c.7g.79gb", False),
        ("eighty", "7g.80gb", False),
    ],
)
def test_names_match_within_1_gb_and_3_percent(wanted: str, there: str, same: bool) -> None:
    assert matches(wanted, there) == ((there,) if same else ())


def test_the_exact_name_wins_over_a_near_one() -> None:
    assert matches("7g.80gb", "7g.79gb", "7g.80gb", "7g.81gb") == ("7g.80gb",)


def test_an_unclear_name_gives_all_it_may_mean() -> None:
    assert matches("7g.80gb", "7g.79gb", "7g.81gb", "7g.82gb") == ("7g.79gb", "7g.81gb")


def test_a_board_with_other_roundings_knows_its_profiles_by_the_usual_names() -> None:
    """B05: the driver says 79 and 39 where the plan says 80 and 40; the driver's own name comes back."""
    board = offered("1g.10gb", "2g.20gb", "3g.39gb", "4g.39gb", "7g.79gb")
    assert [p.name for p in match_name("7g.80gb", board)] == ["7g.79gb"]
    assert [p.name for p in match_name("3g.40gb", board)] == ["3g.39gb"]
    assert match_name("1g.5gb", board) == ()


def test_nearest_names_have_the_same_slices_first() -> None:
    """B13: somebody asks an 80 GB card for a profile of the 40 GB card."""
    names = board("a100-80gb").profiles
    assert nearest_names("1g.5gb", names) == ("1g.10gb", "1g.20gb", "2g.20gb")
    assert nearest_names("1g.5gb+me", names)[0] == "1g.10gb+me"
    assert nearest_names("7g.40gb", names)[0] == "7g.80gb"
    assert nearest_names("7g.40gb", names, most=1) == ("7g.80gb",)
    assert nearest_names("half of it", names) == ()


H14 = [(5_000, "1g.5gb"), (5_120, "1g.5gb"), (5_121, "2g.10gb"), (10_240, "2g.10gb"), (20_480, "3g.20gb")]


@pytest.mark.parametrize(
    ("need_mib", "name"), [*H14, (20_481, "7g.40gb"), (40_960, "7g.40gb"), (40_961, None), (0, "1g.5gb")]
)
def test_the_smallest_profile_that_is_large_enough(need_mib: int, name: str | None) -> None:
    """h14: a profile offers the GB of its name times 1024 MiB, and equal is enough."""
    found = smallest_enough(need_mib, board("a100-40gb", ME + DOUBLE).profiles)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("need_mib", "compute_slices", "name"),
    [
        (5_121, 1, "1g.10gb"),  # as much memory as 2g.10gb, and leaves more compute for others
        (5_121, 2, "2g.10gb"),
        (5_120, 3, "3g.20gb"),
        (5_120, 4, "4g.20gb"),
        (5_120, 5, "7g.40gb"),
        (5_120, 8, None),
    ],
)
def test_the_smallest_profile_with_compute_enough(need_mib: int, compute_slices: int, name: str | None) -> None:
    found = smallest_enough(need_mib, board("a100-40gb").profiles, compute_slices)
    assert (found and found.name) == name


def test_a_plain_profile_is_chosen_over_one_with_attributes() -> None:
    found = smallest_enough(24 * 1024, board("rtx-pro-6000-blackwell").profiles)
    assert found is not None
    assert found.name == "1g.24gb"


def test_a_profile_without_a_place_is_never_chosen() -> None:
    nowhere = Profile("1g.5gb", 19, 1, 4_864, Engines(), 7, ())
    found = smallest_enough(1, (nowhere, *offered("2g.10gb")))
    assert found is not None
    assert found.name == "2g.10gb"


def test_the_memory_of_an_odd_name_is_what_is_reported() -> None:
    assert Profile("whole", 0, 7, 40_192, Engines(), 1, ()).memory_gb == 40
    assert Profile("whole", 0, 7, 40_192, Engines(), 1, ()).memory_slices == 0
    assert Profile("7g.40gb", 0, 7, 1, Engines(), 1, ()).memory_gb == 40
    assert Profile("1g.5gb+me", 0, 1, 1, Engines(), 1, ()).attributes == ("+me",)


def test_a_placement_is_a_run_of_slices() -> None:
    place = Placement(4, 2)
    assert (place.end, place.mask, str(place)) == (6, 0b110000, "4:2")
