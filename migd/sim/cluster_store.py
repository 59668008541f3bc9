"""The simulated API server's objects: verbs, versions, generations, owners, and the history that watches read.

Every verb answers (status, headers, document), as HTTP would; nothing here waits. It refuses what a real one refuses.
"""

from __future__ import annotations

import copy
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from migd.sim import cluster_fields as fields
from migd.sim.cluster_fields import Json, Owner, Owners
from migd.sim.cluster_kinds import KINDS, SimKind, filled_in
from migd.sim.cluster_patches import PatchError, merge_patched, patched

Answer = tuple[int, Mapping[str, str], Json]
Key = tuple[str, str]
"""Namespace ("" for none) and name."""
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


@dataclass(frozen=True, slots=True)
class Entry:
    """One object: its document, without managedFields, and who owns which of its fields."""

    document: Json
    owners: Owners

    def shown(self, kind: SimKind) -> Json:
        """The document as it is sent."""
        document = copy.deepcopy(self.document)
        if self.owners:
            document["metadata"]["managedFields"] = fields.managed_fields(self.owners, kind.api_version)
        return document


@dataclass(frozen=True, slots=True)
class Happened:
    """One change in the history: the object before (None: made) and after; deleted ones with the version of that."""

    version: int
    before: Entry | None
    after: Entry
    deleted: bool


@dataclass(slots=True)
class _Shelf:
    objects: dict[Key, Entry] = field(default_factory=dict)
    history: list[Happened] = field(default_factory=list)


