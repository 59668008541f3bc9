"""What is owed to a node: the old values of what we changed on it, so that anybody can restore it.

The annotation is written by the same request that changes the keys, and removed by the one that restores them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from migd.kube.nodes import LABELS_OF_OTHERS, Node, NodeChange
from migd.kube.stored import Stored

OWED: Final = "migd.dev/owed"
PAUSED: Final = "paused-for-mig-change"
"""What a paused GPU client's label says; the word that NVIDIA's own tools use. Source: GPU Operator."""


@dataclass(frozen=True, slots=True)
class Owed:
    """A debt. turn: the assignment for which it was made. labels: key -> old value, None where there was none."""

    turn: str
    labels: Mapping[str, str | None]


def owed_of(node: Stored[Node]) -> Owed | None:
    """What the node is owed; None for nothing. An annotation that is not ours to read counts as a debt of no labels."""
    text = node.annotations.get(OWED)
    if text is None:
        return None
    try:
        body: Any = json.loads(text)
        labels = {k: v for k, v in body["labels"].items() if k in LABELS_OF_OTHERS and isinstance(v, str | None)}
        return Owed(str(body["turn"]), labels)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Owed("", {})


def owing(node: Stored[Node]) -> bool:
    """Whether something of ours is still on a node: our taint, or old values that it is owed."""
    return node.value.closed or OWED in node.annotations


def closing(node: Stored[Node], turn: str) -> NodeChange:
    """Our taint, and the debt that says whose it is; a debt that is there already keeps its old values."""
    before = owed_of(node)
    return NodeChange(annotations={OWED: _text(turn, before.labels if before else {})}, closed=True)


def pausing(node: Stored[Node], turn: str, keys: tuple[str, ...]) -> NodeChange:
    """Pause these clients by their labels, each only where its label says `true`; a debt keeps its oldest values."""
    running = {key: "true" for key in keys if node.value.labels.get(key) == "true"}
    before = owed_of(node)
    old = {**running, **(before.labels if before else {})}
    return NodeChange(labels=dict.fromkeys(running, PAUSED), annotations={OWED: _text(turn, old)}, closed=True)


def paid(node: Stored[Node]) -> NodeChange:
    """Give back what is owed: our taint goes, and each label that still says what we made of it gets its old value.

    A label that somebody has changed since is theirs.
    """
    owed = owed_of(node)
    labels = owed.labels if owed else {}
    ours = {key: old for key, old in labels.items() if node.value.labels.get(key) == PAUSED}
    return NodeChange(labels=ours, annotations={OWED: None}, closed=False)


def _text(turn: str, labels: Mapping[str, str | None]) -> str:
    return json.dumps({"turn": turn, "labels": dict(sorted(labels.items()))}, sort_keys=True)
