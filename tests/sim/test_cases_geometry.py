"""Situations of geometry and placement from public reports, through the whole agent on simulated hardware.

Left out: what labels and status publish of a name (B05), and time-slicing on a board without MIG (B13): both come with
the cluster. What a plan alone decides is in tests/unit/plans/test_cases.py.
"""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest
from staging import OFF, apply, changes, compute_counts, cut, gpu, places, wish, world_of
from worlds import orphans, serials

from migd.mig.geometry import counts, counts_of
from migd.mig.table import table_of
from migd.plans.rendering import gpus_json
from migd.sim.catalog import models
from migd.sim.switches import PLACEMENTS

CAPABLE = [key for key, model in models().items() if model.mig]
EIGHT_SLICES = [key for key in CAPABLE if models()[key].memory_slices == 8]
H15 = json.loads((Path(__file__).parents[1] / "data" / "h15-hopper141-free-counts.json").read_text())


def named(key: str, *slices: str) -> list[str]:
    """A model's own names of plain profiles: "3g" by its slices, "1g2" is the 1g with twice the memory."""
    plain = sorted(
        (p for p in models()[key].profiles if "+" not in p.name and "-" not in p.name), key=lambda p: p.places[0].size
    )
    found = []
    for wanted in slices:
        of_slices = [p.name for p in plain if p.name.startswith(wanted[:2])]
        found.append(of_slices[1 if wanted.endswith("2") else 0])
    return found


# --- B01 ---


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("key", EIGHT_SLICES)
def test_a_valid_mix_is_created_whole_wherever_the_driver_would_have_put_it(key: str, placement: str) -> None:
    """B01."""
    three, two, one = named(key, "3g", "2g", "1g")
    world = world_of(key, placement=placement)
    assert apply(world, wish({one: 2, two: 1, three: 1}))[0].phase == "Ready"
    assert counts_of(gpu(world).geometry) == counts({one: 2, two: 1, three: 1})
    assert orphans(world.seen()) == []


