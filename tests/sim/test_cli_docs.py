"""What README and docs/cli.md show is what the commands print: each console block is played, durations aside."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import APPLY, GPUS, PLAN, Cli

from migd.cli.exits import ORDER
from migd.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
AT_ONCE = "sim switch duration_scale=0 --simulate 2xa100-80gb --state machine.json"
PAGES = {"README.md": 2, "docs/cli.md": 0}
"""How many commands make what a page's console blocks are played on."""


def migd(command: str, folder: Path) -> str:
    """What a command prints, standard error included, as on a terminal of 120 columns."""
    return subprocess.run(
        [sys.executable, "-m", "migd", *shlex.split(command)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout


def making(page: str) -> list[str]:
    """The commands of a page that make its simulated machine."""
    return re.findall(r"^migd (.* --state machine\.json)$", (ROOT / page).read_text(), re.MULTILINE)


def shown(page: str) -> list[tuple[str, str]]:
    """The commands of a page's console blocks, each with what it is said to print."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    one = re.compile(r"^\$ migd (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
    return [(command, answer) for block in blocks for command, answer in one.findall(block)]


def plain(text: str) -> str:
    return re.sub(r"\d+(\.\d+)? s\b", "N s", text)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_is_what_is_printed(page: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    made = making(page)
    assert len(made) == PAGES[page]
    for command in [AT_ONCE, *made] if made else []:
        migd(command, tmp_path)
    played = shown(page)
    assert played
    for command, answer in played:
        assert plain(migd(command, tmp_path)) == plain(answer), f"{page}: migd {command}"


@pytest.mark.parametrize("page", ["README.md", "docs/cli.md"])
def test_the_exit_codes_are_told_in_the_order_in_which_they_apply(page: str) -> None:
    found = re.findall(r"^\| (\d) \|", (ROOT / page).read_text(), re.MULTILINE)
    assert found == [str(code.value) for code in ORDER]


def test_the_json_shown_is_as_the_schemas_say() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    gpus, unfinished, plan, apply = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    GPUS.validate(gpus)
    GPUS.validate({"gpus": [], "unfinished": unfinished})
    PLAN.validate(plan)
    APPLY.validate(apply)


def test_every_command_and_every_option_is_in_the_reference(cli: Cli) -> None:
    page = (ROOT / "docs/cli.md").read_text()
    for name in COMMANDS:
        assert f"`migd {name}" in page
        for option in re.findall(r"^  (?:-\w, )?(--[a-z-]+)", cli.bare(name, "--help").out, re.MULTILINE):
            assert option in page or option in ("--help", "--output", "--filename", "--config"), f"{name} {option}"
    for name in re.findall(r"^  ([a-z-]+)  ", cli.bare("sim", "--help").out, re.MULTILINE):
        assert f"`{name} " in page or f"`{name}`" in page, f"sim {name}"
        for option in re.findall(r"^  (?:-\w, )?(--[a-z-]+)", cli.bare("sim", name, "--help").out, re.MULTILINE):
            assert option in page or option in ("--help", "--output"), f"sim {name} {option}"


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_every_link_leads_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), target


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for path in (ROOT / "docs").rglob("*.md"):
        if path.name != "README.md":
            assert f"({path.relative_to(ROOT / 'docs')})" in index


def test_the_version_is_that_of_the_package() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert migd("--version", ROOT) == f"migd {version}\n"
