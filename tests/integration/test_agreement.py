"""Plans that nobody thought of: the strict values and the API server judge each of them alike.

Each is a good plan with one or two changes at random places. Left out are the documents on which the two are known to
differ (`plan_documents.DIFFERENCES`).
"""

from __future__ import annotations

import copy
import json
from functools import cache
from random import Random
from typing import Any

import pytest
from controlplane.running import ControlPlane
from integration.plan_documents import GOOD
from integration.texts import PLANS

from migd.plans.plan import plan_of
from migd.plans.problems import BadInput

SEEDS = 2000
WORDS = (
    "",
    " ",
    "x",
    "a b",
    "a/b",
    "A",
    "-a",
    "Evict",
    "1",
    "30m",
    "0s",
    "1g.5gb",
    "1c.3g.20gb",
    "GPU-a",
    "25%",
    "true",
    "*",
)
NUMBERS = (-1, 0, 1, 2, 64, 65, 1023, 1024, 10_001, 604_800, 10**6 + 1, 10**9 + 1)
ODD = (*WORDS, *NUMBERS, True, False, 1.5, [], {}, [1], ["a"], {"a": "b"})
KNOWN_TO_DIFFER = (
    "can never decide on GPU ",  # the API server refuses only rules after one for all GPUs
    "GPU GPU-a is named twice",  # it compares UUIDs with case
    "not null",  # null is left out, and a default takes its place
)


@pytest.mark.parametrize("part", range(4))
def test_both_judge_a_plan_alike(plane: ControlPlane, part: int):
    judged = {True: 0, False: 0}
    for seed in range(part * SEEDS // 4, (part + 1) * SEEDS // 4):
        document = changed(seed)
        refusals = _refusals(document)
        if any(known in said for said in refusals for known in KNOWN_TO_DIFFER):
            continue
        answer = plane.admin.create(PLANS, document, dryRun="All")
        assert answer.ok == (not refusals), f"seed {seed}: {answer.message}\n{refusals}\n{json.dumps(document)}"
        assert answer.ok or answer.code in (400, 422)
        judged[answer.ok] += 1
    assert min(judged.values()) > SEEDS // 40, f"taken and refused: {judged}"


def changed(seed: int) -> dict[str, Any]:
    """A good plan with one or two changes; equal seeds give equal plans."""
    dice = Random(seed)
    document = copy.deepcopy(dice.choice(GOOD).document)
    document["metadata"] = {"name": "test"}
    for _ in range(dice.choice((1, 1, 2))):
        holder, key = dice.choice(list(_places(document["spec"])))
        _change(dice, holder, key)
    return document


def _places(value: Any) -> Any:
    """Every place in a document, as the mapping or list that holds it and its key there."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


@cache
def _seen_at() -> dict[Any, list[Any]]:
    """What the good plans have, by its key."""
    found: dict[Any, list[Any]] = {}
    for doc in GOOD:
        for holder, key in _places(doc.document["spec"]):
            found.setdefault(key, []).append(holder[key])
    return found


def _change(dice: Random, holder: Any, key: Any) -> None:
    now = holder[key]
    match dice.randrange(9):
        case 0:
            del holder[key]
        case 1 if isinstance(now, list) and now:
            now.append(copy.deepcopy(dice.choice(now)))
        case 2 if isinstance(now, str) and now:
            at = dice.randrange(len(now))
            holder[key] = now[:at] + dice.choice("aZ09.-+/% cgm") + now[at + dice.randrange(2) :]
        case 3 if isinstance(now, bool):
            holder[key] = not now
        case 3 if isinstance(now, int):
            holder[key] = dice.choice(NUMBERS)
        case 4 | 5 | 6 | 7:  # what another good plan has there
            holder[key] = copy.deepcopy(dice.choice(_seen_at().get(key, ODD)))
        case _:
            holder[key] = copy.deepcopy(dice.choice(ODD))


def _refusals(document: object) -> list[str]:
    try:
        plan_of(document)
    except BadInput as bad:
        return [str(problem) for problem in bad.problems]
    return []
