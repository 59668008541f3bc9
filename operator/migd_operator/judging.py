"""What a rule would do on one GPU, judged once for all GPUs that are alike."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

from migd.mig.evicting import Occupied, fewest
from migd.mig.geometry import EMPTY, Counts, Geometry, Layout, by_start, counts_of, summary
from migd.mig.observed import SeenGpu
from migd.mig.transition import say
from migd.plans.conditions import Reason
from migd.plans.fields import duration_of
from migd.plans.partitions import Desired, DesiredDisruption, Partition, PlanRef, written
from migd.plans.preview import ForeignPolicy, GpuPreview, plan_gpu
from migd.plans.wishes import Refused, UnknownYet, Wish, resolve
from migd_operator.facts import PlanFacts


@dataclass(frozen=True, slots=True)
class Judged:
    """What a rule would do on a GPU once nothing blocks. evict: instances in use that go, and the GPU where it is in
    use as a whole; each is a pod or more.

    profile: the one profile that it is cut into, None where several or none. refused: it can never be; reason and
    message say why, or what is in the way now.
    """

    from_layout: str
    to: str
    keep: Counts = ()
    destroy: Counts = ()
    create: Counts = ()
    evict: int = 0
    mode_change: Literal["Enable", "Disable"] | None = None
    reset: bool = False
    changes: bool = False
    refused: bool = False
    reason: Reason | None = None
    message: str = ""
    profile: str | None = None


class Judge:
    """Judges GPUs; remembers its answers for GPUs that differ only in who they are."""

    def __init__(self) -> None:
        self._known: dict[object, Judged] = {}
        self._wishes: dict[tuple[str, int], Desired] = {}
        self._texts: dict[int, tuple[Desired, str]] = {}

    def judge(self, plan: PlanFacts, rule: int, partition: Partition) -> Judged:
        """What this rule would do on this GPU, which its agent has told of."""
        gpu = partition.gpu
        assert gpu is not None, "nobody has told of this GPU"
        alike = (
            plan.uid,
            rule,
            gpu.model,
            gpu.memory_mib,
            gpu.mode,
            gpu.resetless,
            gpu.board,
            tuple((i.instance, i.whole, i.in_use, i.instance in partition.owned) for i in gpu.instances),
            gpu.in_use,
            gpu.trouble,
        )
        found = self._known.get(alike)
        if found is None:
            found = self._known[alike] = _judged(plan, rule, partition, gpu)
        return found

    def desired(self, plan: PlanFacts, rule: int) -> Desired:
        """The wish that this rule writes into a partition."""
        found = self._wishes.get((plan.uid, rule))
        if found is None:
            found = self._wishes[plan.uid, rule] = _desired(plan, rule)
        return found

    def text(self, desired: Desired) -> str:
        """A wish as one text, equal for equal wishes."""
        found = self._texts.get(id(desired))
        if found is None:  # the wish is kept beside its text, so that its id stays its own
            found = self._texts[id(desired)] = (desired, json.dumps(written(desired), sort_keys=True))
        return found[1]


def _judged(facts: PlanFacts, number: int, partition: Partition, gpu: SeenGpu) -> Judged:
    spec = facts.plan.spec
    wish = resolve(spec.rules[number], gpu)
    found = plan_gpu(gpu, wish, partition.owned, spec.foreign_instances)
    now = str(gpu.layout)
    refused = found.refused
    if refused is not None:
        message = refused.message
        return Judged(now, _wished(wish), refused=True, reason=refused.reason, message=message)
    evict = 0
    if spec.disruption.policy == "Evict" and found.blocked is not None:
        found, evict = _evicting(gpu, wish, partition.owned, spec.foreign_instances, found)
    to = str(found.target) if found.target is not None else _wished(wish)
    in_use = [i for i in found.destroy if i in gpu.busy]
    judged = Judged(
        from_layout=now,
        to=to,
        keep=counts_of(found.keep),
        destroy=counts_of(found.destroy),
        create=counts_of(found.create),
        evict=evict,
        mode_change=found.mode_change,
        reset=found.reset,
        changes=found.changes,
        profile=_only_profile(wish),
    )
    if found.blocked is None:
        return judged
    if found.blocked.reason == "GPUUnhealthy":
        return replace(judged, reason="GPUUnhealthy", message=gpu.trouble)
    if found.blocked.reason == "InUse":
        what = summary(in_use) or "the GPU as a whole"
        return replace(judged, reason="InUse", message=f"in use: {what}")
    made = summary({b.instance for b in found.blocked.by if b.instance is not None})
    message = f"not made by migd: {made} (foreignInstances: Adopt takes them over)"
    return replace(judged, reason="ForeignInstances", message=message)


def _evicting(
    gpu: SeenGpu, wish: Wish | UnknownYet | Refused, owned: Geometry, foreign: ForeignPolicy, waiting: GpuPreview
) -> tuple[GpuPreview, int]:
    """What is done where pods may be evicted, and how many instances in use go, the GPU as a whole counted as one.

    The agent chooses as this does, but by pod: one may hold several instances. Only it knows who holds them, and
    whether they may go; where not all of them may, it waits. waiting: what is done where nobody is evicted.
    """
    strangers = gpu.geometry - owned if foreign == "Refuse" else EMPTY
    freed: Geometry | None = gpu.busy - strangers
    if isinstance(wish, Wish) and wish.mig and gpu.mig_on and gpu.board is not None:
        held = tuple((i, frozenset({str(i)})) for i in by_start(gpu.busy - strangers))
        (freed,) = fewest([Occupied(gpu.board, gpu.geometry, wish.counts, strangers, held)]).freed
    if freed is None:
        return waiting, 0
    idle = tuple(replace(one, in_use=one.in_use and one.instance not in freed) for one in gpu.instances)
    after = plan_gpu(replace(gpu, instances=idle, in_use=False), wish, owned, foreign)
    if after.blocked is not None:
        return waiting, 0
    whole = any(blocker.instance is None for blocker in waiting.blocked_by)
    return after, len(gpu.busy & frozenset(after.destroy)) + whole


def _only_profile(wish: Wish | UnknownYet | Refused) -> str | None:
    if isinstance(wish, Wish) and len(wish.counts) == 1:
        return wish.counts[0][0]
    return wish.wanted[0].rpartition("×")[2] if isinstance(wish, UnknownYet) and len(wish.wanted) == 1 else None


def _wished(wish: Wish | UnknownYet | Refused) -> str:
    if isinstance(wish, Wish):
        return say(wish.counts) if wish.counts else str(Layout(wish.mig))
    return " ".join(wish.wanted) if isinstance(wish, UnknownYet) else ""


def _desired(facts: PlanFacts, number: int) -> Desired:
    spec = facts.plan.spec
    rule = spec.rules[number]
    wanted = rule.instances or ()
    named = " ".join(f"{i.count}×{i}" if i.count > 1 else str(i) for i in wanted)
    return Desired(
        summary=named or str(Layout(rule.mig is None)),
        mig="Enabled" if rule.mig is None else "Disabled",
        allow_empty=rule.allow_empty,
        instances=wanted,
        plan=PlanRef(name=facts.name, uid=facts.uid, generation=facts.generation),
        disruption=DesiredDisruption.model_validate(
            {
                "policy": spec.disruption.policy,
                "timeout": duration_of(spec.disruption.timeout_s),
                "protect": spec.disruption.protect,
                "allow": spec.disruption.allow,
            }
        ),
        on_failure=spec.on_failure,
        drift=spec.drift,
        foreign_instances=spec.foreign_instances,
    )
