"""What the driver does and refuses: MIG mode, GPU instances, compute instances. Numbers in brackets are rows of §14.

Every function takes the core, whose machine it changes; refusals are pynvml's own exceptions. Callers are privileged
here: who may call what is the face's business. Source: the decision table in docs/simulator.md.
"""

from __future__ import annotations

import pynvml

from migd.sim import placing, processes
from migd.sim.catalog import ComputeProfile, Place, SimProfile, compute_profiles_by_id, durations
from migd.sim.core import Core
from migd.sim.faults import matches
from migd.sim.machine import ComputeInstance, Event, Gpu, GpuInstance, Machine, derived_uuid

ANY_INSTANCE = 0xFFFFFFFF
GI_COUNT_MAX = 8
EVENTS_KEPT = 64
_GI_SHARE = 0.75  # of the published times, which are for GPU instance and compute instance together
_CREATE_S = {1: 0.16, 2: 0.17, 3: 0.20, 4: 0.21, 7: 0.24}
_DESTROY_S = {1: 0.20, 2: 0.20, 3: 0.21, 4: 0.21, 7: 0.22}
_A30_CREATE_S, _A30_DESTROY_S = {1: 0.16, 2: 0.13, 4: 0.21}, {1: 0.10, 2: 0.11, 4: 0.21}


def refusal(code: int) -> Exception:
    """NVML's exception of this code."""
    error: Exception = pynvml.NVMLError(code)
    return error


def idle_success(machine: Machine, name: str) -> bool:
    """Whether this call is to answer success without doing anything."""
    glob = machine.switches.success_without_effect
    return bool(glob) and matches(glob, name)


# ---- mode


def set_mode(core: Core, gpu: Gpu, enable: bool, pid: int) -> int:
    """Ask for MIG mode on or off; the activation status. pid: the caller's, whose own session is not in the way."""
    machine, model = core.machine, core.offer(gpu)
    switches = machine.switches
    if not model.mig:
        raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
    if gpu.mig == enable == gpu.pending:  # [7]
        return int(pynvml.NVML_SUCCESS)
    if not enable and gpu.mig and gpu.instances:  # [8]
        if switches.disable_with_instances == "return":
            raise refusal(pynvml.NVML_ERROR_IN_USE)
        return int(pynvml.NVML_ERROR_IN_USE)
    gpu.pending = enable
    if gpu.mig == enable:  # takes a pending change back
        return int(pynvml.NVML_SUCCESS)
    if switches.vm and not model.resetless:  # [4]
        stuck = switches.vm_refuses_reset
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED if stuck else pynvml.NVML_ERROR_RESET_REQUIRED)
    core.spend(durations()["mode_resetless" if model.resetless else "mode_with_reset"])
    if switches.mode_change_never_takes:
        return int(pynvml.NVML_SUCCESS)
    if _busy_for_mode(machine, gpu, model.resetless, pid):  # [3]
        if model.resetless:
            gpu.pending = gpu.mig
        return int(pynvml.NVML_ERROR_IN_USE)
    activate(machine, gpu)
    return int(pynvml.NVML_SUCCESS)


def activate(machine: Machine, gpu: Gpu) -> None:
    """Make the pending mode current; what else that does to the GPU and to old handles of it [9]."""
    gpu.instances.clear()
    gpu.mig = gpu.pending
    if machine.switches.minor_renumber_on_mode_change:
        gpu.generation += 1
        gpu.minor = max(g.minor for g in machine.gpus) + 1


def _busy_for_mode(machine: Machine, gpu: Gpu, resetless: bool, pid: int) -> bool:
    if resetless:
        return machine.switches.busy_resetless_mode == "in-use" and bool(processes.on_whole_gpu(machine, gpu))
    if _linked(machine, gpu):  # the reset inside the call would be refused
        return True
    others = any(client.pid != pid for client in machine.clients.values())
    return others or any(p.gpu_uuid == gpu.uuid for p in machine.processes.values())


