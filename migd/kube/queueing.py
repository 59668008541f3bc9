"""A queue of keys that coalesces and delays: a key is in it once, is worked on by one at a time, and comes back later.

It knows no clock: every call says what time it is.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a key waits that failed several times in a row: doubling from first_s up to most_s.

    jitter: the wait is up to this share longer, so that what failed together does not come back together.
    """

    first_s: float = 0.1
    most_s: float = 300.0
    jitter: float = 0.2

    def wait_s(self, failures: int, dice: random.Random) -> float:
        """How long to wait after so many failures, 1 or more."""
        return min(self.first_s * 2.0 ** min(failures - 1, 40), self.most_s) * (1 + self.jitter * dice.random())


DEFAULT: Final = Backoff()


class KeyQueue(Generic[K]):
    """Keys with the time when each is due. Adding one that is in already keeps the earlier time."""

    def __init__(self, backoff: Backoff = DEFAULT, dice: random.Random | None = None) -> None:
        self._backoff = backoff
        self._dice = dice or random.Random(0)  # noqa: S311  jitter only
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []  # entries that no longer agree with _due are skipped
        self._order = 0
        self._taken: dict[K, float | None] = {}  # worked on; the time when it is due again, None for not
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}

    def add(self, key: K, now_s: float, after_s: float = 0.0) -> None:
        """Have a key worked on, not before so long. One that is being worked on comes again after that."""
        due = max(now_s + after_s, self._not_before.get(key, 0.0))
        if key in self._taken:
            before = self._taken[key]
            self._taken[key] = due if before is None else min(before, due)
        else:
            self._push(key, due)

    def take(self, now_s: float) -> K | None:
        """The key that has been due longest; the caller says `done` when it has worked on it. None: none is due."""
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) != due:
                heapq.heappop(self._heap)
                continue
            if due > now_s:
                return None
            heapq.heappop(self._heap)
            del self._due[key]
            self._taken[key] = None
            return key
        return None

    def done(self, key: K, now_s: float, again_after_s: float | None = None) -> None:
        """The work on a key went well; it comes back after so long, or when added."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self._release(key, None if again_after_s is None else now_s + again_after_s)

    def failed(self, key: K, now_s: float, at_least_s: float = 0.0) -> float:
        """The work on a key failed; it comes back after a wait that grows. Returns that wait.

        at_least_s: what the API server asked for. Being added brings a key back earlier, since what was added may be
        the cure, but never before that.
        """
        failures = self._failures.get(key, 0) + 1
        self._failures[key] = failures
        wait_s = max(at_least_s, self._backoff.wait_s(failures, self._dice))
        self._not_before[key] = now_s + at_least_s
        self._release(key, now_s + wait_s)
        return wait_s

    def forget(self, key: K) -> None:
        """A key is not to be worked on any more."""
        self._due.pop(key, None)
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        if key in self._taken:
            self._taken[key] = None

    def next_at_s(self) -> float | None:
        """When the next key is due; None where none is waiting."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        return len(self._due) + len(self._taken)

    def _release(self, key: K, due: float | None) -> None:
        assert key in self._taken, f"{key} was not taken"
        again = self._taken.pop(key)
        times = [time for time in (again, due) if time is not None]
        if times:
            self._push(key, max(min(times), self._not_before.get(key, 0.0)))

    def _push(self, key: K, due: float) -> None:
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        self._order += 1
        heapq.heappush(self._heap, (due, self._order, key))
