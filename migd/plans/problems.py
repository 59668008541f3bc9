"""Problems: what is wrong in an input, where, and what to do about it; and how pydantic's findings become them."""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in an input.

    path: where, as `spec.rules[0].instances[1].count`, or a line, or "" for the whole input.
    message: what is wrong, a clause that can follow the path. hint: what to do; "" where there is nothing to add.
    """

    path: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return where + self.message + (f" ({self.hint})" if self.hint else "")


class BadInput(Exception):  # noqa: N818  it names what was handed in, not a fault of ours
    """An input cannot be used. Carries every problem found, and the name of the source they are in."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        assert self.problems, "bad input without a problem"
        super().__init__("\n".join(f"{source}: {problem}" for problem in self.problems))


NOT_IN_V1ALPHA1: Final = {
    "force": "force delete",
    "forcedelete": "force delete",
    "hooks": "hooks",
    "hook": "hooks",
    "prehook": "hooks",
    "posthook": "hooks",
    "reboot": "a reboot by migd",
    "allowreboot": "a reboot by migd",
    "vgpu": "vGPU",
    "vgpus": "vGPU",
    "sharing": "sharing",
    "timeslicing": "time-slicing",
    "mps": "MPS",
    "replicas": "sharing by replicas",
    "computeinstances": "compute instances smaller than their GPU instance",
}
"""Keys people try that this version has no field for, and what they stand for. Source: docs/plans.md."""

_OTHER_WORDS: Final = {
    "migenabled": "mig",
    "migdevices": "instances",
    "devices": "gpus",
    "devicefilter": "gpus",
    "memory": "memoryGB",
    "memorygib": "memoryGB",
    "slices": "computeSlices",
}
"""Words of neighbouring formats, and ours for the same thing."""


def path_of(location: Iterable[str | int]) -> str:
    """A location as a path: `spec.rules[0].gpus`; keys that are no plain words are quoted: `data["config.yaml"]`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", part):
            path += f".{part}" if path else part
        else:
            path += f"[{json.dumps(part, ensure_ascii=False)}]"
    return path


def shown(value: object) -> str:
    """A value in a message, as JSON would write it, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def unknown_key(key: str, known: Iterable[str]) -> tuple[str, str]:
    """Message and hint for a key that does not exist, with what was probably meant."""
    plain = _plain(key)
    if plain in NOT_IN_V1ALPHA1:
        return f"{NOT_IN_V1ALPHA1[plain]} is not in v1alpha1", "leave it out"
    known = sorted(known)
    meant = _meant(key, known)
    if meant:
        return "unknown key", f"did you mean {meant}?"
    return "unknown key", f"known here: {', '.join(known)}" if known else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question that names the known word nearest to a misspelt one, or ""."""
    meant = _meant(word, known)
    return f"did you mean {meant}?" if meant else ""


def _meant(word: str, known: Iterable[str]) -> str:
    by_plain = {_plain(k): k for k in sorted(known)}
    near = difflib.get_close_matches(_plain(word), list(by_plain), n=1, cutoff=0.6)
    if near:
        return by_plain[near[0]]
    other = _OTHER_WORDS.get(_plain(word), "")
    return other if other in by_plain.values() else ""


def _plain(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word[:200].lower())


def wrong(message: str, hint: str = "") -> PydanticCustomError:
    """An error for a validator to raise: message and hint reach the user as they are."""
    return PydanticCustomError("migd", "{text}", {"text": message, "hint": hint})


def problems_of(
    error: ValidationError, root: type[BaseModel], prefix: tuple[str | int, ...] = ()
) -> tuple[Problem, ...]:
    """pydantic's findings about one document of type `root`, in its order, in our words.

    A required key that is only misspelt is reported once, as the misspelt one.
    """
    found = error.errors(include_url=False)
    misspelt = {
        path_of((*f["loc"][:-1], _meant(str(f["loc"][-1]), _keys_at(root, f["loc"][:-1]))))
        for f in found
        if f["type"] == "extra_forbidden"
    }
    return tuple(
        _problem(f, root, prefix) for f in found if f["type"] != "missing" or path_of(f["loc"]) not in misspelt
    )


def _problem(found: ErrorDetails, root: type[BaseModel], prefix: tuple[str | int, ...]) -> Problem:
    location = tuple(part for part in found["loc"] if part != "[key]")
    path = path_of((*prefix, *location))
    value: object = found["input"]
    context: Mapping[str, Any] = found.get("ctx", {})
    kind = found["type"]
    if kind == "migd":
        return Problem(path, context["text"], context["hint"])
    if kind == "extra_forbidden":
        return Problem(path, *unknown_key(str(location[-1]), _keys_at(root, location[:-1])))
    if kind == "missing":
        return Problem(path, "is required", _hint_at(root, location))
    if kind == "literal_error":
        expected = str(context["expected"]).replace("'", "").replace("True", "true")
        meant = did_you_mean(value, re.split(r", | or ", expected)) if isinstance(value, str) else ""
        return Problem(path, f"must be {expected}, not {shown(value)}", meant or _hint_at(root, location))
    wanted, hint = _TYPES.get(kind, ("", ""))
    if wanted:
        if kind == "tuple_type" and isinstance(value, str | int | float):
            hint = f"write [{value}]"
        return Problem(path, f"must be {wanted}, not {shown(value)}", hint)
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return Problem(path, f"must be {words} {context[bound]}, not {shown(value)}")
    return Problem(path, found["msg"])


_TYPES: Final = {
    "int_type": ("a whole number", "without quotes"),
    "int_from_float": ("a whole number", ""),
    "string_type": ("text", "put it in quotes"),
    "bool_type": ("true or false", ""),
    "tuple_type": ("a list", ""),
    "dict_type": ("a mapping", "write it as key: value"),
    "model_type": ("a mapping", "write it as key: value"),
}
_BOUNDS: Final = {"greater_than_equal": ("at least", "ge"), "less_than_equal": ("at most", "le")}


def _keys_at(root: type[BaseModel], location: Iterable[str | int]) -> tuple[str, ...]:
    model = _model_at(root, location)
    return tuple(field.alias or name for name, field in model.model_fields.items()) if model else ()


def _hint_at(root: type[BaseModel], location: tuple[str | int, ...]) -> str:
    """What the field's own description says to do, where it has one."""
    model = _model_at(root, location[:-1])
    if model is None:
        return ""
    return next((f.description or "" for n, f in model.model_fields.items() if (f.alias or n) == location[-1]), "")


def _model_at(root: type[BaseModel], location: Iterable[str | int]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = root
    for part in location:
        if isinstance(part, int) or model is None:
            continue
        field = next((f for n, f in model.model_fields.items() if (f.alias or n) == part), None)
        model = _model_in(field.annotation) if field else None
    return model


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model that an annotation is made of: of `tuple[Rule, ...]` or `Rule | None`, Rule."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for part in typing.get_args(annotation) if (m := _model_in(part))), None)
