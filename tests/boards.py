"""Boards for tests, from listings that real drivers gave; which listing says what is in data/boards.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from migd.mig.boards import Board
from migd.mig.geometry import Geometry, GpuInstance
from migd.mig.profiles import Engines, Placement, Profile

ME = ("1_SLICE_REV1", "2_SLICE_REV1")
"""The media-extension profiles of an 8-slice board and an A30: at most one instance a GPU."""

DOUBLE = ("1_SLICE_REV2",)
"""The 1g profile with twice the memory of an 8-slice board."""

VARIANTS = {
    "basic": ("a100-40gb", ME + DOUBLE),
    "double": ("a100-40gb", ME),
    "media": ("a100-40gb", ()),
    "a30": ("a30", ME),
    "a30-media": ("a30", ()),
    "twelve": ("rtx-pro-6000-blackwell", ()),
}
"""The boards of the proof and of docs/planning.md: name in tests -> arguments of `rows` and `board`."""


@lru_cache(maxsize=1)
def listings() -> dict[str, dict[str, Any]]:
    """Key of the model -> its name, its engine pool (None where no source lists one) and its profiles as reported."""
    found: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "boards.json").read_text())
    return found


def rows(key: str, without: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Profile name -> its reported row, as plain data; without the kinds named."""
    return {row["name"]: row for row in listings()[key]["profiles"] if row["kind"] not in without}


def board_of(listed: Mapping[str, Mapping[str, Any]]) -> Board:
    """A Board from plain rows as `rows` gives them."""
    return Board.of(
        Profile(
            name,
            row["profile_id"],
            row["compute_slices"],
            row["memory_mib"],
            Engines(*row["engines"]),
            row["count"],
            tuple(Placement(start, size) for start, size in row["placements"]),
        )
        for name, row in listed.items()
    )


def board(key: str, without: tuple[str, ...] = ()) -> Board:
    """The Board of a model by its key, without the kinds named."""
    return board_of(rows(key, without))


def at(board: Board, text: str) -> Geometry:
    """A geometry in short: "3g@4 1g@2", or with whole names; "3g" is the narrowest plain profile that begins so.

    A whole name is taken with its profile's width, also where the board has no such place.
    """
    return frozenset(_instance(board, *item.split("@")) for item in text.split())


def _instance(board: Board, name: str, start: str) -> GpuInstance:
    if not board.offers(name):
        plain = [p for p in board.profiles if p.name.startswith(name + ".") and not p.attributes]
        name = min(plain, key=lambda p: (p.memory_slices, p.name)).name
    return GpuInstance(name, Placement(int(start), board.profile(name).memory_slices))
