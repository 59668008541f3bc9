"""Tables as text: as wide as their cells, wrapped only between words, and every word of every cell there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from migd.cli.tables import GLUE, lines, without_blank

WORDS = st.text("abc×@.", min_size=1, max_size=12)
CELLS = st.lists(WORDS, max_size=5).map(" ".join)


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert lines(("GPU", "MODEL"), [("0–7", "A100"), ("8", "a longer name")]) == [
        "GPU  MODEL",
        "0–7  A100",
        "8    a longer name",
    ]


def test_a_table_too_wide_is_wrapped_between_words_the_widest_column_first() -> None:
    assert lines(("GPU", "FREE"), [("0", "7g.80gb 4g.40gb 2×3g.40gb")], 24) == [
        "GPU  FREE",
        "0    7g.80gb 4g.40gb",
        "     2×3g.40gb",
    ]


def test_a_glued_space_is_printed_plain_and_never_broken() -> None:
    assert lines(("MODEL",), [(f"NVIDIA{GLUE}A100 and more",)], 11) == ["MODEL", "NVIDIA A100", "and more"]


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=4), st.integers(1, 120))
def test_no_word_is_lost_or_broken_whatever_the_width(rows: list[tuple[str, str, str]], width: int) -> None:
    shown = lines(("A", "B", "C"), rows, width)
    assert sorted(" ".join(shown).split()) == sorted(" ".join(["A B C", *(" ".join(row) for row in rows)]).split())


@given(st.lists(st.tuples(CELLS, CELLS), max_size=4), st.integers(30, 120))
def test_a_table_whose_words_are_short_enough_fits(rows: list[tuple[str, str]], width: int) -> None:
    assert all(len(line) <= width for line in lines(("A", "B"), rows, width))


def test_only_columns_that_may_go_and_say_nothing_go() -> None:
    rows = [("0", "", "-"), ("1", "", "-")]
    assert without_blank(("GPU", "A", "B"), rows, "B") == (("GPU", "A"), [("0", ""), ("1", "")])
    assert without_blank(("GPU", "A", "B"), [*rows, ("2", "", "x")], "B")[0] == ("GPU", "A", "B")