@pytest.mark.parametrize("order", list(permutations(("3g.20gb", "2g.10gb", "1g.5gb"))))
def test_the_order_in_which_profiles_are_written_changes_nothing(order: tuple[str, ...]) -> None:
    """B01."""
    world = world_of("a100-40gb", placement="mixed-high")
    numbers = {"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2}
    assert apply(world, wish({name: numbers[name] for name in order}))[0].phase == "Ready"
    assert places(gpu(world)) == "2g.10gb@0 1g.5gb@2 1g.5gb@3 3g.20gb@4"


@pytest.mark.parametrize("placement", ["least-loss", "adversarial"])
@pytest.mark.parametrize("key", ["a100-40gb", "a30", "h200", "rtx-pro-6000-blackwell"])
def test_every_multiset_that_fits_is_created_whole(key: str, placement: str) -> None:
    """B01: not the one example, but each multiset a board can hold (a spread sample of them)."""
    world = world_of(key, placement=placement, duration_scale=0)
    world.host.log_calls(False)
    board = gpu(world).board
    if board is None:
        cut(world, "")
        board = gpu(world).board
    assert board is not None
    every = sorted({s.counts for s in table_of(board).sets if s.counts})
    for multiset in every[:: max(1, len(every) // 12)]:
        assert apply(world, wish(dict(multiset)))[0].phase == "Ready", multiset
        assert counts_of(gpu(world).geometry) == multiset
        assert orphans(world.seen()) == []


# --- B03 ---


@pytest.mark.parametrize("key", EIGHT_SLICES)
def test_a_wish_that_cannot_fit_touches_nothing_and_says_why(key: str) -> None:
    """B03: right by its compute slices, too much by its memory slices; three processes run on what is there."""
    three, two, one = named(key, "3g", "2g", "1g")
    world = world_of(key)
    cut(world, "3g@4 2g@0 1g@2")
    for start in (0, 2, 4):
        world.host.start_process(0, start)
    before, begun = serials(world.host), len(world.host.calls)
    outcome = apply(world, wish({three: 2, one: 1}))[0]
    assert (outcome.phase, outcome.cause.reason, outcome.changed) == ("Failed", "Infeasible", False)
    assert f"no place is left for {one}" in outcome.cause.message
    assert models()[key].names[0] in outcome.cause.message
    assert changes(world.host, begun) == []
    assert serials(world.host) == before
    assert two in places(gpu(world))


def test_a_sibling_that_does_fit_is_applied() -> None:
    """B03."""
    world = world_of("a100-80gb")
    assert apply(world, wish({"2g.20gb": 3, "1g.10gb": 1}))[0].phase == "Ready"


def test_one_gpu_that_cannot_hold_its_wish_keeps_every_other_gpu_from_being_touched() -> None:
    """B03, over several GPUs: nothing is touched unless all of it can be begun."""
    world = world_of("2xa100-80gb,a30")
    begun = len(world.host.calls)
    outcomes = apply(world, wish({"3g.40gb": 2, "1g.10gb": 1}, 1), wish({"1g.10gb": 7}, 0), wish({"1g.6gb": 4}, 2))
    assert {i: (o.phase, o.cause.reason) for i, o in outcomes.items()} == {
        0: ("Blocked", "Waiting"),
        1: ("Failed", "Infeasible"),
        2: ("Blocked", "Waiting"),
    }
    assert changes(world.host, begun) == []


# --- B05 ---

ROUNDED = {"7g.80gb": "7g.79gb", "3g.40gb": "3g.39gb"}


@pytest.mark.parametrize(
    ("written", "made"),
    [("7g.80gb", "7g.79gb"), ("7g.79gb", "7g.79gb"), ("3g.40gb", "3g.39gb"), ("1g.10gb", "1g.10gb")],
)
def test_names_that_another_driver_rounds_are_created_under_this_drivers_names(written: str, made: str) -> None:
    """B05."""
    world = world_of("2xa100-80gb", names=ROUNDED)
    assert apply(world, wish({written: 1}))[0].phase == "Ready"
    assert [i.instance.profile for i in gpu(world, 1).instances] == [made]


@pytest.mark.parametrize("other", ["5g.79gb", "3g.41gb", "3g.39gb+me", "2g.19gb", "1g.9gb", "1g.11gb", "1g.10gb-me"])
def test_a_different_profile_is_never_put_in_the_place_of_an_unknown_one(other: str) -> None:
    """B05: another slice count, another attribute, or memory further off than 1 GB and 3 %."""
    world = world_of("a100-80gb", names=ROUNDED)
    begun = len(world.host.calls)
    outcome = apply(world, wish({other: 1}))[0]
    assert (outcome.phase, outcome.cause.reason) == ("Failed", "UnknownProfile")
    assert changes(world.host, begun) == []


def test_a_driver_upgrade_that_renames_profiles_changes_nothing_that_is_there() -> None:
    """B05: applied under the old names, applied again under the new ones."""
    world = world_of("a100-80gb")
    apply(world, wish({"3g.40gb": 2}))
    world.host.switch("names", ROUNDED)
    before, begun = serials(world.host), len(world.host.calls)
    outcome = apply(world, wish({"3g.40gb": 2}))[0]
    assert (outcome.phase, outcome.changed) == ("Ready", False)
    assert changes(world.host, begun) == []
    assert serials(world.host) == before


# --- B07, B09, B12, B13 ---


@pytest.mark.parametrize(
    ("key", "wrong", "right"),
    [("gb200", "1g.24gb", "1g.23gb"), ("b200", "4g.93gb", "4g.90gb"), ("gb300", "2g.72gb", "2g.70gb")],
)
def test_a_name_that_this_board_lacks_is_refused_with_what_it_offers(key: str, wrong: str, right: str) -> None:
    """B07."""
    world = world_of(key)
    begun = len(world.host.calls)
    outcome = apply(world, wish({wrong: 1}))[0]
    assert (outcome.phase, outcome.cause.reason) == ("Failed", "UnknownProfile")
    for profile in models()[key].profiles:
        assert profile.name in outcome.cause.message
    assert changes(world.host, begun) == []
    assert apply(world, wish({right: 1}))[0].phase == "Ready"


@pytest.mark.parametrize("key", CAPABLE)
def test_the_whole_gpu_gets_one_instance_with_one_compute_instance_spanning_it(key: str) -> None:
    """B09: the compute profile is asked of the instance, never guessed."""
    widest = max(
        (p for p in models()[key].profiles if "+" not in p.name and "-" not in p.name), key=lambda p: p.places[0].size
    )
    world = world_of(key)
    assert apply(world, wish({widest.name: 1}))[0].phase == "Ready"
    assert compute_counts(world) == (1, 1)
    (there,) = gpu(world).instances
    assert there.whole
    assert there.instance.profile == widest.name


@pytest.mark.parametrize("key", CAPABLE)
def test_each_profile_of_each_model_is_created_alone_and_whole(key: str) -> None:
    """B09, for its whole kind."""
    world = world_of(key, duration_scale=0)
    world.host.log_calls(False)
    for profile in models()[key].profiles:
        alone = apply(world, wish({profile.name: 1}))[0]
        assert alone.phase == "Ready", profile.name
        assert orphans(world.seen()) == []
        assert counts_of(gpu(world).geometry) == ((profile.name, 1),)


@pytest.mark.parametrize("wanted", H15["must_accept_on_empty_board"], ids=str)
def test_h15_layouts_that_a_141_gb_hopper_takes_are_made(wanted: dict[str, int]) -> None:
    """B12."""
    assert apply(world_of("h200"), wish(wanted))[0].phase == "Ready"


@pytest.mark.parametrize("key", EIGHT_SLICES)
def test_h15_two_halves_and_one_more_are_refused_on_every_part_of_seven_slices(key: str) -> None:
    """B12."""
    three, one = named(key, "3g", "1g")
    assert H15["must_refuse_on_empty_board"] == [{"3g.71gb": 2, "1g.18gb": 1}]
    assert apply(world_of(key), wish({three: 2, one: 1}))[0].cause.reason == "Infeasible"


def test_h15_the_free_counts_of_the_listing_are_what_is_shown() -> None:
    """B12: slices 0 to 5 taken by six instances of one slice each."""
    world = world_of("h200")
    cut(world, "1g.18gb@0 1g.18gb@1 1g.18gb@2 1g.18gb@3 1g.18gb@4 1g.18gb@5")
    (shown,) = gpus_json(world.seen(), None)["gpus"]
    assert {name: shown["free"].get(name, 0) for name in H15["free_total"]} == {
        name: free for name, (free, _) in H15["free_total"].items()
    }


@pytest.mark.parametrize("key", ["a100-80gb", "h100-sxm-80gb", "h200", "b200", "a30"])
def test_a_profile_of_a_smaller_card_is_refused_with_the_nearest_names(key: str) -> None:
    """B13."""
    world = world_of(key)
    begun = len(world.host.calls)
    outcome = apply(world, wish({"1g.5gb": 7}))[0]
    assert (outcome.phase, outcome.cause.reason) == ("Failed", "UnknownProfile")
    assert "nearest: 1g." in outcome.cause.message
    assert changes(world.host, begun) == []


@pytest.mark.parametrize("key", [key for key, model in models().items() if not model.mig])
def test_a_card_without_mig_is_refused_before_anything_is_tried(key: str) -> None:
    """B13."""
    world = world_of(f"3x{key}")
    begun = len(world.host.calls)
    outcomes = apply(world, wish({"1g.10gb": 1}))
    assert {o.cause.reason for o in outcomes.values()} == {"NotCapable"}
    assert all(f"{models()[key].names[0]} is not MIG-capable" in o.cause.message for o in outcomes.values())
    assert changes(world.host, begun) == []
    assert {o.phase for o in apply(world, OFF).values()} == {"Ready"}


# --- B78, B108 ---


@pytest.mark.parametrize(
    ("gb", "made"), [(5, "1g.5gb"), (6, "1g.10gb"), (10, "1g.10gb"), (20, "3g.20gb"), (40, "7g.40gb")]
)
def test_a_need_equal_to_an_instances_size_gets_that_size_and_more_gets_the_next(gb: int, made: str) -> None:
    """B78, in the whole GB that plans write."""
    world = world_of('"NVIDIA A100-PCIE-40GB"')
    assert apply(world, {"gpus": {"all": True}, "instances": [{"memoryGB": gb}]})[0].phase == "Ready"
    assert counts_of(gpu(world).geometry) == ((made, 1),)


def test_a_need_larger_than_the_gpu_is_refused() -> None:
    """B78."""
    world = world_of('"NVIDIA A100-PCIE-40GB"')
    outcome = apply(world, {"gpus": {"all": True}, "instances": [{"memoryGB": 41}]})[0]
    assert (outcome.phase, outcome.cause.reason) == ("Failed", "Infeasible")


@pytest.mark.parametrize("key", ["a100-40gb", "a100-80gb", "h100-sxm-80gb", "h200", "b200", "gb300"])
def test_memory_slices_and_compute_slices_both_count(key: str) -> None:
    """B108: the four answers, on hardware that has halves, doubles and sevenths."""
    three, four, one, double = named(key, "3g", "4g", "1g", "1g2")
    answers = [
        apply(world_of(key), wish(wanted))[0].phase
        for wanted in ({three: 2, one: 1}, {four: 1, three: 1}, {one: 7}, {one: 7, double: 1})
    ]
    assert answers == ["Failed", "Ready", "Ready", "Failed"]


# --- boards with other grids ---


@pytest.mark.parametrize(
    "wanted",
    [
        {"1g.24gb": 4},
        {"1g.24gb+gfx": 4},
        {"1g.24gb+me": 1, "1g.24gb-me": 3},
        {"1g.24gb+me.all": 1, "1g.24gb-me": 3},
        {"2g.48gb+me.all": 1, "2g.48gb-me": 1},
        {"2g.48gb+gfx": 1, "1g.24gb-me": 2},
        {"4g.96gb+gfx": 1},
    ],
    ids=str,
)
def test_attributes_beyond_media_are_cut_as_the_board_lists_them(wanted: dict[str, int]) -> None:
    """Profiles with +gfx, -me and +me.all on a 12-slice board, from one to the next on one GPU."""
    world = world_of("rtx-pro-6000-blackwell")
    apply(world, wish({"2g.48gb": 1, "1g.24gb": 1}))
    assert apply(world, wish(wanted))[0].phase == "Ready"
    assert counts_of(gpu(world).geometry) == counts(wanted)
    assert orphans(world.seen()) == []


@pytest.mark.parametrize(
    "wanted", [{"1g.24gb+me.all": 1, "1g.24gb": 3}, {"1g.24gb+me": 2}, {"2g.48gb+me.all": 2}], ids=str
)
def test_engines_that_one_instance_takes_whole_leave_none_for_another(wanted: dict[str, int]) -> None:
    """+me.all takes every media engine, so only -me fits beside it."""
    world = world_of("rtx-pro-6000-blackwell")
    begun = len(world.host.calls)
    assert apply(world, wish(wanted))[0].cause.reason == "Infeasible"
    assert changes(world.host, begun) == []


@pytest.mark.parametrize(
    "wanted", [{"1g.6gb": 4}, {"2g.12gb": 1, "1g.6gb": 2}, {"2g.12gb": 2}, {"4g.24gb": 1}], ids=str
)
def test_an_a30_that_reports_wrong_counts_is_cut_all_the_same(wanted: dict[str, int]) -> None:
    world = world_of("a30", a30_wrong_count=True)
    assert apply(world, wish(wanted))[0].phase == "Ready"
    assert counts_of(gpu(world).geometry) == counts(wanted)


@pytest.mark.parametrize("wanted", [{"1g.6gb": 5}, {"2g.12gb": 3}, {"4g.24gb": 2}], ids=str)
def test_a_wrong_count_of_an_a30_is_not_believed(wanted: dict[str, int]) -> None:
    world = world_of("a30", a30_wrong_count=True)
    begun = len(world.host.calls)
    assert apply(world, wish(wanted))[0].cause.reason == "Infeasible"
    assert changes(world.host, begun) == []


def test_boards_of_several_kinds_in_one_machine_are_each_cut_by_their_own_names() -> None:
    world = world_of("a100-40gb,a30,l40s,h200,rtx-pro-6000-blackwell")
    outcomes = apply(
        world,
        {"gpus": {"models": ["*A100*"]}, "instances": [{"profile": "3g.20gb", "count": 2}]},
        {"gpus": {"models": ["*A30*"]}, "instances": [{"profile": "1g.6gb", "count": 4}]},
        {"gpus": {"models": ["*H200*"]}, "instances": [{"memoryGB": 30, "count": 2}]},
        {"gpus": {"models": ["*RTX PRO*"]}, "instances": [{"profile": "2g.48gb+gfx", "count": 2}]},
    )
    assert {i: o.phase for i, o in outcomes.items()} == {0: "Ready", 1: "Ready", 3: "Ready", 4: "Ready"}
    found = [str(seen.layout) for seen in world.seen()]
    assert found == ["2×3g.20gb", "4×1g.6gb", "MIG off", "2×1g.35gb", "2×2g.48gb+gfx"]
