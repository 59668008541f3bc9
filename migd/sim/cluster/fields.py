"""Documents by their fields: who owns which, as server-side apply has it. Pure; documents are never changed in place.

A path is the way to one field: "f:NAME" into a mapping, "k:{KEY}" into a list that is merged by key. A leaf is a field
with a value of its own; a list that is not merged by key is one leaf.
Source: sigs.k8s.io/structured-merge-diff, and what kube-apiserver 1.37.2 was seen to do (tests/kube_contract).
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

Json = dict[str, Any]
Path = tuple[str, ...]
ListMaps = Mapping[tuple[str, ...], tuple[str, ...]]
_COMPACT: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
OWNERS: Final = ("metadata", "ownerReferences")
ATOMIC: Final = frozenset({("spec", "desired", "disruption", "protect")})
"""Mappings that are one leaf each. Source: crds/migd.dev_gpupartitions.yaml."""
_UNOWNED: Final = frozenset(
    {("f:apiVersion",), ("f:kind",)}
    | {
        ("f:metadata", f"f:{name}")
        for name in ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields")
    }
    | {("f:metadata", "f:deletionTimestamp"), ("f:metadata", "f:deletionGracePeriodSeconds")}
)


@dataclass(frozen=True, slots=True)
class Owner:
    """Somebody who owns fields of an object: manager, "Apply" or "Update", and through which subresource."""

    manager: str
    operation: str
    subresource: str = ""


def _name(owner: Owner) -> tuple[str, str, str]:
    return owner.manager, owner.operation, owner.subresource


Owners = Mapping[Owner, frozenset[Path]]


def copied(value: Any) -> Any:
    """A deep copy of a JSON value; many times faster than copy.deepcopy, which also asks what is shared."""
    return marshal.loads(marshal.dumps(value)) if isinstance(value, dict | list) else value  # noqa: S302  our own bytes


def leaves(document: Any, list_maps: ListMaps) -> dict[Path, Any]:
    """The leaves of a document with their values; what names an object is none."""
    return dict(_leaves(document, {**list_maps, OWNERS: ("uid",)}, (), ()))


def _leaves(value: Any, list_maps: ListMaps, names: tuple[str, ...], path: Path) -> Iterator[tuple[Path, Any]]:
    if path in _UNOWNED:
        return
    if isinstance(value, dict) and value and names not in ATOMIC:
        for name, inner in value.items():
            yield from _leaves(inner, list_maps, (*names, name), (*path, f"f:{name}"))
    elif isinstance(value, list) and value and names in list_maps:
        for item in value:
            at = (*path, _key({name: item[name] for name in list_maps[names]}))
            if names == OWNERS:
                yield at, item
            else:
                yield from _leaves(item, list_maps, names, at)
    elif path:
        yield path, value


def _key(key: Json) -> str:
    return "k:" + _COMPACT.encode(key)


@lru_cache(maxsize=4096)
def _keyed(step: str) -> Json:
    """The key that a step names, not to be changed."""
    found: Json = json.loads(step[2:])
    return found


def at(document: Any, path: Path) -> Any:
    """The value of a path; None where there is none."""
    for step in path:
        if step.startswith("f:"):
            document = document.get(step[2:]) if isinstance(document, dict) else None
        else:
            document = _item(document, _keyed(step))
    return document


def _item(items: Any, key: Json) -> Any:
    found = items if isinstance(items, list) else ()
    return next((i for i in found if all(i.get(name) == value for name, value in key.items())), None)


def merged(document: Json, values: Mapping[Path, Any]) -> Json:
    """The document with these leaves set."""
    document = copied(document)
    for path, value in values.items():
        plain = tuple(step[2:] for step in path) not in ATOMIC
        if plain and value == {} and isinstance(at(document, path), dict):
            continue  # an empty mapping says nothing of what is in it
        _set(document, path, copied(value))
    return document


def _set(document: Json, path: Path, value: Any) -> None:
    inside: Any = document
    for step, after in zip(path, (*path[1:], ""), strict=True):
        empty: Any = value if not after else ([] if after.startswith("k:") else {})
        if step.startswith("f:"):
            name = step[2:]
            if not after or not isinstance(inside.get(name), type(empty)):
                inside[name] = empty
            inside = inside[name]
        else:
            key = _keyed(step)
            found = _item(inside, key)
            if found is None:
                found = value if not after else dict(key)
                inside.append(found)
            elif not after:
                found.clear()
                found.update(value)
            inside = found


def without(document: Json, paths: Iterable[Path]) -> Json:
    """The document without what is at these paths, and without what is empty then."""
    found = sorted(paths, reverse=True)
    document = copied(document) if found else document
    for path in found:
        _remove(document, path)
    return document


def _remove(inside: Any, path: Path) -> None:
    step, rest = path[0], path[1:]
    if step.startswith("f:"):
        name = step[2:]
        if not isinstance(inside, dict) or name not in inside:
            return
        if rest:
            _remove(inside[name], rest)
        if not rest or inside[name] in ({}, []):
            del inside[name]
    else:
        found = _item(inside, _keyed(step))
        if found is None:
            return
        if rest:
            _remove(found, rest)
        if not rest or not found:
            inside.remove(found)


@dataclass(frozen=True, slots=True)
class Taken:
    """An apply that was taken: the document and its owners afterwards.

    emptied: where all that this owner had in a mapping went and an empty one was applied: it is null then, which no
    definition of ours takes.
    """

    document: Json
    owners: Owners
    emptied: tuple[Path, ...] = ()


def apply(
    document: Json, owners: Owners, config: Json, me: Owner, force: bool, list_maps: ListMaps
) -> Taken | tuple[tuple[str, Path], ...]:
    """Server-side apply. Conflicts, as (manager, path), where another has a field with another value, unless forced."""
    mine = leaves(config, list_maps)
    conflicts = tuple(
        (owner.manager, path)
        for owner, fields in sorted(owners.items(), key=lambda pair: _name(pair[0]))
        if owner != me
        for path in sorted(fields)
        if path in mine and mine[path] != {} and at(document, path) != mine[path]
    )
    if conflicts and not force:
        return conflicts
    lost = {path for _, path in conflicts}
    others = {owner: fields - lost for owner, fields in owners.items() if owner != me}
    held = frozenset().union(*others.values())
    dropped = owners.get(me, frozenset()) - set(mine) - held
    gone = {_root(path, {*mine, *held}) for path in dropped}
    left = without(document, (path for path in gone if path))
    emptied = tuple(p for p, v in sorted(mine.items()) if v == {} and _inside(p, dropped) and not _inside(p, held))
    return Taken(merged(left, mine), _tidy({**others, me: frozenset(mine)}), emptied)


def _inside(path: Path, fields: Iterable[Path]) -> bool:
    return any(len(field) > len(path) and field[: len(path)] == path for field in fields)


def _root(path: Path, kept: set[Path]) -> Path:
    """What goes with a field that is dropped: all round it in which nobody owns a field, also what was filled in.

    () where it must stay: others own what is in it, or it is part of the key of an item that stays.
    """
    for depth in range(1, len(path) + 1):
        if not any(field[:depth] == path[:depth] for field in kept):
            return () if depth == len(path) and _is_key(path) else path[:depth]
    return ()


def updated(before: Json, owners: Owners, after: Json, me: Owner, list_maps: ListMaps) -> Owners:
    """The owners after somebody wrote the whole document: what they changed is theirs alone, what is gone nobody's."""
    old, new = leaves(before, list_maps), leaves(after, list_maps)
    changed = frozenset(path for path, value in new.items() if path not in old or old[path] != value)
    kept = {owner: (fields & set(new)) - changed for owner, fields in owners.items()}
    return _tidy({**kept, me: kept.get(me, frozenset()) | changed})


def _is_key(path: Path) -> bool:
    """Whether a field is part of the key of its item."""
    return len(path) > 1 and path[-2].startswith("k:") and path[-1][2:] in _keyed(path[-2])


def _tidy(owners: Owners) -> Owners:
    return {owner: fields for owner, fields in owners.items() if fields}


def managed_fields(owners: Owners, api_version: str) -> list[Json]:
    """The owners as `metadata.managedFields`."""
    return [
        {
            "manager": owner.manager,
            "operation": owner.operation,
            "apiVersion": api_version,
            "fieldsType": "FieldsV1",
            "fieldsV1": _tree(fields),
            **({"subresource": owner.subresource} if owner.subresource else {}),
        }
        for owner, fields in sorted(owners.items(), key=lambda pair: _name(pair[0]))
    ]


def _tree(fields: frozenset[Path]) -> Json:
    root: Json = {}
    for path in sorted(fields):
        inside = root
        for step in path:
            inside = inside.setdefault(step, {})
            if step.startswith("k:") and path[-1] != step:
                inside["."] = {}
    return root
