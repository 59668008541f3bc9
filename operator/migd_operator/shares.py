"""A plan's part of each node, and what there is to say of the nodes that it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from migd_operator.claims import Claim
from migd_operator.evicting import Evictions
from migd_operator.facts import NodeFacts
from migd_operator.turns import Turn, away, is_ready

_LISTED: Final = 5


@dataclass(frozen=True, slots=True)
class Share:
    """A plan's part of one node: the claims in which it has a say, and the node's turn."""

    turn: Turn
    claims: tuple[Claim, ...]

    @property
    def node(self) -> NodeFacts:
        """The node."""
        return self.turn.progress.wish.node


def as_wished(turn: Turn, claim: Claim) -> bool:
    """Whether a GPU is as this very generation of its plan wishes, and its agent says so of this very object."""
    return turn.progress.given and claim.desired is not None and is_ready(claim.partition)


def skipped(shares: Sequence[Share]) -> str:
    """The nodes that are not to be had for reasons that are not ours, with these reasons."""
    found = [why.message for s in shares if not s.turn.progress.given and (why := away(s.turn.progress.wish))]
    if not found:
        return ""
    return f"skipped: {_listed(found)}"


def idling(shares: Sequence[Share]) -> str:
    """The nodes that wait for what is in use. By whom changes all the time, and is told of the GPUs."""
    found = [
        s.node.name
        for s in shares
        if s.turn.progress.given and any(c.partition.status.phase == "WaitingForIdle" for c in s.claims)
    ]
    if not found:
        return ""
    return f"in use on {_listed(found)}: kubectl get gpart -o wide says by whom"


def held_up(shares: Sequence[Share], evictions: Evictions) -> str:
    """The nodes that wait for pods which cannot be evicted now, and for how many, by why."""
    nodes: dict[str, list[str]] = {}
    pods: dict[str, set[str]] = {}
    for share in shares:
        for claim in share.claims:
            if claim.partition.status.phase == "Draining":
                for one in evictions.told.get(claim.partition.name, ()):
                    if one.reason is not None and one.reason in _HELD:
                        nodes.setdefault(one.reason, []).append(share.node.name)
                        pods.setdefault(one.reason, set()).add(one.pod_uid)
    found = []
    for reason, words in _HELD.items():
        if reason in pods:
            number, where = len(pods[reason]), _listed(list(dict.fromkeys(nodes[reason])))
            found.append(f"{number} {'pod' if number == 1 else 'pods'} on {where} {words[number > 1]}")
    return f"{'; '.join(found)}: see status.evictions of the GPUs" if found else ""


_HELD: Final[Mapping[str, tuple[str, str]]] = {
    "DrainBlocked": ("is held by a disruption budget or may not go", "are held by disruption budgets or may not go"),
    "EvictionBudget": ("is more than disruption.maxEvictions", "are more than disruption.maxEvictions"),
    "NoPermission": ("may not be evicted by the operator", "may not be evicted by the operator"),
}


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return ", ".join(found[:_LISTED]) + more


def fell_silent(shares: Sequence[Share]) -> str:
    """A node whose agent fell silent in its turn, before all was as wished; "" where there is none."""
    found = (s for s in shares if s.node.silent and s.turn.progress.given)
    return next((s.node.name for s in found if not all(as_wished(s.turn, c) for c in s.claims)), "")
