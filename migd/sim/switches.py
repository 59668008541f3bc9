"""Switches: the behaviours of a driver, a board or a host that differ in the field, each off or usual by default."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from typing import Any, Final

from migd.sim.errors import SimulationError

PLACEMENTS: Final = ("least-loss", "first-fit", "highest", "mixed-high", "adversarial")


@dataclass(slots=True)
class Switches:
    """Behaviours of the whole machine.

    vm: a pass-through VM: on Ampere a mode change answers RESET_REQUIRED and is pending until a reboot.
    vm_refuses_reset: and its hypervisor allows no GPU reset: the answer is then NOT_SUPPORTED, pending all the same.
    mode_change_never_takes: accepted, but current stays as it is, also after a reset or reboot.
    disable_with_instances: how MIG off is refused while instances exist: "return" raises IN_USE, "status" returns it.
    busy_resetless_mode: Hopper and later, a busy GPU: "switches" at once (the first instance then fails), or "in-use".
    reset_loses_mode: Hopper and later: a GPU reset switches MIG off.
    profiles_while_off: a newer driver, which lists profiles while MIG is off; False: NOT_SUPPORTED.
    placement_error_code: NVML code for a placement that is not in the profile's list.
    placement: what the driver chooses without a placement: see PLACEMENTS.
    enum_end: the first GPU instance profile value that this driver calls INVALID_ARGUMENT; 10 for old ones.
    uuid_changes_on_recreate, old_uuid_format: of MIG UUIDs.
    a30_wrong_count: an A30 reports a wrong instanceCount. capacity_overstates: RemainingCapacity ignores what is taken.
    names: profile name -> the name this driver shows. memory_variant: 1 or 2 takes another driver's memory figures.
    name_prefix: the profile structure's name starts with "MIG ".
    release_lag_s: what an ended process held stays in use so long.
    minor_renumber_on_mode_change: an activated mode change renumbers minors and retires the GPU's handles.
    stale_old_sessions: sessions older than a change see MIG devices as they were at nvmlInit.
    success_without_effect: a glob of calls that answer success and change nothing; "" for none.
    no_permission: callers are not root: NO_PERMISSION wherever a privilege is needed.
    nvswitch: GPUs of an NVLink group hang on NVSwitches, so that one can be reset alone.
    fabric_manager_down: no GPU of an NVLink group can be reset.
    missing_symbols: C symbols (or pynvml names) that this library lacks: FUNCTION_NOT_FOUND.
    duration_scale: factor on every simulated duration; 0 makes all calls immediate.
    driver_version: what nvmlSystemGetDriverVersion answers.
    """

    vm: bool = False
    vm_refuses_reset: bool = False
    mode_change_never_takes: bool = False
    disable_with_instances: str = "return"
    busy_resetless_mode: str = "switches"
    reset_loses_mode: bool = False
    profiles_while_off: bool = True
    placement_error_code: int = 2
    placement: str = "least-loss"
    enum_end: int = 18
    uuid_changes_on_recreate: bool = False
    old_uuid_format: bool = False
    a30_wrong_count: bool = False
    capacity_overstates: bool = False
    names: dict[str, str] = field(default_factory=dict)
    memory_variant: int = 0
    name_prefix: bool = False
    release_lag_s: float = 0.0
    minor_renumber_on_mode_change: bool = False
    stale_old_sessions: bool = False
    success_without_effect: str = ""
    no_permission: bool = False
    nvswitch: bool = False
    fabric_manager_down: bool = False
    missing_symbols: list[str] = field(default_factory=list)
    duration_scale: float = 1.0
    driver_version: str = "580.95.05"


@dataclass(slots=True)
class GpuSwitches:
    """Behaviours of one GPU.

    swapped_halves: a board whose placement start 0 is the upper physical half, which shows in the GPU instance ids.
    fewer_placements: places this board does not have, as "1g.18gb@6".
    nvlink_group: GPUs with the same non-empty text are joined by NVLink.
    recovery_action: field 230: 0 none, 1 GPU reset, 2 node reboot and so on.
    remap_pending, remap_failure: of row remapping, readable only while there are no instances.
    """

    swapped_halves: bool = False
    fewer_placements: list[str] = field(default_factory=list)
    nvlink_group: str = ""
    recovery_action: int = 0
    remap_pending: bool = False
    remap_failure: bool = False


_CHOICES: Final = {
    "placement": PLACEMENTS,
    "disable_with_instances": ("return", "status"),
    "busy_resetless_mode": ("switches", "in-use"),
}
_MACHINE: Final = {f.name: f.type for f in fields(Switches)}
_GPU: Final = {f.name: f.type for f in fields(GpuSwitches)}


def is_gpu_switch(name: str) -> bool:
    """Whether the switch belongs to one GPU (True) or to the machine (False); SimulationError for neither."""
    if name in _GPU:
        return True
    if name in _MACHINE:
        return False
    near = difflib.get_close_matches(name, [*_MACHINE, *_GPU], 2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join([*_MACHINE, *_GPU])}"
    raise SimulationError(f"no switch is called {name!r}; {hint}")


def set_switch(switches: Switches | GpuSwitches, name: str, value: Any) -> None:
    """Set one switch; SimulationError where the value is not of its kind."""
    present = getattr(switches, name)
    if isinstance(present, list) and isinstance(value, (list, tuple, set, frozenset)):
        value = [str(item) for item in value]
    elif isinstance(present, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif isinstance(present, dict) and isinstance(value, dict):
        value = {str(key): str(item) for key, item in value.items()}
    elif type(value) is not type(present):
        raise SimulationError(f"the switch {name} takes a {type(present).__name__}, not {value!r}")
    choices = _CHOICES.get(name)
    if choices is not None and value not in choices:
        raise SimulationError(f"the switch {name} takes {' or '.join(choices)}, not {value!r}")
    setattr(switches, name, value)
