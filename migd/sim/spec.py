"""Specifications of a simulated machine: "8xa100-80gb,2xh200", read, checked and written in one canonical form."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

from migd.sim.catalog import models, not_simulable
from migd.sim.errors import SpecError

GPUS_MAX = 64
_ITEM = re.compile(r"(?:(?P<count>\d+)\s*[x×*]\s*)?(?P<name>.+)", re.IGNORECASE)


class Kind(NamedTuple):
    """One GPU of a machine: the key of its model, and which of the model's NVML names it carries."""

    key: str
    name: str


def parse_spec(text: str) -> tuple[Kind, ...]:
    """The GPUs that a specification names, in order of their index.

    text: items joined by commas, each a count and a model: "8xa100-80gb", "l40s", '2x"NVIDIA A100-PCIE-40GB"'. A model
    is a key of the table, an NVML name (any case, quoted or not), or a board without MIG.
    Raises SpecError, which says what is wrong and what may have been meant.
    """
    kinds: list[Kind] = []
    for item in (part.strip() for part in text.split(",")):
        found = _ITEM.fullmatch(item)
        if found is None:
            raise SpecError(f"an empty item in the machine {text!r}: write for example 8xa100-80gb,2xh200")
        count = int(found["count"] or 1)
        if not 1 <= count <= GPUS_MAX or len(kinds) + count > GPUS_MAX:
            raise SpecError(f"{item!r}: a machine has 1 to {GPUS_MAX} GPUs")
        kinds += [_kind(found["name"].strip().strip("\"'").strip(), item)] * count
    return tuple(kinds)


def write_spec(kinds: Sequence[Kind]) -> str:
    """The canonical form of a specification: equal machines have equal forms, and parse_spec reads it back."""
    items: list[str] = []
    at = 0
    while at < len(kinds):
        run = at
        while run < len(kinds) and kinds[run] == kinds[at]:
            run += 1
        key, name = kinds[at]
        items.append(f"{run - at}x{key}" if name == models()[key].names[0] else f'{run - at}x"{name}"')
        at = run
    return ",".join(items)


def _kind(name: str, item: str) -> Kind:
    wanted = name.lower()
    known = models()
    if wanted in known:
        return Kind(wanted, known[wanted].names[0])
    for model in known.values():
        for full in model.names:
            if full.lower() in (wanted, "nvidia " + wanted):
                return Kind(model.key, full)
    if wanted in not_simulable():
        raise SpecError(f"{item!r}: {name} cannot be simulated: {not_simulable()[wanted]}")
    spellings = {spelling.lower(): spelling for m in known.values() for spelling in (m.key, *m.names)}
    begins = [s for low, s in spellings.items() if low.startswith(wanted)][:4]
    near = begins or [spellings[low] for low in difflib.get_close_matches(wanted, spellings, 3, 0.5)]
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(known)}"
    raise SpecError(f"{item!r}: no GPU called {name!r} is known{hint}")
