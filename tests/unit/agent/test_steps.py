"""The next operation on one GPU. What the whole transaction does with it is tested in tests/sim."""

from __future__ import annotations

from dataclasses import replace

from migd.agent.steps import InTheWay, next_operation
from migd.mig.geometry import EMPTY, GpuInstance, Layout
from migd.mig.observed import Holder, MigMode, SeenComputeInstance, SeenGpu, SeenInstance
from migd.mig.operations import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstances,
    DestroyGpuInstance,
    SetMode,
)
from migd.mig.profiles import Placement

UUID = "GPU-0"
ONE, TWO, THREE = (
    GpuInstance("1g.5gb", Placement(0, 1)),
    GpuInstance("2g.10gb", Placement(2, 2)),
    GpuInstance("3g.20gb", Placement(4, 4)),
)
WHOLE = (SeenComputeInstance(0, True, "MIG-0"),)
NARROW = (SeenComputeInstance(0, False, "MIG-0"),)


def there(instance: GpuInstance, cis: tuple[SeenComputeInstance, ...] = WHOLE, in_use: bool = False) -> SeenInstance:
    return SeenInstance(instance, 7, cis, in_use, (Holder(4711),) if in_use else ())


def gpu(*instances: SeenInstance, on: bool = True, pending: bool | None = None, in_use: bool = False) -> SeenGpu:
    mode = MigMode(on, on if pending is None else pending)
    return SeenGpu(UUID, 0, "A100", "0x20B010DE", 40960, mode, instances=instances, in_use=in_use)


def walk(seen: SeenGpu, goal: Layout) -> list[str]:
    """Every operation until the goal, done on the value as hardware would do it."""
    done = []
    for _ in range(50):
        step = next_operation(seen, goal, seen.geometry)
        if step is None:
            return done
        assert not isinstance(step, InTheWay)
        done.append(str(step))
        seen = _after(seen, step)
    raise AssertionError(f"no end: {done}")


def _after(seen: SeenGpu, step: object) -> SeenGpu:
    match step:
        case SetMode(_, enable):
            return replace(seen, mode=MigMode(enable, enable))
        case DestroyComputeInstances(_, instance):
            return replace(
                seen, instances=tuple(there(i.instance, ()) if i.instance == instance else i for i in seen.instances)
            )
        case DestroyGpuInstance(_, instance):
            return replace(seen, instances=tuple(i for i in seen.instances if i.instance != instance))
        case CreateGpuInstance(_, instance):
            return replace(seen, instances=(*seen.instances, there(instance, ())))
        case CreateComputeInstance(_, instance):
            return replace(
                seen, instances=tuple(there(i.instance) if i.instance == instance else i for i in seen.instances)
            )
    raise AssertionError(step)


def test_all_compute_instances_go_before_the_first_gpu_instance() -> None:
    assert walk(gpu(there(ONE), there(TWO)), Layout(True, frozenset({THREE}))) == [
        "destroy compute instance of 1g.5gb@0",
        "destroy compute instance of 2g.10gb@2",
        "destroy GPU instance 1g.5gb@0",
        "destroy GPU instance 2g.10gb@2",
        "create GPU instance 3g.20gb@4",
        "create compute instance of 3g.20gb@4",
    ]


def test_what_is_right_already_is_not_touched() -> None:
    assert walk(gpu(there(ONE, in_use=True), there(TWO)), Layout(True, frozenset({ONE, THREE}))) == [
        "destroy compute instance of 2g.10gb@2",
        "destroy GPU instance 2g.10gb@2",
        "create GPU instance 3g.20gb@4",
        "create compute instance of 3g.20gb@4",
    ]


def test_mig_is_turned_off_only_when_nothing_is_left() -> None:
    assert walk(gpu(there(ONE)), Layout(False))[-1] == "MIG mode off"


def test_mig_is_turned_on_first() -> None:
    assert walk(gpu(on=False), Layout(True, frozenset({ONE})))[0] == "MIG mode on"


def test_anything_in_use_that_must_go_is_found_before_the_first_operation() -> None:
    step = next_operation(gpu(there(ONE), there(TWO, in_use=True)), Layout(True), frozenset({ONE, TWO}))
    assert isinstance(step, InTheWay)
    assert str(step) == "2g.10gb@2 is in use by pid 4711"


def test_a_gpu_in_use_as_a_whole_blocks_a_mode_change() -> None:
    assert isinstance(next_operation(gpu(on=False, in_use=True), Layout(True), EMPTY), InTheWay)


def test_taking_back_a_pending_mode_disturbs_nobody_and_is_done_on_a_busy_gpu() -> None:
    seen = gpu(there(ONE, in_use=True), pending=False, in_use=True)
    step = next_operation(seen, Layout(True, frozenset({ONE})), frozenset({ONE}))
    assert step == SetMode(UUID, True)


def test_a_gpu_instance_without_compute_instance_is_completed_or_removed() -> None:
    bare = gpu(there(ONE, ()))
    assert walk(bare, Layout(True, frozenset({ONE}))) == ["create compute instance of 1g.5gb@0"]
    assert walk(bare, Layout(True)) == ["destroy GPU instance 1g.5gb@0"]


def test_a_narrow_compute_instance_is_replaced_by_one_that_spans_the_instance() -> None:
    assert walk(gpu(there(THREE, NARROW)), Layout(True, frozenset({THREE}))) == [
        "destroy compute instance of 3g.20gb@4",
        "create compute instance of 3g.20gb@4",
    ]


def test_what_is_not_ours_is_neither_destroyed_nor_emptied() -> None:
    seen = gpu(there(ONE, ()), there(TWO, in_use=True), there(THREE, NARROW))
    assert next_operation(seen, Layout(True, frozenset({THREE})), EMPTY) is None


def test_what_is_not_ours_is_in_the_way_of_a_mode_change() -> None:
    step = next_operation(gpu(there(ONE), there(TWO)), Layout(False), EMPTY)
    assert isinstance(step, InTheWay)
    assert str(step) == "1g.5gb@0 was not made by migd"


def test_nothing_to_do_on_a_gpu_without_mig() -> None:
    seen = replace(gpu(), mode=None)
    assert next_operation(seen, Layout(False), EMPTY) is None


def test_going_back_turns_mig_off_again_under_a_process_that_came_before_it_was_on() -> None:
    assert next_operation(gpu(in_use=True), Layout(False), frozenset(), undoing=True) == SetMode(UUID, False)


def test_going_back_never_turns_mig_on_under_a_process() -> None:
    step = next_operation(gpu(on=False, in_use=True), Layout(True), frozenset(), undoing=True)
    assert isinstance(step, InTheWay)


def test_mig_goes_off_under_somebody_on_the_gpu_only_on_the_way_back() -> None:
    seen = gpu(in_use=True)
    assert isinstance(next_operation(seen, Layout(False), EMPTY), InTheWay)
    assert next_operation(seen, Layout(False), EMPTY, undoing=True) == SetMode(UUID, False)
    assert isinstance(next_operation(gpu(on=False, in_use=True), Layout(True), EMPTY, undoing=True), InTheWay)
