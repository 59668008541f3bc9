"""Plain tables for people, as text: as wide as their cells, wrapped between words where that is too wide. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

GAP: Final = 2
"""Spaces between two columns."""

GLUE: Final = "\u00a0"
"""A space at which a cell is never wrapped; it is printed as a plain one."""

Row = tuple[str, ...]


def lines(titles: Row, rows: Sequence[Row], width: int | None = None) -> list[str]:
    """The lines of a table with a head. width: of the reader's terminal, in characters; None: never wrap.

    A row has a cell for each title. Where the table is wider than `width`, the widest columns are narrowed first, and
    none below its longest word: a table of long words may stay too wide.
    """
    table = [titles, *rows]
    columns = range(len(titles))
    widths = [max(len(row[n]) for row in table) for n in columns]
    least = [max(len(word) for row in table for word in row[n].split(" ")) for n in columns]
    while width is not None and sum(widths) + GAP * (len(widths) - 1) > width:
        narrowed = max((n for n in columns if widths[n] > least[n]), key=lambda n: widths[n], default=None)
        if narrowed is None:
            break
        widths[narrowed] -= 1
    return [line for row in table for line in _wrapped(row, widths)]


def _wrapped(row: Row, widths: Sequence[int]) -> Iterable[str]:
    """One row as one or more lines."""
    cells = [
        textwrap.wrap(cell, max(width, 1), break_long_words=False, break_on_hyphens=False) or [""]
        for cell, width in zip(row, widths, strict=True)
    ]
    for at in range(max(map(len, cells))):
        parts = ((cell[at] if at < len(cell) else "").ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield (" " * GAP).join(parts).rstrip().replace(GLUE, " ")


def without_blank(titles: Row, rows: Sequence[Row], *dispensable: str) -> tuple[Row, list[Row]]:
    """A table without those of the columns `dispensable` that say nothing: all cells empty or "-"."""
    kept = [n for n, title in enumerate(titles) if title not in dispensable or any(r[n] not in ("", "-") for r in rows)]
    return tuple(titles[n] for n in kept), [tuple(row[n] for n in kept) for row in rows]
