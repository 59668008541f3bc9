"""An order: what is to be made of which GPUs of this machine, and how gently."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from migd.mig.geometry import EMPTY, Geometry, Layout
from migd.mig.observed import SeenGpu
from migd.plans.plan import Rule
from migd.plans.preview import GpuPreview, plan_gpu, plan_layout
from migd.plans.wishes import resolve

Goal = Rule | Layout
"""A rule of a plan, or an exact layout to return to."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be made of this machine's GPUs.

    id: of its content, so that the same plan given again is known again. goals: by GPU UUID.
    foreign: what to do with instances that are not in this machine's record. on_failure: go back, or stay.
    wait_until_s: on the clock of `Seen.now_s`; how long instances in use are waited for; None: not at all.
    """

    id: str
    goals: Mapping[str, Goal]
    foreign: Literal["Refuse", "Adopt"] = "Refuse"
    on_failure: Literal["Rollback", "Hold"] = "Rollback"
    wait_until_s: float | None = None

    def plan(self, gpu: SeenGpu, owned: Geometry, freed: Geometry = EMPTY) -> GpuPreview:
        """What this order would do to one GPU as it is now. freed: instances in use that are to be free by then."""
        goal = self.goals[gpu.uuid]
        if isinstance(goal, Layout):
            return plan_layout(gpu, goal, owned, self.foreign)
        return plan_gpu(gpu, resolve(goal, gpu), owned, self.foreign, freed)

    def plans(self, gpus: Iterable[SeenGpu], owned: Mapping[str, Geometry]) -> dict[str, GpuPreview]:
        """What this order would do to each of its GPUs that is there, by index."""
        return {
            gpu.uuid: self.plan(gpu, owned.get(gpu.uuid, EMPTY))
            for gpu in sorted(gpus, key=lambda gpu: gpu.index)
            if gpu.uuid in self.goals
        }


def order_id(text: str) -> str:
    """The id of an order from the text of what it asks for; equal texts give equal ids."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
