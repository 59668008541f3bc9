"""Stories in which a plan evicts: who holds its GPUs, what protects them, and who interferes with the drain."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

from migd.sim.nodes.documents import pod_document
from migd.sim.nodes.world import NodeSpec, Workload

KEPT: Final = {"example.com/keep": "yes"}
"""Labels of pods that some plans protect."""
DRAIN_ACTS: Final[dict[str, int]] = {
    "budget comes": 3,
    "budget goes": 3,
    "evictions throttled": 2,
    "pod deleted": 3,
    "pod replaced": 3,
    "disruption": 4,
    "retry": 3,
    "pause": 3,
    "edit": 3,
    "agent strike": 4,
    "operator strike": 4,
    "operator kill": 2,
    "agent crash": 2,
}
"""What may happen in the middle of a drain, with how often."""
DRAIN_S: Final = ((0, 8), (0, 8), (3, 60))
"""When: evictions are called for some three seconds after the plan, and drains in vain last a minute or more."""
ENDLESS_S: Final = 7200
"""A pod that takes so long to end never does, in a story."""
_EMPTY_DIR: Final = {"volumes": [{"name": "scratch", "emptyDir": {}}]}
_EVERYTHING: Final = {"tolerations": [{"operator": "Exists"}]}


def rules(dice: random.Random) -> dict[str, Any]:
    """A plan's `disruption` that evicts."""
    found: dict[str, Any] = {"policy": "Evict", "timeout": dice.choice(("1m", "1m", "5m"))}
    if dice.random() < 0.4:
        found["protect"] = {"matchLabels": KEPT}
    allow = [one for one in ("EmptyDir", "Unmanaged") if dice.random() < 0.4]
    if allow:
        found["allow"] = allow
    if dice.random() < 0.2:
        found["maxEvictions"] = dice.choice((0, 1, 1, 2, 3))
    if dice.random() < 0.3:
        found["gracePeriodSeconds"] = dice.choice((1, 5, 40))
    return found


def services(dice: random.Random, specs: Sequence[NodeSpec], jobs: Sequence[Workload]) -> tuple[Workload, ...]:
    """Pods that stay until they are evicted, beside some of the jobs."""
    found = [job for job in jobs if dice.random() < 0.5]
    plain = dice.random() < 0.4
    for number in range(dice.choice((1, 1, 2, 3))):
        odd: dict[str, Any] = {} if plain else _odd(dice)
        found.append(
            Workload(
                f"service-{number}",
                {_resource(dice, specs): 1 if plain else dice.choice((1, 1, 1, 2))},
                pods=dice.choice((1, 1, 2, 3)),
                labels=KEPT if not plain and dice.random() < 0.15 else {},
                idle=dice.random() < 0.5,
                **odd,
            )
        )
    return tuple(found)


def _odd(dice: random.Random) -> dict[str, Any]:
    """What makes a service hard to evict."""
    kind = dice.random()
    if kind < 0.12:
        return {"stops_in_s": ENDLESS_S, "spec": {"terminationGracePeriodSeconds": ENDLESS_S}}
    if kind < 0.24:
        return {"stops_in_s": dice.choice((10.0, 50.0)), "spec": {"terminationGracePeriodSeconds": 90}}
    if kind < 0.34:
        return {"spec": _EMPTY_DIR}
    if kind < 0.44:
        return {"spec": _EVERYTHING}
    return {}


def unmanaged(dice: random.Random, specs: Sequence[NodeSpec]) -> tuple[dict[str, Any], ...]:
    """Pods that nobody would make again."""
    if dice.random() < 0.8:
        return ()
    spec = _EMPTY_DIR if dice.random() < 0.3 else {}
    return (pod_document("lonely", {_resource(dice, specs): 1}, **spec),)


def _resource(dice: random.Random, specs: Sequence[NodeSpec]) -> str:
    """What a node has: an instance of its layout, or a GPU as a whole where it has none."""
    spec = dice.choice(specs)
    profiles = sorted({profile for layout in spec.layout.values() for profile in layout})
    return f"nvidia.com/mig-{dice.choice(profiles)}" if profiles else "nvidia.com/gpu"


def budgets(dice: random.Random, jobs: Sequence[Workload]) -> tuple[tuple[dict[str, Any], float | None], ...]:
    """PodDisruptionBudgets, each with when it goes, in seconds after the plan; None: it stays."""
    found: list[tuple[dict[str, Any], float | None]] = []
    if dice.random() < 0.5:
        return ()
    for job in jobs:
        kind = dice.random()
        leaves_s = round(dice.uniform(5, 90), 3) if dice.random() < 0.6 else None
        if kind < 0.3:
            found.append((budget(job.name, job.name, "allows"), None))
        elif kind < 0.6:
            found.append((budget(job.name, job.name, "blocks"), leaves_s))
        elif kind < 0.7:
            found.append((budget(job.name, job.name, "allows"), None))
            found.append((budget(f"{job.name}-too", job.name, "allows"), leaves_s))
    return tuple(found)


def budget(name: str, app: str, kind: str) -> dict[str, Any]:
    """A PodDisruptionBudget on one workload. kind: `allows` lets one go at a time or all, `blocks` nobody."""
    limit = {"minAvailable": 0} if kind == "allows" else {"minAvailable": "100%"}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"selector": {"matchLabels": {"app": app}}, **limit},
    }
