"""Somebody else creates and destroys instances between our looks: what is theirs stays, and what we say stays true.

Left out: instances whose maker cannot be told from a look, such as one that a stranger makes anew at the very place of
one that we destroyed a moment before.
"""

from __future__ import annotations

import pytest
from staging import (
    OFF,
    apply,
    cut,
    gpu,
    make,
    once_after,
    once_before,
    places,
    remove,
    roll_back,
    stranger,
    wish,
    world_of,
)
from worlds import World, orphans, serials

from migd.mig.geometry import counts, counts_of
from migd.mig.observed import SeenGpu
from migd.sim.faults import Fault

STEPS = ["destroy compute", "destroy GPU", "create GPU", "create compute"]


def start_of(text: str) -> int:
    return int(text.partition("@")[2])


def by_hand(world: World, seen: SeenGpu, text: str) -> dict[tuple[str, int], tuple[int, ...]]:
    """Somebody makes an instance; its serials are put into the answer when it happens."""
    made: dict[tuple[str, int], tuple[int, ...]] = {}
    with stranger(world.host) as gpus:
        make(gpus, seen, text)
    made |= {k: v for k, v in serials(world.host).items() if k[1] == start_of(text)}
    return made


@pytest.mark.parametrize("moment", [once_before, once_after])
@pytest.mark.parametrize("begun", STEPS)
@pytest.mark.parametrize("theirs", ["1g@3", "1g@2"])
def test_an_instance_that_appears_in_a_free_place_is_left_alone_and_told(begun: str, theirs: str, moment) -> None:  # type: ignore[no-untyped-def]
    """The wish has no room for one more, so what we did is undone around it, and the next command knows it."""
    world = world_of("a100-40gb")
    cut(world, "3g@4 1g@0")
    seen = gpu(world)
    made: dict[tuple[str, int], tuple[int, ...]] = {}
    listen = moment(begun, lambda: made.update(by_hand(world, seen, theirs)))
    outcome = apply(world, wish({"3g.20gb": 1, "1g.5gb+me": 1}), listen=listen)[0]
    assert made != {}
    assert made.items() <= serials(world.host).items(), "a stranger's instance was touched"
    assert (outcome.phase, outcome.cause.reason) == ("Blocked", "ForeignInstances")
    assert theirs.replace("1g", "1g.5gb") in outcome.cause.message
    assert places(gpu(world)) == f"1g.5gb@0 1g.5gb@{start_of(theirs)} 3g.20gb@4"
    assert orphans(world.seen()) == []


@pytest.mark.parametrize("begun", STEPS[:3])
def test_an_instance_in_a_place_that_we_were_about_to_use_is_counted_where_it_fits(begun: str) -> None:
    """A foreign instance that fits the wish is kept, and stays foreign."""
    world = world_of("a100-40gb")
    cut(world, "3g@4 2g@0")
    seen = gpu(world)
    made: dict[tuple[str, int], tuple[int, ...]] = {}
    listen = once_before(begun, lambda: made.update(by_hand(world, seen, "1g@3")))
    outcome = apply(world, wish({"3g.20gb": 1, "1g.5gb": 4}), listen=listen)[0]
    assert made.items() <= serials(world.host).items()
    assert outcome.phase == "Ready"
    assert counts_of(gpu(world).geometry) == counts({"3g.20gb": 1, "1g.5gb": 4})
    (theirs,) = gpu(world).geometry - world.record().gpu(seen.uuid).owned
    assert str(theirs) == "1g.5gb@3"


@pytest.mark.parametrize("begun", STEPS[:3])
def test_an_instance_of_theirs_in_a_wished_place_survives_the_way_back(begun: str) -> None:
    """What we did not begin to create is not ours to destroy, even where it is what we were going to make."""
    world = world_of("a100-40gb")
    cut(world, "3g@4 2g@0")
    seen = gpu(world)
    made: dict[tuple[str, int], tuple[int, ...]] = {}

    def theirs() -> None:
        made.update(by_hand(world, seen, "1g@3"))
        world.host.inject(Fault("nvmlGpuInstanceCreateComputeInstance", nth=2, times=3))

    outcome = apply(world, wish({"3g.20gb": 1, "1g.5gb": 4}), listen=once_before(begun, theirs))[0]
    assert outcome.phase == "Failed"
    assert made.items() <= serials(world.host).items(), "a stranger's instance was destroyed on the way back"
    assert places(gpu(world)) == "2g.10gb@0 1g.5gb@3 3g.20gb@4"
    assert orphans(world.seen()) == []


