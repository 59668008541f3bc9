"""What is ours and what is not, while others create, destroy and split instances between two of our operations.

With `foreignInstances: Refuse` nothing that somebody else made is ever destroyed, wholly or in part, and nothing that
somebody else made counts as ours afterwards.
"""

from __future__ import annotations

import others
import pytest
from others import after, before, place, shown
from worlds import World, order_for, serials

from migd.agent.orders import Goal, Order
from migd.agent.running import Progress
from migd.mig.geometry import GpuInstance, Layout
from migd.mig.observed import SeenGpu
from migd.plans.plan import GpuSelector, InstanceRule, Rule
from migd.sim.faults import Fault
from migd.sim.host import SimHost

CREATE_GI = "nvmlDeviceCreateGpuInstanceWithPlacement"


def world_with(spec: str = "a100-40gb", *ours: str) -> tuple[World, str]:
    """A machine whose one GPU migd has cut into these, MIG being on; and the GPU's UUID."""
    world = World(SimHost.fresh(spec))
    gpu = gpu_of(world)
    assert world.attempt(order_for({gpu.uuid: Layout(True, frozenset(place(gpu, text) for text in ours))})) == "done"
    return world, gpu.uuid


def gpu_of(world: World) -> SeenGpu:
    (gpu,) = world.seen()
    world.end()
    return gpu


def at(world: World, text: str) -> GpuInstance:
    return place(gpu_of(world), text)


def exactly(world: World, *texts: str) -> Order:
    gpu = gpu_of(world)
    return order_for({gpu.uuid: Layout(True, frozenset(place(gpu, text) for text in texts))})


def counted(uuid: str, name: str = "counted", **counts: int) -> Order:
    """A wish for so many of each profile, wherever: _1g_5gb=2."""
    wanted = tuple(InstanceRule(profile=key[1:].replace("_", "."), count=n) for key, n in counts.items())
    goals: dict[str, Goal] = {uuid: Rule(gpus=GpuSelector(every=True), instances=wanted)}
    return Order(name, goals)


def owned(world: World, uuid: str) -> str:
    return " ".join(sorted(map(str, world.record().gpu(uuid).owned)))


def serial(world: World, uuid: str, instance: GpuInstance) -> tuple[int, ...]:
    return serials(world.host)[(uuid, instance.placement.start)]


def phase(world: World, uuid: str) -> tuple[str, str]:
    outcome = world.record().gpu(uuid).outcome
    assert outcome is not None
    return outcome.phase, outcome.cause.reason


def test_an_instance_that_somebody_else_made_at_a_wished_place_is_kept_and_stays_theirs() -> None:
    world, uuid = world_with()
    theirs = at(world, "2g@2")
    order = exactly(world, "1g@0", "2g@2")
    made = before("create GPU instance 1g", lambda: others.create(world.host, uuid, theirs))
    assert world.attempt(order, made) == "done"
    assert shown(gpu_of(world)) == "1g.5gb@0 2g.10gb@2"
    assert owned(world, uuid) == "1g.5gb@0"
    kept = serial(world, uuid, theirs)
    assert world.attempt(exactly(world)) == "done"
    assert phase(world, uuid) == ("Blocked", "ForeignInstances")
    assert serial(world, uuid, theirs) == kept


def test_an_instance_of_ours_that_somebody_destroyed_and_made_anew_is_theirs() -> None:
    world, uuid = world_with("a100-40gb", "1g@0", "1g@1", "3g@4")
    one = at(world, "1g@0")
    remade = after("destroy GPU instance 1g.5gb@1", lambda: others.create(world.host, uuid, one))
    assert world.attempt(exactly(world, "7g@0"), remade) == "done"
    assert phase(world, uuid) == ("Blocked", "ForeignInstances")
    assert shown(gpu_of(world)) == "1g.5gb@0 1g.5gb@1 3g.20gb@4"
    assert owned(world, uuid) == "1g.5gb@1 3g.20gb@4"


def test_compute_instances_that_somebody_puts_into_their_own_kept_instance_are_left_alone() -> None:
    world, uuid = world_with()
    theirs = at(world, "3g@0")
    others.create(world.host, uuid, theirs)
    split = after("create GPU instance 1g", lambda: others.narrow(world.host, uuid, theirs))
    parts: list[tuple[int, ...]] = []
    assert world.attempt(counted(uuid, _3g_20gb=1, _1g_5gb=1), split) == "done"
    parts.append(serial(world, uuid, theirs))
    assert [c.profile_id for c in world.host.snapshot().gpus[0].instances[0].compute] == [0]
    assert phase(world, uuid) == ("Blocked", "ForeignInstances")
    assert shown(gpu_of(world)) == "3g.20gb@0"
    assert world.record().open == ()


def test_a_kept_instance_of_theirs_that_vanishes_is_made_anew_and_is_then_ours() -> None:
    world, uuid = world_with()
    theirs = at(world, "3g@0")
    others.create(world.host, uuid, theirs)
    gone = before("create GPU instance 1g", lambda: others.destroy(world.host, uuid, theirs))
    assert world.attempt(counted(uuid, _3g_20gb=1, _1g_5gb=1), gone) == "done"
    assert phase(world, uuid) == ("Ready", "AsWished")
    assert "3g.20gb@0" in owned(world, uuid)
    assert world.record().gpu(uuid).owned == gpu_of(world).geometry


