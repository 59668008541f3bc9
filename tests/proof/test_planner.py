"""The planner is right in every state of the boards in use: proven by comparing it with brute force.

For each set of instances, each part of it that may be in use, and each wish: what is in use stays untouched, a wish
is refused only where brute force finds no way and for the right reason, as few idle instances go as brute force
needs, and among those ways the one is taken that leaves the most room (V, then Phi, then lowest starts). Wishes are
every multiset that fits, and every single profile up to two more than fit. Names and memory do not enter, so what
holds for one 8-slice board holds for all with the same sets; `test_figures` compares those.

The board with everything on it has 47,375 states and 142 wishes: a seeded quarter of them, and all with --soak.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
from boards import DOUBLE, ME, rows
from proof.judge import Judge

BOARDS = {
    "basic": ("a100-40gb", ME + DOUBLE, 4_377, 4),
    "double": ("a100-40gb", ME, 11_593, 24),
    "media": ("a100-40gb", (), 47_375, 24),
    "a30": ("a30", ME, 123, 1),
    "a30-media": ("a30", (), 431, 1),
    "twelve": ("rtx-pro-6000-blackwell", (), 6_417, 16),
}
"""Name here -> model, kinds of profile left out, states, and in how many shares they are checked."""

SAMPLED = {"media": 4}
"""Board -> one in how many is checked."""


@lru_cache(maxsize=2)
def judge_of(name: str) -> Judge:
    model, without, _, _ = BOARDS[name]
    return Judge(rows(model, without))


@pytest.mark.parametrize("name", BOARDS)
def test_the_shares_hold_every_state_once(name: str) -> None:
    judge = judge_of(name)
    _, _, states, parts = BOARDS[name]
    seen = [(current, busy) for part in range(parts) for busy, found in judge.share(part, parts) for current in found]
    assert len(seen) == len(set(seen)) == states
    assert set(seen) == set(judge.twin.states())


@pytest.mark.parametrize(
    ("name", "part", "parts"), [(name, k, parts) for name, (_, _, _, parts) in BOARDS.items() for k in range(parts)]
)
def test_answers_are_what_brute_force_gives(name: str, part: int, parts: int, request: pytest.FixtureRequest) -> None:
    judge = judge_of(name)
    one_in = 1 if request.config.getoption("--soak", default=False) else SAMPLED.get(name, 1)
    compared = judge.check_share(part, parts, one_in)
    every = sum(len(states) for _, states in judge.share(part, parts)) * len(judge.demands)
    assert compared == every or (one_in > 1 and compared > 20_000)
