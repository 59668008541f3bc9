"""JSON patches and merge patches, as the API server does them: all of a patch or nothing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from migd.sim.cluster.fields import Json, copied


class PatchError(Exception):
    """A patch cannot be applied; the text says which operation, and why."""


def patched(document: Json, operations: Sequence[Json]) -> Json:
    """The document after a JSON patch (RFC 6902); PatchError where a part of it cannot be done, or a test fails.

    A test for null holds where there is nothing. Source: evanphx/json-patch, as kube-apiserver uses it.
    """
    document = copied(document)
    for operation in operations:
        _do(document, operation)
    return document


def _do(document: Json, operation: Json) -> None:
    kind, text, value = operation["op"], operation["path"], copied(operation.get("value"))
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]
    inside: Any = document
    for part in way:
        inside = _within(inside, part)
        if inside is None:
            break
    there = _within(inside, last)
    if kind == "test":
        if there != value:
            raise PatchError(f"testing value {text} failed")
    elif not isinstance(inside, dict | list) or (kind in ("remove", "replace") and there is None):
        raise PatchError(f"{kind} operation does not apply: doc is missing path: {text}")
    elif kind == "remove":
        inside.pop(int(last) if isinstance(inside, list) else last)
    elif isinstance(inside, list):
        if kind == "replace":
            inside[int(last)] = value
        else:
            inside.insert(len(inside) if last == "-" else int(last), value)
    else:
        inside[last] = value


def _within(inside: Any, part: str) -> Any:
    if isinstance(inside, dict):
        return inside.get(part)
    if isinstance(inside, list) and part.isdigit() and int(part) < len(inside):
        return inside[int(part)]
    return None


def merge_patched(document: Any, patch: Any) -> Any:
    """The document after a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return copied(patch)
    merged = dict(document) if isinstance(document, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patched(merged.get(name), value)
    return merged