def reset_hinders(machine: Machine, gpu: Gpu) -> str:
    """Why this GPU cannot be reset now; "" where it can [47]."""
    if gpu.lost:
        return f"GPU {gpu.bus_id}: GPU is lost"
    if machine.switches.vm and machine.switches.vm_refuses_reset:
        return f"Resetting GPU {gpu.bus_id} is not supported."
    linked = _linked(machine, gpu)
    if linked:
        return linked
    pids = {p.pid for p in machine.processes.values() if p.gpu_uuid == gpu.uuid}
    pids |= {client.pid for client in machine.clients.values()}
    if pids:
        return f"GPU {gpu.bus_id} is in use by one or more clients: pid {', '.join(map(str, sorted(pids)))}"
    return ""


def _linked(machine: Machine, gpu: Gpu) -> str:
    group = gpu.switches.nvlink_group
    peers = [g.index for g in machine.gpus if group and g.switches.nvlink_group == group and g is not gpu]
    if peers and not machine.switches.nvswitch:
        joined = ", ".join(map(str, peers))
        return f"GPU {gpu.bus_id} is joined by NVLink to GPU {joined}; they can only be reset together"
    if group and machine.switches.fabric_manager_down:
        return f"GPU {gpu.bus_id}: Fabric Manager is not running"
    return ""


def reset(core: Core, gpu: Gpu) -> None:
    """Reset a GPU that nobody holds: pending becomes current, instances are gone."""
    machine, model = core.machine, core.offer(gpu)
    core.spend(durations()["reset"])
    if machine.switches.vm:
        return
    gpu.instances.clear()
    gpu.generation += 1
    if model.resetless and machine.switches.reset_loses_mode:
        gpu.mig = gpu.pending = False
    elif not machine.switches.mode_change_never_takes:
        activate(machine, gpu)


# ---- GPU instances


def require_mig(core: Core, gpu: Gpu) -> None:
    """NOT_SUPPORTED where MIG is off or impossible [10]."""
    if not gpu.mig:
        raise refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)


def gpu_profile(core: Core, gpu: Gpu, profile_id: int) -> SimProfile:
    """The profile with this numeric id; INVALID_ARGUMENT where this GPU has none such [12]."""
    profile = core.profile(gpu, profile_id)
    if profile is None:
        raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return profile


def create_gi(core: Core, gpu: Gpu, profile_id: int, where: tuple[int, int] | None, name: str) -> GpuInstance:
    """Create a GPU instance, at this (start, size) or where the driver likes."""
    machine, model = core.machine, core.offer(gpu)
    require_mig(core, gpu)
    profile = gpu_profile(core, gpu, profile_id)
    if where is not None and where not in {(p.start, p.size) for p in profile.places}:  # [17]
        raise refusal(machine.switches.placement_error_code)
    if not gpu.instances and any(not p.silent for p in processes.on_whole_gpu(machine, gpu)):  # [29]
        raise refusal(pynvml.NVML_ERROR_IN_USE)
    swapped = gpu.switches.swapped_halves
    spot: Place | None
    if where is None:
        spot = placing.choose(machine.switches.placement, model, gpu.instances, profile, swapped)
    else:
        spot = next((p for p in placing.free_places(model, gpu.instances, profile) if p.start == where[0]), None)
    if spot is None or len(gpu.instances) >= GI_COUNT_MAX:  # [16, 22]
        raise refusal(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    busy = {engine for i in gpu.instances for engine in i.engines}
    engines = [e for e in range(2 * GI_COUNT_MAX) if e not in busy][: profile.slices]
    instance = GpuInstance(
        machine.take_serial(),
        placing.gi_id(model, spot, swapped),
        profile_id,
        spot.start,
        spot.size,
        engines,
    )
    core.spend(_seconds(gpu, profile.slices, create=True) * _GI_SHARE)
    if not idle_success(machine, name):
        gpu.instances.append(instance)
        _config_changed(machine, gpu)
    return instance


def destroy_gi(core: Core, gpu: Gpu, instance: GpuInstance) -> None:
    """Destroy a GPU instance without compute instances that nobody holds [26]."""
    if instance.compute or processes.holds_gi(core.machine, instance.serial):
        raise refusal(pynvml.NVML_ERROR_IN_USE)
    core.spend(_seconds(gpu, gpu_profile(core, gpu, instance.profile_id).slices, create=False) * _GI_SHARE)
    if not idle_success(core.machine, "nvmlGpuInstanceDestroy"):
        gpu.instances.remove(instance)
        _config_changed(core.machine, gpu)


# ---- compute instances


def ci_profile(core: Core, gpu: Gpu, instance: GpuInstance, profile_id: int) -> ComputeProfile:
    """The compute profile of this id; NOT_SUPPORTED where it is not offered, INVALID_ARGUMENT past the end."""
    found = compute_profiles_by_id(gpu_profile(core, gpu, instance.profile_id).slices).get(profile_id)
    if found is not None:
        return found
    past = not 0 <= profile_id < pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT
    raise refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT if past else pynvml.NVML_ERROR_NOT_SUPPORTED)


