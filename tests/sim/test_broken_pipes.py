"""A command whose reader goes away works on to the end: what it tells never decides what it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import World

from migd.agent.store import FileStore
from migd.cli.machines import beside
from migd.sim.host import SimHost

PLAN = (
    "apiVersion: migd.dev/v1alpha1\nkind: GPUPartitionPlan\nmetadata: {name: piped}\nspec:\n  nodeSelector: {}\n"
    "  rules:\n  - {gpus: {all: true}, instances: [{profile: 1g.6gb, count: 2}]}\n"
)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_an_apply_whose_reader_went_away_is_carried_out(tmp_path: Path, stream: str) -> None:
    path, plan = tmp_path / "machine.json", tmp_path / "plan.yaml"
    SimHost.open(path, "a30", clock="virtual")
    plan.write_text(PLAN)
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | {stream: writer}
    command = [sys.executable, "-m", "migd", "apply", "-f", str(plan), "--state", str(path)]
    ended = subprocess.run(command, check=False, **streams)  # type: ignore[call-overload]
    os.close(writer)
    record = FileStore(beside(path)).load()
    assert record is not None
    assert record.open == ()
    assert [len(gpu.instances) for gpu in World(SimHost.open(path)).seen()] == [2]
    assert ended.returncode == 0 or stream == "stdout"  # the table could not be shown
