"""Nodes: what we read of them, and the one request that changes our labels, annotations and taint, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from migd.kube.errors import Json
from migd.kube.stored import NOTHING, OURS, Interner, Kind, Stored

TAINT: Final = "migd.dev/changing"
_EFFECT: Final = "NoSchedule"
LABELS_OF_OTHERS: Final = frozenset(
    {
        *(
            f"nvidia.com/gpu.deploy.{client}"
            for client in (
                "device-plugin",
                "gpu-feature-discovery",
                "dcgm-exporter",
                "dcgm",
                "nvsm",
                "client",
                "mig-manager",
            )
        ),
        "nvidia.com/mig.config.state",
    }
)
"""The labels of NVIDIA's stack that may be written: pausing its GPU clients, mig-manager's off-label, the mirror."""
HAMI: Final = "hami.io/node-nvidia-register"
SAFE_LOAD: Final = "nvidia.com/gpu-driver-upgrade.driver-wait-for-safe-load"
_ANNOTATIONS_OF_OTHERS: Final = frozenset({HAMI, SAFE_LOAD})
_RESOURCES: Final = "nvidia.com/"


@dataclass(frozen=True, slots=True, order=True)
class Taint:
    """A taint. added: when, as the API server has it, "" for not told."""

    key: str
    value: str
    effect: str
    added: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """What we read of a node. labels: all of them. allocatable: of resources under nvidia.com/, as told.

    ready: the kubelet says so. unschedulable: an admin's cordon, which is theirs. annotated: it has annotations,
    whosever; ours are in `Stored`. others: those by which other owners of GPUs show: HAMi's, and the driver upgrade's.
    """

    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    unschedulable: bool
    ready: bool
    allocatable: Mapping[str, str]
    annotated: bool
    others: Mapping[str, str] = field(default_factory=lambda: NOTHING)

    @property
    def closed(self) -> bool:
        """Our taint keeps new pods away."""
        return any(_is_ours(taint) for taint in self.taints)


@dataclass(frozen=True, slots=True)
class NodeChange:
    """A change of what is ours on a node. labels, annotations: new values, None to remove; keys not named stay.

    closed: our taint there or not; None to leave it. AssertionError for a key that is not ours to write.
    """

    labels: Mapping[str, str | None] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    closed: bool | None = None

    def __post_init__(self) -> None:
        foreign = [key for key in self.labels if not key.startswith(OURS) and key not in LABELS_OF_OTHERS]
        foreign += [key for key in self.annotations if not key.startswith(OURS)]
        assert not foreign, f"not ours to write: {', '.join(foreign)}"


def operations(seen: Stored[Node], change: NodeChange) -> list[Json]:
    """The JSON patch of a change, empty where nothing differs.

    What is tested is what the change was decided on: the node's uid, the old value of every key it writes, and the
    whole list of taints where it writes that. So what others do to other keys is no conflict, and never undone.
    """
    node = seen.value
    found = [
        *_keys("/metadata/labels", node.labels, change.labels, bool(node.labels)),
        *_keys("/metadata/annotations", seen.annotations, change.annotations, node.annotated),
        *(_taints(node.taints, change.closed) if change.closed not in (None, node.closed) else ()),
    ]
    return [_test("/metadata/uid", seen.uid), *found] if found else []


def without_annotation(seen: Stored[Any], key: str) -> list[Json]:
    """The JSON patch that takes one annotation off an object, if both are as seen."""
    at = f"/metadata/annotations/{_escaped(key)}"
    return [_test("/metadata/uid", seen.uid), _test(at, seen.annotations[key]), {"op": "remove", "path": at}]


def _keys(path: str, old: Mapping[str, str], new: Mapping[str, str | None], there: bool) -> Iterable[Json]:
    differing = {key: value for key, value in sorted(new.items()) if old.get(key) != value}
    if differing and not there:
        yield _test(path, None)
        yield {"op": "add", "path": path, "value": {}}
    for key, value in differing.items():
        at = f"{path}/{_escaped(key)}"
        if there:
            yield _test(at, old.get(key))
        yield {"op": "remove", "path": at} if value is None else {"op": "add", "path": at, "value": value}


def _taints(old: tuple[Taint, ...], closed: bool | None) -> Iterable[Json]:
    written = [_written(taint) for taint in old]
    yield _test("/spec/taints", written or None)
    if not closed:
        kept = [_written(taint) for taint in old if not _is_ours(taint)]
        yield (
            {"op": "replace", "path": "/spec/taints", "value": kept}
            if kept
            else {"op": "remove", "path": "/spec/taints"}
        )
    elif old:
        yield {"op": "add", "path": "/spec/taints/-", "value": _OURS_WRITTEN}
    else:
        yield {"op": "add", "path": "/spec/taints", "value": [_OURS_WRITTEN]}


_OURS_WRITTEN: Final[Json] = {"key": TAINT, "effect": _EFFECT}


def _is_ours(taint: Taint) -> bool:
    """Whether a taint is the one that closes a node. With another effect it is another taint, and somebody else's."""
    return (taint.key, taint.effect) == (TAINT, _EFFECT)


def _written(taint: Taint) -> Json:
    parts = {"key": taint.key, "value": taint.value, "effect": taint.effect, "timeAdded": taint.added}
    return {name: text for name, text in parts.items() if text}


def _test(path: str, value: object) -> Json:
    """A test; None holds where there is nothing, as the API server's JSON patch has it."""
    return {"op": "test", "path": path, "value": value}


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _node(document: Json, same: Interner) -> Node:
    metadata, spec, status = document["metadata"], document.get("spec") or {}, document.get("status") or {}
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
    others = {k: v for k, v in (metadata.get("annotations") or {}).items() if k in _ANNOTATIONS_OF_OTHERS}
    allocatable = {k: v for k, v in (status.get("allocatable") or {}).items() if k.startswith(_RESOURCES)}
    return Node(
        labels=same.mapping(metadata.get("labels")),
        taints=same(tuple(_taint(t) for t in spec.get("taints") or ())),
        unschedulable=spec.get("unschedulable", False),
        ready=conditions.get("Ready") == "True",
        allocatable=same.mapping(allocatable) if allocatable else NOTHING,
        annotated=bool(metadata.get("annotations")),
        others=same.mapping(others),
    )


def _taint(t: Json) -> Taint:
    return Taint(t["key"], t.get("value", ""), t["effect"], t.get("timeAdded", ""))


NODES: Final = Kind("v1", "Node", "nodes", _node)
