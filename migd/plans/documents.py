"""Text into plain values: YAML and JSON without surprises, bounded, with duplicate keys and odd types refused.

PyYAML does the scanning and parsing; what its events become is decided here, so that no text can name a Python
type, grow by aliases, nest without end, or say a key twice without being told.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import yaml

from migd.plans.problems import BadInput, Problem, shown

BYTES_MAX: Final = 1 << 20
NODES_MAX: Final = 50_000
"""Values in one text, each counted as often as its aliases repeat it."""
DEPTH_MAX: Final = 32

JsonValue = dict[str, "JsonValue"] | list["JsonValue"] | str | int | float | bool | None


def parse_documents(text: str, source: str = "input") -> tuple[JsonValue, ...]:
    """The documents of a YAML or JSON text, in order, empty ones left out; BadInput for anything else.

    Mappings have text keys only; scalars are text, whole numbers, finite floats, booleans or None. At most 1 MiB,
    50,000 values and 32 levels.
    """
    if len(text.encode("utf-8", "surrogatepass")) > BYTES_MAX:
        raise BadInput(source, [Problem("", f"is larger than {BYTES_MAX >> 20} MiB", "a plan is a few KiB")])
    found = _json(text)
    if found is not None:
        return found
    try:
        return tuple(d for d in _Builder(text).documents() if d is not None)
    except _Refused as refused:
        raise BadInput(source, [Problem(f"line {refused.line}", refused.message, refused.hint)]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        where = f"line {mark.line + 1}" if mark else ""
        raise BadInput(source, [Problem(where, f"is neither YAML nor JSON: {what}")]) from None
    except yaml.YAMLError as error:
        first = next(iter(str(error).splitlines()), "cannot be read")
        raise BadInput(source, [Problem("", f"is neither YAML nor JSON: {first}")]) from None


def _json(text: str) -> tuple[JsonValue, ...] | None:
    """The one document of a clean JSON text; None where it is none, or YAML has more to say about it."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value: JsonValue = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return (value,) if _bounded(value) else None


def _distinct(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _no_constant(name: str) -> JsonValue:
    raise ValueError(name)


def _bounded(value: JsonValue) -> bool:
    level: list[JsonValue] = [value]
    nodes = 0
    for _ in range(DEPTH_MAX):
        nodes += len(level)
        if any(isinstance(v, float) and not math.isfinite(v) for v in level):
            return False
        inside = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [item for items in inside for item in items]
        if not level:
            return nodes <= NODES_MAX
    return False


class _Refused(Exception):  # noqa: N818
    def __init__(self, event: yaml.Event, message: str, hint: str = "") -> None:
        self.line = _line(event)
        self.message = message
        self.hint = hint
        super().__init__(message)


def _line(event: yaml.Event) -> int:
    """The line an event starts in, from 1."""
    return event.start_mark.line + 1 if event.start_mark else 1


@dataclass(frozen=True, slots=True)
class _Node:
    """A value, and how many values it holds with itself."""

    value: JsonValue
    nodes: int


class _Builder:
    """Builds values from PyYAML's events, counting as it goes."""

    def __init__(self, text: str) -> None:
        self._events: Iterator[yaml.Event] = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        self._anchors: dict[str, _Node | None] = {}
        self._nodes = 0

    def documents(self) -> Iterable[JsonValue]:
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                self._anchors = {}
                yield self._node(next(self._events), 1).value

    def _node(self, event: yaml.Event, depth: int) -> _Node:
        if depth > DEPTH_MAX:
            raise _Refused(event, f"nests deeper than {DEPTH_MAX} levels")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        assert isinstance(event, yaml.NodeEvent)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = _Node(_scalar(event), 1)
            self._count(event, 1)
        elif isinstance(event, yaml.SequenceStartEvent):
            _no_tag(event)
            node = self._sequence(event, depth)
        else:
            assert isinstance(event, yaml.MappingStartEvent)
            _no_tag(event)
            node = self._mapping(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _alias(self, event: yaml.AliasEvent) -> _Node:
        if event.anchor not in self._anchors:
            raise _Refused(event, f"*{event.anchor} refers to nothing")
        node = self._anchors[event.anchor]
        if node is None:
            raise _Refused(event, f"*{event.anchor} refers to itself")
        self._count(event, node.nodes)
        return node

    def _sequence(self, start: yaml.Event, depth: int) -> _Node:
        self._count(start, 1)
        items: list[JsonValue] = []
        nodes = 1
        for event in self._events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            node = self._node(event, depth + 1)
            items.append(node.value)
            nodes += node.nodes
        return _Node(items, nodes)

    def _mapping(self, start: yaml.Event, depth: int) -> _Node:
        self._count(start, 1)
        found: dict[str, JsonValue] = {}
        lines: dict[str, int] = {}
        nodes = 1
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self._key(event, depth)
            if key in found:
                raise _Refused(event, f"key {shown(key)} is already given in line {lines[key]}", "keep one of them")
            lines[key] = _line(event)
            node = self._node(next(self._events), depth + 1)
            found[key] = node.value
            nodes += node.nodes + 1
        return _Node(found, nodes)

    def _key(self, event: yaml.Event, depth: int) -> str:
        if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.implicit[0]:
            raise _Refused(event, "merge keys (<<) are not taken", "write the keys out")
        key = self._node(event, depth + 1).value
        if not isinstance(key, str):
            raise _Refused(event, f"a key must be text, not {shown(key)}", "put it in quotes")
        return key

    def _count(self, event: yaml.Event, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > NODES_MAX:
            raise _Refused(event, f"holds more than {NODES_MAX} values, aliases counted each time")


def _no_tag(event: yaml.CollectionStartEvent) -> None:
    if event.tag is not None:
        raise _Refused(event, f"tags such as {shown(event.tag)} are not taken", "write plain values")


_NULL: Final = re.compile(r"~|null|Null|NULL|")
_TRUE: Final = re.compile(r"true|True|TRUE|yes|Yes|YES|on|On|ON")
_FALSE: Final = re.compile(r"false|False|FALSE|no|No|NO|off|Off|OFF")
_INT: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,30})")
_HEX: Final = re.compile(r"0x[0-9a-fA-F]{1,16}")
_FLOAT: Final = re.compile(
    r"[-+]?(?:[0-9]{1,30}\.[0-9]{0,30}|\.[0-9]{1,30}|[0-9]{1,30}(?=[eE]))(?:[eE][-+]?[0-9]{1,3})?"
)


def _scalar(event: yaml.ScalarEvent) -> JsonValue:
    """A scalar as Kubernetes reads it, but for octal, sexagesimal and dates, which stay text."""
    if event.tag is not None and event.tag != "!":
        raise _Refused(event, f"tags such as {shown(event.tag)} are not taken", "write plain values")
    return plain(event.value) if event.implicit[0] else event.value


def plain(text: str) -> JsonValue:
    """What a scalar without quotes means."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text) or _FALSE.fullmatch(text):
        return _TRUE.fullmatch(text) is not None
    if _INT.fullmatch(text):
        return int(text)
    if _HEX.fullmatch(text):
        return int(text, 16)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text
