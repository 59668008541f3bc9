"""Times as values: what is measured, summed up as n, p50, p99 and max."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Times:
    """How long n runs of one thing took, in seconds."""

    n: int
    p50_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Times:
        """Summed up; percentiles are times that were measured (nearest rank), none is interpolated."""
        ordered = sorted(seconds)
        assert ordered, "nothing was measured"
        return cls(len(ordered), percentile(ordered, 50), percentile(ordered, 99), ordered[-1])


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest of these ascending values that at least so many percent of them do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def median(values: Iterable[float]) -> float:
    """The 50th percentile, by nearest rank."""
    return percentile(sorted(values), 50)


def timed(act: Callable[[], T]) -> tuple[float, T]:
    """How long one call took, and what it gave."""
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result


def each(cases: Iterable[Callable[[], T]]) -> tuple[Times, list[T]]:
    """Call each case once; the times, and the answers in order."""
    measured = [timed(case) for case in cases]
    return Times.of(seconds for seconds, _ in measured), [answer for _, answer in measured]
