"""What planning's tables weigh in memory, and how long a command takes to start."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from boards import VARIANTS, board_of, rows

from benchmarks.measuring import Times, timed
from benchmarks.planning import BOARDS
from migd.mig.table import Table

ROOT: Final = Path(__file__).parent.parent
GPUS: Final = ("-m", "migd", "gpus", "--simulate", "8xa100-80gb")
NOTHING: Final = ("-c", "pass")


@dataclass(frozen=True, slots=True)
class Memory:
    """One board's table. bytes: what stays once it is built; peak_bytes: the most while it is built."""

    board: str
    sets: int
    bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Start:
    """`migd gpus --simulate 8xa100-80gb` as a process, from its start to its end; and Python doing nothing."""

    command: Times
    python: Times
    ratio: float


def memory(variant: str) -> Memory:
    """The table of one board, every geometry of it asked for once, as long use does."""
    board = board_of(rows(*VARIANTS[variant]))
    tracemalloc.start()
    try:
        table = Table(board)
        for found in table.sets:
            table.geometry(found.bits)
        stays, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Memory(BOARDS[variant], len(table.sets), stays, peak)


def start(runs: int) -> Start:
    """So many starts of each, taken in turns, after one that compiles the sources, as installing migd does."""
    took: dict[tuple[str, ...], list[float]] = {GPUS: [], NOTHING: []}
    with tempfile.TemporaryDirectory() as compiled:
        shown = _process(GPUS, compiled)[1]
        assert "0–7" in shown, f"the command does not list eight GPUs: {shown}"
        for _ in range(runs):
            for arguments, seconds in took.items():
                seconds.append(_process(arguments, compiled)[0])
    command, python = Times.of(took[GPUS]), Times.of(took[NOTHING])
    return Start(command, python, command.p50_s / python.p50_s)


def _process(arguments: tuple[str, ...], compiled: str) -> tuple[float, str]:
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )

    seconds, done = timed(run)
    return seconds, done.stdout
