"""What goes wrong between us and an API server, by seed; each fault with the reason why it must be survived."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Trouble(Enum):
    """What happens to a request. The value says why it must be survived."""

    TOO_MANY = "others ask a lot too: 429 with Retry-After, by priority and fairness"
    UNWELL = "an API server restarts, or etcd has no leader: 500, 503 or 504 for a while"
    REFUSED = "the machine is gone or the network is: nobody answers, nothing was done"
    LOST_ANSWER = "the connection breaks after the write: done, and we do not know it"
    HANGS = "a load balancer forgets the connection: no answer, ever"
    SLOW = "the answer takes seconds"


class WatchTrouble(Enum):
    """What happens to a watch. The value says why it must be survived."""

    GONE = "the history we want to go on from was compacted: 410"
    CUT = "the API server or what is in between ends the connection, at any moment"
    SILENT = "the connection is dead, and no packet says so"
    LATE = "the watch cache lags behind etcd: what we hear is seconds old"


@dataclass(frozen=True, slots=True)
class Chances:
    """How likely each trouble is, from 0 to 1, for one request or one event of a watch."""

    request: float = 0.1
    watch: float = 0.05


NONE: Final = Chances(0.0, 0.0)


class Faults:
    """Decides by seed; `calm` ends all trouble, so that a test can ask for convergence."""

    def __init__(self, seed: int = 0, chances: Chances = NONE) -> None:
        self._dice = random.Random(f"cluster faults {seed}")  # noqa: S311
        self._chances = chances

    def calm(self) -> None:
        """Nothing goes wrong from now on."""
        self._chances = NONE

    def of_request(self) -> Trouble | None:
        """The trouble that the next request is in, if any."""
        return self._dice.choice(list(Trouble)) if self._dice.random() < self._chances.request else None

    def of_watch(self) -> WatchTrouble | None:
        """The trouble that a watch is in with its next event, if any."""
        return self._dice.choice(list(WatchTrouble)) if self._dice.random() < self._chances.watch else None

    def delay_s(self, most_s: float) -> float:
        """A delay up to this."""
        return self._dice.random() * most_s
