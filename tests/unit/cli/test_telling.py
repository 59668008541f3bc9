"""Progress in few lines: what is told when, and the sentence at the end."""

from __future__ import annotations

import pytest
from unit.plans.boards import gpu, uuid

from migd.agent.effects import Pause
from migd.agent.records import AS_WISHED, Cause, Outcome
from migd.agent.running import Progress
from migd.cli.telling import Teller, changed, total
from migd.mig.geometry import GpuInstance
from migd.mig.operations import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstances,
    DestroyGpuInstance,
    Operation,
    SetMode,
)
from migd.mig.profiles import Placement

BEFORE = [gpu(0, instances="3g.20gb@4 1g.5gb@0"), gpu(1)]
READY, CHANGED = Outcome("Ready", AS_WISHED), Outcome("Ready", AS_WISHED, True)


def at(profile: str, start: int, size: int) -> GpuInstance:
    return GpuInstance(profile, Placement(start, size))


def play(*steps: Operation | Pause | tuple[Operation, str]) -> None:
    teller = Teller(BEFORE)
    for step in steps:
        effect, error = step if isinstance(step, tuple) else (step, "")
        teller(Progress(effect, done=False))
        teller(Progress(effect, True, 0.5, error))
    teller.end()


def test_steps_of_one_kind_on_one_gpu_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    old, one, two = at("3g.20gb", 4, 4), at("1g.5gb", 1, 1), at("1g.5gb", 2, 1)
    play(
        DestroyComputeInstances(uuid(0), old),
        DestroyGpuInstance(uuid(0), old),
        CreateGpuInstance(uuid(0), one),
        CreateGpuInstance(uuid(0), two),
        CreateComputeInstance(uuid(0), one),
        CreateComputeInstance(uuid(0), two),
        SetMode(uuid(1), True),
    )
    assert capsys.readouterr().err.splitlines() == [
        "GPU 0  destroyed 3g.20gb@4  1.0 s",
        "GPU 0  created 1g.5gb@1,2  2.0 s",
        "GPU 1  MIG mode on  0.50 s",
    ]


def test_a_failure_and_the_pause_after_it_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    step = DestroyGpuInstance(uuid(0), at("3g.20gb", 4, 4))
    play((step, "in use"), Pause(0.1, "in use", uuid(0)), (step, "in use"), Pause(0.2, "in use", uuid(0)), step)
    assert capsys.readouterr().err.splitlines() == [
        "GPU 0  destroy GPU instance 3g.20gb@4 failed: in use",
        "GPU 0  destroyed 3g.20gb@4  0.50 s",
    ]


def test_a_wait_is_told_when_it_begins_and_when_its_reason_changes(capsys: pytest.CaptureFixture[str]) -> None:
    play(Pause(2, "in use by a", uuid(1)), Pause(2, "in use by a", uuid(1)), Pause(2, "in use by b", uuid(1)))
    assert capsys.readouterr().err.splitlines() == ["GPU 1  waiting: in use by a", "GPU 1  waiting: in use by b"]


def test_the_last_line_sums_up() -> None:
    after = [gpu(0, instances="3g.20gb@4 1g.5gb@1"), gpu(1, instances="7g.40gb@0")]
    both = {uuid(0): CHANGED, uuid(1): CHANGED}
    assert total(BEFORE, after, both, 7.26) == "done in 7.3 s: 2 GPUs changed, 1 instance kept"
    assert total(BEFORE[1:], after[1:], {uuid(1): CHANGED}, 7.26) == "done in 7.3 s: 1 GPU changed"
    assert total(BEFORE, BEFORE, {uuid(0): READY, uuid(1): READY}, 0) == "nothing was changed: 2 GPUs as wished already"
    stuck = {uuid(0): Outcome("Blocked", Cause("InUse", "")), uuid(1): Outcome("Blocked", Cause("Waiting", ""))}
    assert total(BEFORE, BEFORE, stuck, 1) == "nothing was changed: 2 GPUs blocked"
    mixed = {uuid(0): CHANGED, uuid(1): Outcome("Failed", Cause("NVMLError", ""))}
    assert (
        total(BEFORE, [after[0], BEFORE[1]], mixed, 1)
        == "ended after 1.0 s: 1 GPU changed, 1 instance kept, 1 GPU failed"
    )


def test_a_gpu_that_this_command_finished_for_a_dead_one_counts_as_changed() -> None:
    after = [gpu(0, instances="7g.40gb@0"), gpu(1)]
    ready = {uuid(0): READY, uuid(1): READY}
    assert changed(BEFORE, after, ready) == {uuid(0)}
    assert total(BEFORE, after, ready, 1) == "done in 1.0 s: 1 GPU changed, 0 instances kept"
