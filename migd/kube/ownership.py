"""What a field manager has applied to an object, as one digest: equal digests mean that an apply would change nothing.

The API server keeps, for each manager, which fields it applied (`metadata.managedFields`). The digest is made of these
fields and of their values now, so it tells a change of ours from a change by others and from a field that we left out,
also after a restart, and takes 16 bytes where the object takes 16 KiB.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from migd.kube.errors import Json

Digest = bytes
Path = tuple[str, ...]
Leaves = list[tuple[str, Any]]
ListMaps = Mapping[Path, tuple[str, ...]]
"""Lists that are merged by key: path of field names -> the fields that make the key. All other lists are one value."""

OWNERS: Final[ListMaps] = {("metadata", "ownerReferences"): ("uid",)}
_UNOWNED: Final = frozenset(
    {("apiVersion",), ("kind",), *(("metadata", name) for name in ("name", "namespace", "uid", "resourceVersion"))}
)
"""What names the object and is nobody's field. Source: apimachinery, managedfields' stripMeta."""
_ATOMIC_ITEMS: Final = frozenset({("metadata", "ownerReferences")})
"""List maps whose items are one value each. Source: apimachinery, OwnerReference has +structType=atomic."""
_PROTECT: Final = ("spec", "desired", "disruption", "protect")
_ATOMIC_MAPS: Final = frozenset({_PROTECT})
"""Mappings of our kinds that are one value each, with nobody's fields in them. Source: our definitions."""
_ATOMIC_AT: Final = frozenset("".join(f"/f:{name}" for name in path) for path in _ATOMIC_MAPS)
_SORTED: Final = json.JSONEncoder(sort_keys=True)
_COMPACT: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def applied(document: Json, manager: str) -> dict[str, Digest]:
    """What a manager applied, by subresource ("" for the object itself); absent where it applied nothing."""
    entries = document["metadata"].get("managedFields") or ()
    return {
        entry.get("subresource", ""): digest(_owned([], entry["fieldsV1"], document))
        for entry in entries
        if entry.get("manager") == manager and entry.get("operation") == "Apply"
    }


def wanted(body: Json, list_maps: ListMaps) -> Digest:
    """What `applied` says of an object after this body was applied to it.

    Defaults that the API server fills in inside a list of one value must be in the body, or the two never agree.
    """
    return digest(_leaves([], body, {**list_maps, **OWNERS}, (), ""))


def digest(leaves: Leaves) -> Digest:
    """A digest of paths with their values, in whatever order they come."""
    text = repr(sorted((path, _text(value)) for path, value in leaves))
    return hashlib.sha256(text.encode()).digest()[:16]


def _text(value: Any) -> str:
    """A JSON value as a text, whatever the order of its keys; most values are plain and need no encoder."""
    return _SORTED.encode(value) if isinstance(value, dict | list) else repr(value)


def _leaves(found: Leaves, value: Any, list_maps: ListMaps, path: Path, at: str) -> Leaves:
    """`found`, with the leaves of a value added."""
    if path in _UNOWNED:
        return found
    if path in _ATOMIC_MAPS:
        found.append((at, value))
    elif isinstance(value, dict):  # one that is empty says nothing, unlike a list
        for name, inner in value.items():
            _leaves(found, inner, list_maps, (*path, name), f"{at}/f:{name}")
    elif isinstance(value, list) and value and path in list_maps:
        for item in value:
            key = _key({name: item[name] for name in list_maps[path]})
            inner_at = f"{at}/k:{key}"
            if path in _ATOMIC_ITEMS:
                found.append((inner_at, item))
            else:
                _leaves(found, item, list_maps, path, inner_at)
    else:
        found.append((at, value))
    return found


def _owned(found: Leaves, fields: Json, value: Any, at: str = "") -> Leaves:
    """`found`, with the leaves of a fieldsV1 and their values in the document; None for a field that is gone."""
    if at in _ATOMIC_AT:
        found.append((at, value))
        return found
    leaf = True
    for name, inner in fields.items():
        if name == ".":
            continue
        leaf = False
        kind, _, rest = name.partition(":")
        if kind == "f":
            _owned(found, inner, value.get(rest) if isinstance(value, dict) else None, f"{at}/{name}")
        elif kind == "k":
            key = json.loads(rest)
            _owned(found, inner, _item(value, key), f"{at}/k:{_key(key)}")
        else:  # an element of a set: its own value
            found.append((f"{at}/{name}", rest))
    if leaf and not (isinstance(value, dict) and "/k:" not in at.rpartition("/f:")[2]):
        found.append((at, value))
    return found


def _item(value: Any, key: Json) -> Any:
    items = value if isinstance(value, list) else ()
    return next((item for item in items if all(item.get(name) == wanted for name, wanted in key.items())), None)


def _key(key: Json) -> str:
    return _COMPACT.encode(key)


NOTHING_APPLIED: Final = digest([])
"""What is wanted of a body without fields."""
