"""The sources as text: habits that no other tool watches."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = frozenset(ROOT.glob("migd/**/*_pb2*.py"))
SOURCES = sorted({*ROOT.glob("migd/**/*.py"), *ROOT.glob("operator/**/*.py")} - GENERATED)
TESTS = sorted(ROOT.glob("tests/**/*.py"))
LINES_MAX = 420


def named(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda p: str(p.relative_to(ROOT)))


@named(SOURCES)
def test_a_module_says_its_idea_in_its_first_line_and_is_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    assert first.endswith((".", ":")), f"the first line is no sentence: {first!r}"
    assert len(text.splitlines()) <= LINES_MAX, "more than one idea lives here"


@named(TESTS)
def test_no_test_patches_a_module_of_ours_or_waits_on_the_clock(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ours = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] in ("migd", "migd_operator")
    }
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        name = ast.unparse(call.func)
        assert not name.endswith(("time.sleep", "mock.patch", "Mock")), f"line {call.lineno}: {name}"
        if name.endswith((".setattr", ".setitem")) and call.args:
            target = ast.unparse(call.args[0]).strip("'\"").split(".")[0]
            assert target not in ours | {"migd", "migd_operator"}, f"line {call.lineno} patches {target}"


@named(SOURCES)
def test_nothing_is_left_to_do_later(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not [word for word in ("TODO", "FIXME", "XXX", "NotImplementedError") if word in text]


def test_operator_is_a_folder_and_hides_no_standard_module() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    code = "import sys; sys.path.insert(0, sys.argv[1]); import collections, operator; print(operator.attrgetter)"
    subprocess.run([sys.executable, "-c", code, str(ROOT)], check=True, capture_output=True)


def test_every_page_of_the_docs_is_in_their_index_and_every_link_leads_somewhere() -> None:
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    linked: set[str] = set()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in _links(page.read_text(encoding="utf-8")):
            found = (page.parent / target).resolve()
            assert found.exists(), f"{page.relative_to(ROOT)} links to {target}"
            if page == ROOT / "docs" / "README.md" and found.suffix == ".md":
                linked.add(found.relative_to(ROOT / "docs").as_posix() if found.is_relative_to(ROOT / "docs") else "")
    assert pages <= linked, f"not in docs/README.md: {sorted(pages - linked)}"


def _links(text: str) -> list[str]:
    found = []
    for part in text.split("](")[1:]:
        target = part.split(")")[0].split("#")[0]
        if target and "://" not in target:
            found.append(target)
    return found


def test_the_json_schemas_are_json() -> None:
    schemas = sorted(ROOT.glob("migd/**/schemas/*.json"))
    assert schemas
    for schema in schemas:
        assert json.loads(schema.read_text())["$schema"] == "https://json-schema.org/draft/2020-12/schema"
