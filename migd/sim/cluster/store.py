"""The simulated API server's objects: verbs, versions, generations, owners, and the history that watches read.

Every verb answers (status, headers, document), as HTTP would; nothing here waits. It refuses what a real one refuses.
"""

from __future__ import annotations

import itertools
import random
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from migd.sim.cluster import fields, pods
from migd.sim.cluster.answers import Refusal, Target, matcher
from migd.sim.cluster.deleting import deleting, released, text_of
from migd.sim.cluster.entries import Entry, Happened, Key, Listener, Outcome, Shelf
from migd.sim.cluster.fields import Json, Owner, Owners, copied
from migd.sim.cluster.kinds import KINDS, SimKind, filled_in
from migd.sim.cluster.patches import PatchError, merge_patched, patched

_PATHS_KEPT: Final = 4096
BY_PLURAL: Final = {kind.plural: kind for kind in KINDS}
_GOING: Final = ("deletionTimestamp", "deletionGracePeriodSeconds")
Answer = tuple[int, Mapping[str, str], Json]


class Store:
    """All objects; what is kept is never changed, only replaced.

    now: the wall clock, for what is stamped. told: called after each change.
    """

    def __init__(self, seed: int, now: Callable[[], datetime], told: Listener = lambda _kind, _happened: None) -> None:
        self._dice = random.Random(seed)  # noqa: S311  for uids
        self.now = now
        self._told = told
        self._shelves = {kind.plural: Shelf() for kind in KINDS}
        self._targets: dict[str, Target] = {}
        self._owned: dict[str, set[tuple[str, Key]]] = {}  # uid of an owner -> what goes with it
        self._snapshots: dict[str, tuple[int, list[Json]]] = {}
        self.version = 100
        self.forgotten = self.version
        """Changes up to this version are no longer in the history: a watch from before it gets 410."""

    def target(self, path: str) -> Target:
        """What a path leads to; Refusal for a path that leads nowhere."""
        found = self._targets.get(path)
        if found is None:
            if len(self._targets) > _PATHS_KEPT:
                self._targets.clear()
            found = self._targets[path] = self._found(path)
        return found

    def _found(self, path: str) -> Target:
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

    def history(self, kind: SimKind, after: int, begun: bool = False) -> Iterator[Happened]:
        """What happened after a version; Refusal where that is forgotten.

        begun: a watch that is under way asks: it has missed nothing if nothing of the kind was forgotten since.
        """
        if after < (self._shelves[kind.plural].forgotten if begun else self.forgotten):
            raise Refusal(410, f"too old resource version: {after} ({self.forgotten})")
        history = self._shelves[kind.plural].history
        first = bisect_right(history, after, key=lambda happened: happened.version)
        return itertools.islice(history, first, None)

    def forget(self) -> None:
        """Forget the history, as compaction does; lists that are half read are forgotten too."""
        self.forgotten = self.version
        self._snapshots.clear()
        for shelf in self._shelves.values():
            shelf.forgotten = shelf.history[-1].version if shelf.history else shelf.forgotten
            shelf.history.clear()

    def get(self, target: Target) -> Outcome:
        """One object."""
        return self._entry(target)

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

    def document(self, target: Target) -> Json:
        """One object as it is now, not to be changed."""
        return self._entry(target).document

    def documents(self, plural: str) -> list[Json]:
        """All objects of a kind as they are now, not to be changed."""
        return [entry.document for entry in self._shelves[plural].objects.values()]

    def at(self, plural: str, document: Json) -> Target:
        """Where an object is."""
        metadata = document["metadata"]
        return Target(BY_PLURAL[plural], metadata.get("namespace", ""), metadata["name"], "")

    def rewrite(self, target: Target, document: Json) -> Outcome:
        """Keep an object as the API server itself has changed it; who owns what stays as it was."""
        entry = self._entry(target)
        return self._put(target, entry, document, entry.owners)

    def create(self, target: Target, body: Json, manager: str) -> Outcome:
        """Make an object; or have a pod bound or evicted."""
        self._namespace_takes(target, (body.get("metadata") or {}).get("name", ""))
        if target.subresource == "binding":
            return pods.bind(self, target, body)
        if target.subresource == "eviction":
            return pods.evict(self, target, body)
        name = (body.get("metadata") or {}).get("name", "")
        target = replace(target, name=name)
        if not name:
            raise Refusal(422, f"{target.kind.kind} is invalid: metadata.name: Required value")
        if (target.namespace, name) in self.entries(target.kind):
            raise Refusal(409, f'{target.kind.plural} "{name}" already exists')
        if target.kind.status and target.kind.generation:  # a custom resource's status is not taken from a create
            body = {key: value for key, value in body.items() if key != "status"}
        made = self._newborn(target, body)
        return self._put(target, None, made, _owners(target, {}, {}, made, manager))

    def _namespace_takes(self, target: Target, name: str) -> None:
        """Nothing is made in a namespace that is being deleted; one that nobody made takes all, other than there."""
        found = self._shelves["namespaces"].objects.get(("", target.namespace))
        if found is not None and "deletionTimestamp" in found.document["metadata"]:
            why = f"unable to create new content in namespace {target.namespace} because it is being terminated"
            cause = {"reason": "NamespaceTerminating", "message": f"namespace {target.namespace} is being terminated"}
            said = f'{target.kind.plural} "{target.name or name}" is forbidden: {why}'
            raise Refusal(403, said, causes=[{**cause, "field": "metadata.namespace"}])

    def replace(self, target: Target, body: Json, manager: str) -> Outcome:
        """Replace an object that is the version that the body says."""
        return self._update(target, copied(body), manager)

    def patch(self, target: Target, body: Any, content_type: str, query: Mapping[str, str]) -> Outcome:
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

    def delete(self, target: Target, body: Json | None) -> Outcome:
        """Delete an object, or have it go: see `deleting`."""
        entry = self._entry(target)
        metadata = entry.document["metadata"]
        expected = ((body or {}).get("preconditions") or {}).get("uid", metadata["uid"])
        if expected != metadata["uid"]:
            raise Refusal(
                409, f"Precondition failed: UID in precondition: {expected}, UID in object meta: {metadata['uid']}"
            )
        if (body or {}).get("dryRun"):
            return entry
        after = deleting(target.kind.kind, entry.document, body or {}, self.now())
        if after is not None:
            return self._put(target, entry, copied(after), entry.owners)
        self._remove(target, entry)
        return pods.done(200)

    def _remove(self, target: Target, entry: Entry) -> None:
        shelf = self._shelves[target.kind.plural]
        del shelf.objects[target.namespace, target.name]
        last = copied(entry.document)
        last["metadata"]["resourceVersion"] = self._next()
        happened = Happened(self.version, entry, Entry(last, entry.owners), deleted=True)
        shelf.history.append(happened)
        self._index(target, entry, None)
        self._told(target.kind, happened)
        self._collect(entry.document["metadata"]["uid"])

    def _collect(self, uid: str) -> None:
        """What a deleted object owned goes with it, as the garbage collector has it, only at once."""
        for plural, (namespace, name) in sorted(self._owned.pop(uid, ())):
            kind = BY_PLURAL[plural]
            entry = self.entries(kind).get((namespace, name))
            if entry is not None:
                self.delete(Target(kind, namespace, name, ""), None)

    def _index(self, target: Target, before: Entry | None, after: Entry | None) -> None:
        """Keep the way from owners to what they own."""
        key = (target.kind.plural, (target.namespace, target.name))
        for entry in (before, after):
            for owner in (entry.document["metadata"].get("ownerReferences") or ()) if entry else ():
                owned = self._owned.setdefault(owner["uid"], set())
                if entry is after:
                    owned.add(key)
                else:
                    owned.discard(key)

    def _update(self, target: Target, body: Json, manager: str) -> Outcome:
        entry = self._entry(target)
        before = entry.document
        said = body.get("metadata") or {}
        if said.get("uid", before["metadata"]["uid"]) != before["metadata"]["uid"]:
            raise Refusal(409, f"Precondition failed: UID in object meta: {before['metadata']['uid']}")
        _as_seen(target, said, before)
        after = self._within(target, before, body)
        return self._kept(target, entry, after, _owners(target, before, entry.owners, after, manager))

    def _kept(self, target: Target, entry: Entry | None, after: Json, owners: Owners) -> Outcome:
        """Keep what was written; it goes where only a finalizer had kept it, and that is gone."""
        kept = self._put(target, entry, after, owners)
        if released(kept.document):
            self._remove(target, kept)
        return kept

    def _apply(self, target: Target, body: Json, manager: str, force: bool) -> Outcome:
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
        _as_seen(target, said, entry.document if entry else None)
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
        if done.emptied:
            at = ".".join(step[2:] for step in done.emptied[0])
            wrong = f'{at}: Invalid value: "null": {at} in body must be of type object: "null"'
            raise Refusal(422, f'{kind.kind} "{target.name}" is invalid: {wrong}', causes=[{"field": at}])
        if entry is None:
            self._namespace_takes(target, target.name)
        document = done.document if entry else self._newborn(target, done.document)
        return self._kept(target, entry, document, done.owners)

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
        own = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", *_GOING)
        told = {k: v for k, v in after.get("metadata", {}).items() if v not in ({}, [])}  # omitempty
        metadata = {k: v for k, v in told.items() if k not in (*own, "managedFields")}
        named = {k: v for k, v in before["metadata"].items() if k in own}
        return {**after, "apiVersion": before["apiVersion"], "kind": before["kind"], "metadata": {**metadata, **named}}

    def _newborn(self, target: Target, body: Json) -> Json:
        made = copied(body)
        metadata = made.setdefault("metadata", {})
        metadata |= {"name": target.name, "creationTimestamp": text_of(self.now())}
        metadata["uid"] = str(uuid.UUID(int=self._dice.getrandbits(128), version=4))
        if target.namespace:
            metadata["namespace"] = target.namespace
        if target.kind.generation:
            metadata["generation"] = 1
        metadata.pop("resourceVersion", None)
        if target.kind.kind == "Node":
            made.setdefault("spec", {})
        if target.kind.kind == "Namespace":
            made["spec"] = {"finalizers": ["kubernetes"]}  # its controller's, who empties it first
        return {**made, "apiVersion": target.kind.api_version, "kind": target.kind.kind}

    def _put(self, target: Target, entry: Entry | None, document: Json, owners: Owners) -> Entry:
        """Keep a document; nothing happens where it and its owners are as before."""
        kind = target.kind
        document = {**document, "metadata": _without_empty(document["metadata"])}
        if kind.defaults:
            document = filled_in(kind, copied(document))
        wrong = kind.check(document, entry.document if entry else None)
        if wrong:
            raise Refusal(
                422,
                f'{kind.kind} "{target.name}" is invalid: {"; ".join(wrong)}',
                causes=[{"message": w} for w in wrong],
            )
        if entry is not None:
            if entry.document == document and entry.owners == owners:
                return entry
            if kind.generation and entry.document.get("spec") != document.get("spec"):
                document["metadata"]["generation"] += 1
        document["metadata"]["resourceVersion"] = self._next()
        kept = Entry(document, owners)
        shelf = self._shelves[kind.plural]
        shelf.objects[target.namespace, target.name] = kept
        happened = Happened(self.version, entry, kept, deleted=False)
        shelf.history.append(happened)
        self._index(target, entry, kept)
        self._told(kind, happened)
        return kept

    def _entry(self, target: Target) -> Entry:
        found = self.entries(target.kind).get((target.namespace, target.name))
        if found is None:
            raise Refusal(404, f'{target.kind.plural} "{target.name}" not found')
        return found

    def _next(self) -> str:
        self.version += 1
        return str(self.version)


def _as_seen(target: Target, said: Json, before: Json | None) -> None:
    """Refuse what was decided on another version of the object than there is; who names no version, does not mind."""
    if before is not None and said.get("resourceVersion", (at := before["metadata"]["resourceVersion"])) != at:
        raise Refusal(
            409,
            f'Operation cannot be fulfilled on {target.kind.plural} "{target.name}": the object has been modified',
        )


def _without_empty(metadata: Json) -> Json:
    """Metadata without maps and lists that are empty: nothing of them is kept, and nothing is sent."""
    return {key: value for key, value in metadata.items() if value not in ({}, [])}


def _owners(target: Target, before: Json, owners: Owners, after: Json, manager: str) -> Owners:
    """Who owns which fields after an update."""
    if not target.kind.owned:
        return owners
    return fields.updated(before, owners, after, Owner(manager, "Update", target.subresource), target.kind.list_maps)
