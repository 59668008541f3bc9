"""What is there, as a plan that would keep it so; and a plan as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import yaml

from migd.mig.geometry import Counts, counts_of
from migd.mig.observed import SeenGpu
from migd.plans.documents import plain
from migd.plans.plan import GpuSelector, InstanceRule, LabelSelector, Plan, PlanSpec, Rule, document_of
from migd.plans.problems import BadInput, Problem


def plan_from(gpus: Iterable[SeenGpu], name: str = "exported", by: Literal["indices", "uuids"] = "indices") -> Plan:
    """The plan that says what these GPUs are: one rule for each layout, over indices or UUIDs.

    GPUs that cannot do MIG, or are lost, are left out; BadInput where none is left. A plan says how many instances
    of each profile, not where they lie.
    """
    alike: dict[tuple[bool, Counts], list[SeenGpu]] = {}
    for gpu in sorted(gpus, key=lambda g: (g.index, g.uuid)):
        if gpu.mode is not None and not gpu.out_of_reach:
            alike.setdefault((gpu.mig_on, counts_of(gpu.geometry)), []).append(gpu)
    if not alike:
        raise BadInput("export", [Problem("", "no GPU of this machine can do MIG: there is nothing to export")])
    rules = tuple(_rule(mig, counts, found, by) for (mig, counts), found in alike.items())
    return Plan(name=name, spec=PlanSpec(node_selector=LabelSelector(), rules=rules))


def dump(plan: Plan) -> str:
    """A plan as YAML that reads back equal; what is default is left out."""
    return yaml.dump(document_of(plan), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _rule(mig: bool, counts: Counts, gpus: list[SeenGpu], by: Literal["indices", "uuids"]) -> Rule:
    selector = (
        GpuSelector(indices=tuple(g.index for g in gpus))
        if by == "indices"
        else GpuSelector(uuids=tuple(g.uuid for g in gpus))
    )
    if not mig:
        return Rule(gpus=selector, mig="Disabled")
    wanted = tuple(InstanceRule(profile=profile, count=number) for profile, number in counts)
    return Rule(gpus=selector, instances=wanted, allow_empty=not wanted)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that our own reader would take for something else; writes no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def text(self, text: str) -> yaml.ScalarNode:
        style = None if isinstance(plain(text), str) else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.text)
