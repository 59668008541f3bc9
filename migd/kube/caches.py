"""A cache of one kind of object: lists and events in, changes out. It asks nobody and knows no time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Generic, TypeGuard, TypeVar

from migd.kube.errors import Json
from migd.kube.ownership import applied
from migd.kube.stored import NOTHING, OURS, Interner, Kind, Stored, key_of

T = TypeVar("T")
NOT_OF_ITS_KIND: Final = (AttributeError, KeyError, TypeError, ValueError)
"""What `Reader.read` raises for a document that is none of its kind."""


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """One object appeared (before is None), vanished (after is None) or is another now.

    An object that was deleted and made again under its name is two changes, also where nobody saw it go. ours: it is
    the answer to a write of ours, which may tell of changes by others too.
    """

    kind: Kind[T]
    key: str
    before: Stored[T] | None
    after: Stored[T] | None
    ours: bool = False


class Reader(Generic[T]):
    """Documents of one kind into stored values. manager: whose applied fields are kept, as digests."""

    def __init__(self, kind: Kind[T], manager: str, same: Interner) -> None:
        self.kind = kind
        self._manager = manager
        self._same = same

    def read(self, document: Json) -> Stored[T]:
        """The stored value; one of NOT_OF_ITS_KIND where the document is none of this kind."""
        metadata = document["metadata"]
        ours = {k: v for k, v in (metadata.get("annotations") or {}).items() if k.startswith(OURS)}
        digests = applied(document, self._manager)
        return Stored(
            name=metadata["name"],
            namespace=metadata.get("namespace", ""),
            uid=metadata["uid"],
            resource_version=metadata["resourceVersion"],
            generation=metadata.get("generation", 0),
            deleting="deletionTimestamp" in metadata,
            annotations=self._same.mapping(ours),
            applied=digests or NOTHING,
            value=self.kind.parse(document, self._same),
        )


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An object that is there, whose document is none of its kind; why is for people."""

    key: str
    why: str


class Cache(Generic[T]):
    """The objects of one kind that were last heard of.

    synced: one list is complete, so that what is missing is missing. unreadable: objects that are there but whose
    document is none of this kind, key -> why. Answers to our own writes go in too (`noted`), so that we never decide
    on what we ourselves have changed since.
    """

    def __init__(self, reader: Reader[T]) -> None:
        self._reader = reader
        self._objects: dict[str, Stored[T]] = {}
        self._heard = 0  # the newest resource version that the API server told of
        self.synced = False
        self.unreadable: dict[str, str] = {}

    @property
    def kind(self) -> Kind[T]:
        """The kind that it is about."""
        return self._reader.kind

    @property
    def objects(self) -> Mapping[str, Stored[T]]:
        """All objects by key; it changes as the cache does, so copy what must stay."""
        return MappingProxyType(self._objects)

    def get(self, name: str, namespace: str = "") -> Stored[T] | None:
        """One object; None where there is none, as far as heard."""
        return self._objects.get(key_of(name, namespace))

    def __iter__(self) -> Iterator[Stored[T]]:
        return iter(tuple(self._objects.values()))

    def __len__(self) -> int:
        return len(self._objects)

    def read(self, document: Json) -> Stored[T] | Unreadable:
        """A document as `listed` takes it; so of a long list only values are kept, and a page of documents."""
        try:
            return self._reader.read(document)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            metadata = document["metadata"]
            return Unreadable(
                key_of(metadata["name"], metadata.get("namespace", "")), f"{type(error).__name__}: {error}"
            )

    def listed(self, found: Iterable[Stored[T] | Unreadable], resource_version: str) -> tuple[Change[T], ...]:
        """Take a complete list, taken at this resource version; what is not in it is gone.

        Answers of ours that are newer than the list stay. A list older than what was heard before means that the API
        server's own past is another one (restored from a backup): then only the list counts.
        """
        at = _number(resource_version)
        known_before = self._objects if at >= self._heard else {}
        self.unreadable = {}
        new = {one.key: one for one in found if self._readable(one)}
        for key, known in known_before.items():
            newer = _number(known.resource_version) > at
            if newer and (key not in new or _number(new[key].resource_version) < _number(known.resource_version)):
                new[key] = known
        changes = [c for key in sorted({*self._objects, *new}) for c in self._changes(key, new.get(key))]
        self._objects = new
        self._heard = at
        self.synced = True
        return tuple(changes)

    def event(self, kind: str, document: Json) -> tuple[Change[T], ...]:
        """Take an event of a watch: ADDED, MODIFIED, DELETED or BOOKMARK, in the order of the watch."""
        at = _number(document["metadata"]["resourceVersion"])
        self._heard = max(self._heard, at)
        if kind == "BOOKMARK":
            return ()
        key = key_of(document["metadata"]["name"], document["metadata"].get("namespace", ""))
        known = self._objects.get(key)
        newest = _number(known.resource_version) if known is not None else -1
        if newest > at or (newest == at and kind != "DELETED"):
            return ()  # an answer of ours told this already, or more
        self.unreadable.pop(key, None)
        return self._put(key, None if kind == "DELETED" else self._read(document))

    def noted(self, found: Stored[T]) -> tuple[Change[T], ...]:
        """Take the answer to a write of ours, unless the watch has told of later things already."""
        if _number(found.resource_version) <= self._heard:
            return ()
        known = self._objects.get(found.key)
        if known is not None and _number(known.resource_version) >= _number(found.resource_version):
            return ()
        return self._put(found.key, found, ours=True)

    def _put(self, key: str, found: Stored[T] | None, ours: bool = False) -> tuple[Change[T], ...]:
        changes = tuple(self._changes(key, found, ours))
        if found is None:
            self._objects.pop(key, None)
        else:
            self._objects[key] = found
        return changes

    def _changes(self, key: str, after: Stored[T] | None, ours: bool = False) -> Iterator[Change[T]]:
        before = self._objects.get(key)
        if before is not None and after is not None and before.uid != after.uid:
            yield Change(self.kind, key, before, None)
            before = None
        if (before is None) != (after is None) or (
            before is not None and after is not None and before.resource_version != after.resource_version
        ):
            yield Change(self.kind, key, before, after, ours)

    def _read(self, document: Json) -> Stored[T] | None:
        found = self.read(document)
        return found if self._readable(found) else None

    def _readable(self, found: Stored[T] | Unreadable) -> TypeGuard[Stored[T]]:
        if isinstance(found, Unreadable):
            self.unreadable[found.key] = found.why
            return False
        return True


def _number(resource_version: str) -> int:
    """A resource version as a number: those of one kind are in the order of writes.

    Source: KEP-5504; so in every release we support, since they are etcd's revisions.
    """
    return int(resource_version)
