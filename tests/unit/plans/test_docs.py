"""The examples of docs/plans.md and docs/import.md are read as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from unit.plans.texts import migparted, plan

from migd.plans.migparted import to_plan
from migd.plans.plan import Plan
from migd.plans.reading import read
from migd.plans.statuses import plan_status_of

DOCS = Path(__file__).parents[3] / "docs"


def examples(page: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_every_example_plan_is_a_plan():
    found = [read(text) for text in examples("plans.md")]
    assert len(found) == 5
    assert all(isinstance(p, Plan) for p in found)


def test_the_example_of_all_fields_shows_the_defaults():
    found = read(examples("plans.md")[2])
    assert isinstance(found, Plan)
    assert found.spec == plan({"gpus": {"all": True}, "mig": "Disabled"}).spec


def test_the_example_import_gives_the_example_plan():
    file, expected = examples("import.md")
    assert to_plan(migparted(file), None) == (read(expected), ())


def test_the_example_status_is_one():
    (text,) = re.findall(r"```\n(status:.*?)```", (DOCS / "plans.md").read_text(), re.DOTALL)
    found = plan_status_of(yaml.safe_load(text)["status"])
    assert found.preview is not None
    assert found.preview.totals.create == 25
    assert [group.reason for group in found.preview.groups] == [None, "InUse"]
