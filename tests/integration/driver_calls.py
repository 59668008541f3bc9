"""What the driver's log of calls says of a change: who made it, and which programs looked at GPUs half changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from controlplane.real_clusters import RealCluster
from integration.nvidia_programs import pids

from migd.sim.cface.handlers import CHANGING
from migd.sim.cface.records import Call

_LOOKS: Final = ("Mig", "Instance")


@dataclass
class Logged:
    """The calls of a while, by all programs of the node; empty before it is over.

    known: the processes of programs that are not kept away, and may look.
    """

    calls: list[Call] = field(default_factory=list)
    known: set[int] = field(default_factory=set)

    @property
    def changes(self) -> list[Call]:
        """Those that changed a mode, or destroyed or created instances, in order."""
        return [call for call in self.calls if call.name in CHANGING]

    def half_seen(self) -> list[Call]:
        """Looks at instances between the first change and the last, by others than who changes and who is known."""
        changes = self.changes
        assert changes, "nothing was changed"
        first, last = min(call.began_s for call in changes), max(call.ended_s for call in changes)
        others = {call.pid for call in changes} | self.known
        during = [call for call in self.calls if call.ended_s > first and call.began_s < last]
        return [call for call in during if call.pid not in others and any(word in call.name for word in _LOOKS)]


@contextmanager
def logged(real_cluster: RealCluster, *known: str) -> Iterator[Logged]:
    """The calls while this is entered; they are there when it is left. known: programs, by their containers' names."""
    found = Logged()
    with real_cluster.real.driver.client() as client:
        begun = client.newest()
        found.known = pids(real_cluster, *known)
        yield found
        found.known |= pids(real_cluster, *known)  # one that failed by what it saw was started anew
        found.calls = client.calls(after=begun)