@pytest.mark.parametrize("begun", STEPS[:3])
def test_an_instance_in_the_way_of_the_wish_ends_in_the_layout_before(begun: str) -> None:
    world = world_of("a100-40gb")
    cut(world, "1g@0")
    seen = gpu(world)
    made: dict[tuple[str, int], tuple[int, ...]] = {}
    listen = once_before(begun, lambda: made.update(by_hand(world, seen, "2g@4")))
    outcome = apply(world, wish({"3g.20gb": 1, "4g.20gb": 1}), listen=listen)[0]
    assert (outcome.phase, outcome.cause.reason) == ("Blocked", "ForeignInstances")
    assert made.items() <= serials(world.host).items()
    assert places(gpu(world)) == "1g.5gb@0 2g.10gb@4"


@pytest.mark.parametrize("begun", ["destroy GPU", "create GPU", "create compute"])
@pytest.mark.parametrize("foreign", [False, True])
def test_a_kept_instance_that_vanishes_meanwhile_is_made_anew_and_is_then_ours(begun: str, foreign: bool) -> None:
    """Ready is what is read back at the end, not what was planned to stay."""
    world = world_of("a100-40gb")
    cut(world, "2g@0" if foreign else "3g@4 2g@0")
    if foreign:
        by_hand(world, gpu(world), "3g@4")
    seen = gpu(world)
    before = serials(world.host)

    def vanish() -> None:
        with stranger(world.host) as gpus:
            remove(gpus, seen, [i for i in seen.geometry if i.placement.start == 4])

    outcome = apply(world, wish({"3g.20gb": 1, "1g.5gb": 3}), listen=once_before(begun, vanish))[0]
    assert outcome.phase == "Ready"
    assert counts_of(gpu(world).geometry) == counts({"3g.20gb": 1, "1g.5gb": 3})
    assert serials(world.host)[seen.uuid, 4] != before[seen.uuid, 4]
    assert world.record().gpu(seen.uuid).owned == gpu(world).geometry
    assert orphans(world.seen()) == []


@pytest.mark.parametrize("begun", STEPS)
def test_instances_that_somebody_destroys_for_us_are_no_error(begun: str) -> None:
    world = world_of("a100-40gb")
    cut(world, "1g@0 1g@1 1g@2")
    seen = gpu(world)

    def vanish() -> None:
        with stranger(world.host) as gpus:
            remove(gpus, seen, seen.geometry)

    outcome = apply(world, wish({"3g.20gb": 2}), listen=once_before(begun, vanish))[0]
    assert outcome.phase == "Ready"
    assert places(gpu(world)) == "3g.20gb@0 3g.20gb@4"


@pytest.mark.parametrize("begun", ["create GPU instance 3g.20gb@4", "create compute instance of 3g.20gb@4"])
def test_what_we_made_and_somebody_destroys_at_once_is_made_again(begun: str) -> None:
    world = world_of("a100-40gb")
    cut(world, "1g@0")
    seen = gpu(world)

    def vanish() -> None:
        with stranger(world.host) as gpus:
            remove(gpus, seen, [i for i in gpus.look()[0].geometry if i.profile.startswith("3g")])

    assert apply(world, wish({"3g.20gb": 2}), listen=once_after(begun, vanish))[0].phase == "Ready"
    assert orphans(world.seen()) == []


def test_a_stranger_who_takes_every_place_again_and_again_is_met_a_bounded_number_of_times() -> None:
    world = world_of("a100-40gb")
    cut(world, "")
    seen = gpu(world)
    count = 0

    def listen(progress: object) -> None:
        nonlocal count
        text = str(getattr(progress, "effect", ""))
        if text.startswith("create GPU") and getattr(progress, "done", False):
            count += 1
            with stranger(world.host) as gpus:
                remove(gpus, seen, gpus.look()[0].geometry)

    outcome = apply(world, wish({"7g.40gb": 1}), listen=listen)[0]
    assert outcome.phase == "Failed"
    assert 0 < count <= 5
    assert places(gpu(world)) == ""


def test_a_foreign_instance_never_becomes_ours_by_standing_beside_ours() -> None:
    """Neither by a plan that it fits, nor by a rollback."""
    world = world_of("a100-40gb")
    cut(world, "1g@0")
    by_hand(world, gpu(world), "3g@4")
    before = serials(world.host)
    assert apply(world, wish({"3g.20gb": 1, "1g.5gb": 2}))[0].phase == "Ready"
    assert apply(world, wish({"3g.20gb": 1, "1g.5gb": 1}))[0].phase == "Ready"
    assert roll_back(world)[0].phase == "Ready"
    assert apply(world, OFF)[0].cause.reason == "ForeignInstances"
    uuid = gpu(world).uuid
    assert serials(world.host)[uuid, 4] == before[uuid, 4]