class Store:
    """All objects. now: RFC 3339 time of day, for what is stamped. told: called after each change."""

    def __init__(self, seed: int, now: Callable[[], str], told: Callable[[], None] = lambda: None) -> None:
        self._dice = random.Random(seed)  # noqa: S311  for uids
        self._now = now
        self._told = told
        self._shelves = {kind.plural: _Shelf() for kind in KINDS}
        self._snapshots: dict[str, tuple[int, list[Json]]] = {}
        self.version = 100
        self.forgotten = self.version
        """Changes up to this version are no longer in the history: a watch from before it gets 410."""

    def target(self, path: str) -> Target:
        """What a path leads to; Refusal for a path that leads nowhere."""
        for kind in KINDS:
            parts = path.removeprefix(kind.root + "/").split("/")
            if not path.startswith(kind.root + "/"):
                continue
            namespace = ""
            if kind.namespaced and parts[0] == "namespaces" and len(parts) > 2:
                namespace, parts = parts[1], parts[2:]
            if parts[0] == kind.plural and len(parts) <= 3:
                name, subresource = (*parts[1:], "", "")[:2]
                return Target(kind, namespace, name, subresource)
        raise Refusal(404, "the server could not find the requested resource")

    def entries(self, kind: SimKind) -> Mapping[Key, Entry]:
        """The objects of a kind, by namespace and name."""
        return self._shelves[kind.plural].objects

    def history(self, kind: SimKind, after: int) -> Iterator[Happened]:
        """What happened after a version; Refusal where that is forgotten."""
        if after < self.forgotten:
            raise Refusal(410, f"too old resource version: {after} ({self.forgotten})")
        return (happened for happened in self._shelves[kind.plural].history if happened.version > after)

    def forget(self) -> None:
        """Forget the history, as compaction does; lists that are half read are forgotten too."""
        self.forgotten = self.version
        self._snapshots.clear()
        for shelf in self._shelves.values():
            shelf.history.clear()

    def get(self, target: Target) -> Json:
        """One object."""
        return self._entry(target).shown(target.kind)

    def page(self, target: Target, query: Mapping[str, str]) -> Json:
        """A list, or a page of it; all pages are of the moment of the first."""
        limit = int(query.get("limit", "0"))
        token = query.get("continue", "")
        if token:
            if token not in self._snapshots:
                raise Refusal(410, "The provided continue parameter is too old")
            version, items = self._snapshots.pop(token)
        else:
            matches = matcher(target, query)
            entries = sorted(self.entries(target.kind).items())
            version, items = self.version, [e.shown(target.kind) for _, e in entries if matches(e.document)]
        metadata: Json = {"resourceVersion": str(version)}
        if limit and len(items) > limit:
            metadata["continue"] = f"c{self._dice.getrandbits(64):x}"
            self._snapshots[metadata["continue"]] = (version, items[limit:])
            items = items[:limit]
        kind = target.kind
        return {"apiVersion": kind.api_version, "kind": f"{kind.kind}List", "metadata": metadata, "items": items}

    def create(self, target: Target, body: Json, manager: str) -> Json:
        """Make an object."""
        name = (body.get("metadata") or {}).get("name", "")
        target = replace(target, name=name)
        if not name:
            raise Refusal(422, f"{target.kind.kind} is invalid: metadata.name: Required value")
        if (target.namespace, name) in self.entries(target.kind):
            raise Refusal(409, f'{target.kind.plural} "{name}" already exists')
        if target.kind.status and target.kind.generation:  # a custom resource's status is not taken from a create
            body = {key: value for key, value in body.items() if key != "status"}
        made = self._newborn(target, body)
        owners = fields.updated({}, {}, made, Owner(manager, "Update"), target.kind.list_maps)
        return self._put(target, None, made, owners)

    def replace(self, target: Target, body: Json, manager: str) -> Json:
        """Replace an object that is the version that the body says."""
        return self._update(target, body, manager)

    def patch(self, target: Target, body: Any, content_type: str, query: Mapping[str, str]) -> Json:
        """A JSON patch, a merge patch or a server-side apply."""
        manager = query.get("fieldManager", "")
        if content_type == "application/apply-patch+yaml":
            return self._apply(target, body, manager, query.get("force") == "true")
        before = self._entry(target).document
        if content_type == "application/json-patch+json":
            try:
                after = patched(before, body)
            except PatchError:
                raise Refusal(422, "the server rejected our request due to an error in our request") from None
        elif content_type == "application/merge-patch+json":
            after = merge_patched(before, body)
        else:
            raise Refusal(415, f"the body of the request was in an unknown format: {content_type}")
        return self._update(target, after, manager or "unknown")

    def delete(self, target: Target, body: Json | None) -> Json:
        """Delete an object. A pod that is bound to a node stays until its kubelet says that it ended (`remove`)."""
        entry = self._entry(target)
        metadata = entry.document["metadata"]
        expected = ((body or {}).get("preconditions") or {}).get("uid", metadata["uid"])
        if expected != metadata["uid"]:
            raise Refusal(
                409, f"Precondition failed: UID in precondition: {expected}, UID in object meta: {metadata['uid']}"
            )
        now_s = (body or {}).get("gracePeriodSeconds") == 0
        if target.kind.kind == "Pod" and entry.document.get("spec", {}).get("nodeName") and not now_s:
            if "deletionTimestamp" in metadata:
                return entry.shown(target.kind)
            after = copy.deepcopy(entry.document)
            after["metadata"] |= {"deletionTimestamp": self._now(), "deletionGracePeriodSeconds": 30}
            return self._put(target, entry, after, entry.owners)
        self._remove(target, entry)
        return status(200, "") | {"status": "Success"}

    def _remove(self, target: Target, entry: Entry) -> None:
        shelf = self._shelves[target.kind.plural]
        del shelf.objects[target.namespace, target.name]
        last = copy.deepcopy(entry.document)
        last["metadata"]["resourceVersion"] = self._next()
        shelf.history.append(Happened(self.version, entry, Entry(last, entry.owners), deleted=True))
        self._told()
        self._collect(entry.document["metadata"]["uid"])

    def _collect(self, uid: str) -> None:
        """What a deleted object owned goes with it, as the garbage collector has it, only at once."""
        for kind in KINDS:
            for (namespace, name), entry in sorted(self.entries(kind).items()):
                owners = entry.document["metadata"].get("ownerReferences") or ()
                if any(owner["uid"] == uid for owner in owners):
                    self._remove(Target(kind, namespace, name, ""), entry)

    def _update(self, target: Target, body: Json, manager: str) -> Json:
        entry = self._entry(target)
        before = entry.document
        said = body.get("metadata") or {}
        if said.get("uid", before["metadata"]["uid"]) != before["metadata"]["uid"]:
            raise Refusal(409, f"Precondition failed: UID in object meta: {before['metadata']['uid']}")
        if said.get("resourceVersion", before["metadata"]["resourceVersion"]) != before["metadata"]["resourceVersion"]:
            raise Refusal(
                409,
                f'Operation cannot be fulfilled on {target.kind.plural} "{target.name}": the object has been modified',
            )
        after = self._within(target, before, copy.deepcopy(body))
        owner = Owner(manager, "Update", target.subresource)
        return self._put(
            target, entry, after, fields.updated(before, entry.owners, after, owner, target.kind.list_maps)
        )

    def _apply(self, target: Target, body: Json, manager: str, force: bool) -> Json:
        if not manager:
            raise Refusal(
                422, "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: is required for apply patch"
            )
        kind = target.kind
        said = body.get("metadata") or {}
        if (body.get("apiVersion"), body.get("kind"), said.get("name")) != (kind.api_version, kind.kind, target.name):
            raise Refusal(400, "the kind and the name in the body must be those of the path")
        entry = self.entries(kind).get((target.namespace, target.name))
        if entry is None:
            if target.subresource:
                raise Refusal(404, f'{kind.plural} "{target.name}" not found')
            if "uid" in said:
                raise Refusal(409, f"Precondition failed: UID in precondition: {said['uid']}, UID in object meta: ")
        elif (
            not target.subresource
            and said.get("uid", entry.document["metadata"]["uid"]) != entry.document["metadata"]["uid"]
        ):
            wrong = f'metadata.uid: Invalid value: "{said["uid"]}": field is immutable'
            raise Refusal(422, f'{kind.kind} "{target.name}" is invalid: {wrong}', causes=[{"field": "metadata.uid"}])
        config = {key: value for key, value in body.items() if self._has(target, key)}
        me = Owner(manager, "Apply", target.subresource)
        before, owners = (entry.document, entry.owners) if entry else ({}, {})
        done = fields.apply(before, owners, config, me, force, kind.list_maps)
        if not isinstance(done, fields.Taken):
            causes = [
                {"reason": "FieldManagerConflict", "message": f'conflict with "{m}"', "field": ".".join(p)}
                for m, p in done
            ]
            raise Refusal(409, f"Apply failed with {len(done)} conflicts: {done}", causes=causes)
        document = done.document if entry else self._newborn(target, done.document)
        return self._put(target, entry, document, done.owners)

    def _has(self, target: Target, key: str) -> bool:
        """Whether a top-level key is written through this path: status only through its subresource, and only that."""
        if target.subresource == "status":
            return key == "status"
        return key != "status" or not target.kind.status

    def _within(self, target: Target, before: Json, body: Json) -> Json:
        """What a write through this path makes of an object: the rest stays as it was."""
        kept = {key: value for key, value in before.items() if not self._has(target, key)}
        after = {key: value for key, value in body.items() if self._has(target, key)}
        after = {**before, **after} if target.subresource else {**after, **kept}
        own = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
        metadata = {k: v for k, v in after.get("metadata", {}).items() if k not in (*own, "managedFields")}
        named = {k: v for k, v in before["metadata"].items() if k in own}
        return {**after, "apiVersion": before["apiVersion"], "kind": before["kind"], "metadata": {**metadata, **named}}

    def _newborn(self, target: Target, body: Json) -> Json:
        made = copy.deepcopy(body)
        metadata = made.setdefault("metadata", {})
        metadata |= {"name": target.name, "creationTimestamp": self._now()}
        metadata["uid"] = str(uuid.UUID(int=self._dice.getrandbits(128), version=4))
        if target.namespace:
            metadata["namespace"] = target.namespace
        if target.kind.generation:
            metadata["generation"] = 1
        metadata.pop("resourceVersion", None)
        if target.kind.kind == "Node":
            made.setdefault("spec", {})
        return {**made, "apiVersion": target.kind.api_version, "kind": target.kind.kind}

    def _put(self, target: Target, entry: Entry | None, document: Json, owners: Owners) -> Json:
        """Keep a document; nothing happens where it and its owners are as before."""
        kind = target.kind
        document = filled_in(kind, copy.deepcopy(document))
        wrong = kind.check(document, entry.document if entry else None)
        if wrong:
            raise Refusal(
                422,
                f'{kind.kind} "{target.name}" is invalid: {"; ".join(wrong)}',
                causes=[{"message": w} for w in wrong],
            )
        if entry is not None:
            if entry.document == document and entry.owners == owners:
                return entry.shown(kind)
            if kind.generation and entry.document.get("spec") != document.get("spec"):
                document["metadata"]["generation"] += 1
        document["metadata"]["resourceVersion"] = self._next()
        kept = Entry(document, owners)
        shelf = self._shelves[kind.plural]
        shelf.objects[target.namespace, target.name] = kept
        shelf.history.append(Happened(self.version, entry, kept, deleted=False))
        self._told()
        return kept.shown(kind)

    def _entry(self, target: Target) -> Entry:
        found = self.entries(target.kind).get((target.namespace, target.name))
        if found is None:
            raise Refusal(404, f'{target.kind.plural} "{target.name}" not found')
        return found

    def _next(self) -> str:
        self.version += 1
        return str(self.version)


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
