"""`python -m benchmarks`: run them all, print tables, and with --json FILE write the figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import evicting, faces, fleet, footprint, planning, quality, report, saving, transactions

PARTS = ("planning", "quality", "footprint", "transactions", "fleet", "faces")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there too; times in seconds")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    parser.add_argument("--small", action="store_true", help="tiny sizes: shows that it runs, its figures mean nothing")
    given = parser.parse_args(arguments)
    found = run((given.only,) if given.only else PARTS, small=given.small)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def run(parts: Iterable[str], *, small: bool = False) -> dict[str, Any]:
    """Run these parts, print each as soon as it is there, and give all figures as plain values."""
    found: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count(), "small": small}
    for part in parts:
        for name, results, rows in _PARTS[part](small):
            print(report.text(rows), end="\n\n", flush=True)
            found[name] = [asdict(result) for result in results]
    return found


def _planning(small: bool) -> Iterable[tuple[str, list[Any], list[tuple[str, ...]]]]:
    builds, cases, asked = (2, 20, 10) if small else (30, 3000, 300)
    results = [one for variant in planning.BOARDS for one in planning.planning(variant, builds, cases, asked)]
    results += evicting.evicting(20 if small else 3000, asked)
    yield "planning", results, report.planning_rows(results)


def _quality(small: bool) -> Iterable[tuple[str, list[Any], list[tuple[str, ...]]]]:
    orders = [quality.orders(variant) for variant in planning.BOARDS]
    yield "orders", orders, report.orders_rows(orders)
    recuts = [quality.recuts(variant, 20 if small else 3000) for variant in planning.BOARDS]
    yield "recuts", recuts, report.recuts_rows(recuts)


def _footprint(small: bool) -> Iterable[tuple[str, list[Any], list[tuple[str, ...]]]]:
    weights = [footprint.memory(variant) for variant in planning.BOARDS]
    yield "memory", weights, report.memory_rows(weights)
    start = footprint.start(1 if small else 9)
    yield "start", [start], report.start_rows(start)


def _transactions(small: bool) -> Iterable[tuple[str, list[Any], list[tuple[str, ...]]]]:
    saved = saving.saving(3 if small else 50)
    yield "saving", [saved], report.saving_rows(saved)
    kinds: tuple[transactions.Kept, ...] = ("memory", "file")
    results = [
        transactions.transactions(story, kept, 1 if small else story.runs, 0.01 if small else 1.0)
        for story in transactions.STORIES
        for kept in kinds
    ]
    yield "transactions", results, report.transaction_rows(results)


def _fleet(small: bool) -> Iterable[tuple[str, list[Any], list[tuple[str, ...]]]]:
    results = list(fleet.fleets(5, 1) if small else fleet.fleets(1000, 5))
    yield "fleet", results, report.fleet_rows(results)


def _faces(small: bool) -> Iterable[tuple[str, list[Any], list[tuple[str, ...]]]]:
    kinds: tuple[transactions.Kept, ...] = ("memory", "file")
    results = [one for kept in kinds for one in faces.faces(kept, 3 if small else 300)]
    yield "faces", results, report.faces_rows(results)


_PARTS = {
    "planning": _planning,
    "quality": _quality,
    "footprint": _footprint,
    "transactions": _transactions,
    "fleet": _fleet,
    "faces": _faces,
}

if __name__ == "__main__":
    main()
