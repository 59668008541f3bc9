"""Mode changes that wait for a reboot, resets that are refused, pending modes that somebody else left behind."""

from __future__ import annotations

import pytest
from boards import at
from others import after, before, shown, somebody
from worlds import World

from migd.agent.orders import Order
from migd.mig.geometry import Layout
from migd.mig.observed import MigMode, SeenGpu
from migd.mig.operations import SetMode
from migd.sim.faults import Fault
from migd.sim.host import SimHost

OFF, ON, WAITS = MigMode(False, False), MigMode(True, True), MigMode(False, True)


def gpu_of(world: World) -> SeenGpu:
    (gpu,) = world.seen()
    world.end()
    return gpu


def order(world: World, text: str | None, name: str = "test") -> Order:
    gpu = gpu_of(world)
    assert gpu.board is not None
    return Order(name, {gpu.uuid: Layout(False) if text is None else Layout(True, at(gpu.board, text))})


def told(world: World) -> tuple[str, str]:
    outcome = world.record().gpu(gpu_of(world).uuid).outcome
    assert outcome is not None
    return outcome.phase, outcome.cause.reason


def message(world: World) -> str:
    outcome = world.record().gpu(gpu_of(world).uuid).outcome
    assert outcome is not None
    return outcome.cause.message


REBOOT = ("RebootRequired", "RebootRequired")


@pytest.mark.parametrize("refused", [False, True])
def test_mig_in_a_virtual_machine_comes_with_its_reboot(refused: bool) -> None:
    world = World(SimHost.fresh("a100-40gb", vm=True, vm_refuses_reset=refused))
    wish = order(world, "3g@4")
    for _ in range(2):
        assert world.attempt(wish) == "done"
        assert told(world) == REBOOT
        assert gpu_of(world).mode == WAITS
    world.host.reboot()
    assert world.attempt(wish) == "done"
    assert told(world) == ("Ready", "AsWished")
    assert shown(gpu_of(world)) == "3g.20gb@4"


def test_what_refused_the_reset_is_told() -> None:
    world = World(SimHost.fresh("a100-40gb", vm=True, vm_refuses_reset=True))
    assert world.attempt(order(world, "3g@4")) == "done"
    assert "is not supported" in message(world)


def test_mig_that_is_still_off_after_the_reboot_is_a_failure_and_tried_no_more() -> None:
    world = World(SimHost.fresh("a100-40gb", vm=True, vm_refuses_reset=True, mode_change_never_takes=True))
    wish = order(world, "3g@4")
    assert world.attempt(wish) == "done"
    assert told(world) == REBOOT
    world.host.reboot()
    since = len(world.host.calls)
    for _ in range(2):
        assert world.attempt(wish) == "done"
        assert told(world) == ("Failed", "ModeChangeFailed")
    assert not any(call.name == "nvmlDeviceSetMigMode" for call in list(world.host.calls)[since:])
    assert world.roll_back() == "done"
    assert gpu_of(world).mode == OFF


def test_a_reset_that_is_refused_because_of_a_client_is_blocked_and_the_pending_mode_is_called_off() -> None:
    world = World(SimHost.fresh("a100-40gb", vm=True))
    monitor: list[int] = []
    start = before("GPU reset", lambda: monitor.append(world.host.start_process(0, silent=True, command="dcgm")))
    wish = order(world, "3g@4")
    assert world.attempt(wish, start) == "done"
    assert told(world) == ("Blocked", "ResetRefused")
    assert "dcgm" in message(world)
    assert gpu_of(world).mode == OFF
    world.host.end_process(monitor[0])
    world.host.switch("vm", False)
    assert world.attempt(wish) == "done"
    assert told(world) == ("Ready", "AsWished")


def test_a_pending_mode_that_was_waited_for_is_called_off_by_a_rollback() -> None:
    world = World(SimHost.fresh("a100-40gb", vm=True))
    assert world.attempt(order(world, "3g@4")) == "done"
    assert gpu_of(world).mode == WAITS
    assert world.roll_back() == "done"
    assert told(world) == ("Ready", "AsWished")
    assert gpu_of(world).mode == OFF


