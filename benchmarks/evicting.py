"""How long it takes to find who must go from a node: random nodes next to brute force, and nodes made to be hard."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Final

from boards import VARIANTS, board_of, rows
from proof.drains import brute, some_node, twin_of
from proof.judge import occupied

from benchmarks.measuring import each
from benchmarks.planning import SEED, Planning
from migd.mig.evicting import Occupied, fewest
from migd.mig.table import table_of

GPUS: Final = 8
"""Of a hard node; each is cut into seven."""

HARD: Final = {"pods of two": (2, 1), "pods of 1 to 8": (0, 1), "pods of three, two on each": (3, 2)}
"""What a hard node is called -> how many instances, on any GPU, each pod has (0: any number), and pods an instance."""


def evicting(nodes: int, asked: int) -> Iterator[Planning]:
    """nodes: of each kind; asked: how many of the random ones brute force gets."""
    dice = random.Random(f"{SEED} evicting")
    some = [some_node(dice) for _ in range(nodes)]
    seen = [[occupied(gpu) for gpu in node] for node in some]
    for gpu in (gpu for node in some for gpu in node):  # both sides know every layout, and which is better
        table_of(occupied(gpu).board)
        twin_of(gpu.kind).ranked(gpu.wish or ())
    ours, answers = each([partial(fewest, node) for node in seen])
    theirs_took, theirs = each([partial(brute, node) for node in some[:asked]])
    for mine, other in zip(answers, theirs, strict=False):
        assert mine.proven, "a small node was given up on"
        assert mine.pods == other.pods, "the planner and brute force differ"
    yield Planning("evictions", "1 to 4 GPUs", ours, theirs_took, theirs_took.p50_s / ours.p50_s, len(theirs))
    for what, (instances, shared) in HARD.items():
        hard = [hard_node(dice, instances, shared) for _ in range(max(2, nodes // 100))]
        took, found = each([partial(fewest, node) for node in hard])
        assert all(one.proven for one in found), "a hard node was given up on"
        yield Planning(f"evictions, {what}", f"{GPUS} GPUs", took, None, None, 0)


def hard_node(dice: random.Random, instances: int, shared: int) -> list[Occupied]:
    """GPUs with seven small instances, of which a few may stay, and pods on any of all of them."""
    board = board_of(rows(*VARIANTS["basic"]))
    table = table_of(board)
    (name, most), *_ = max(table.multisets(), key=lambda wish: (len(wish) == 1, wish[0][1] if wish else 0))
    there = sorted(table.geometry(table.with_counts(((name, most),))[0].bits))
    places = [(gpu, instance) for gpu in range(GPUS) for instance in there] * shared
    dice.shuffle(places)
    held: dict[tuple[int, object], frozenset[str]] = {}
    pod = 0
    while places:
        size = instances or dice.randint(1, 8)
        for place in places[:size]:
            held[place] = held.get(place, frozenset()) | {f"pod-{pod}"}
        places, pod = places[size:], pod + 1
    return [
        Occupied(
            board,
            frozenset(there),
            ((name, dice.randint(2, most - 1)),),
            frozenset(),
            tuple((instance, held[gpu, instance]) for instance in there),
        )
        for gpu in range(GPUS)
    ]
