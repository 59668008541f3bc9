"""The transition in cases people met: what stays, what goes, where the new instances lie."""

from __future__ import annotations

import pytest
from boards import DOUBLE, ME, at, board, board_of, listings, rows

from migd.mig.boards import Board
from migd.mig.geometry import EMPTY, GpuInstance, by_start, counts
from migd.mig.profiles import Placement, match_name, nearest_names
from migd.mig.table import table_of
from migd.mig.transition import Refusal, Transition, fit, transition

A100 = board("a100-40gb")
A100_80 = board("a100-80gb")
BASIC = board("a100-40gb", ME + DOUBLE)


def way(board: Board, current: str, busy: str, wanted: dict[str, int]) -> Transition:
    found = transition(board, at(board, current), at(board, busy), counts(wanted))
    assert isinstance(found, Transition), found
    return found


def refused(board: Board, current: str, busy: str, wanted: dict[str, int]) -> Refusal:
    found = transition(board, at(board, current), at(board, busy), counts(wanted))
    assert isinstance(found, Refusal), found
    return found


def fits(board: Board, wanted: dict[str, int]) -> bool:
    return not isinstance(fit(board, counts(wanted)), Refusal)


def test_a_mix_is_placed_where_all_of_it_fits() -> None:
    """B01: small first and large first both fail with this mix when the places are chosen one by one."""
    found = way(A100, "", "", {"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2})
    assert found.target == at(A100, "3g@4 2g@0 1g@2 1g@3")
    assert found.create == by_start(found.target)
    assert found.keep == found.destroy == ()


def test_two_halves_and_a_seventh_are_refused_before_anything_is_touched() -> None:
    """B03: seven compute slices by count, and no memory slice left; three pods run, and they are not the reason."""
    found = refused(A100_80, "3g@0 2g@4 1g@6", "3g@0 2g@4 1g@6", {"3g.40gb": 2, "1g.10gb": 1})
    assert found.reason == "Infeasible"
    assert found.left_over == (("1g.10gb", 1),)
    assert "2×3g.40gb" in found.message
    assert "1g.10gb" in found.message
    assert found.nearest[0] == (("3g.40gb", 2),)
    assert fits(A100_80, {"2g.20gb": 3, "1g.10gb": 1})


def test_a_board_offers_what_it_lists_and_nothing_else() -> None:
    """B07: a GB200 that lists 1g.23gb is not asked for 1g.24gb, and needs no table of ours."""
    gb200 = board("gb200")
    assert match_name("1g.24gb", gb200.profiles) == ()
    assert nearest_names("1g.24gb", gb200.profiles) == ("1g.23gb", "1g.47gb", "2g.47gb")
    with pytest.raises(ValueError, match=r"1g\.24gb is not a profile of this board"):
        fit(gb200, (("1g.24gb", 7),))
    assert fits(gb200, {"1g.23gb": 7})
    assert fits(gb200, {"1g.23gb": 6, "1g.23gb+me": 1})
    assert not fits(gb200, {"1g.23gb": 8})


def test_hopper_takes_and_refuses_what_the_listing_says() -> None:
    """h15: what a real 141 GB board must take and refuse when it is empty."""
    h200 = board("h200")
    assert not fits(h200, {"3g.71gb": 2, "1g.18gb": 1})
    assert fits(h200, {"3g.71gb": 2})
    assert fits(h200, {"1g.35gb": 4})
    assert fits(h200, {"1g.35gb": 3, "1g.18gb": 1})
    assert fits(h200, {"1g.18gb": 7})


@pytest.mark.parametrize("model", [key for key, listed in listings().items() if len(listed["profiles"]) == 7])
def test_two_halves_and_a_seventh_fit_on_no_eight_slice_board(model: str) -> None:
    names = {row["kind"]: row["name"] for row in listings()[model]["profiles"]}
    assert fits(board(model), {names["3_SLICE"]: 2})
    assert not fits(board(model), {names["3_SLICE"]: 2, names["1_SLICE"]: 1})


def test_an_instance_in_use_stays_where_it_is_and_the_rest_is_built_around_it() -> None:
    """B27: the old and the new layout share an instance in use; the idle one that serves as well stays too."""
    found = way(A100, "3g@4 2g@0 1g@2 1g@3", "1g@3", {"1g.5gb": 7})
    assert found.keep == by_start(at(A100, "1g@2 1g@3"))
    assert found.destroy == by_start(at(A100, "2g@0 3g@4"))
    assert found.create == by_start(at(A100, "1g@0 1g@1 1g@4 1g@5 1g@6"))


def test_a_set_wanted_as_one_lies_on_one_gpu() -> None:
    """B105 and h12."""
    h100 = board("h100-pcie-80gb")
    assert fit(h100, counts({"4g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1})) == at(h100, "4g@0 2g@4 1g@6")


def test_slices_counted_are_not_slices_that_fit() -> None:
    """B108: 8 memory slices and 7 compute slices; a sum proves nothing."""
    assert refused(A100, "3g@0 3g@4", "", {"3g.20gb": 2, "1g.5gb": 1}).reason == "Infeasible"
    assert fits(A100, {"4g.20gb": 1, "3g.20gb": 1})
    assert fits(A100, {"1g.5gb": 7})
    assert refused(A100, "", "", {"1g.5gb": 7, "1g.10gb": 1}).reason == "Infeasible"


def test_one_media_extension_fits_on_a_gpu_and_not_two() -> None:
    assert fits(A100, {"1g.5gb": 6, "1g.5gb+me": 1})
    assert not fits(A100, {"1g.5gb": 5, "1g.5gb+me": 2})
    assert not fits(board("a30"), {"1g.6gb+me": 1, "2g.12gb+me": 1})


def test_all_media_engines_leave_only_neighbours_without_any() -> None:
    rtx = board("rtx-pro-6000-blackwell")
    assert fits(rtx, {"1g.24gb+me.all": 1, "1g.24gb-me": 3})
    assert fits(rtx, {"2g.48gb+me.all": 1, "2g.48gb-me": 1})
    assert not fits(rtx, {"1g.24gb+me.all": 1, "1g.24gb": 1})
    assert not fits(rtx, {"2g.48gb+me.all": 1, "1g.24gb+gfx": 1})


def test_nothing_to_do_is_no_step() -> None:
    found = way(A100, "3g@0 1g@5", "", {"3g.20gb": 1, "1g.5gb": 1})
    assert found.target == at(A100, "3g@0 1g@5")
    assert found.destroy == found.create == ()


def test_idle_instances_are_not_moved_to_a_better_place() -> None:
    """Fewest destroyed goes before least fragmentation: 1g@0 blocks the better half and stays all the same."""
    assert way(BASIC, "1g@0", "", {"1g.5gb": 1, "2g.10gb": 1}).keep == by_start(at(BASIC, "1g@0"))


def test_only_the_idle_instances_that_must_go_are_destroyed() -> None:
    found = way(BASIC, "3g@0 1g@4 1g@5 1g@6", "", {"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 1})
    assert found.keep == by_start(at(BASIC, "3g@0 1g@6"))
    assert found.destroy == by_start(at(BASIC, "1g@4 1g@5"))
    assert found.create == by_start(at(BASIC, "2g@4"))


def test_the_worked_example_of_the_docs() -> None:
    """docs/planning.md: what stays decides first, then what is destroyed, then V and Phi."""
    table = table_of(BASIC)
    wanted = counts({"1g.5gb": 2, "2g.10gb": 1})
    there, held = at(BASIC, "2g@0 1g@3 3g@4"), at(BASIC, "1g@3")
    ways = [(table.geometry(found.bits), found) for found in table.with_counts(wanted)]
    around = {(target - held): (len(there - target), s.value, s.openness) for target, s in ways if held <= target}
    assert len(ways) == 30
    assert around == {
        at(BASIC, "2g@0 1g@2"): (1, 8, 9),
        at(BASIC, "2g@0 1g@6"): (1, 7, 5),
        at(BASIC, "2g@0 1g@4"): (1, 4, 3),
        at(BASIC, "2g@0 1g@5"): (1, 4, 3),
        at(BASIC, "2g@4 1g@2"): (2, 7, 5),
        at(BASIC, "2g@4 1g@6"): (2, 7, 5),
        at(BASIC, "2g@4 1g@0"): (2, 4, 3),
        at(BASIC, "2g@4 1g@1"): (2, 4, 3),
    }
    found = way(BASIC, "2g@0 1g@3 3g@4", "1g@3", dict(wanted))
    assert (found.destroy, found.create) == (by_start(at(BASIC, "3g@4")), by_start(at(BASIC, "1g@2")))


def test_emptying_destroys_all_that_is_idle() -> None:
    found = way(A100, "3g@4 2g@0 1g@2 1g@3", "", {})
    assert found.target == EMPTY
    assert found.destroy == by_start(at(A100, "3g@4 2g@0 1g@2 1g@3"))


def test_an_idle_instance_that_the_board_does_not_list_is_removed() -> None:
    strange = GpuInstance("6g.30gb", Placement(0, 6))
    found = transition(A100, frozenset({strange}), EMPTY, counts({"3g.20gb": 1}))
    assert isinstance(found, Transition)
    assert found.destroy == (strange,)
    assert strange not in found.target


def test_a_known_profile_at_an_unlisted_place_is_removed_when_idle() -> None:
    found = transition(A100, at(A100, "1g.5gb@7 3g@4"), EMPTY, counts({"1g.5gb": 1}))
    assert isinstance(found, Transition)
    assert GpuInstance("1g.5gb", Placement(7, 1)) in found.destroy


def test_a_set_that_the_engines_should_not_allow_is_still_led_to_the_wish() -> None:
    """What exists is a fact, also where the inferred engine pool says it cannot be."""
    found = way(A100, "1g.5gb+me@0 1g.5gb+me@1", "", {"1g.5gb+me": 1, "3g.20gb": 1})
    assert len(found.destroy) == 1
    assert refused(A100, "1g.5gb+me@0 1g.5gb+me@1", "1g.5gb+me@0 1g.5gb+me@1", {"1g.5gb+me": 1}).reason == "InUse"


def test_fit_places_around_what_stays() -> None:
    staying = at(A100, "1g@3")
    found = fit(A100, counts({"1g.5gb": 2, "3g.20gb": 1}), staying)
    assert not isinstance(found, Refusal)
    assert staying < found
    assert at(A100, "3g@4") < found


def test_a_wish_written_out_of_order_is_a_bug_of_the_caller() -> None:
    for wish in ((("3g.20gb", 1), ("1g.5gb", 1)), (("1g.5gb", 0),), (("1g.5gb", 1), ("1g.5gb", 1))):
        with pytest.raises(AssertionError, match="ascending"):
            transition(A100, EMPTY, EMPTY, wish)


def test_what_is_busy_must_exist() -> None:
    with pytest.raises(AssertionError, match="exist"):
        transition(A100, EMPTY, at(A100, "1g@0"), ())


def test_a_board_with_nothing_on_offer_can_only_be_empty() -> None:
    nothing = Board(())
    assert isinstance(transition(nothing, EMPTY, EMPTY, ()), Transition)


def test_a_count_that_the_driver_limits_is_kept() -> None:
    """The reported count is a limit of its own, also where more places are free."""
    listed = rows("a100-40gb", ME + DOUBLE)
    listed["1g.5gb"] = {**listed["1g.5gb"], "count": 2}
    assert fits(board_of(listed), {"1g.5gb": 2})
    assert not fits(board_of(listed), {"1g.5gb": 3})
