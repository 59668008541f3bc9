"""Real programs that hold an instance, as an open device file of it does: for as long as their connection lasts."""

from __future__ import annotations

from typing import Final

from migd.sim import driver
from migd.sim.cface.peers import Peer
from migd.sim.errors import SimulationError
from migd.sim.machine import Machine, Process

_PREFIX: Final = "held:"
"""Of their keys among a machine's processes; what `SimHost.start_process` starts has its pid as key."""


def hold(machine: Machine, uuid: str, peer: Peer, number: int, silent: bool) -> str:
    """Let a program hold the MIG device of this UUID, or the whole GPU; the key to release it with.

    SimulationError where there is none such, or nothing can hold it. silent: not in NVML's process list.
    """
    key = f"{_PREFIX}{number}"
    for gpu in machine.gpus:
        if gpu.uuid == uuid:
            if gpu.mig and not silent:
                raise SimulationError(f"{uuid} has MIG on: hold one of its MIG devices")
            machine.processes[key] = Process(peer.pid, uuid, 0, 0, peer.command, peer.container, silent)
            return key
        for instance, compute in driver.mig_devices(gpu):
            if compute.uuid == uuid:
                machine.processes[key] = Process(
                    peer.pid, gpu.uuid, instance.serial, compute.serial, peer.command, peer.container, silent
                )
                return key
    raise SimulationError(f"there is no GPU or MIG device {uuid} here")


def release(machine: Machine, key: str, now_s: float) -> None:
    """It is let go of, as when a process ends."""
    process = machine.processes.get(key)
    if process is not None and process.released_at_s is None:
        process.released_at_s = now_s + machine.switches.release_lag_s
        machine.next_at_s = min(machine.next_at_s, process.released_at_s)


def drop_holds(machine: Machine) -> None:
    """The server that had them is gone, and with it their connections."""
    for key in [key for key in machine.processes if key.startswith(_PREFIX)]:
        del machine.processes[key]
