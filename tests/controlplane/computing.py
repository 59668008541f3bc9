"""`python -m controlplane.computing`: what a pod does on the GPUs that it got: it computes there until it is ended.

Where there is a driver (MIGD_DRIVER_ROOT), it finds them by the device nodes that it has, and holds them by a message
to the driver's server, which lets go when the connection ends. Where the GPUs are a file, it shows in NVML as a process
of its container on each device that NVIDIA_VISIBLE_DEVICES names. Each of them has a file beside the simulated
machine's, which this process has locked: the kernel lets go of the lock however it ends, and the node then lets go of
the device; see `let_go`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import IO, Any, Final

from controlplane.container_devices import devices_of
from migd.agent.processes import ProcProcesses
from migd.nvml.roots import ROOT, this_library
from migd.sim import SimHost
from migd.sim.errors import SimulationError

FOLDER: Final = "held"
_COMMAND: Final = "python train.py"


def hold(state: Path, devices: list[str], container: str) -> list[IO[bytes]]:
    """Compute on these devices of a simulated machine for as long as the files are open. container: its id."""
    host = SimHost.open(state)
    folder = state.parent / FOLDER
    folder.mkdir(exist_ok=True)
    return [_held(host, folder, device, container) for device in devices]


def _held(host: SimHost, folder: Path, device: str, container: str) -> IO[bytes]:
    at = place_of(host, device)
    if at is None:
        sys.exit(f"there is no {device}")
    new = folder / f".{device}.new"
    file = new.open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)  # before it has its name: who finds it unlocked takes us for dead
    pid = host.start_process(at[0], at[1], command=_COMMAND, container=container)
    new.replace(folder / str(pid))
    return file


def let_go(state: Path) -> int:
    """End what processes computed that are no more, as a driver does; how many there were."""
    folder, ended = state.parent / FOLDER, 0
    if not folder.exists():
        return 0
    for name in sorted(entry.name for entry in os.scandir(folder) if entry.name.isdigit()):
        with (folder / name).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
        (folder / name).unlink()
        with contextlib.suppress(SimulationError):  # a reboot ended it
            SimHost.open(state).end_process(int(name))
        ended += 1
    return ended


def place_of(host: SimHost, device: str) -> tuple[int, int | None] | None:
    """Index of the GPU and first memory slice of the instance, None for a whole GPU; None where it is not there."""
    for gpu in host.snapshot().gpus:
        if gpu.uuid == device:
            return gpu.index, None
        for instance in gpu.instances:
            if any(compute.uuid == device for compute in instance.compute):
                return gpu.index, instance.start
    return None


def driven(root: Path, ends: set[signal.Signals]) -> int:
    """Compute, until one of these signals, on what has a driver. root: the driver's."""
    from migd.sim.cface.client import ControlClient  # what has no driver needs none of this

    nvml: Any = this_library()
    nvml.nvmlInit()
    devices = devices_of(nvml, root)
    nvml.nvmlShutdown()
    with ControlClient(root) as client:
        for device in devices:
            client.hold(device)
        sys.stdout.write(f"computing on {' '.join(devices) or 'nothing'}\n")
        sys.stdout.flush()
        signal.sigwait(ends)
    return 0


def main() -> int:
    """Compute until SIGTERM; the exit status."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    if ROOT in os.environ:
        return driven(Path(os.environ[ROOT]), ends)
    given = os.environ.get("NVIDIA_VISIBLE_DEVICES", "")
    devices = [device.partition("::")[0] for device in given.split(",") if device and device != "void"]
    described = ProcProcesses().describe(os.getpid())
    files = hold(Path(os.environ["SIMULATED_STATE"]), devices, described[1] if described else "") if devices else []
    sys.stdout.write(f"computing on {' '.join(devices) or 'nothing'}\n")
    sys.stdout.flush()
    signal.sigwait(ends)
    for file in files:
        file.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
