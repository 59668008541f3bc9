"""One NVML session: opened at first use, run through a caller with deadlines, and given up when the driver goes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from migd.nvml.callers import Caller
from migd.nvml.calls import Calls, Library, text
from migd.nvml.errors import DriverError, GpuError, HungError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long NVML may take before it counts as hung, in seconds.

    open_s: nvmlInit, which starts every GPU where persistence mode is off. read_s: reading one GPU.
    mutation_s: creating or destroying one instance. mode_s: a mode change, which may reset the GPU.
    """

    open_s: float = 120.0
    read_s: float = 30.0
    mutation_s: float = 60.0
    mode_s: float = 120.0


class Session:
    """Runs functions within one long-lived session of NVML.

    calls: what those functions call NVML with. driver: the driver's version, None while no session is open.
    upset: called when anything remembered may be wrong: at a new session (True), after a hang (False).
    """

    def __init__(self, library: Library, caller: Caller, deadlines: Deadlines, upset: Callable[[bool], None]) -> None:
        self.calls = Calls(library)
        self.deadlines = deadlines
        self.driver: str | None = None
        self._caller = caller
        self._upset = upset

    def run(self, what: str, gpu_uuid: str, deadline_s: float, fn: Callable[[], T]) -> T:
        """What fn returns, within a session; what: the deed in words, for people.

        Raises what fn raises; a DriverError also ends the session, so that the next run opens another. HungError
        when deadline_s seconds have passed, or an earlier function is still hanging.
        """

        def within_session() -> T:
            try:
                return fn()
            except DriverError:
                self._abandon()
                raise

        if self.driver is None:
            self._wait("open an NVML session", "", self.deadlines.open_s, self._open)
        return self._wait(what, gpu_uuid, deadline_s, within_session)

    def close(self) -> None:
        """End the session, if one is open."""
        if self.driver is not None:
            self._wait("end the NVML session", "", self.deadlines.read_s, self._shut)

    def _wait(self, what: str, gpu_uuid: str, deadline_s: float, fn: Callable[[], T]) -> T:
        def named() -> T:
            return fn()

        named.__name__ = what  # what a caller says when it gives up
        try:
            return self._caller.run(named, deadline_s)
        except TimeoutError as error:
            self._upset(False)
            raise HungError(self.calls.in_flight, gpu_uuid, None, f"{error}; {HungError.advice}") from error

    def _open(self) -> None:
        self._upset(True)
        self.calls("nvmlInit", "")
        try:
            self.driver = text(self.calls("nvmlSystemGetDriverVersion", ""))
        except GpuError:
            self._abandon()
            raise

    def _shut(self) -> None:
        with suppress(DriverError):  # the driver went first
            self.calls("nvmlShutdown", "")
        self.driver = None

    def _abandon(self) -> None:
        """Let go of a session that the driver has ended: what it holds open would keep the driver from reloading."""
        self.driver = None
        with suppress(GpuError):  # nothing was left to end
            self.calls("nvmlShutdown", "")
