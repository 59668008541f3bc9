"""Boards that no vendor has built: the planner knows only what a board reports, so it plans for these as well."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proof.judge import Judge

SLICES_MAX = 12
PLACES_MAX = 4
"""Of one profile; with at most four profiles a board has no more than a few thousand sets."""


@st.composite
def listings(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Rows as a driver might report them: any grid, any profiles, places anywhere, engines of all kinds."""
    slices = draw(st.integers(1, SLICES_MAX))
    listed = {}
    for k in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, slices))
        starts = draw(st.sets(st.integers(0, slices - size), min_size=1, max_size=PLACES_MAX))
        name = draw(st.sampled_from(["1g.5gb", "half", "9g.1gb+odd", "x"])) + f"-{k}"
        listed[name] = {
            "profile_id": draw(st.integers(0, 3)) + 4 * k,
            "compute_slices": 1,
            "memory_mib": 1_024,
            "count": draw(st.integers(1, 5)),
            "engines": draw(st.lists(st.integers(0, 3), min_size=5, max_size=5)),
            "placements": [[start, size] for start in sorted(starts)],
        }
    return listed


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), listings())
def test_any_board_is_planned_as_brute_force_would(data: st.DataObject, listed: dict[str, dict[str, Any]]) -> None:
    judge = Judge(listed)
    twin = judge.twin
    assert judge.board.engine_pool == twin.pool
    for _ in range(8):
        current = data.draw(st.sampled_from(twin.sets))
        busy = current & data.draw(st.integers(0, (1 << len(twin.places)) - 1))
        some = st.dictionaries(st.sampled_from(sorted(listed)), st.integers(1, 6), max_size=3)
        wish = data.draw(st.sampled_from(judge.demands) | some.map(lambda d: tuple(sorted(d.items()))))
        judge.check(busy, [current], wish)
