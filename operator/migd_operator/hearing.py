"""Whether each node's agent is alive, as we hear it: how long ago its lease was last seen to change, by our own clock.

Clocks of others are never compared with ours, so what a lease says of time is looked at for equality only. After a
start nothing has expired yet, and after the API server was away neither: who cannot write cannot renew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from migd.kube.leases import Lease

EXPIRES_S: Final = 180.0
"""How long an agent is taken to be alive after a renewal. It renews every 60 s."""
PAYS_S: Final = 600.0
"""How long after that its debts are paid by others."""
DEAF_S: Final = 90.0
"""A cache that heard nothing for so long, not even a bookmark, says nothing about anybody's silence."""

Agent = Literal["alive", "unheard", "silent"]


@dataclass(slots=True)
class _Heard:
    """A lease as it last changed, and when we saw that; renewed: we saw it change, and not only that it is there."""

    mark: tuple[str, str]
    since_s: float
    renewed: bool


class Hearing:
    """What was heard of agents, by node; times are of our monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}
        self._complete = False
        self._last_s = float("-inf")

    def lease(self, node: str, lease: Lease | None, now_s: float) -> None:
        """An agent's lease is there, has changed, or is gone. A lease that was given up is heard like a renewal."""
        mark = (lease.holder, lease.renewed) if lease is not None else ("", "")
        before = self._heard.get(node)
        if before is None or before.mark != mark:
            self._heard[node] = _Heard(mark, now_s, lease is not None and self._complete)

    def listed(self) -> None:
        """All leases that there are have been told of: a lease that comes from now on is a new one."""
        self._complete = True

    def listening(self, heard_s: float, now_s: float) -> float:
        """Until when silence counts, given when the API server was last heard; call it at least twice a minute.

        After we were deaf, all agents have their time anew: they may have had nobody to renew with.
        """
        if heard_s - self._last_s > DEAF_S:
            for one in self._heard.values():
                one.since_s = max(one.since_s, heard_s)
        self._last_s = max(self._last_s, heard_s)
        return min(now_s, self._last_s + DEAF_S)

    def agent(self, node: str, until_s: float) -> Agent:
        """What is known of a node's agent; a node that is asked for and has no lease is given the same time."""
        one = self._heard.setdefault(node, _Heard(("", ""), until_s, False))
        if until_s - one.since_s >= EXPIRES_S:
            return "silent"
        return "alive" if one.renewed else "unheard"

    def overdue(self, node: str, until_s: float) -> bool:
        """Whether an agent has been silent for so long that others pay what its node is owed."""
        one = self._heard.get(node)
        return one is not None and until_s - one.since_s >= EXPIRES_S + PAYS_S

    def next_s(self, nodes: Iterable[str], until_s: float) -> float | None:
        """When one of these agents expires or is overdue next, if nobody is heard till then; None for never."""
        times = [
            one.since_s + after_s
            for node in nodes
            if (one := self._heard.get(node)) is not None
            for after_s in (EXPIRES_S, EXPIRES_S + PAYS_S)
        ]
        return min((time for time in times if time > until_s), default=None)
