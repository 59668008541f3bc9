"""What runs in a simulated node's containers: what computes, the device plugin, monitors, feature discovery.

A program begins when its container does. It is told of SIGHUP, of SIGTERM (stop) and of the kubelet's restart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pynvml

from migd.sim.errors import HangError, SimulationError
from migd.sim.host import SimHost
from migd.sim.machine import Gpu
from migd.sim.nodes.acting import Actor
from migd.sim.nodes.devices import DeviceManager
from migd.sim.nodes.plugin import RETRY_S, DevicePlugin, PluginConfig, PluginError, device_of, preferred

FEATURES_S: Final = 60.0
_MONITOR: Final = "nv-hostengine"


class ProgramError(Exception):
    """A container cannot start: what its runtime says."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What a program finds around it.

    node: the name. me: its dice and its time. pid: of its process. container: the id. devices: what its pod holds.
    config: how the plugins of this node are set up. reregisters: a plugin minds a kubelet that starts anew.
    """

    node: str
    me: Actor
    host: SimHost
    manager: DeviceManager
    features: Actor
    pid: int
    container: str
    devices: tuple[str, ...]
    config: PluginConfig
    reregisters: Callable[[], bool]


class Program(Protocol):
    """One container's process."""

    def start(self) -> None:
        """Begin; ProgramError where it cannot."""
        ...

    def stop(self) -> None:
        """End, by a signal or because the machine lost its power; what it held is let go of."""
        ...

    def hang_up(self) -> None:
        """SIGHUP."""
        ...

    def kubelet_restarted(self) -> None:
        """The kubelet's socket was made anew."""
        ...

    def look(self) -> None:
        """The GPUs have something to tell."""
        ...


class Idle:
    """Sleeps, whatever it holds; most programs are like this in most respects."""

    def __init__(self, box: Sandbox) -> None:
        self.box = box
        self.alive = False

    def start(self) -> None:
        """Begin."""
        self.alive = True

    def stop(self) -> None:
        """End."""
        self.alive = False

    def hang_up(self) -> None:
        """Ignored."""

    def kubelet_restarted(self) -> None:
        """Ignored."""

    def look(self) -> None:
        """Ignored."""

    def later(self, least_s: float, most_s: float, act: Callable[[], None]) -> None:
        """Do something later, if it still runs then."""
        self.box.me.later(least_s, most_s, lambda: act() if self.alive else None)


class Compute(Idle):
    """Computes on every device that its pod holds."""

    def __init__(self, box: Sandbox) -> None:
        super().__init__(box)
        self._pids: list[int] = []

    def start(self) -> None:
        """Begin on each device; ProgramError where one of them is not there."""
        super().start()
        for uuid in sorted({device_of(one) for one in self.box.devices}):
            try:
                index, start = place_of(self.box.host, uuid)
                pid = self.box.host.start_process(index, start, "python train.py", self.box.container)
            except SimulationError as error:
                self.stop()
                raise ProgramError(f"failed to inject device {uuid}: {error}") from error
            self._pids.append(pid)

    def stop(self) -> None:
        """End on all of them."""
        super().stop()
        self._pids = _ended(self.box.host, self._pids)


class Monitor(Idle):
    """Watches GPUs: an NVML session, and a hold on each MIG device it saw at its start, unseen in process lists."""

    holds = True

    def __init__(self, box: Sandbox) -> None:
        super().__init__(box)
        self._nvml: Any = None
        self._pids: list[int] = []

    def start(self) -> None:
        """Begin, with what there is now."""
        super().start()
        self._nvml = self.box.host.nvml(pid=self.box.pid, command=_MONITOR, container=self.box.container)
        try:
            self._nvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise ProgramError(f"NVML: {error}") from error
        for gpu in self.box.host.snapshot().gpus if self.holds else ():
            self._pids += [
                self.box.host.start_process(gpu.index, instance.start, _MONITOR, self.box.container, silent=True)
                for instance in gpu.instances
                if instance.compute and not gpu.lost
            ]

    def stop(self) -> None:
        """Let go of all."""
        super().stop()
        self._pids = _ended(self.box.host, self._pids)
        self.box.host.close_sessions(self.box.pid)


class Exporter(Monitor):
    """Reads what a monitor knows: a session, and no hold on MIG devices."""

    holds = False


