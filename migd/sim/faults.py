"""Faults: what goes wrong, at which call, before or after its effect. Armed on a machine, counted there."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import pynvml

from migd.sim.errors import SimulationError
from migd.sim.machine import ArmedFault

POINTS: Final = ("reset", "record.save", "devices.refresh", "signal.hang_up")
"""Where migd's own commands and agent pass a fault point that is not NVML's: see SimHost.touch."""
ACTIONS: Final = ("error", "delay", "hang", "skip", "crash", "kill")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that will go wrong.

    call: a glob of pynvml function names, or of names given to SimHost.touch; "reset" is the GPU reset.
    action: "error" raises the NVML error `code` (OSError at a touch point); "delay" takes `delay_s` longer, in which
    others act: one before the effect may then find another machine; "hang" never returns; "skip" answers success
    without the effect; "crash" raises SimulatedCrash; "kill" ends this process with SIGKILL. gpu: only calls on the
    GPU with this index; None: any call. when: "before" or "after" the effect.
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
        _check_call(self.call)
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


@lru_cache(maxsize=256)
def _check_call(glob: str) -> None:
    """A fault at a call that NVML does not have would never fire, and what it was to try would seem to go well."""
    if glob.startswith("nvml") and not fnmatch.filter(_CALLS, glob):
        raise SimulationError(f"NVML has no call {glob}{_near(glob, _CALLS)}")


def check_point(glob: str) -> None:
    """Raises SimulationError where no call and no point of migd's own matches: beside tests nobody passes others."""
    known = [*_CALLS, *POINTS]
    if not fnmatch.filter(known, glob):
        raise SimulationError(f"nothing is called {glob!r}{_near(glob, known)}")


def _near(glob: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(glob, known, 3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


_CALLS: Final = sorted(name for name, found in vars(pynvml).items() if name.startswith("nvml") and callable(found))


def due(armed: Sequence[ArmedFault], when: str) -> list[ArmedFault]:
    """Of the faults that concern a call those that fire at this point of it; counts it on every fault of this point."""
    firing = []
    for fault in armed:
        if fault.when != when:
            continue
        fault.seen += 1
        if fault.seen >= fault.nth and (fault.times == 0 or fault.fired < fault.times):
            fault.fired += 1
            firing.append(fault)
    return firing


def code_named(name: str) -> int:
    """The NVML code of a name such as IN_USE, or of a number; SimulationError with names that are near."""
    if name.isdigit():
        return int(name)
    codes = {
        key.removeprefix("NVML_ERROR_"): value
        for key, value in vars(pynvml).items()
        if key.startswith("NVML_ERROR_") and isinstance(value, int)
    }
    plain = name.upper().removeprefix("NVML_ERROR_")
    if plain not in codes:
        near = difflib.get_close_matches(plain, codes, 3) or sorted(codes)[:3]
        raise SimulationError(f"no NVML error is called {name!r}; did you mean {' or '.join(near)}?")
    return int(codes[plain])


@lru_cache(maxsize=4096)
def matches(glob: str, name: str) -> bool:
    """Whether a glob of call names covers this call."""
    return fnmatch.fnmatchcase(name, glob)
