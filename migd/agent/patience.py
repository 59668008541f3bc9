"""How often something is tried, and how long apart: operations by what they answered, and waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from migd.agent.records import Cause

TURNS_MAX: Final = 200
"""Operations of one transaction in one direction; a whole 7-slice GPU re-cut takes 29 and a mode change."""

POLL_S: Final = 2.0
"""Between two looks while waiting for instances to become idle."""

TRY_AGAIN_S: Final = 15.0
"""Between two tries, while waiting, against somebody whom only the driver sees: each try disturbs what is idle."""

RESETS_MAX: Final = 2
"""GPU resets tried for one mode change; the second is for one that a crash may have kept from happening."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How often an operation is tried again after one kind of error, and how long apart.

    tries: in all, forward. tries_back: in all, on the way back, where giving up leaves the GPU half done.
    first_s, most_s: the pause doubles from the one to the other.
    """

    tries: int
    tries_back: int
    first_s: float
    most_s: float

    def pause_s(self, tries: int) -> float:
        """The pause after so many tries."""
        return float(min(self.first_s * 2 ** (tries - 1), self.most_s))


PATIENCE: Final[Mapping[str, Patience]] = {
    "InUse": Patience(8, 10, 0.1, 2.0),  # a release lags some tenths of a second behind its process's end
    "NoPermission": Patience(1, 2, 0.5, 0.5),  # asking again does not help
    "ResetRefused": Patience(RESETS_MAX, RESETS_MAX, 1.0, 1.0),
    "GPUUnhealthy": Patience(1, 1, 0.5, 0.5),
    "": Patience(3, 10, 0.2, 3.0),  # everything else may be passing
}

PAUSE_MAX_S: Final = max(patience.most_s for patience in PATIENCE.values())
"""No try is put off longer; a later moment was written by another clock, and is not waited for."""


def patience_with(error: Cause | None) -> Patience:
    """The patience with what an operation answered; None where it was accepted and did nothing."""
    return PATIENCE.get(error.reason, PATIENCE[""]) if error else PATIENCE[""]
