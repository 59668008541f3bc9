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
from boards import VARIANTS, rows
from proof.judge import Judge

STATES = {"basic": 4_377, "double": 11_593, "media": 47_375, "a30": 123, "a30-media": 431, "twelve": 6_417}

SHARES = {"basic": 4, "double": 24, "media": 24, "a30": 1, "a30-media": 1, "twelve": 16}
"""In how many tests the states of a board are checked, so that workers can share them."""

SAMPLED = {"media": 4}
"""Board -> one in how many is checked."""


@lru_cache(maxsize=2)
def judge_of(name: str) -> Judge:
    return Judge(rows(*VARIANTS[name]))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_shares_hold_every_state_once(name: str) -> None:
    judge = judge_of(name)
    parts = SHARES[name]
    seen = [(current, busy) for part in range(parts) for busy, found in judge.share(part, parts) for current in found]
    assert len(seen) == len(set(seen)) == STATES[name]
    assert set(seen) == set(judge.twin.states())


@pytest.mark.parametrize(
    ("name", "part", "parts"), [(name, part, parts) for name, parts in SHARES.items() for part in range(parts)]
)
def test_answers_are_what_brute_force_gives(name: str, part: int, parts: int, request: pytest.FixtureRequest) -> None:
    judge = judge_of(name)
    one_in = 1 if request.config.getoption("--soak", default=False) else SAMPLED.get(name, 1)
    compared = judge.check_share(part, parts, one_in)
    every = sum(len(states) for _, states in judge.share(part, parts)) * len(judge.demands)
    assert compared == every or (one_in > 1 and compared > 20_000)
