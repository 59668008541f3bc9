"""Tables as kubectl prints them: the columns of a custom resource are read from its definition, nothing is made up."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]
CRDS = Path(__file__).resolve().parent.parent / "crds"
_FILTER = re.compile(r'(\w+)\[\?\(@\.(\w+)=="([^"]*)"\)\]')
_NAME_MAX = 13


def get(plural: str, objects: Iterable[Json], now: datetime) -> str:
    """What `kubectl get PLURAL` prints of these objects; long names are cut. Columns of priority 1 are left out."""
    columns = [column for column in _columns(plural) if not column.get("priority")]
    rows = [[short(o["metadata"]["name"]), *(_cell(column, o, now) for column in columns)] for o in objects]
    return table(["Name", *(column["name"] for column in columns)], rows)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], between: int = 2) -> str:
    """Lines of aligned columns, heads in capitals, nothing at the end of a line. between: blanks between columns."""
    lines = [[head.upper() for head in heads], *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    blank = " " * between
    return "\n".join(
        blank.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def short(name: str) -> str:
    """A name, or its beginning where it is long, as UUIDs are."""
    return name if len(name) <= _NAME_MAX else name[: _NAME_MAX - 1] + "…"


def found(document: Any, path: str) -> Any:
    """The value at a JSON path as printer columns have it, None where there is none.

    Known are names, and filters for equality: `.status.conditions[?(@.type=="Ready")].status`.
    """
    for part in re.findall(r"\w+(?:\[[^]]*\])?", path):
        if not isinstance(document, dict):
            return None
        filtered = _FILTER.fullmatch(part)
        if filtered:
            name, key, value = filtered.groups()
            document = next((one for one in document.get(name) or () if one.get(key) == value), None)
        else:
            document = document.get(part)
    return document


def age(seconds: float) -> str:
    """A time as kubectl shows ages: 45s, 3m20s, 12m, 5h, 3d. Source: k8s.io/apimachinery, HumanDuration, shortened."""
    whole = int(seconds)
    if whole < 120:
        return f"{whole}s"
    if whole < 600:
        return f"{whole // 60}m{whole % 60}s" if whole % 60 else f"{whole // 60}m"
    if whole < 3 * 3600:
        return f"{whole // 60}m"
    return f"{whole // 3600}h" if whole < 2 * 86400 else f"{whole // 86400}d"


@cache
def _columns(plural: str) -> tuple[Json, ...]:
    """The printer columns of a custom resource."""
    definition = yaml.load((CRDS / f"migd.dev_{plural}.yaml").read_text(), yaml.CSafeLoader)
    (version,) = definition["spec"]["versions"]
    return tuple(version["additionalPrinterColumns"])


def _cell(column: Json, document: Json, now: datetime) -> str:
    value = found(document, column["jsonPath"])
    if value is None:
        return ""
    if column["type"] == "date":
        return age((now - datetime.fromisoformat(value)).total_seconds())
    return str(value)
