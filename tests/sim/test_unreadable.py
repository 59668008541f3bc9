"""One GPU of the machine answers every read with an error: it is shown as it is, and holds up only itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from worlds import World, order_for

from migd.cli.exits import Exit
from migd.cli.main import run as command
from migd.mig.geometry import GpuInstance, Layout
from migd.mig.profiles import Placement
from migd.sim.faults import Fault
from migd.sim.host import SimHost

CUT = Layout(True, frozenset({GpuInstance("3g.40gb", Placement(4, 4))}))
BROKEN = Fault("nvmlDeviceGetMigMode", gpu=0, times=0)


def test_the_other_gpus_are_changed_as_wished() -> None:
    host = SimHost.fresh("2xh100-sxm-80gb")
    host.inject(BROKEN)
    world = World(host)
    broken, whole = world.seen()
    assert "nvmlDeviceGetMigMode" in broken.unreadable
    assert world.attempt(order_for({whole.uuid: CUT})) == "done"
    assert world.seen()[1].layout == CUT


def test_an_order_that_names_it_waits_for_it_a_little_and_then_says_why() -> None:
    host = SimHost.fresh("2xh100-sxm-80gb")
    world = World(host)
    broken, whole = world.seen()
    host.inject(BROKEN)
    answer = world.attempt(order_for({broken.uuid: CUT, whole.uuid: CUT}))
    assert answer.startswith(f"gave up: {broken.uuid} cannot be read: nvmlDeviceGetMigMode")
    assert world.seen()[1].layout == Layout(False)


def test_a_gpu_that_is_unreadable_for_a_moment_is_waited_for() -> None:
    host = SimHost.fresh("h100-sxm-80gb")
    world = World(host)
    (gpu,) = world.seen()
    host.inject(Fault("nvmlDeviceGetMigMode", nth=2, times=3))
    assert world.attempt(order_for({gpu.uuid: CUT})) == "done"
    assert world.seen()[0].layout == CUT


def test_gpus_and_plan_show_it_and_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, plan = tmp_path / "machine.json", tmp_path / "plan.yaml"
    host = SimHost.open(state, "2xh100-sxm-80gb", clock="virtual")
    host.inject(BROKEN)
    plan.write_text(
        "apiVersion: migd.dev/v1alpha1\nkind: GPUPartitionPlan\nmetadata: {name: all}\n"
        "spec: {nodeSelector: {}, rules: [{gpus: {all: true}, instances: [{profile: 3g.40gb}]}]}\n"
    )
    assert command(["gpus", "--state", str(state)]) == Exit.DONE
    assert "cannot be read: nvmlDeviceGetMigMode" in capsys.readouterr().err
    assert command(["plan", "-f", str(plan), "--state", str(state), "-o", "json"]) == Exit.BLOCKED
    broken, whole = json.loads(capsys.readouterr().out)["gpus"]
    assert broken["blockedBy"][0]["reason"] == "GPUUnhealthy"
    assert whole["create"]
