"""The results as tables for people; ratios come before times, since times depend on the machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.faces import Faces
from benchmarks.fleet import Fleets
from benchmarks.footprint import Memory, Start
from benchmarks.measuring import Times
from benchmarks.planning import Planning
from benchmarks.quality import Orders, Recuts
from benchmarks.saving import Saving
from benchmarks.transactions import Transactions


def fleet_rows(results: Iterable[Fleets]) -> list[tuple[str, ...]]:
    """Deciding for a fleet."""
    head = ("DECIDING", "NODES", "GPUS", "WRITES", "N", "P50", "P99", "MAX")
    return [head, *((r.what, str(r.nodes), str(r.gpus), str(r.writes), *_spread(r.took)) for r in results)]


def faces_rows(results: Iterable[Faces]) -> list[tuple[str, ...]]:
    """Calls through the C face, next to the face in process."""
    head = ("C FACE", "KEPT IN", "CALLS", "TIMES THE FACE IN PROCESS", "N", "P50", "P99", "MAX")
    return [head, *((r.what, r.kept, str(r.calls), f"{r.ratio:.1f}", *_spread(r.c)) for r in results)]


def planning_rows(results: Iterable[Planning]) -> list[tuple[str, ...]]:
    """Planning, next to brute force."""
    head = ("PLANNING", "BOARD", "BRUTE FORCE / OURS", "SAME ANSWERS", "N", "P50", "P99", "MAX")
    return [head, *((r.what, r.board, _times(r.ratio), str(r.same or "-"), *_spread(r.ours)) for r in results)]


def orders_rows(results: Iterable[Orders]) -> list[tuple[str, ...]]:
    """Requests placed one by one."""
    head = ("FINDS NO PLACE", "ORDERS", "FIRST-FIT", "BEST ONLINE", "LARGEST FIRST", "OURS")
    return [
        head,
        *(
            (
                r.board,
                str(r.orders),
                f"{r.fails_first_fit:.1%}",
                f"{r.fails_best:.1%}",
                f"{r.fails_largest_first:.1%} of {r.multisets}",
                f"{r.fails_ours:.1%} of {r.multisets}",
            )
            for r in results
        ),
    ]


def recuts_rows(results: Iterable[Recuts]) -> list[tuple[str, ...]]:
    """Recuts, next to simpler ways."""
    head = ("RECUT", "N", "GREEDY STUCK", "STUCK, SOME IN USE", "OURS STUCK", "DESTROYED: CLEAR ALL", "OURS", "SAVED")
    return [
        head,
        *(
            (
                r.board,
                str(r.n),
                f"{r.fails_greedy:.1%}",
                f"{r.fails_greedy_busy:.1%}",
                "0.0%",
                f"{r.destroyed_clear:.2f}",
                f"{r.destroyed_ours:.2f}",
                f"{1 - r.destroyed_ours / r.destroyed_clear:.0%}",
            )
            for r in results
        ),
    ]


def transaction_rows(results: Iterable[Transactions]) -> list[tuple[str, ...]]:
    """Whole transactions: the ratio, and what each part of the rest adds to it."""
    head = (
        "TRANSACTION",
        "KEPT IN",
        "TIME / NVML'S OWN",
        "MAX",
        "N",
        "NVML'S OWN",
        "LOOKS",
        "SAVES",
        "CALLS",
        "DECIDE",
    )
    return [
        head,
        *(
            (
                r.story,
                r.kept,
                f"{r.ratio_p50:.3f}",
                f"{r.ratio_max:.3f}",
                str(r.n),
                f"{r.nvml_s:.2f} s",
                f"{_share(r.looks_s, r)} ({r.looks})",
                f"{_share(r.saves_s, r)} ({r.saves})",
                f"{_share(r.operations_s, r)} ({r.steps})",
                _share(r.decide_s, r),
            )
            for r in results
        ),
    ]


def memory_rows(results: Iterable[Memory]) -> list[tuple[str, ...]]:
    """Tables in memory."""
    head = ("TABLE IN MEMORY", "SETS", "STAYS", "PEAK")
    return [head, *((r.board, str(r.sets), _kib(r.bytes), _kib(r.peak_bytes)) for r in results)]


def start_rows(start: Start) -> list[tuple[str, ...]]:
    """Starting a command."""
    return [
        ("START", "TIMES PYTHON'S OWN", "N", "P50", "P99", "MAX"),
        ("migd gpus --simulate 8xa100-80gb", f"{start.ratio:.1f}", *_spread(start.command)),
        ("python -c pass", "1.0", *_spread(start.python)),
    ]


def saving_rows(saving: Saving) -> list[tuple[str, ...]]:
    """Saving the record."""
    return [
        ("SAVE", "TIMES THE DISK'S OWN", "N", "P50", "P99", "MAX"),
        ("record of 8 GPUs", f"{saving.ratio:.2f}", *_spread(saving.ours)),
        (f"the disk: {saving.bytes} bytes", "1.00", *_spread(saving.disk)),
    ]


def text(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, the first one being the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _spread(times: Times) -> tuple[str, str, str, str]:
    return str(times.n), _short(times.p50_s), _short(times.p99_s), _short(times.max_s)


def _short(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f}"


def _share(seconds: float, result: Transactions) -> str:
    return f"{seconds / result.nvml_s:+.3f}"


def _kib(size: int) -> str:
    return f"{size / 1024:.0f} KiB"
