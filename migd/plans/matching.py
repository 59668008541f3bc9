"""What selectors match: which rule of a plan decides on which GPU of a node, and labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from migd.mig.observed import SeenGpu
from migd.plans.fields import pci_key
from migd.plans.plan import GpuSelector, LabelSelector, Plan
from migd.plans.problems import Problem


@dataclass(frozen=True, slots=True)
class Matching:
    """What a plan says about the GPUs of one node.

    rules: for each GPU, in the order given, the index of the first rule that matches, or None: left alone.
    problems: GPUs that the plan names and the node lacks. notes: rules that decide on no GPU.
    """

    rules: tuple[int | None, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def match(plan: Plan, gpus: Sequence[SeenGpu]) -> Matching:
    """Match the rules of a plan against every NVIDIA GPU of one node; indices and UUIDs count over all of them."""
    selectors = [rule.gpus for rule in plan.spec.rules]
    decided = tuple(next((n for n, s in enumerate(selectors) if selects(s, gpu)), None) for gpu in gpus)
    problems = tuple(p for n, s in enumerate(selectors) for p in _absent(f"spec.rules[{n}].gpus", s, gpus))
    used = set(decided)
    notes = tuple(f"spec.rules[{n}] decides on no GPU of this machine" for n in range(len(selectors)) if n not in used)
    return Matching(decided, problems, notes)


def selects(selector: GpuSelector, gpu: SeenGpu) -> bool:
    """Whether a GPU passes every part that the selector gives."""
    return (
        (selector.indices is None or gpu.index in selector.indices)
        and (selector.uuids is None or gpu.uuid.lower() in {u.lower() for u in selector.uuids})
        and (selector.models is None or any(fnmatchcase(gpu.model, glob) for glob in selector.models))
        and (
            selector.pci_device_ids is None
            or pci_key(gpu.pci_device_id) in {pci_key(device) for device in selector.pci_device_ids}
        )
    )


def matches(selector: LabelSelector, labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches, as Kubernetes has it: NotIn also matches where the label is absent."""
    if any(labels.get(key) != value for key, value in selector.match_labels.items()):
        return False
    for need in selector.match_expressions:
        there = need.key in labels
        listed = there and labels[need.key] in need.values
        holds = {"In": listed, "NotIn": not listed, "Exists": there, "DoesNotExist": not there}[need.operator]
        if not holds:
            return False
    return True


def _absent(path: str, selector: GpuSelector, gpus: Sequence[SeenGpu]) -> Iterable[Problem]:
    here = {gpu.index for gpu in gpus}
    known = {gpu.uuid.lower() for gpu in gpus}
    for at, index in enumerate(selector.indices or ()):
        if index not in here:
            has = f"has {ranges(here)}" if here else "has no NVIDIA GPU"
            yield Problem(f"{path}.indices[{at}]", f"plan names GPU index {index}; this machine {has}")
    for at, uuid in enumerate(selector.uuids or ()):
        if uuid.lower() not in known:
            yield Problem(f"{path}.uuids[{at}]", f"plan names {uuid}, which is not in this machine", "see migd gpus")


def ranges(indices: Iterable[int]) -> str:
    """Indices in short: 0–3, 5."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
