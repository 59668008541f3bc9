"""Simulated GPUs that refuse what hardware refuses: the fake NVML, its machine, its faults; clusters of machines."""

from migd.sim.errors import (
    HangError,
    ResetRefusedError,
    SimFileError,
    SimulatedCrash,
    SimulationError,
    SpecError,
    SpecMismatchError,
)
from migd.sim.faults import Fault
from migd.sim.host import SimHost
from migd.sim.spec import parse_spec, write_spec

__all__ = [
    "Fault",
    "HangError",
    "ResetRefusedError",
    "SimFileError",
    "SimHost",
    "SimulatedCrash",
    "SimulationError",
    "SpecError",
    "SpecMismatchError",
    "parse_spec",
    "write_spec",
]
