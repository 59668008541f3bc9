"""What happens in a story, drawn from its seed: nodes, jobs, plans, and who interferes when."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from migd.sim.cluster.faults import Chances
from migd.sim.nodes.world import NodeSpec, Workload
from whole.drains import DRAIN_ACTS, DRAIN_S, budgets, rules, services, unmanaged

CUTS: Final[dict[str, tuple[dict[str, int], ...]]] = {
    "a30": ({"1g.6gb": 4}, {"2g.12gb": 2}, {"4g.24gb": 1}, {"2g.12gb": 1, "1g.6gb": 2}, {"1g.6gb": 2}),
    "a100-40gb": ({"1g.5gb": 7}, {"3g.20gb": 2}, {"3g.20gb": 1, "2g.10gb": 1, "1g.5gb": 2}, {"7g.40gb": 1}),
    "a100-80gb": ({"1g.10gb": 7}, {"3g.40gb": 2}, {"3g.40gb": 1, "1g.10gb": 3}, {"4g.40gb": 1, "3g.40gb": 1}),
    "h100-sxm-80gb": ({"1g.10gb": 7}, {"3g.40gb": 2}, {"2g.20gb": 3, "1g.10gb": 1}, {"3g.40gb": 1, "1g.20gb": 2}),
}
"""By model, layouts that it can be cut into."""
HOPPER: Final = frozenset({"h100-sxm-80gb"})
USUAL: Final[dict[str, int]] = {
    "edit": 6,
    "pause": 4,
    "delete": 2,
    "conflict": 3,
    "infeasible": 2,
    "off": 2,
    "two plans": 1,
    "drift": 3,
    "hold": 3,
    "hold gpu": 2,
    "retry": 2,
    "reload": 1,
    "api away": 3,
    "api bad": 5,
    "watches bad": 3,
    "nvml error": 6,
    "nvml late error": 4,
    "nvml in use": 2,
    "nvml hang": 2,
    "nvml skip": 1,
    "save error": 1,
    "refresh error": 1,
    "agent kill": 3,
    "agent crash": 8,
    "agent strike": 6,
    "operator kill": 3,
    "two operators": 2,
    "operator strike": 3,
    "reboot": 4,
    "kubelet restart": 3,
    "plugin crashes": 2,
    "cordon": 3,
    "mig-manager": 2,
    "node vanishes": 2,
    "node joins": 2,
    "gpu lost": 2,
    "xid": 1,
    "jobs": 3,
}
"""What may happen in a story, with how often; in one that evicts also what is in DRAIN_ACTS."""
ACTS: Final = frozenset(USUAL) | frozenset(DRAIN_ACTS)
CALLS: Final = (
    "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceDestroy",
    "nvmlGpuInstanceCreateComputeInstance*",
    "nvmlComputeInstanceDestroy",
)
"""NVML's calls that change something."""


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that happens. at_s: after the first plan. what: of ACTS. dice: seeds what it draws."""

    at_s: float
    what: str
    dice: int


@dataclass(frozen=True, slots=True)
class Tale:
    """A whole story. quiet: nobody interferes, so that it must go exactly as the preview says.

    wish: instances of the first plan's only rule; None: MIG off. spec: more of the plan's spec. absent: nodes that join
    later, if they do. chances: of troubles with the API server, all the time until it is calm. budgets: each with when
    it goes, see `drains.budgets`. lonely: pods of no controller.
    """

    seed: int
    nodes: tuple[NodeSpec, ...]
    wish: tuple[dict[str, Any], ...] | None
    spec: dict[str, Any]
    jobs: tuple[Workload, ...]
    acts: tuple[Act, ...]
    absent: frozenset[str] = frozenset()
    chances: Chances = field(default_factory=lambda: Chances(0.0, 0.0))
    budgets: tuple[tuple[dict[str, Any], float | None], ...] = ()
    lonely: tuple[dict[str, Any], ...] = ()

    @property
    def evicts(self) -> bool:
        """Whether the plan evicts, as it is first."""
        return bool(self.spec["disruption"]["policy"] == "Evict")

    @property
    def quiet(self) -> bool:
        return not self.acts and self.chances == Chances(0.0, 0.0)

    @property
    def steady(self) -> bool:
        """Whether every pod stays until it is evicted, holds one device, and may go."""
        plain = all(job.lasts_s is None and not job.spec and set(job.limits.values()) == {1} for job in self.jobs)
        return self.evicts and plain and not self.lonely

    @property
    def models(self) -> tuple[str, ...]:
        """The models of GPU that there are."""
        return tuple(
            dict.fromkeys(spec.gpus.rpartition("x" if spec.gpus[0].isdigit() else "")[2] for spec in self.nodes)
        )


def tale(seed: int) -> Tale:
    """The story of a seed: most are small, a few are large."""
    dice = random.Random(f"tale {seed}")
    size = dice.random()
    model = dice.choices(list(CUTS), (10, 1, 1, 2))[0]
    nodes, gpus = (
        (1, 1) if size < 0.84 else ((1, 2) if size < 0.9 else ((2, 1) if size < 0.975 else (3, dice.choice((1, 1, 2)))))
    )
    specs = tuple(_node(dice, f"node-{'abc'[n]}", model if dice.random() < 0.8 else "a30", gpus) for n in range(nodes))
    kind = dice.random()
    absent: frozenset[str] = frozenset()
    acts: tuple[Act, ...] = ()
    chances = Chances(0.0, 0.0)
    if kind > 0.15:
        number = dice.choice((1, 1, 1, 1, 1, 2, 2, 3))
        times = sorted(
            round(dice.choice((dice.uniform(0, 40), dice.uniform(0, 40), dice.uniform(0, 70))), 3)
            for _ in range(number)
        )
        acts = tuple(Act(at, _one(dice, USUAL), dice.getrandbits(32)) for at in times)
        if dice.random() < 0.1:
            chances = Chances(0.03, 0.02)
        if nodes > 1 and any(act.what == "node joins" for act in acts):
            absent = frozenset({specs[-1].name})
    wish, spec = _wish(dice, [_model(s) for s in specs]), _spec(dice, specs)
    found = Tale(seed, specs, wish, spec, _jobs(dice, specs), acts, absent, chances)
    evicting = random.Random(f"evictions {seed}")
    return _drained(evicting, found) if evicting.random() < 1 / 3 else found


def _drained(dice: random.Random, story: Tale) -> Tale:
    """The same story, of a plan that evicts: somebody holds what must go, and acts come while he does."""
    acts = tuple(
        replace(act, what=_one(dice, DRAIN_ACTS), at_s=round(dice.uniform(*dice.choice(DRAIN_S)), 3))
        if dice.random() < 0.7
        else act
        for act in story.acts
    )
    jobs = services(dice, story.nodes, story.jobs) if dice.random() < 0.9 else story.jobs
    return replace(
        story,
        spec={**story.spec, "disruption": rules(dice)},
        jobs=jobs,
        acts=tuple(sorted(acts, key=lambda act: act.at_s)),
        budgets=budgets(dice, jobs),
        lonely=unmanaged(dice, story.nodes),
    )


def _one(dice: random.Random, often: Mapping[str, int]) -> str:
    return dice.choices(list(often), list(often.values()))[0]


def _model(spec: NodeSpec) -> str:
    return spec.gpus.partition("x")[2] if spec.gpus[0].isdigit() else spec.gpus


def _node(dice: random.Random, name: str, model: str, gpus: int) -> NodeSpec:
    style = dice.choices(("helm", "operator", "helm-tolerant"), (5, 4, 2))[0]
    layout: dict[int, list[str]] = {}
    for index in range(gpus):
        cut = dice.choice(CUTS[model])
        if dice.random() < 0.65 or style == "helm-tolerant":  # a plugin that is not paused keeps modes as they are
            layout[index] = [profile for profile, number in cut.items() for _ in range(number)]
    labels = {"example.com/rack": "r1"}
    if style == "operator" and dice.random() < 0.3:
        labels["nvidia.com/gpu.deploy.dcgm"] = "false"
    return NodeSpec(name, f"{gpus}x{model}", style, layout=layout, labels=labels)


def _wish(dice: random.Random, models: list[str]) -> tuple[dict[str, Any], ...] | None:
    if len(set(models)) > 1:
        return ({"memoryGB": 5, "count": dice.choice((1, 2, 3))},)
    if dice.random() < 0.07:
        return None
    return instances(dice.choice(CUTS[models[0]]))


def instances(cut: dict[str, int]) -> tuple[dict[str, Any], ...]:
    """A layout as a rule has it."""
    return tuple({"profile": profile, "count": number} for profile, number in cut.items())


def _spec(dice: random.Random, specs: tuple[NodeSpec, ...]) -> dict[str, Any]:
    spec: dict[str, Any] = {"disruption": {"policy": "WaitForIdle", "timeout": dice.choice(("1m", "30m"))}}
    if dice.random() < 0.85:
        spec["foreignInstances"] = "Adopt"
    if len(specs) > 1 and dice.random() < 0.3:
        spec["rollout"] = {"maxUnavailable": dice.choice((2, "50%")), "pauseOnFailure": dice.random() < 0.5}
    if dice.random() < 0.1:
        spec["onFailure"] = "Hold"
    if dice.random() < 0.1:
        spec["drift"] = "Observe"
    return spec


def _jobs(dice: random.Random, specs: tuple[NodeSpec, ...]) -> tuple[Workload, ...]:
    """Who uses GPUs: jobs that come and go, and services that stay until they are stopped."""
    profiles = sorted({p for spec in specs for layout in spec.layout.values() for p in layout})
    if not profiles or dice.random() < 0.5:
        return ()
    found = []
    for number in range(dice.choice((1, 1, 2))):
        profile = dice.choice(profiles)
        lasts = (2.0, dice.choice((10.0, 60.0))) if dice.random() < 0.8 else None
        found.append(
            Workload(
                f"job-{number}",
                {f"nvidia.com/mig-{profile}": 1},
                pods=dice.choice((1, 1, 2, 3)),
                lasts_s=lasts,
                pause_s=dice.choice(((0.1, 1.0), (5.0, 30.0))),
                idle=dice.random() < 0.5,
            )
        )
    return tuple(found)
