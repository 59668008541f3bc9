"""The examples and the demo: they say what happens, and it does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Cli

from migd.cli.exits import Exit

EXAMPLES = Path(__file__).parents[2] / "examples"
PLANS = sorted((EXAMPLES / "plans").glob("*.yaml"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_an_example_plan_can_be_tried_as_it_says(path: Path, cli: Cli) -> None:
    (command,) = re.findall(r"^# Try it: migd (.*)$", path.read_text(), re.MULTILINE)
    words = [str(path) if word.startswith("examples/") else word for word in shlex.split(command)]
    assert str(path) in words, "the command is about this file"
    expected = Exit.DONE if path.stem == "disable" else Exit.CHANGES
    assert cli.bare(*words).code == expected
    assert cli.bare("apply", *words[1:]).code == Exit.DONE


def test_by_need_finds_the_smallest_enough_on_each_board(cli: Cli) -> None:
    ran = cli.bare(
        "plan", "-f", str(EXAMPLES / "plans/by-need.yaml"), "--simulate", "a100-40gb,a100-80gb,h200", "-o", "json"
    )
    found = [sorted(instance["profile"] for instance in gpu["create"]) for gpu in ran.json["gpus"]]
    assert found == [["2g.10gb", "3g.20gb"], ["1g.20gb", "2g.20gb"], ["1g.35gb", "2g.35gb"]]


def test_the_demo_tells_its_story_in_time(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    story = ran.stdout
    told = [
        "0–7  NVIDIA A100-SXM4-80GB  off  -          no      7g.80gb 4g.40gb 2×3g.40gb",
        "8 GPUs would change: 0 instances kept, 0 destroyed, 32 created, MIG turned on for 8, 8 reset.",
        "GPU 0–7 refused (Infeasible): NVIDIA A100-SXM4-80GB: 2×3g.40gb + 1g.10gb does not fit on this GPU",
        "Nearest that fits: 2×3g.40gb or",
        "(exit code 3: cannot be met on this hardware: nothing was touched)",
        "GPU 7  created 2g.20gb@0 1g.10gb@2,3 3g.40gb@4",
        "GPU 3 1g.10gb@3  40000  python serve.py  3f1c2d9a80b7",
        "GPU 3 blocked (InUse): in use: 1g.10gb@3 by pid 40000 (python serve.py) in container 3f1c2d9a80b7",
        "(exit code 4: blocked: nothing was touched)",
        "8 GPUs changed, 16 instances kept",
        "(exit code -9: killed, as by kill -9)",
        "note: unfinished: GPU 2 (create GPU instance 3g.40gb@4), GPU 3–7 (not begun)",
        "note: first, what was left under way on GPU 2–7 is finished or undone",
        "6 GPUs changed, 14 instances kept",
        "$ migd rollback --state demo.json",
        "8 GPUs changed, 16 instances kept",
        ".venv/bin/migd plan -f examples/plans/mixed.yaml --state demo.json",
    ]
    at = 0
    unwrapped = re.sub(r"\n  +(?=\S)", " ", story)
    for line in told:
        found = unwrapped.find(line, at)
        assert found >= 0, f"missing, or not in this order: {line}\n{story}"
        at = found + 1
    assert int(re.findall(r"That was migd in (\d+) seconds", story)[0]) < 60


def test_what_the_demo_proposes_next_can_be_done(cli: Cli, tmp_path: Path) -> None:
    demo = (EXAMPLES / "demo.py").read_text()
    commands = re.findall(r"\.venv/bin/migd (.+?) --state \{STATE\}", demo)
    assert len(commands) == 3
    for command in commands:
        words = [str(EXAMPLES.parent / word) if word.startswith("examples/") else word for word in shlex.split(command)]
        ran = cli.bare(*words, "--simulate", "8xa100-80gb", "--state", str(tmp_path / "demo.json"))
        assert ran.code in (Exit.DONE, Exit.CHANGES)
