"""One object of the simulated API server as it is kept, and one change of it. Nothing of it is changed in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from migd.sim.cluster import fields
from migd.sim.cluster.fields import Json, Owners, copied
from migd.sim.cluster.kinds import SimKind

Key = tuple[str, str]
"""Namespace ("" for none) and name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One object: its document, without managedFields, and who owns which of its fields. Neither is ever changed."""

    document: Json
    owners: Owners
    _sent: list[Json] = field(default_factory=list, compare=False)

    def shown(self, kind: SimKind) -> Json:
        """The document as it is sent, the reader's own."""
        return copied(self.sent(kind))  # type: ignore[no-any-return]

    def sent(self, kind: SimKind) -> Json:
        """The document as it is sent, for many readers who only read."""
        if not self._sent:
            document = self.document
            if self.owners:
                managed = fields.managed_fields(self.owners, kind.api_version)
                document = {**document, "metadata": {**document["metadata"], "managedFields": managed}}
            self._sent.append(document)
        return self._sent[0]


@dataclass(frozen=True, slots=True)
class Happened:
    """One change in the history: the object before (None: made) and after; deleted ones with the version of that."""

    version: int
    before: Entry | None
    after: Entry
    deleted: bool


Outcome = Entry | Json
"""What a verb answers: an object as it is now, or a document of another kind, such as a list or a Status."""
Listener = Callable[[SimKind, Happened], None]
"""Told of each change at once, within the write: it must not write itself."""


@dataclass(slots=True)
class Shelf:
    """All objects of one kind, and what happened to them. forgotten: changes up to this version are not in it."""

    objects: dict[Key, Entry] = field(default_factory=dict)
    history: list[Happened] = field(default_factory=list)
    forgotten: int = 0
