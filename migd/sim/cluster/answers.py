"""What the simulated API server is asked for and how it refuses: paths as targets, selectors, and Status documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from migd.sim.cluster.fields import Json
from migd.sim.cluster.kinds import SimKind

_REASONS: Final = {
    400: "BadRequest",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
}


class Refusal(Exception):  # noqa: N818  an answer, not a fault of ours
    """A request was refused; carries the answer."""

    def __init__(self, code: int, message: str, **details: object) -> None:
        self.code = code
        self.body = status(code, message, **details)
        super().__init__(message)


def status(code: int, message: str, **details: object) -> Json:
    """A Status of failure."""
    found: Json = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
    found |= {"reason": _REASONS.get(code, "Unknown"), "code": code}
    return found | ({"details": details} if details else {})


@dataclass(frozen=True, slots=True)
class Target:
    """What a URL path leads to. name: "" for all of a kind; namespace: "" for none or all."""

    kind: SimKind
    namespace: str
    name: str
    subresource: str


def matcher(target: Target, query: Mapping[str, str]) -> Callable[[Json], bool]:
    """Whether a document is among those of a target with these selectors; "a=b,c=d" each."""
    wanted_fields = [pair.split("=", 1) for pair in query.get("fieldSelector", "").split(",") if pair]
    wanted_labels = [pair.split("=", 1) for pair in query.get("labelSelector", "").split(",") if pair]

    def matches(document: Json) -> bool:
        metadata = document["metadata"]
        if target.namespace not in ("", metadata.get("namespace", "")) or target.name not in ("", metadata["name"]):
            return False
        labels = metadata.get("labels") or {}
        if any(labels.get(name) != value for name, value in wanted_labels):
            return False
        return all(_field(document, path) == value for path, value in wanted_fields)

    return matches


def _field(document: Any, path: str) -> str:
    for part in path.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return str(document or "")
