"""A plan's preview for its status: what will be done, in groups of GPUs for which the same is done; and its digest.

A digest is 56 hexadecimal digits that carry what an approval needs, so that nothing has to be remembered: 16 name
the plan and its generation, 16 the preview's content, and 8 each say how many instances go, how many pods, and how
many GPUs are reset. An approval holds as long as it is of this generation and none of the three has grown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Final

from migd.mig.geometry import Counts
from migd.plans.conditions import cut
from migd.plans.partitions import written
from migd.plans.statuses import Group, PlanPreview, ProfileCount, Totals
from migd_operator.claims import Claim
from migd_operator.facts import APPROVED, PlanFacts
from migd_operator.judging import Judged

GROUPS_MAX: Final = 50
EXAMPLES_MAX: Final = 5
BYTES_MAX: Final = 256 * 1024
_LAYOUT_MAX: Final = 1024
_MOST: Final = 0xFFFFFFFF

_Key = tuple[str, Judged]


def preview_of(plan: PlanFacts, claims: Iterable[tuple[str, Claim]]) -> PlanPreview:
    """The preview of a plan. claims: each GPU it decides on, or has a part in a conflict over, with its node's name.

    Groups with something to do or to tell are listed, the largest first; with all, totals are over every GPU.
    """
    groups: dict[_Key, list[str]] = {}
    for node, claim in claims:
        groups.setdefault((_model(claim), told_of(claim)), []).append(node)
    totals = _totals(groups)
    told = [
        _group(model, judged, nodes) for (model, judged), nodes in groups.items() if judged.changes or judged.reason
    ]
    ordered = sorted(
        told, key=lambda g: (-g.gpus, g.model, g.from_layout, g.to, json.dumps(written(g), sort_keys=True))
    )
    shown = ordered[:GROUPS_MAX]
    while len(json.dumps([written(g) for g in shown], ensure_ascii=False).encode()) > BYTES_MAX * 3 // 4:
        shown.pop()
    return PlanPreview(
        digest=_digest(plan, totals, ordered),
        observed_generation=plan.generation,
        totals=totals,
        groups=tuple(shown),
        groups_left_out=len(ordered) - len(shown),
    )


def approved(plan: PlanFacts, preview: PlanPreview) -> bool:
    """Whether the plan needs no approval, or has one for this generation that covers what is still to be done."""
    if plan.plan.spec.approval == "Automatic":
        return True
    given = plan.annotations.get(APPROVED, "").strip()
    if len(given) != len(preview.digest) or given[:16] != preview.digest[:16]:
        return False
    return all(given[at : at + 8] >= preview.digest[at : at + 8] for at in (32, 40, 48))


def _digest(plan: PlanFacts, totals: Totals, groups: Sequence[Group]) -> str:
    spec = f"{plan.uid} {plan.generation}"
    content = json.dumps([written(totals), [written(g) for g in groups]], sort_keys=True)
    parts = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in (spec, content)]
    return "".join(parts) + "".join(f"{min(n, _MOST):08x}" for n in (totals.destroy, totals.evict, totals.resets))


def _model(claim: Claim) -> str:
    return claim.partition.gpu.model if claim.partition.gpu else ""


def told_of(claim: Claim) -> Judged:
    """What is told of a GPU: where it is left out, nothing is done there, and the reason says why."""
    judged = claim.judged
    left = claim.left
    if left is None:
        assert judged is not None
        return judged
    now = str(claim.partition.gpu.layout) if claim.partition.gpu and not claim.partition.gpu.lost else ""
    refused = left.reason in ("Infeasible", "UnknownProfile", "NotCapable")
    to = judged.to if judged is not None and refused else now
    return Judged(now, to, refused=refused, reason=left.reason, message=left.message)


def _totals(groups: dict[_Key, list[str]]) -> Totals:
    nodes: set[str] = set()
    sums = dict.fromkeys(
        ("gpus", "unchanged", "refused", "blocked", "keep", "destroy", "create", "evict", "mode_changes", "resets"), 0
    )
    for (_, judged), where in groups.items():
        n = len(where)
        if judged.changes:
            nodes.update(where)
        sums["gpus"] += n * judged.changes
        sums["refused"] += n * judged.refused
        sums["blocked"] += n * (judged.reason is not None and not judged.refused)
        sums["unchanged"] += n * (not judged.changes and judged.reason is None)
        sums["keep"] += n * _number(judged.keep)
        sums["destroy"] += n * _number(judged.destroy)
        sums["create"] += n * _number(judged.create)
        sums["evict"] += n * judged.evict
        sums["mode_changes"] += n * (judged.mode_change is not None)
        sums["resets"] += n * judged.reset
    return Totals(nodes=len(nodes), **sums)


def _number(counts: Counts) -> int:
    return sum(number for _, number in counts)


def _listed(counts: Counts) -> tuple[ProfileCount, ...]:
    return tuple(ProfileCount(profile=name, count=number) for name, number in counts)


def _group(model: str, judged: Judged, where: list[str]) -> Group:
    nodes = sorted(set(where))
    return Group(
        model=cut(model, 256),
        from_layout=cut(judged.from_layout, _LAYOUT_MAX),
        to=cut(judged.to, _LAYOUT_MAX),
        nodes=len(nodes),
        gpus=len(where),
        example_nodes=tuple(nodes[:EXAMPLES_MAX]),
        keep=_listed(judged.keep),
        destroy=_listed(judged.destroy),
        create=_listed(judged.create),
        evict=judged.evict * len(where),
        mode_change=judged.mode_change,
        reset=judged.reset,
        reason=judged.reason,
        message=cut(judged.message, 1024),
    )
