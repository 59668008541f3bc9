"""What a server keeps of the calls made to it: who called what and when, and which functions are not simulated."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

KEPT: Final = 100_000


@dataclass(frozen=True, slots=True)
class Call:
    """One call that was answered. number: of all calls to this server, in the order of their ends.

    began_s, ended_s: time.time(). pid: of the caller. gpu: UUID, "" for none. code: what NVML returned.
    """

    number: int
    began_s: float
    ended_s: float
    pid: int
    name: str
    gpu: str
    code: int


class Records:
    """The log of calls, bounded, and counts by name of functions that are not simulated."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[tuple[int, float, float, int, str, str, int]] = deque(maxlen=KEPT)
        self._number = 0
        self._unsimulated: Counter[str] = Counter()

    def add(self, began_s: float, ended_s: float, pid: int, name: str, gpu: str, code: int) -> None:
        """One call more."""
        with self._lock:
            self._number += 1
            self._calls.append((self._number, began_s, ended_s, pid, name, gpu, code))

    def missed(self, name: str) -> None:
        """A function was called that is not simulated."""
        with self._lock:
            self._unsimulated[name] += 1

    def calls(self, pid: int | None = None, after: int = 0) -> list[Call]:
        """The calls, by when they began; of one caller; those that ended after the one of this number."""
        with self._lock:
            kept = list(self._calls)
        found = [Call(*one) for one in kept if one[0] > after and pid in (None, one[3])]
        return sorted(found, key=lambda call: (call.began_s, call.number))

    @property
    def newest(self) -> int:
        """The number of the newest call; 0 before there is one."""
        return self._number

    def unsimulated(self) -> dict[str, int]:
        """How often each function was called that is not simulated, by name."""
        with self._lock:
            return dict(sorted(self._unsimulated.items()))
