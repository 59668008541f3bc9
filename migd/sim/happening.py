"""What happens to a machine as a whole: it reboots, its driver is loaded anew, a board is swapped or reports an Xid."""

from __future__ import annotations

from typing import Final

from migd.sim import driver
from migd.sim.core import Core
from migd.sim.machine import Gpu, Machine, new_gpu
from migd.sim.spec import Kind, parse_spec

_XID_CRITICAL: Final = 0x8


def reboot(core: Core, machine: Machine) -> None:
    """Power off and on: lost GPUs are back, and a mode that a reset was to change is changed."""
    machine.boot += 1
    _restart_driver(core, machine)
    for gpu in machine.gpus:
        gpu.lost = False
        if not core.offer(gpu).resetless and not machine.switches.mode_change_never_takes:
            gpu.mig = gpu.pending


def reload_driver(core: Core, machine: Machine, seconds: float) -> None:
    """Unload and load the kernel module, which takes so long."""
    _restart_driver(core, machine)
    machine.driver_back_at_s = core.now_s() + seconds


def _restart_driver(core: Core, machine: Machine) -> None:
    machine.session += 1
    machine.clients.clear()
    machine.events.clear()
    machine.processes.clear()
    for gpu in machine.gpus:
        gpu.instances.clear()
        gpu.generation += 1
        if core.offer(gpu).resetless:
            gpu.mig = gpu.pending = False


def swap_board(machine: Machine, old: Gpu, spec: str | None) -> str:
    """Another board in this one's slot, of the same model or as spec says; its UUID."""
    kind = Kind(old.key, old.name) if spec is None else parse_spec(spec)[0]
    fresh = new_gpu(kind, old.index, machine.seed, board=machine.take_serial())
    fresh.minor, fresh.bus_id = old.minor, old.bus_id
    machine.gpus[machine.gpus.index(old)] = fresh
    for key in [k for k, p in machine.processes.items() if p.gpu_uuid == old.uuid]:
        del machine.processes[key]
    return fresh.uuid


def raise_xid(machine: Machine, gpu: Gpu, xid: int, start: int | None) -> None:
    """An Xid of the GPU; start: memory slice of the instance that it belongs to, None where that is not known."""
    if start is None:
        driver.post(machine, gpu, _XID_CRITICAL, xid)
        return
    instance = next(i for i in gpu.instances if i.start == start)
    driver.post(machine, gpu, _XID_CRITICAL, xid, instance.gi_id, instance.compute[0].ci_id)
