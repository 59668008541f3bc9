"""What a decision looks at, and the effects it may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from migd.agent.orders import Order
from migd.mig.observed import SeenGpu
from migd.mig.operations import Operation


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a decision looks at. now_s: any clock that only moves forward within one boot."""

    boot_id: str
    now_s: float
    gpus: tuple[SeenGpu, ...]
    order: Order | None = None

    def gpu(self, uuid: str) -> SeenGpu | None:
        """This GPU, or None where NVML does not show it."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for a while, then look again. why: for people; uuid: the GPU it is for."""

    seconds: float
    why: str
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Nothing to do but to save the record and look again."""


Effect = Operation | Pause | LookAgain
