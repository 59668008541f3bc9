"""The examples of docs/plans.md, docs/pods.md and docs/import.md are read as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import yaml
from unit.plans.texts import migparted, plan

from migd.plans.migparted import to_plan
from migd.plans.partitions import NotGoing, PartitionStatus
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


def test_the_example_of_a_drain_is_a_status_in_which_every_victim_has_its_answer():
    (text,) = re.findall(r"```\n(status:.*?)```", (DOCS / "pods.md").read_text(), re.DOTALL)
    found = PartitionStatus.model_validate(yaml.safe_load(text)["status"], by_alias=True, by_name=False)
    assert found.phase == "Draining"
    assert [pod.uid for pod in found.victims] == [answer.pod_uid for answer in found.evictions]
    assert [(answer.code, answer.reason) for answer in found.evictions] == [(429, "DrainBlocked"), (201, None)]
    assert [blocker.pod for blocker in found.blockers] == [found.victims[0]]


def test_every_reason_why_a_victim_does_not_go_is_explained():
    page = (DOCS / "pods.md").read_text().split("| `reason` of an answer |", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(get_args(NotGoing))


def test_the_plan_for_owners_of_pods_evicts_and_protects():
    (found,) = [read(text) for text in examples("pods.md") if "GPUPartitionPlan" in text]
    assert isinstance(found, Plan)
    assert (found.spec.disruption.policy, found.spec.disruption.allow) == ("Evict", ("EmptyDir",))
    assert found.spec.disruption.protect is not None
