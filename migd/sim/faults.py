"""Faults: what goes wrong, at which call, before or after its effect. Armed on a machine, counted there."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from functools import cache
from typing import Final

from migd.sim.errors import SimulationError
from migd.sim.machine import ArmedFault

ACTIONS: Final = ("error", "delay", "hang", "skip", "crash", "kill")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that will go wrong.

    call: a glob of pynvml function names, or of names given to SimHost.touch; "reset" is the GPU reset.
    action: "error" raises the NVML error `code` (OSError at a touch point); "delay" takes `delay_s` longer; "hang"
    never returns; "skip" answers success without the effect; "crash" raises SimulatedCrash; "kill" ends this process
    with SIGKILL. gpu: only calls on the GPU with this index; None: any call. when: "before" or "after" the effect.
    nth: fires at the nth matching call from now. times: so often in a row; 0: for ever.
    """

    call: str
    action: str = "error"
    code: int = 999
    gpu: int | None = None
    when: str = "before"
    nth: int = 1
    times: int = 1
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise SimulationError(f"a fault's action is one of {', '.join(ACTIONS)}, not {self.action!r}")
        if self.when not in ("before", "after") or self.nth < 1 or self.times < 0:
            raise SimulationError(f"a fault fires before or after its call, from nth 1 on: {self}")
        if self.action == "skip" and self.when == "after":
            raise SimulationError("a call can be skipped only before its effect")

    def arm(self) -> ArmedFault:
        """The fault as a machine keeps it, with its counters at zero."""
        return ArmedFault(
            self.call, self.action, self.gpu, self.when, self.nth, self.times, self.code, float(self.delay_s)
        )


def due(armed: list[ArmedFault], name: str, gpu: int | None, when: str) -> list[ArmedFault]:
    """The faults that fire at this call; counts it on every fault that it matches."""
    firing = []
    for fault in armed:
        if fault.when != when or (fault.gpu is not None and fault.gpu != gpu) or not matches(fault.call, name):
            continue
        fault.seen += 1
        if fault.seen >= fault.nth and (fault.times == 0 or fault.fired < fault.times):
            fault.fired += 1
            firing.append(fault)
    return firing


@cache
def _pattern(glob: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(glob))


def matches(glob: str, name: str) -> bool:
    """Whether a glob of call names covers this call."""
    return _pattern(glob).match(name) is not None
