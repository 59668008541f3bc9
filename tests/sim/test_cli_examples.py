"""The examples and the demo of one machine: they say what happens, and it does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Cli
from jsonschema import Draft202012Validator, ValidationError

from migd.cli.exits import Exit
from migd.plans.plan import Plan
from migd.plans.reading import read

EXAMPLES = Path(__file__).parents[2] / "examples"
ROOT = EXAMPLES.parent
PLANS = sorted((EXAMPLES / "plans").glob("*.yaml"))
ENDS = {
    "disable": (Exit.DONE, Exit.DONE),
    "infeasible": (Exit.INFEASIBLE, Exit.INFEASIBLE),
    "pool": (Exit.CHANGES, Exit.BLOCKED),  # it is paused
}
"""How `migd plan` and `migd apply` end, where it is not with changes and well."""


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_an_example_plan_can_be_tried_as_it_says(path: Path, cli: Cli) -> None:
    (command,) = re.findall(r"^# Try it: migd (.*)$", path.read_text(), re.MULTILINE)
    words = [str(path) if word.startswith("examples/") else word for word in shlex.split(command)]
    assert str(path) in words, "the command is about this file"
    planned, applied = ENDS.get(path.stem, (Exit.CHANGES, Exit.DONE))
    assert cli.bare(*words).code == planned
    assert cli.bare("apply", *words[1:]).code == applied


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_an_example_plan_is_good_for_the_cluster_too(path: Path) -> None:
    """By the definition's schema, without unknown fields; its rules in CEL are tried on a real API server."""
    definition = yaml.safe_load((ROOT / "crds/migd.dev_gpupartitionplans.yaml").read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    document = yaml.safe_load(path.read_text())
    Draft202012Validator(closed(schema)).validate(document)
    plan = read(path.read_text())
    assert isinstance(plan, Plan)
    assert plan.name == path.stem == document["metadata"]["name"]
    with pytest.raises(ValidationError, match="paussed"):
        Draft202012Validator(closed(schema)).validate({**document, "spec": {**document["spec"], "paussed": True}})


def closed(schema: Any) -> Any:
    """A structural schema as JSON Schema that takes no field it does not name, as kubectl's strict validation."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if isinstance(schema.get("properties"), dict) and schema["properties"] and schema.get("type") == "object":
        found["additionalProperties"] = False
    return found


def test_by_need_finds_the_smallest_enough_on_each_board(cli: Cli) -> None:
    ran = cli.bare(
        "plan", "-f", str(EXAMPLES / "plans/by-need.yaml"), "--simulate", "a100-40gb,a100-80gb,h200", "-o", "json"
    )
    found = [sorted(instance["profile"] for instance in gpu["create"]) for gpu in ran.json["gpus"]]
    assert found == [["2g.10gb", "3g.20gb"], ["1g.20gb", "2g.20gb"], ["1g.35gb", "2g.35gb"]]


def test_the_demo_of_one_machine_tells_its_story(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo_node.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
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
    assert re.search(r"That was migd in \d+ seconds", story)


def test_what_the_demo_proposes_next_can_be_done(cli: Cli, tmp_path: Path) -> None:
    demo = (EXAMPLES / "demo_node.py").read_text()
    commands = re.findall(r"\.venv/bin/migd (.+?) --state \{STATE\}", demo)
    assert len(commands) == 3
    for command in commands:
        words = [str(EXAMPLES.parent / word) if word.startswith("examples/") else word for word in shlex.split(command)]
        ran = cli.bare(*words, "--simulate", "8xa100-80gb", "--state", str(tmp_path / "demo.json"))
        assert ran.code in (Exit.DONE, Exit.CHANGES)
