"""The planner is right in every state of the boards in use: proven by comparing it with brute force.

For each set of instances, each part of it that may be in use, and each wish: what is in use stays untouched, a wish
is refused only where brute force finds no way and for the right reason, as few idle instances go as brute force
needs, and among those ways the one is taken that leaves the most room (V, then Phi, then lowest starts). Wishes are
every multiset that fits, and every single profile up to two more than fit. Names and memory do not enter, so what
holds for one 8-slice board holds for all that list the same placements and engines; `test_figures` compares them.
"""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
from boards import DOUBLE, ME, rows
from proof.judge import Judge

BOARDS = {
    "basic": ("a100-40gb", ME + DOUBLE),
    "double": ("a100-40gb", ME),
    "media": ("a100-40gb", ()),
    "a30": ("a30", ME),
    "a30-media": ("a30", ()),
    "twelve": ("rtx-pro-6000-blackwell", ()),
}
"""Name here -> model, and the kinds of profile left out."""

WHOLE = {"basic": (4_377, 4), "double": (11_593, 24), "a30": (123, 1), "a30-media": (431, 1)}
"""Board -> its states, and in how many shares they are checked."""

SAMPLED = {"media": (47_375, 8), "twelve": (6_417, 4)}

SAMPLE = 4_000
"""Pairs of state and wish that one share of a sample takes."""


@lru_cache(maxsize=2)
def judge_of(name: str) -> Judge:
    model, without = BOARDS[name]
    return Judge(rows(model, without))


@pytest.mark.parametrize(("name", "states"), [(n, s) for n, (s, _) in (WHOLE | SAMPLED).items()])
def test_the_shares_hold_every_state_once(name: str, states: int) -> None:
    judge = judge_of(name)
    parts = (WHOLE | SAMPLED)[name][1]
    seen = [
        (current, busy) for part in range(parts) for busy, found in judge.busy_parts(part, parts) for current in found
    ]
    assert len(seen) == len(set(seen)) == states
    assert set(seen) == set(judge.twin.states())


@pytest.mark.parametrize(
    ("name", "part", "parts"), [(name, part, parts) for name, (_, parts) in WHOLE.items() for part in range(parts)]
)
def test_every_answer_is_what_brute_force_gives(name: str, part: int, parts: int) -> None:
    judge = judge_of(name)
    states = sum(len(found) for _, found in judge.busy_parts(part, parts))
    assert judge.check_all(part, parts) == states * len(judge.demands) > 0


@pytest.mark.parametrize(
    ("name", "part", "parts"), [(name, part, parts) for name, (_, parts) in SAMPLED.items() for part in range(parts)]
)
def test_sampled_answers_are_what_brute_force_gives(name: str, part: int, parts: int) -> None:
    judge = judge_of(name)
    dice = random.Random(f"{name} {part}")
    states = [(current, busy) for busy, found in judge.busy_parts(part, parts) for current in found]
    for _ in range(SAMPLE):
        current, busy = dice.choice(states)
        judge.check(busy, [current], dice.choice(judge.demands))
