"""What commands print: tables for people, JSON and YAML for programs, notes on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from migd.cli.options import Format


def document(body: Mapping[str, Any], output: Format) -> None:
    """Print a document as JSON or YAML on standard output."""
    if output is Format.JSON:
        text = json.dumps(body, indent=2, ensure_ascii=False) + "\n"
    else:
        text = yaml.safe_dump(dict(body), sort_keys=False, allow_unicode=True)
    sys.stdout.write(text)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a plain table on standard output: wide enough for its texts, wrapped only on a terminal."""
    made = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=column in ("GPU", "MIG"))
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    console(sys.stdout).print(made)


def console(stream: Any) -> Console:
    """A console that never wraps for a reader that is no terminal."""
    return Console(file=stream, highlight=False, soft_wrap=False, width=None if stream.isatty() else 200)


def note(text: str) -> None:
    """Say something to a person, on standard error, apart from the result."""
    print(f"note: {text}", file=sys.stderr)  # noqa: T201 - this is the program's voice


def notes(texts: Iterable[str]) -> None:
    """Say several things, each once."""
    for text in dict.fromkeys(texts):
        note(text)
