"""What a text is: a plan, a mig-parted file, or a ConfigMap around one; and reading it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from migd.plans.documents import JsonValue, parse_documents
from migd.plans.migparted import MigParted, migparted_of
from migd.plans.plan import API_VERSION, KIND, Plan, plan_of
from migd.plans.problems import BadInput, Problem, did_you_mean, path_of, shown

_WANTED: Final = "give a GPUPartitionPlan, a mig-parted file, or a ConfigMap that holds one"


@dataclass(frozen=True, slots=True)
class _Found:
    """A document that is meant for us: what it is, and where it lies in its text."""

    what: str
    value: JsonValue
    prefix: tuple[str | int, ...]


def read(text: str, source: str = "input") -> Plan | MigParted:
    """The one plan or mig-parted file in a YAML or JSON text of one or more documents.

    source: the name of the text in messages. Documents of other kinds beside it are passed over.
    Raises BadInput with every problem found, whatever the text is.
    """
    documents = parse_documents(text, source)
    if not documents:
        raise BadInput(source, [Problem("", "is empty", _WANTED)])
    found = [f for document in _flat(documents) for f in _meant_for_us(document, source)]
    if not found:
        raise BadInput(source, [_nothing_known(_flat(documents))])
    if len(found) > 1:
        listed = ", ".join(f.what for f in found)
        raise BadInput(source, [Problem("", f"holds {len(found)} things to apply: {listed}", "give one of them")])
    (one,) = found
    return plan_of(one.value, source) if one.what == KIND else migparted_of(one.value, source, one.prefix)


def _flat(documents: tuple[JsonValue, ...]) -> tuple[JsonValue, ...]:
    """The documents, with the items of a Kubernetes List in place of the list."""
    flat: list[JsonValue] = []
    for document in documents:
        items = document.get("items") if isinstance(document, dict) and document.get("kind") == "List" else None
        flat += items if isinstance(items, list) else [document]
    return tuple(flat)


def _meant_for_us(document: JsonValue, source: str) -> tuple[_Found, ...]:
    if not isinstance(document, dict):
        return ()
    version, kind = document.get("apiVersion"), document.get("kind")
    if kind == KIND or (isinstance(version, str) and version.split("/")[0] == API_VERSION.split("/")[0]):
        return (_Found(KIND, document, ()),)
    if kind == "ConfigMap":
        return _in_config_map(document, source)
    if kind is None and version is None and _looks_like_migparted(document):
        return (_Found("a mig-parted file", document, ()),)
    return ()


def _looks_like_migparted(document: JsonValue) -> bool:
    return isinstance(document, dict) and any(
        key in ("version", "mig-configs") or did_you_mean(key, ["mig-configs"]) for key in document
    )


def _in_config_map(document: dict[str, JsonValue], source: str) -> tuple[_Found, ...]:
    """The mig-parted files under the keys of a ConfigMap. Other texts are passed over, unless they mention one."""
    metadata, data = document.get("metadata"), document.get("data")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    found: list[_Found] = []
    for key, text in data.items() if isinstance(data, dict) else ():
        if not isinstance(text, str) or "configs" not in text:
            continue
        prefix = ("data", key)
        try:
            inside = parse_documents(text, source)
        except BadInput as bad:
            if "mig-configs" not in text:
                continue
            where = path_of(prefix)
            moved = [Problem(f"{where}, {p.path}" if p.path else where, p.message, p.hint) for p in bad.problems]
            raise BadInput(source, moved) from None
        what = f"{path_of(prefix)} of ConfigMap {name or '(no name)'}"
        found += [_Found(what, value, prefix) for value in inside if _looks_like_migparted(value)]
    return tuple(found)


def _nothing_known(documents: tuple[JsonValue, ...]) -> Problem:
    kinds = [d.get("kind") for d in documents if isinstance(d, dict)]
    if "ConfigMap" in kinds:
        return Problem("data", "no key of the ConfigMap holds a mig-parted file", "its text starts with version: v1")
    named = [k for k in kinds if isinstance(k, str)]
    if named:
        meant = next((m for k in named if (m := did_you_mean(k, [KIND]))), "")
        return Problem("kind", f"{shown(named[0])} is nothing migd takes", meant or _WANTED)
    return Problem("", f"holds neither a plan nor a mig-parted file, but {shown(documents[0])}", _WANTED)
