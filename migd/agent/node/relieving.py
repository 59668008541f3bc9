"""Where nothing can be decided, as the record cannot be saved or the GPUs cannot be read: the node is opened in time.

No operation is begun without a saved record and a fresh look, so nothing is lost by it: once there is a decision
again, it finds that the pause has lasted too long, or that the node is open, and goes on from there.
"""

from __future__ import annotations

from migd.agent.node.bounds import PAUSE_MAX_S
from migd.agent.node.effects import ChangeNode
from migd.agent.node.moments import work_of
from migd.agent.records import Record
from migd.kube.nodes import Node
from migd.kube.owed import owing, paid
from migd.kube.stored import Stored


def relief(record: Record, node: Stored[Node], boot_id: str, now_s: float) -> ChangeNode | None:
    """What is to be done to a node on which nothing could be decided now; None for nothing, or not yet.

    record: as it was saved last. boot_id, now_s: of now. What an earlier boot left closed is overdue at once.
    """
    if not owing(node):
        return None
    work = work_of(record)
    closed_s = work.closed_s if work.stage in ("Closing", "Draining", "Settling", "Pausing") else None
    since_s = next(s for s in (work.paused_s, closed_s, work.since_s) if s is not None)
    if record.boot_id == boot_id and now_s - since_s <= PAUSE_MAX_S:
        return None
    return ChangeNode(paid(node), "open the node, as nothing can be decided on it")
