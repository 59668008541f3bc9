"""NVIDIA's device plugin as it behaves: devices are found at start and on SIGHUP only, health goes one way only.

No socket and no clock is here: whoever serves it, simulated or by gRPC, calls `start`, `hang_up`, `listen` and `stop`.
Source: k8s-device-plugin 0.19 and 0.20, internal/rm/device_map.go, health.go and cmd/nvidia-device-plugin/main.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pynvml

GPU: Final = "nvidia.com/gpu"
STRATEGIES: Final = ("none", "single", "mixed")
RETRY_S: Final = 30.0
"""A plugin that cannot start tries again after so long."""
APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
"""The program's fault, not the GPU's."""
_ANY: Final = 0xFFFFFFFF
Resources = dict[str, dict[str, bool]]
"""Resource name -> device id -> healthy."""


class PluginError(Exception):
    """The plugin cannot start, and so offers nothing at all; the text is what its log says."""


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """How a plugin is set up.

    strategy: see STRATEGIES. replicas: resource -> into how many time slices each device is cut. renamed: a resource
    with replicas is called `….shared`. empty_mig_fails: of versions that start on no node where a GPU has MIG on and
    nothing in it; newer ones warn under mixed.
    """

    strategy: str = "mixed"
    replicas: Mapping[str, int] = field(default_factory=dict)
    renamed: bool = False
    empty_mig_fails: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise PluginError(f"unknown MIG strategy: {self.strategy}")
        wrong = {name: number for name, number in self.replicas.items() if number < 2}
        if wrong:
            raise PluginError(f"invalid replicas, number of replicas must be >= 2: {wrong}")


@dataclass(frozen=True, slots=True)
class _Found:
    """A device as NVML shows it. profile: "" for a whole GPU; attributes: its type; instance: its GI and CI id."""

    uuid: str
    profile: str = ""
    attributes: tuple[int, ...] = ()
    instance: tuple[int, ...] = ()


def enumerated(nvml: Any, config: PluginConfig) -> Resources:
    """What a plugin with this configuration offers on the machine as it is now, all of it healthy.

    nvml: a face with an open session. PluginError where it would not start: a GPU is lost, or the MIG layout is not one
    of its strategy.
    """
    found: Resources = {}
    try:
        for device in _checked(list(_gpus(nvml)), config):
            found.setdefault(_resource(device, config.strategy), {})[device.uuid] = True
    except pynvml.NVMLError as error:
        raise PluginError(f"error building device map: {nvml.nvmlErrorString(error.value)}") from error
    return {name: found[name] for name in sorted(found)}


def shared(resources: Resources, config: PluginConfig) -> Resources:
    """The resources with each device cut into its replicas, named `UUID::n`."""
    cut: Resources = {}
    for name, devices in resources.items():
        number = config.replicas.get(name, 1)
        if number == 1:
            cut[name] = devices
            continue
        called = f"{name}.shared" if config.renamed else name
        cut[called] = {f"{uuid}::{n}": healthy for uuid, healthy in devices.items() for n in range(number)}
    return cut


def resource_of(profile: str) -> str:
    """The resource name of a profile under mixed."""
    return "nvidia.com/mig-" + profile.replace("+", ".")


def preferred(available: Iterable[str], number: int) -> list[str]:
    """Which of the available device ids the plugin would have taken: those of the devices with most replicas free."""
    left = sorted(available)
    chosen: list[str] = []
    while left and len(chosen) < number:
        free: dict[str, int] = {}
        for one in left:
            free[device_of(one)] = free.get(device_of(one), 0) + 1
        best = max(left, key=lambda one: (free[device_of(one)], -left.index(one)))
        left.remove(best)
        chosen.append(best)
    return chosen


def device_of(device_id: str) -> str:
    """The UUID behind a device id: what of a replica is before `::`."""
    return device_id.partition("::")[0]


def _gpus(nvml: Any) -> Iterator[tuple[_Found, bool, list[_Found]]]:
    """Each GPU, whether its MIG mode is on, and its MIG devices."""
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        try:
            on = bool(nvml.nvmlDeviceGetMigMode(handle)[0])
        except pynvml.NVMLError_NotSupported:
            on = False
        yield _Found(uuid), on, list(_mig_devices(nvml, handle)) if on else []


def _mig_devices(nvml: Any, handle: Any) -> Iterator[_Found]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError_NotFound:
            continue
        a = nvml.nvmlDeviceGetAttributes(mig)
        attributes = (
            *(a.gpuInstanceSliceCount, a.computeInstanceSliceCount, a.multiprocessorCount, a.memorySizeMB),
            *(a.sharedCopyEngineCount, a.sharedDecoderCount, a.sharedEncoderCount, a.sharedJpegCount, a.sharedOfaCount),
        )
        profile = nvml.nvmlDeviceGetName(mig).rpartition(" MIG ")[2]
        instance = (nvml.nvmlDeviceGetGpuInstanceId(mig), nvml.nvmlDeviceGetComputeInstanceId(mig))
        yield _Found(nvml.nvmlDeviceGetUUID(mig), profile, attributes, instance)


def _checked(gpus: Sequence[tuple[_Found, bool, list[_Found]]], config: PluginConfig) -> list[_Found]:
    """The devices to offer; PluginError for what a strategy does not take."""
    if config.strategy == "none":
        return [gpu for gpu, _on, _migs in gpus]
    single = config.strategy == "single"
    whole = [gpu for gpu, on, _migs in gpus if not on]
    migs = [mig for _gpu, _on, found in gpus for mig in found]
    if single or config.empty_mig_fails:
        for index, (_gpu, on, found) in enumerate(gpus):
            if on and not found:
                raise PluginError(
                    "invalid MIG configuration: at least one device with migEnabled=true was not configured correctly: "
                    f"device {index} has no MIG devices configured"
                )
    if single and len({mig.attributes for mig in migs}) > 1:
        raise PluginError("invalid MIG configuration: more than one MIG device type present on node")
    if single and whole and migs:
        raise PluginError("all devices on the node must be configured with the same migEnabled value")
    odd = [mig.profile for mig in migs if not single and "c." in mig.profile]
    if odd:
        raise PluginError(f"error building MIG device map: MIG profile '{odd[0]}' does not match any resource patterns")
    return whole + migs


def _resource(device: _Found, strategy: str) -> str:
    return resource_of(device.profile) if device.profile and strategy == "mixed" else GPU


class DevicePlugin:
    """One plugin process: its NVML session, and what it offers until it is told to look again.

    nvml: `SimHost.nvml(pid=…, command="nvidia-device-plugin", container=…)`, or pynvml. resources: what its sockets
    offer now, one socket a resource; empty while it has not started or could not.
    The session stays open for the health events, so the process is in the way of a mode change and of a reset.
    """

    def __init__(self, nvml: Any, config: PluginConfig | None = None) -> None:
        self._nvml = nvml
        self._config = config or PluginConfig()
        self._events: Any = None
        self._heard: dict[str, tuple[str, tuple[int, ...]]] = {}  # GPU UUID -> the one device that hears of its Xids
        self._open = False
        self.resources: Resources = {}

    def start(self) -> Resources:
        """Begin, or begin anew: what is offered from now on. PluginError: nothing is, try again after RETRY_S."""
        self.stop()
        try:
            self._nvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise PluginError(f"failed to initialize NVML: {self._nvml.nvmlErrorString(error.value)}") from error
        self._open = True
        try:
            found = enumerated(self._nvml, self._config)
            self._register()
        except PluginError:
            self.stop()
            raise
        self.resources = shared(found, self._config)
        return self.resources

    def hang_up(self) -> Resources:
        """SIGHUP: as `start`, in the same process; what it offered is withdrawn before it looks."""
        return self.start()

    def stop(self) -> None:
        """End: the session closes, the sockets go."""
        self.resources = {}
        self._events = None
        if self._open:
            self._open = False
            try:
                self._nvml.nvmlShutdown()
            except pynvml.NVMLError_Uninitialized:
                return  # the driver was reloaded, or the machine rebooted, under it

    def listen(self) -> bool:
        """Hear what NVML has to tell by now; whether anything became unhealthy. Nothing ever becomes healthy again."""
        changed = False
        while self._events is not None:
            try:
                event = self._nvml.nvmlEventSetWait(self._events, 0)
            except pynvml.NVMLError_Timeout:
                break
            except pynvml.NVMLError:
                changed |= self._unhealthy(None)  # as GPU_IS_LOST: the plugin can no longer tell, so all are
                break
            if event.eventData not in APPLICATION_XIDS:
                changed |= self._unhealthy(self._meant(event))
        return changed

    def _meant(self, event: Any) -> str | None:
        """The device that an event is taken to mean; "" for none, None for all: its GPU cannot say who it is."""
        try:
            gpu = self._nvml.nvmlDeviceGetUUID(event.device)
        except pynvml.NVMLError:
            return None
        uuid, instance = self._heard.get(gpu, ("", ()))
        said = (event.gpuInstanceId, event.computeInstanceId)
        return "" if instance and _ANY not in said and instance != said else uuid

    def _register(self) -> None:
        """Listen to every GPU. Of several MIG devices of a GPU only the last is told, as upstream's map has it."""
        try:
            self._events = self._nvml.nvmlEventSetCreate()
            kinds = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
            for gpu, on, migs in _gpus(self._nvml):
                handle = self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                self._nvml.nvmlDeviceRegisterEvents(handle, kinds, self._events)
                offered = migs if on and self._config.strategy != "none" else [gpu]
                self._heard[gpu.uuid] = (offered[-1].uuid, offered[-1].instance) if offered else ("", ())
        except pynvml.NVMLError as error:
            raise PluginError(f"failed to watch health: {self._nvml.nvmlErrorString(error.value)}") from error

    def _unhealthy(self, uuid: str | None) -> bool:
        changed = False
        for devices in self.resources.values():
            for one, healthy in devices.items():
                if healthy and (uuid is None or device_of(one) == uuid):
                    devices[one] = False
                    changed = True
        return changed