def test_an_instance_that_appears_where_nothing_was_wished_turns_the_change_back() -> None:
    world, uuid = world_with("a100-40gb", "3g@4")
    theirs = at(world, "1g@6")
    seen = after("destroy GPU instance 3g.20gb@4", lambda: others.create(world.host, uuid, theirs))
    assert world.attempt(exactly(world, "2g@0", "2g@4"), seen) == "done"
    assert phase(world, uuid) == ("Failed", "ForeignInstances")  # its place is needed for the way back
    assert "1g.5gb@6" in shown(gpu_of(world))
    others.destroy(world.host, uuid, theirs)
    assert world.attempt(None) == "done"
    assert shown(gpu_of(world)) == "3g.20gb@4"
    assert owned(world, uuid) == "3g.20gb@4"


@pytest.mark.parametrize("vm", [False, True])
def test_mig_is_not_turned_off_and_no_gpu_reset_over_an_instance_that_is_not_ours(vm: bool) -> None:
    world, uuid = world_with("a100-40gb", "3g@4")
    world.host.switch("vm", vm)
    theirs = at(world, "1g@0")
    since = len(world.host.calls)
    made = after("destroy GPU instance 3g.20gb@4", lambda: others.create(world.host, uuid, theirs))
    assert world.attempt(order_for({uuid: Layout(False)}), made) == "done"
    assert phase(world, uuid) == ("Blocked", "ForeignInstances")
    assert shown(gpu_of(world)) == "1g.5gb@0 3g.20gb@4"
    assert not {"reset", "nvmlDeviceSetMigMode"} & {call.name for call in list(world.host.calls)[since:]}


def test_a_way_back_to_mig_off_waits_for_an_instance_that_is_not_ours() -> None:
    world = World(SimHost.fresh("a100-40gb"))
    uuid = gpu_of(world).uuid
    theirs = place(gpu_of(world), "1g@0")
    made = after("MIG mode on", lambda: others.create(world.host, uuid, theirs))
    assert world.attempt(exactly(world, "3g@4"), made) == "done"
    assert phase(world, uuid) == ("Failed", "InUse")
    assert shown(gpu_of(world)) == "1g.5gb@0"
    since = len(world.host.calls)
    assert world.attempt(None) == "done"
    assert not {"reset", "nvmlDeviceSetMigMode"} & {call.name for call in list(world.host.calls)[since:]}
    others.destroy(world.host, uuid, theirs)
    assert world.attempt(None) == "done"
    assert gpu_of(world).layout == Layout(False)
    assert world.record().open == ()


def test_after_a_hold_only_what_was_really_made_is_ours() -> None:
    world, uuid = world_with()
    theirs = at(world, "2g@2")
    world.host.inject(Fault(CREATE_GI, "error", 999, nth=3, times=3))
    order = Order("held", exactly(world, "1g@0", "2g@2", "3g@4").goals, on_failure="Hold")
    assert (
        world.attempt(order, before("create GPU instance 1g", lambda: others.create(world.host, uuid, theirs)))
        == "done"
    )
    assert phase(world, uuid) == ("Held", "Held")
    assert shown(gpu_of(world)) == "1g.5gb@0 2g.10gb@2"
    assert owned(world, uuid) == "1g.5gb@0"


def test_adopting_takes_over_all_that_is_there_when_the_change_begins() -> None:
    world, uuid = world_with()
    others.create(world.host, uuid, at(world, "3g@0"))
    others.create(world.host, uuid, at(world, "1g@4"), bare=True)
    order = Order("adopt", counted(uuid, _3g_20gb=1, _2g_10gb=1).goals, "Adopt")
    assert world.attempt(order) == "done"
    assert phase(world, uuid) == ("Ready", "AsWished")
    assert world.record().gpu(uuid).owned == gpu_of(world).geometry


def test_what_a_driver_reload_took_from_a_gpu_whose_turn_is_yet_to_come_and_others_made_anew_is_theirs() -> None:
    world = World(SimHost.fresh("2xa100-40gb"))
    first, second = world.seen()
    there = place(first, "3g@4")
    assert world.attempt(order_for({gpu.uuid: Layout(True, frozenset({there})) for gpu in (first, second)})) == "done"
    order = order_for({gpu.uuid: Layout(True, frozenset({place(first, "2g@0")})) for gpu in (first, second)})

    def listen(step: Progress) -> None:
        if step.done and str(step.effect) == "destroy compute instance of 3g.20gb@4":
            world.host.snapshot().gpus[1].instances.clear()  # the next look does not find them
        if step.done and str(step.effect) == "create compute instance of 2g.10gb@0":
            others.create(world.host, second.uuid, there)

    assert world.attempt(order, listen) == "done"
    assert phase(world, first.uuid) == ("Ready", "AsWished")
    assert phase(world, second.uuid) == ("Blocked", "ForeignInstances")
    assert shown(world.seen()[1]) == "3g.20gb@4"


def test_a_hold_that_ends_what_a_crash_left_ends_the_command_too() -> None:
    world, uuid = world_with("a100-40gb", "3g@4")
    order = Order("held", exactly(world, "1g@0", "2g@2").goals, on_failure="Hold")
    world.host.inject(Fault(CREATE_GI, "crash", when="after"), Fault(CREATE_GI, "error", 999, nth=2, times=3))
    assert world.attempt(order) == "crashed"
    assert world.attempt(order) == "done"
    assert phase(world, uuid) == ("Held", "Held")
    assert shown(gpu_of(world)) == "1g.5gb@0"
    assert world.attempt(order) == "done"
    assert phase(world, uuid) == ("Ready", "AsWished")
