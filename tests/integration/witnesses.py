"""What the audit log says of our two programs: when nodes were closed, which keys were written, and by what right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from controlplane.audit import Request
from integration.acting import TAINT
from integration.deployed import AGENT, OPERATOR

OURS: Final = frozenset({AGENT, OPERATOR})
_LEASES: Final = "leases"


@dataclass(frozen=True)
class Switched:
    """A node was closed or opened. at: the request's place in the log."""

    at: int
    node: str
    closed: bool
    user: str


def ours(requests: Iterable[Request]) -> list[Request]:
    """What our two programs asked for."""
    return [request for request in requests if request.user in OURS]


def writes(requests: Iterable[Request], *names: str) -> list[Request]:
    """What our programs asked to be changed, leases left out; names: only of objects called so, or all."""
    found = [r for r in ours(requests) if r.writes and r.resource != _LEASES]
    return [r for r in found if r.name in names] if names else found


@dataclass(frozen=True)
class Evicted:
    """An eviction that was asked for. uid: the only pod of this name that was meant. code: the answer."""

    pod: str
    uid: str
    code: int
    user: str


def evicted(requests: Iterable[Request], *pods: str) -> list[Evicted]:
    """Every eviction of these pods that was asked for, in order, dry runs left out."""
    found = []
    for request in requests:
        if request.resource == "pods/eviction" and request.name in pods and request.writes:
            options = (request.body or {}).get("deleteOptions") or {}
            uid = (options.get("preconditions") or {}).get("uid", "")
            found.append(Evicted(request.name, uid, request.code, request.user))
    return found


def switched(requests: Sequence[Request], *nodes: str) -> list[Switched]:
    """Every time that one of these nodes was closed or opened, in order."""
    return [
        Switched(at, request.name, closed, request.user)
        for at, request in enumerate(requests)
        if request.resource == "nodes" and request.name in nodes and request.code < 300 and request.writes
        for closed in _closings(request)
    ]


def most_closed(requests: Sequence[Request], *nodes: str) -> int:
    """How many of these nodes were closed at once, at most."""
    closed: set[str] = set()
    most = 0
    for one in switched(requests, *nodes):
        (closed.add if one.closed else closed.discard)(one.node)
        most = max(most, len(closed))
    return most


def node_keys(request: Request) -> set[str]:
    """What a request changes on a node: `labels KEY`, `annotations KEY`, `taint KEY`, or the path of anything else."""
    return set(_node_keys(request.body))


def _node_keys(body: Any) -> Iterator[str]:
    if not isinstance(body, list):  # a merge or an apply: none of ours on nodes is one
        yield f"not a JSON patch: {json.dumps(body)[:200]}"
        return
    tested = {op["path"]: op["value"] for op in body if op["op"] == "test"}
    for op in body:
        path = op["path"]
        keyed = re.fullmatch(r"/metadata/(labels|annotations)/(.+)", path)
        if op["op"] == "test" or (path in ("/metadata/labels", "/metadata/annotations") and not op.get("value")):
            continue
        if keyed:
            yield f"{keyed[1]} {keyed[2].replace('~1', '/').replace('~0', '~')}"
        elif path == "/spec/taints/-":
            yield f"taint {op['value']['key']}"
        elif path == "/spec/taints":
            before, after = tested[path] or [], op.get("value") or []
            yield from (f"taint {one['key']}" for one in [*before, *after] if (one in before) != (one in after))
        else:
            yield path


def _closings(request: Request) -> list[bool]:
    if not isinstance(request.body, list):
        return []
    found = []
    for op in request.body:
        if op["op"] == "test" or not op["path"].startswith("/spec/taints"):
            continue
        value = op.get("value") or []
        keys = [one["key"] for one in (value if isinstance(value, list) else [value])]
        found.append(TAINT in keys)
    return found
