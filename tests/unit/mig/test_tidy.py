"""The planner's sources name no GPU model and no profile: all it knows comes from what a board reports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import migd.mig

SOURCES = sorted(Path(migd.mig.__file__).parent.glob("*.py"))
MODELS = re.compile(
    r"(?i)(?<![a-z])(a10|a16|a30|a40|a100|a800|h20|h100|h200|h800|gh200|b200|b300|gb200|gb300|l40s?|rtx|thor)"
)
GRIDS = re.compile(r"\dg\.|\+me|\+gfx|-me\b|(?i:ampere|hopper|blackwell)|(?i:nvidia)")


@pytest.mark.parametrize("source", SOURCES, ids=[s.stem for s in SOURCES])
def test_no_model_and_no_profile_is_written_into_the_planner(source: Path) -> None:
    """Docstrings and comments may give examples; names and strings of the code may not know any board."""
    for word in words_of(ast.parse(source.read_text())):
        assert not MODELS.search(word), f"{source.name} knows a model: {word!r}"
        assert not GRIDS.search(word), f"{source.name} knows a profile: {word!r}"


def test_the_search_for_model_names_finds_some() -> None:
    code = 'A100_SLICES = 8\ndef hopper(): """H100."""\nx = f"NVIDIA {y}"\nz = "3g.40gb"\n'
    found = [word for word in words_of(ast.parse(code)) if MODELS.search(word) or GRIDS.search(word)]
    assert found == ["A100_SLICES", "hopper", "NVIDIA ", "3g.40gb"]
    assert len(SOURCES) > 5


def words_of(tree: ast.Module) -> list[str]:
    """Every name and string of the code, in order; docstrings and strings that stand alone are left out."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    words = []
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in said:
                words.append((node.lineno, node.col_offset, text))
            case ast.Name(id=name) | ast.Attribute(attr=name):
                words.append((node.lineno, node.col_offset, name))
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                words.append((node.lineno, node.col_offset, name))
    return [word for _, _, word in sorted(words)]
