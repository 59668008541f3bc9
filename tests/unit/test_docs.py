"""The pages for operators name every word that the programs say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from migd.plans.conditions import PHASES, REASONS, WELL

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = [*ROOT.glob("migd/**/*.py"), *ROOT.glob("operator/**/*.py")]
_METRIC = re.compile(r"(?:Gauge|Counter|Histogram|Summary|_gauge)\(\s*\"(migd_\w+)\"")


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading, by the word in their first cell."""
    part = (DOCS / page).read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [re.split(r"(?<!\\)\|", line.strip("|")) for line in part.splitlines() if line.startswith("| `")]
    return {found[0].strip(" `"): [cell.strip() for cell in found[1:]] for found in cells}


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_its_row(phase: str):
    meaning, advice = rows("troubleshooting.md", "By phase")[phase]
    assert meaning
    assert advice


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_its_row(reason: str):
    meaning, look, advice = rows("troubleshooting.md", "By reason")[reason]
    assert meaning
    assert advice
    assert look or reason in WELL


def test_there_is_no_row_of_a_phase_that_is_none():
    assert set(rows("troubleshooting.md", "By phase")) == set(PHASES)


def test_every_metric_is_in_the_page_of_metrics():
    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    named = {name for text in texts for name in _METRIC.findall(text)}
    listed = {*rows("metrics.md", "Operator"), *rows("metrics.md", "Agent")}
    assert {name for name in named if not {name, f"{name}_total"} & listed} == set()


def test_the_page_of_metrics_finds_names_as_the_sources_write_them():
    text = 'Gauge("migd_a", 1)\nCounter(\n    "migd_b", 1)\nself._gauge("migd_c")\nHistogram("other", 1)'
    assert _METRIC.findall(text) == ["migd_a", "migd_b", "migd_c"]
