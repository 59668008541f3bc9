"""How long a node's transaction waits for what, and how often it tries again. In seconds, on the clock of the boot."""

from __future__ import annotations

from typing import Final

POLL_S: Final = 2.0
"""Between two looks at what no watch tells of."""

KUBELET_LOOK_S: Final = 5.0
"""Between two looks at what a watch should tell of: what the kubelet advertises."""

KUBELET_TELLS_S: Final = 20.0
"""For a kubelet to advertise nothing any more of a plugin that is gone; it writes its status every 10 s."""

GUARD_LOOK_S: Final = 30.0
"""Between two looks while something stands in the way that waits for a person."""

SETTLE_S: Final = 5.0
"""The scheduler still binds for a moment after the taint. Measured: up to 1.5 s after it."""

CLOSED_MAX_S: Final = 120.0
"""Closed without its clients paused yet: for pods to be admitted, and for what must go to be idle again.

Of a drain: while nobody is on the way out, though something is in use.
"""

GONE_S: Final = 10.0
"""After the last of the pods that were asked to go is gone, for the kubelet and the driver to know it too."""

HEARD_S: Final = 10.0
"""Of a drain, before it is heeded that the plan's evictions are used up: what is read may be of the one before."""

CLIENTS_MAX_S: Final = 100.0
"""Paused, until GPU clients are gone and nothing is advertised any more."""

FORWARD_MAX_S: Final = 170.0
"""Paused, and still changing GPUs: from here on they go back."""

PAUSE_MAX_S: Final = 235.0
"""Paused in all. After 5 minutes the kubelet forgets the plugin, and restarted containers of kept pods hang."""

VERIFY_MAX_S: Final = 180.0
"""Open again, until what is advertised is as expected; also how long that may differ at rest."""

NUDGE_S: Final = 60.0
"""Before the device plugin is told to look again, the first time; then twice as long each time."""

WEDGED_S: Final = 600.0
"""Labels paused by a tool that is not there: mig-manager itself gives its clients 5 minutes."""

DENIED_S: Final = 30.0
"""After the API server denied a change, until it is asked again."""

REFRESHES_MAX: Final = 3
"""Tries to make device nodes, while the clients are paused."""

BACKOFF_FIRST_S: Final = 60.0
BACKOFF_MAX_S: Final = 1800.0


def backoff_s(tries: int) -> float:
    """The pause after so many attempts that did not end well: a minute, doubling to half an hour."""
    return float(min(BACKOFF_FIRST_S * 2 ** min(tries - 1, 10), BACKOFF_MAX_S)) if tries > 0 else 0.0
