"""Refusals: they name what is left over, who is in the way, and what would fit; ready to be shown to a person."""

from __future__ import annotations

from boards import DOUBLE, ME, at, board

from migd.mig.geometry import EMPTY, Geometry, GpuInstance, by_start, counts
from migd.mig.profiles import Placement
from migd.mig.transition import NEAREST_MAX, Refusal, say, transition

BASIC = board("a100-40gb", ME + DOUBLE)


def refused(current: Geometry, busy: Geometry, wanted: dict[str, int]) -> Refusal:
    found = transition(BASIC, current, busy, counts(wanted))
    assert isinstance(found, Refusal)
    return found


def in_use(there: str, wanted: dict[str, int]) -> Refusal:
    return refused(at(BASIC, there), at(BASIC, there), wanted)


def test_infeasible_says_what_is_left_over_and_what_fits() -> None:
    assert refused(EMPTY, EMPTY, {"3g.20gb": 2, "1g.5gb": 1}) == Refusal(
        "Infeasible",
        "2×3g.20gb + 1g.5gb does not fit on this GPU: no place is left for 1g.5gb. "
        "Nearest that fits: 2×3g.20gb or 3g.20gb + 1g.5gb or 3g.20gb + 2×1g.5gb.",
        left_over=(("1g.5gb", 1),),
        nearest=(
            (("3g.20gb", 2),),
            (("1g.5gb", 1), ("3g.20gb", 1)),
            (("1g.5gb", 2), ("3g.20gb", 1)),
        ),
    )


def test_what_is_left_over_is_as_little_memory_as_can_be() -> None:
    assert refused(EMPTY, EMPTY, {"1g.5gb": 9}).left_over == (("1g.5gb", 2),)
    assert refused(EMPTY, EMPTY, {"7g.40gb": 1, "1g.5gb": 7}).left_over == (("1g.5gb", 7),)
    assert refused(EMPTY, EMPTY, {"4g.20gb": 2, "3g.20gb": 1}).left_over == (("4g.20gb", 1),)


def test_what_is_in_use_is_never_the_reason_where_the_board_is() -> None:
    found = refused(at(BASIC, "7g@0"), at(BASIC, "7g@0"), {"1g.5gb": 8})
    assert found.reason == "Infeasible"
    assert found.blocked_by == ()
    assert found.nearest[0] == (("1g.5gb", 7),)


def test_in_use_names_who_is_in_the_way_and_what_fits_around() -> None:
    found = in_use("3g@0 2g@4", {"7g.40gb": 1})
    assert found.reason == "InUse"
    assert found.blocked_by == by_start(at(BASIC, "3g@0 2g@4"))
    assert found.message.startswith(
        "3g.20gb@0, 2g.10gb@4 are in use and have to go before this GPU can be cut into 7g.40gb. "
    )
    assert found.nearest[0] == (("2g.10gb", 1), ("3g.20gb", 1))
    assert found.left_over == (("7g.40gb", 1),)


def test_only_those_in_the_way_are_named() -> None:
    """2g@2 lies where 4g would, and 1g@6 is part of the wish; of two 1g, one in each half, either may go."""
    assert in_use("2g@2 1g@6", {"4g.20gb": 1, "2g.10gb": 1, "1g.5gb": 1}).blocked_by == by_start(at(BASIC, "2g@2"))
    assert in_use("1g@0 1g@5", {"1g.5gb": 1, "3g.20gb": 1}).blocked_by == by_start(at(BASIC, "1g@0"))


def test_idle_instances_are_not_in_the_way() -> None:
    found = refused(at(BASIC, "3g@0 1g@4"), at(BASIC, "1g@4"), {"7g.40gb": 1})
    assert found.blocked_by == by_start(at(BASIC, "1g@4"))


def test_the_narrowest_of_equally_many_is_named() -> None:
    """Each is in the way of 3g in its half, and the other may stay."""
    wanted = {"1g.5gb": 1, "2g.10gb": 1, "3g.20gb": 1}
    assert in_use("1g@3 2g@4", wanted).blocked_by == by_start(at(BASIC, "1g@3"))
    assert in_use("2g@2 1g@6", wanted).blocked_by == by_start(at(BASIC, "1g@6"))


def test_an_instance_that_must_only_go_is_not_said_to_be_in_the_way_of_another() -> None:
    found = in_use("2g@0", {"1g.5gb": 1})
    assert found.left_over == ()
    assert found.message.startswith("2g.10gb@0 is in use and has to go before this GPU can be cut into 1g.5gb. ")
    assert in_use("2g@0", {}).message.startswith("2g.10gb@0 is in use and has to go before this GPU can be emptied. ")


def test_what_the_board_does_not_list_blocks_when_busy_and_offers_nothing_instead() -> None:
    strange = GpuInstance("6g.30gb", Placement(0, 6))
    there = at(BASIC, "1g@6") | {strange}
    found = refused(there, there, {"2g.10gb": 1, "1g.5gb": 1})
    assert found.reason == "InUse"
    assert found.blocked_by == (strange,)
    assert found.nearest == ()
    assert "6g.30gb@0 is in use" in found.message
    assert "Nearest" not in found.message


def test_no_more_layouts_are_offered_than_a_person_reads() -> None:
    assert len(refused(EMPTY, EMPTY, {"1g.5gb": 8}).nearest) == NEAREST_MAX == 3
    assert in_use("7g@0", {"1g.5gb": 7}).nearest == ((("7g.40gb", 1),),)


def test_counts_are_said_as_people_write_them() -> None:
    assert say((("1g.5gb", 1), ("3g.20gb", 2))) == "2×3g.20gb + 1g.5gb"
    assert say(()) == "nothing"