@pytest.mark.parametrize("wish", [None, "3g@4"])
def test_a_mode_that_somebody_left_pending_is_settled_as_the_plan_says(wish: str | None) -> None:
    world = World(SimHost.fresh("a100-40gb", vm=True))
    uuid = gpu_of(world).uuid
    with somebody(world.host) as gpus:
        gpus.perform(SetMode(uuid, True))
    assert gpu_of(world).mode == WAITS
    world.host.switch("vm", False)
    assert world.attempt(order(world, wish)) == "done"
    assert told(world) == ("Ready", "AsWished")
    assert gpu_of(world).mode == (OFF if wish is None else ON)


def test_a_mode_that_somebody_left_pending_is_not_left_pending_by_a_failure() -> None:
    world = World(SimHost.fresh("a100-40gb", vm=True))
    uuid = gpu_of(world).uuid
    with somebody(world.host) as gpus:
        gpus.perform(SetMode(uuid, True))
    world.host.inject(Fault("nvmlDeviceSetMigMode", "error", 999, times=3))
    assert world.attempt(order(world, "3g@4")) == "done"
    assert told(world) == ("Failed", "NVMLError")
    assert gpu_of(world).mode == OFF


def test_on_hopper_the_mode_that_a_reboot_took_is_set_again() -> None:
    world = World(SimHost.fresh("h100-sxm-80gb"))
    wish = order(world, "3g@4")
    assert world.attempt(wish) == "done"
    world.host.reboot()
    assert gpu_of(world).mode == OFF
    assert world.attempt(None) == "done"
    assert world.record().gpu(gpu_of(world).uuid).owned == frozenset()
    assert world.attempt(wish) == "done"
    assert shown(gpu_of(world)) == "3g.40gb@4"


def test_a_driver_reload_in_the_middle_of_a_change_is_gone_through() -> None:
    world = World(SimHost.fresh("h100-sxm-80gb"))
    assert world.attempt(order(world, "3g@0 1g@4")) == "done"
    reload = before("create GPU instance 2g", lambda: world.host.reload_driver(3.0))
    assert world.attempt(order(world, "3g@0 2g@4"), reload) == "done"
    assert told(world) == ("Ready", "AsWished")
    (gpu,) = world.seen()
    assert shown(gpu) == "3g.40gb@0 2g.20gb@4"
    assert world.record().gpu(gpu.uuid).owned == gpu.geometry


def test_a_gpu_is_not_reset_while_it_is_not_known_who_holds_it() -> None:
    world = World(SimHost.fresh("a100-40gb"))
    world.host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", "error", 999, times=3))
    since = len(world.host.calls)

    def blind() -> None:
        world.host.switch("vm", True)  # so that MIG off will wait for a reset, on the way back
        world.host.inject(Fault("nvmlDeviceGetComputeRunningProcesses*", "error", 999, times=0))

    assert world.attempt(order(world, "3g@4"), after("create GPU instance", blind)) == "done"
    assert "reset" not in {call.name for call in list(world.host.calls)[since:]}
    assert told(world) == ("Failed", "InUse")
    world.host.clear_faults()
    world.host.switch("vm", False)
    assert world.attempt(None) == "done"
    assert gpu_of(world).mode == OFF


def test_a_gpu_that_waits_for_a_reboot_says_so_although_another_stops_the_order() -> None:
    world = World(SimHost.fresh("2xa100-40gb", vm=True))
    first, second = world.seen()
    assert first.board is not None
    goals = {gpu.uuid: Layout(True, at(first.board, "3g@4")) for gpu in (first, second)}
    wish = Order("both", goals)
    world.host.switch("vm", False)
    assert world.attempt(Order("one", {second.uuid: goals[second.uuid]})) == "done"
    world.host.switch("vm", True)
    wish = Order("both", {first.uuid: goals[first.uuid], second.uuid: Layout(True, at(first.board, "2g@0"))})
    world.host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", "error", 999, gpu=1, times=0))
    for _ in range(2):
        assert world.attempt(wish) == "done"
        phases = {uuid: found.phase for uuid in wish.goals if (found := world.record().gpu(uuid).outcome)}
        assert phases == {first.uuid: "RebootRequired", second.uuid: "Failed"}
