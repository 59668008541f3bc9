"""How much room is left on a GPU, and how badly it is scattered."""

from __future__ import annotations

from functools import lru_cache

from migd.mig.boards import Board
from migd.mig.geometry import Geometry, counts_of, occupied
from migd.mig.table import openness, table_of


def free(board: Board, geometry: Geometry) -> dict[str, int]:
    """How many more of each profile would fit beside what is there, each profile on its own, ascending by name.

    An instance that the board does not list, or a set it should not allow, leaves no room that could be promised: 0.
    """
    table = table_of(board)
    bits = table.bits_of(geometry)
    most = {p.name: 0 for p in board.profiles}
    if bits is None:
        return most
    there = dict(counts_of(geometry))
    for counts in table.around(bits):
        for name, number in counts:
            most[name] = max(most[name], number - there.get(name, 0))
    return most


def fragmentation(board: Board, geometry: Geometry) -> float:
    """F, from 0 (as open as any layout with so many free slices can be) to 1 (nothing fits where something could).

    F = 1 - Phi(occupied) / Phi(best mask with as many free slices), over the masks this board can really have.
    Instances that the board does not list can leave a mask more open than any of those; that is 0 as well.
    """
    mask = occupied(geometry)
    best = _best_openness(board).get(mask.bit_count(), 0)
    return max(0.0, 1 - openness(board, mask) / best) if best else 0.0


@lru_cache(maxsize=64)
def _best_openness(board: Board) -> dict[int, int]:
    best: dict[int, int] = {}
    for found in table_of(board).sets:
        taken = found.mask.bit_count()
        best[taken] = max(best.get(taken, 0), found.openness)
    return best
