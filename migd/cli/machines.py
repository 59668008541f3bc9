"""The machine a command works on: this one, or a simulated one. Everything real or fake is chosen here, once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from migd.agent.host import HostBoot, HostClock, NvidiaSmiReset
from migd.agent.locking import exclusive
from migd.agent.processes import ProcProcesses
from migd.agent.running import Machine
from migd.agent.store import FileStore
from migd.cli.exits import CliError, Exit
from migd.nvml.gpus import NvmlGpus

if TYPE_CHECKING:
    from migd.sim.host import SimHost

STATE_DIR: Final = Path("/var/lib/migd")


@dataclass(frozen=True, slots=True)
class Opened:
    """A machine to work on, and where its record and lock lie."""

    machine: Machine
    state_dir: Path

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Hold this machine's lock, as every change needs."""
        with exclusive(self.state_dir):
            yield


@contextmanager
def opened(simulate: str | None, state: Path | None, state_dir: Path | None) -> Iterator[Opened]:
    """The machine that the options name, its NVML session closed at the end. CliError where the options contradict."""
    with ExitStack() as stack:
        if simulate is None and state is None:
            folder = state_dir or STATE_DIR
            gpus = NvmlGpus()
            stack.callback(gpus.close)
            yield Opened(
                Machine(gpus, NvidiaSmiReset(), ProcProcesses(), HostClock(), HostBoot(), FileStore(folder)), folder
            )
            return
        from migd.agent.simulated import simulated  # here, because a real machine needs no simulator

        host = sim_host(simulate, state)
        if state_dir is not None:
            folder = state_dir
        elif state is not None:
            folder = beside(state)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="migd-")))
        machine = simulated(host, FileStore(folder))
        stack.callback(machine.gpus.close)
        yield Opened(machine, folder)


def beside(state: Path) -> Path:
    """The state folder that belongs to a simulated machine's file."""
    real = Path(os.path.realpath(state))  # as the simulator does: one machine has one record, by whatever name
    return real.with_name(real.name + ".d")


def sim_host(
    simulate: str | None, state: Path | None, *, default: str | None = None, clock: str = "virtual"
) -> SimHost:
    """The simulated machine of --simulate and --state; CliError where they contradict or cannot be used.

    default: the machine where neither says which. clock: of one that is in no file.
    """
    from migd.sim.errors import SimulationError  # as above
    from migd.sim.host import SimHost

    if simulate is not None and not simulate.strip():
        raise CliError(Exit.USAGE, "--simulate names no machine: write for example 8xa100-80gb")
    if state is not None and (not state.name or "\0" in str(state)):
        raise CliError(Exit.USAGE, f"--state {str(state)!r} is not a file's name")
    if simulate is None and (state is None or not os.path.exists(state)):
        simulate = default
    try:
        return SimHost.fresh(simulate or "", clock=clock) if state is None else SimHost.open(state, simulate)
    except SimulationError as error:
        raise CliError(Exit.USAGE, str(error)) from error
