"""Events for people: which to post, which to count, which to leave out. Posting one never stops anything."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from migd.kube.errors import Json
from migd.kube.leases import micro_time

API_VERSION: Final = "events.k8s.io/v1"
NOTE_MAX: Final = 1024
"""Bytes of a note that the API server takes. Source: pkg/apis/core/validation/events.go."""
_NAME_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Regarding:
    """The object that an event is about. namespace: "" for kinds without."""

    api_version: str
    kind: str
    name: str
    uid: str
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth telling. reason: a condition's reason. action: what was being done, in one word of that kind."""

    regarding: Regarding
    type: Literal["Normal", "Warning"]
    reason: str
    action: str
    text: str


@dataclass(frozen=True, slots=True)
class Post:
    """An event to create: its namespace and document."""

    namespace: str
    document: Json


@dataclass(frozen=True, slots=True)
class Count:
    """An event that is there already, to be counted up: its namespace, name, and what to merge into it."""

    namespace: str
    name: str
    patch: Json


@dataclass(frozen=True, slots=True)
class Limits:
    """How many events one object may cause, and how often an equal one is counted up.

    burst, refill_s: so many at once, then one every so many seconds; as client-go has it.
    quiet_s: an equal event within that time is only counted, and written with the next one after it.
    again_s: an equal one after that is a new event: the API server forgets them after an hour.
    objects_max: objects and events that are remembered, the oldest forgotten first.
    """

    burst: int = 25
    refill_s: float = 300.0
    quiet_s: float = 60.0
    again_s: float = 3000.0
    objects_max: int = 4096


@dataclass(slots=True)
class _Series:
    name: str
    first_s: float
    written_s: float
    count: int


class Recorder:
    """Decides what becomes of each note. controller, instance: who reports, as migd.dev/agent and the pod's name."""

    def __init__(self, controller: str, instance: str, limits: Limits | None = None) -> None:
        self._controller = controller
        self._instance = instance[:128]
        self._limits = limits or Limits()
        self._series: OrderedDict[Note, _Series] = OrderedDict()
        self._tokens: OrderedDict[str, tuple[float, float]] = OrderedDict()  # uid -> (tokens, when)
        self.left_out = 0  # notes that were neither posted nor counted, for want of tokens

    def record(self, note: Note, now_s: float, now: datetime) -> Post | Count | None:
        """What to write for a note, if anything. now_s: monotonic; now: the wall clock."""
        known = self._series.get(note)
        if known is not None and now_s - known.first_s < self._limits.again_s:
            return self._count(note, known, now_s, now)
        if not self._allowed(note.regarding.uid, now_s):
            self.left_out += 1
            return None
        name = self._name(note, now)
        self._remember(note, _Series(name, now_s, now_s, 1))
        return Post(_namespace(note), self._document(note, name, now))

    def failed(self, note: Note) -> None:
        """A post did not arrive, or the event is gone: the next equal note is a new one."""
        self._series.pop(note, None)

    def _count(self, note: Note, known: _Series, now_s: float, now: datetime) -> Count | None:
        known.count += 1
        self._series.move_to_end(note)
        if now_s - known.written_s < self._limits.quiet_s:
            return None
        known.written_s = now_s
        patch: Json = {"series": {"count": known.count, "lastObservedTime": micro_time(now)}}
        return Count(_namespace(note), known.name, patch)

    def _allowed(self, uid: str, now_s: float) -> bool:
        tokens, when = self._tokens.pop(uid, (float(self._limits.burst), now_s))
        tokens = min(self._limits.burst, tokens + (now_s - when) / self._limits.refill_s)
        allowed = tokens >= 1
        self._tokens[uid] = (tokens - 1 if allowed else tokens, now_s)
        if len(self._tokens) > self._limits.objects_max:
            self._tokens.popitem(last=False)
        return allowed

    def _remember(self, note: Note, series: _Series) -> None:
        self._series[note] = series
        if len(self._series) > self._limits.objects_max:
            self._series.popitem(last=False)

    def _name(self, note: Note, now: datetime) -> str:
        seed = f"{note}{self._instance}{micro_time(now)}"
        return f"{note.regarding.name[:_NAME_MAX]}.{hashlib.sha256(seed.encode()).hexdigest()[:16]}"

    def _document(self, note: Note, name: str, now: datetime) -> Json:
        about = note.regarding
        regarding: Json = {"apiVersion": about.api_version, "kind": about.kind, "name": about.name, "uid": about.uid}
        if about.namespace:
            regarding["namespace"] = about.namespace
        return {
            "apiVersion": API_VERSION,
            "kind": "Event",
            "metadata": {"name": name, "namespace": _namespace(note)},
            "eventTime": micro_time(now),
            "reportingController": self._controller,
            "reportingInstance": self._instance,
            "regarding": regarding,
            "type": note.type,
            "reason": note.reason[:128],
            "action": note.action[:128],
            "note": _cut(note.text),
        }


def path(namespace: str, name: str = "") -> str:
    """Where the events of a namespace, or one of them, are served."""
    return f"/apis/{API_VERSION}/namespaces/{namespace}/events" + (f"/{name}" if name else "")


def _namespace(note: Note) -> str:
    """Events about what has no namespace go to `default`. Source: client-go, tools/events."""
    return note.regarding.namespace or "default"


def _cut(text: str) -> str:
    """A text of at most NOTE_MAX bytes."""
    if len(text.encode()) <= NOTE_MAX:
        return text
    return text.encode()[: NOTE_MAX - 3].decode(errors="ignore") + "…"