def free_ci_places(instance: GpuInstance, profile: ComputeProfile) -> tuple[Place, ...]:
    """Where one more compute instance of this profile fits in the GPU instance now."""
    taken = 0
    for other in instance.compute:
        taken |= ((1 << other.size) - 1) << other.start
    return tuple(p for p in profile.places if not p.mask & taken)


def create_ci(
    core: Core, gpu: Gpu, instance: GpuInstance, profile_id: int, where: tuple[int, int] | None, name: str
) -> ComputeInstance:
    """Create a compute instance, and with it a MIG device [25]."""
    machine = core.machine
    profile = ci_profile(core, gpu, instance, profile_id)
    if where is not None and where not in {(p.start, p.size) for p in profile.places}:
        raise refusal(machine.switches.placement_error_code)
    free = free_ci_places(instance, profile)
    spot = next((p for p in free if where is None or p.start == where[0]), None)
    if spot is None:
        raise refusal(pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)
    taken = {c.ci_id for c in instance.compute}
    ci_id = next(n for n in range(GI_COUNT_MAX) if n not in taken)  # [24]
    serial = machine.take_serial()
    made = ComputeInstance(
        serial, ci_id, profile_id, spot.start, spot.size, _mig_uuid(machine, gpu, instance, ci_id, spot, serial)
    )
    core.spend(_seconds(gpu, profile.slices, create=True) * (1 - _GI_SHARE))
    if not idle_success(machine, name):
        instance.compute.append(made)
    return made


def destroy_ci(core: Core, gpu: Gpu, instance: GpuInstance, compute: ComputeInstance) -> None:
    """Destroy a compute instance that nobody holds [27]."""
    if processes.holds_ci(core.machine, compute.serial):
        raise refusal(pynvml.NVML_ERROR_IN_USE)
    core.spend(_seconds(gpu, compute.size, create=False) * (1 - _GI_SHARE))
    if not idle_success(core.machine, "nvmlComputeInstanceDestroy"):
        instance.compute.remove(compute)


def mig_devices(gpu: Gpu) -> list[tuple[GpuInstance, ComputeInstance]]:
    """The MIG devices of a GPU in the order of their indices: by GPU instance id, then compute instance id [32]."""
    return [
        (instance, compute)
        for instance in sorted(gpu.instances, key=lambda i: i.gi_id)
        for compute in sorted(instance.compute, key=lambda c: c.ci_id)
    ]


def post(
    machine: Machine, gpu: Gpu, kind: int, data: int, gi_id: int = ANY_INSTANCE, ci_id: int = ANY_INSTANCE
) -> None:
    """Tell the listeners of this GPU something."""
    machine.events.append(Event(machine.next_event, gpu.uuid, kind, data, gi_id, ci_id))
    machine.next_event += 1
    del machine.events[:-EVENTS_KEPT]


def _config_changed(machine: Machine, gpu: Gpu) -> None:
    post(machine, gpu, pynvml.nvmlEventMigConfigChange, 0)  # [43]


def _mig_uuid(machine: Machine, gpu: Gpu, instance: GpuInstance, ci_id: int, spot: Place, serial: int) -> str:
    if machine.switches.old_uuid_format:
        return f"MIG-{gpu.uuid}/{instance.gi_id}/{ci_id}"
    parts: tuple[object, ...] = (gpu.uuid, instance.gi_id, instance.engines[spot.start])  # [33]
    if machine.switches.uuid_changes_on_recreate:
        parts += (serial,)
    return "MIG-" + derived_uuid("mig", *parts)


def _seconds(gpu: Gpu, slices: int, *, create: bool) -> float:
    if gpu.key == "a30":
        return (_A30_CREATE_S if create else _A30_DESTROY_S)[slices]
    return (_CREATE_S if create else _DESTROY_S)[slices]