class Plugin(Idle):
    """NVIDIA's device plugin with its sockets: registers each resource, and all of them anew after a SIGHUP."""

    def __init__(self, box: Sandbox) -> None:
        super().__init__(box)
        nvml = box.host.nvml(pid=box.pid, command="nvidia-device-plugin", container=box.container)
        self._plugin = DevicePlugin(nvml, box.config)
        self._numbers: dict[str, int] = {}

    def start(self) -> None:
        """Begin; devices are looked for a moment later."""
        super().start()
        self.later(0.2, 1.0, self._begin)

    def stop(self) -> None:
        """End; the sockets close."""
        super().stop()
        self._withdraw()
        self._plugin.stop()

    def hang_up(self) -> None:
        """Withdraw everything, and look again."""
        self.box.me.say(f"device plugin on {self.box.node}: SIGHUP")
        self._withdraw()
        self.later(0.2, 0.8, self._begin)

    def kubelet_restarted(self) -> None:
        """Start anew, as for SIGHUP, where it minds."""
        self._numbers.clear()
        if self.box.reregisters():
            self.later(0.5, 2.0, self._begin)

    def look(self) -> None:
        """Tell the kubelet what became unhealthy."""
        if self._plugin.listen():
            for resource, number in self._numbers.items():
                self.box.manager.update(number, self._plugin.resources[resource])

    def _begin(self) -> None:
        self._withdraw()
        who = f"device plugin on {self.box.node}"
        try:
            resources = self._plugin.start()
        except (PluginError, HangError) as error:  # somebody starts again what hangs
            self.box.me.say(f"{who}: {error}")
            self.later(RETRY_S, RETRY_S + 1.0, self._begin)
            return
        offers = ", ".join(f"{name} {len(devices)}" for name, devices in resources.items())
        self.box.me.say(f"{who}: offers {offers or 'nothing'}")
        prefer = preferred if self.box.config.replicas else None
        for resource, devices in resources.items():
            self._numbers[resource] = self.box.manager.register(resource, devices, prefer)

    def _withdraw(self) -> None:
        for number in self._numbers.values():
            self.box.manager.gone(number, self.box.me.stage.now_s())
        self._numbers.clear()


class Features(Idle):
    """GPU feature discovery, with the node labels that come of it: at the start, on SIGHUP and every minute."""

    def __init__(self, box: Sandbox) -> None:
        super().__init__(box)
        self._told: dict[str, str] = {}
        self._round = 0

    def start(self) -> None:
        """Begin."""
        super().start()
        self.later(0.5, 2.0, self._discover)

    def hang_up(self) -> None:
        """Look at once."""
        self.later(0.1, 0.5, self._discover)

    def _discover(self) -> None:
        self._round += 1
        mine = self._round
        self.later(FEATURES_S, FEATURES_S, lambda: self._discover() if mine == self._round else None)
        labels = features(self.box.host, self.box.config)
        if labels == self._told:
            return
        gone = dict.fromkeys(sorted(self._told.keys() - labels.keys()))
        if self.box.features.merge("nodes", self.box.node, {"metadata": {"labels": {**labels, **gone}}}) is not None:
            self._told = labels


def features(host: SimHost, config: PluginConfig) -> dict[str, str]:
    """The labels that describe the GPUs of a machine."""
    gpus = sorted(host.snapshot().gpus, key=lambda gpu: gpu.index)
    found = {"nvidia.com/mig.strategy": config.strategy, "nvidia.com/gpu.count": str(len(gpus))}
    if gpus:
        found["nvidia.com/gpu.product"] = gpus[0].name.replace(" ", "-")
        found["nvidia.com/mig.capable"] = str(host.model(0).mig).lower()
    if config.replicas:
        found["nvidia.com/gpu.replicas"] = str(max(config.replicas.values()))
    for name, number in sorted(_profiles(host, gpus).items()) if config.strategy == "mixed" else ():
        found[f"nvidia.com/mig-{name.replace('+', '.')}.count"] = str(number)
    return found


def _profiles(host: SimHost, gpus: list[Gpu]) -> dict[str, int]:
    names: dict[str, int] = {}
    for gpu in gpus:
        for instance in gpu.instances:
            name = host.model(gpu.index).by_id()[instance.profile_id].name
            names[name] = names.get(name, 0) + len(instance.compute)
    return names


def place_of(host: SimHost, uuid: str) -> tuple[int, int | None]:
    """GPU index, and the memory slice where the instance begins, None for a whole GPU; SimulationError for neither."""
    for gpu in host.snapshot().gpus:
        if gpu.uuid == uuid:
            if gpu.lost:
                raise SimulationError(f"{uuid} is lost")
            return gpu.index, None
        for instance in gpu.instances:
            if any(compute.uuid == uuid for compute in instance.compute):
                return gpu.index, instance.start
    raise SimulationError(f"{uuid} is unknown")


def _ended(host: SimHost, pids: list[int]) -> list[int]:
    alive = host.snapshot().processes
    for pid in pids:
        if str(pid) in alive and alive[str(pid)].released_at_s is None:
            host.end_process(pid)
    return []


PROGRAMS: Final[dict[str, Callable[[Sandbox], Program]]] = {
    "idle": Idle,
    "compute": Compute,
    "device-plugin": Plugin,
    "gpu-feature-discovery": Features,
    "dcgm": Monitor,
    "dcgm-exporter": Exporter,
}
