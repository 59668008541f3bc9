"""What the simulator raises besides NVML's own errors: mistakes in its use, refused resets, and simulated deaths."""

from __future__ import annotations


class SimulationError(Exception):
    """The simulator was asked for something that no machine does, or was given something it cannot use."""


class SpecError(SimulationError, ValueError):
    """A machine's specification cannot be read, or names a GPU that cannot be simulated."""


class SpecMismatchError(SimulationError):
    """The file holds another machine than the specification asks for."""


class SimFileError(SimulationError):
    """The file is not a simulated machine, or cannot be read or written. It is never overwritten."""


class ResetRefusedError(SimulationError):
    """The GPU reset was refused; reason says who or what is in the way, as nvidia-smi would."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class HangError(SimulationError):
    """A simulated call hung and nobody set a deadline: in virtual time that would be for ever."""


class SimulatedCrash(BaseException):
    """The program dies here, as far as the test is concerned: memory is lost, the machine and its files stay."""
