"""What the operator writes on nodes: what a silent agent owes, the state of its node, and whose node it is.

Pure. An agent that is alive does all of it by itself, except for the label by which mig-manager is kept away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from migd.kube.nodes import Node, NodeChange
from migd.kube.owed import owing, paid
from migd.kube.stored import Stored
from migd_operator.assembling import Look
from migd_operator.deciding import Decision
from migd_operator.facts import MANAGER_DEPLOY, TAKEN_OVER

STATE: Final = "migd.dev/state"
UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class NodeWrite:
    """A change of one node, as decided on what was seen of it. paid: it gets back what it was owed."""

    node: Stored[Node]
    change: NodeChange
    paid: bool = False


def node_writes(look: Look, decision: Decision) -> tuple[NodeWrite, ...]:
    """Only what differs, by name of node."""
    found = []
    for name, node in sorted(look.nodes.items()):
        labels: dict[str, str | None] = {}
        annotations: dict[str, str | None] = {}
        closed = None
        if name in look.overdue and owing(node):
            due = paid(node)
            labels, annotations, closed = {**due.labels}, {**due.annotations}, due.closed
        if name in decision.silent and node.value.labels.get(STATE) != UNKNOWN:
            labels[STATE] = UNKNOWN
        if name in decision.taken_over:
            labels[MANAGER_DEPLOY] = "false"
            annotations[TAKEN_OVER] = node.value.labels[MANAGER_DEPLOY]
        elif name in decision.released:
            annotations[TAKEN_OVER] = None
            if node.value.labels.get(MANAGER_DEPLOY) == "false":  # what somebody has made of it since is theirs
                labels[MANAGER_DEPLOY] = node.annotations[TAKEN_OVER]
        if labels or annotations or closed is not None:
            change = NodeChange(labels=labels, annotations=annotations, closed=closed)
            found.append(NodeWrite(node, change, paid=closed is not None))
    return tuple(found)
