"""Who holds what: processes on GPUs and instances, NVML sessions, and what becomes of them as time passes."""

from __future__ import annotations

import os

from migd.sim.errors import SimulationError
from migd.sim.machine import NEVER, Gpu, Machine, Process


def settle(machine: Machine, now_s: float) -> None:
    """Do what was due by now: processes end by themselves, and the driver lets go of what ended ones held."""
    lag = machine.switches.release_lag_s
    upcoming = NEVER
    for key, process in list(machine.processes.items()):
        if process.released_at_s is None and process.ends_at_s is not None and process.ends_at_s <= now_s:
            process.released_at_s = process.ends_at_s + lag
        if process.released_at_s is not None and process.released_at_s <= now_s:
            del machine.processes[key]
            continue
        for at in (process.released_at_s, process.ends_at_s if process.released_at_s is None else None):
            upcoming = upcoming if at is None else min(upcoming, at)
    machine.next_at_s = upcoming


def start(
    machine: Machine,
    gpu: Gpu,
    now_s: float,
    *,
    at: int | None,
    command: str,
    container: str,
    silent: bool,
    ends_after_s: float | None,
) -> int:
    """Start a process on a GPU, or on the instance whose memory slices start `at`; its pid."""
    gi_serial = ci_serial = 0
    if at is not None:
        instance = next((i for i in gpu.instances if i.start == at), None)
        if instance is None:
            raise SimulationError(f"GPU {gpu.index} has no instance at memory slice {at} for {command!r} to run on")
        if not instance.compute and not silent:
            raise SimulationError(f"the instance at memory slice {at} of GPU {gpu.index} has no compute instance")
        gi_serial = instance.serial
        ci_serial = min(instance.compute, key=lambda c: c.ci_id).serial if instance.compute else 0
    elif gpu.mig and not silent:
        raise SimulationError(f"GPU {gpu.index} has MIG on: nothing computes outside its instances; give start=")
    pid = machine.next_pid
    machine.next_pid += 1
    ends = None if ends_after_s is None else now_s + ends_after_s
    machine.processes[str(pid)] = Process(
        pid, gpu.uuid, gi_serial, ci_serial, command, container, silent, ends_at_s=ends
    )
    machine.next_at_s = min(machine.next_at_s, NEVER if ends is None else ends)
    return pid


def end(machine: Machine, pid: int, now_s: float) -> None:
    """End a process now; what it held is let go of after the driver's lag."""
    process = machine.processes.get(str(pid))
    if process is None or process.released_at_s is not None:
        raise SimulationError(f"no simulated process has pid {pid}")
    process.released_at_s = now_s + machine.switches.release_lag_s
    settle(machine, now_s)


def running(machine: Machine, gpu: Gpu) -> list[Process]:
    """The processes on this GPU that have not ended, by pid."""
    return [p for p in machine.processes.values() if p.gpu_uuid == gpu.uuid and p.released_at_s is None]


def on_whole_gpu(machine: Machine, gpu: Gpu) -> list[Process]:
    """Who holds the GPU outside every instance, ended but not yet let go of included."""
    return [p for p in machine.processes.values() if p.gpu_uuid == gpu.uuid and not p.gi_serial]


def holds_ci(machine: Machine, serial: int) -> bool:
    """Whether anybody still holds this compute instance."""
    return any(p.ci_serial == serial for p in machine.processes.values())


def holds_gi(machine: Machine, serial: int) -> bool:
    """Whether anybody still holds this GPU instance."""
    return any(p.gi_serial == serial for p in machine.processes.values())


def started_at(pid: int) -> int | None:
    """The start time of a process of this host in clock ticks, None where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def pid_space() -> int | None:
    """The number of the pid namespace that this process looks at others from; None where there are none.

    Containers that share a machine's file have one each, unless they have the host's. Source: pid_namespaces(7).
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def prune_clients(machine: Machine) -> bool:
    """Drop the sessions of real processes that are gone, as the kernel closes what a dead process had open.

    Whether there were any. A pid of another namespace is somebody else's here: who is in that one drops its sessions.
    """
    real = {key: client for key, client in machine.clients.items() if client.started is not None}
    if not real:
        return False
    space = pid_space()
    gone = [
        key
        for key, client in real.items()
        if client.space == space and client.pid != os.getpid() and started_at(client.pid) != client.started
    ]
    for key in gone:
        del machine.clients[key]
    return bool(gone)
