"""Prints many answers of the planner, each in full: run by `test_determinism` under different hash seeds."""

from __future__ import annotations

import random

from boards import board

from migd.mig.boards import Board
from migd.mig.evicting import Occupied, fewest
from migd.mig.fragmentation import fragmentation, free
from migd.mig.geometry import Geometry, by_start, counts, summary
from migd.mig.profiles import nearest_names
from migd.mig.table import table_of
from migd.mig.transition import Refusal, transition

CASES = 150
"""How many random states of each board are asked for."""


def answers(board: Board, seed: str) -> str:
    """Answers to the same random questions for the same seed, as text."""
    dice = random.Random(seed)
    table, lines = table_of(board), []
    for _ in range(CASES):
        current = table.geometry(dice.choice(table.sets).bits)
        busy: Geometry = frozenset(i for i in by_start(current) if dice.random() < 0.4)
        wanted = dice.choice(table.multisets()) if dice.random() < 0.6 else _any_counts(board, dice)
        found = transition(board, current, busy, wanted)
        if isinstance(found, Refusal):
            lines.append(repr(found))
        else:
            lines.append(repr((by_start(found.target), found.keep, found.destroy, found.create)))
        lines.append(f"{summary(current)} {free(board, current)} {fragmentation(board, current)!r}")
    lines += [_who_goes(board, dice) for _ in range(CASES)]
    lines += [repr(nearest_names(name, board.profiles)) for name in ("1g.7gb", "3g.30gb+me", "4g.4gb")]
    return "\n".join(lines)


def _who_goes(board: Board, dice: random.Random) -> str:
    """The evictions from a node of three such GPUs with pods across them."""
    table, node = table_of(board), []
    for _ in range(3):
        there = table.members(dice.choice(table.sets).bits)
        held = tuple((i, frozenset(dice.choices("abcdefgh", k=dice.randint(1, 2)))) for i in there)
        node.append(Occupied(board, frozenset(there), dice.choice(table.multisets()), frozenset(), held))
    found = fewest(node)
    return repr((sorted(found.pods), [freed and by_start(freed) for freed in found.freed], found.destroyed))


def _any_counts(board: Board, dice: random.Random) -> tuple[tuple[str, int], ...]:
    return counts({p.name: dice.choice((0, 0, 0, 1, 2, 3)) for p in board.profiles})


if __name__ == "__main__":
    for key in ("a100-40gb", "a30", "rtx-pro-6000-blackwell"):
        print(answers(board(key), key))  # noqa: T201
