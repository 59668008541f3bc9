"""`python plugin.py`: NVIDIA's device plugin on a simulated node, as a process of its own that speaks real gRPC.

It is told by environment, as the container of a DaemonSet: SIMULATED_STATE, the file of the simulated machine;
SIMULATED_ROOT, the folder that is the node's `/`; MIG_STRATEGY; CONTAINER_ID. What it finds and when it looks is
`migd.sim.nodes.plugin`: at start, on SIGHUP, and when the kubelet's socket was made anew.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc

from controlplane.nodes_sockets import HEALTHY, PLUGINS, REGISTRATION
from migd.kubelet.deviceplugin_v1beta1_pb2 import (
    AllocateResponse,
    ContainerAllocateResponse,
    ContainerPreferredAllocationResponse,
    Device,
    DevicePluginOptions,
    ListAndWatchResponse,
    PreferredAllocationResponse,
    RegisterRequest,
)
from migd.kubelet.deviceplugin_v1beta1_pb2_grpc import (
    DevicePluginServicer,
    RegistrationStub,
    add_DevicePluginServicer_to_server,
)
from migd.sim import SimHost
from migd.sim.nodes.plugin import RETRY_S, DevicePlugin, PluginConfig, PluginError, preferred

COMMAND: Final = "nvidia-device-plugin"
_LOOK_S: Final = 1.5
_CALL_S: Final = 10.0
_PR_SET_NAME: Final = 15  # prctl(2)
_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


class Serving(DevicePluginServicer):
    """One resource on a socket of its own."""

    def __init__(self, devices: dict[str, bool], visible: str) -> None:
        self._devices = devices
        self._visible = visible
        self._changed = threading.Condition()
        self._ended = False

    def tell(self, devices: dict[str, bool]) -> None:
        """Send another list to whoever listens."""
        with self._changed:
            self._devices = dict(devices)
            self._changed.notify_all()

    def end(self) -> None:
        """End every stream."""
        self._ended = True
        self._stirred()

    def _stirred(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def GetDevicePluginOptions(self, request: Any, context: Any) -> DevicePluginOptions:
        return DevicePluginOptions(get_preferred_allocation_available=True)

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[ListAndWatchResponse]:
        told: dict[str, bool] | None = None
        context.add_callback(self._stirred)  # called when nobody listens any more
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda told=told: self._ended or self._devices != told or not context.is_active()
                )
                if self._ended or not context.is_active():
                    return
                if self._devices == told:
                    continue
                told = dict(self._devices)
            yield ListAndWatchResponse(
                devices=[Device(ID=one, health=HEALTHY if well else "Unhealthy") for one, well in told.items()]
            )

    def GetPreferredAllocation(self, request: Any, context: Any) -> PreferredAllocationResponse:
        chosen = [
            ContainerPreferredAllocationResponse(deviceIDs=preferred(one.available_deviceIDs, one.allocation_size))
            for one in request.container_requests
        ]
        return PreferredAllocationResponse(container_responses=chosen)

    def Allocate(self, request: Any, context: Any) -> AllocateResponse:
        unknown = {one for asked in request.container_requests for one in asked.devices_ids} - self._devices.keys()
        if unknown:
            context.abort(grpc.StatusCode.UNKNOWN, f"invalid allocation request: unknown device: {min(unknown)}")
        envs = [{self._visible: ",".join(asked.devices_ids)} for asked in request.container_requests]
        return AllocateResponse(container_responses=[ContainerAllocateResponse(envs=one) for one in envs])


class Program:
    """The process: serves what the plugin offers, registers it, and starts anew when told to."""

    def __init__(self, plugin: DevicePlugin, kubelet: Path) -> None:
        self._plugin = plugin
        self._kubelet = kubelet
        self._served: dict[str, tuple[Serving, grpc.Server]] = {}
        self._told: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()

    def run(self) -> int:
        """Until SIGTERM; the exit status."""
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda found, _frame: self._told.put(signal.Signals(found)))
        while True:
            again_at = self._begin()
            kubelet = self._inode()
            while True:
                told = self._wait()
                if told in (signal.SIGTERM, signal.SIGINT):
                    self._withdraw()
                    self._plugin.stop()
                    return 0
                if told is signal.SIGHUP:
                    _say("Received SIGHUP, restarting.")
                    break
                if self._inode() not in (kubelet, None):
                    _say(f"inotify: {self._kubelet / REGISTRATION} created, restarting.")
                    break
                if again_at is not None and time.monotonic() >= again_at:
                    break
                if self._plugin.listen():
                    for resource, (serving, _) in self._served.items():
                        serving.tell(self._plugin.resources[resource])

    def _begin(self) -> float | None:
        """Offer what is there now; when to try again where that failed."""
        self._withdraw()
        try:
            for resource, devices in self._plugin.start().items():
                if devices:
                    self._offer(resource, devices)
        except (PluginError, grpc.RpcError) as error:
            _say(f"Failed to start plugins: {error}. Retrying in {RETRY_S:.0f}s...")
            self._withdraw()
            return time.monotonic() + RETRY_S
        return None

    def _offer(self, resource: str, devices: dict[str, bool]) -> None:
        serving = Serving(dict(devices), "NVIDIA_VISIBLE_DEVICES")
        server = grpc.server(ThreadPoolExecutor(max_workers=4), options=_OPTIONS)
        add_DevicePluginServicer_to_server(serving, server)
        path = self._kubelet / PLUGINS / f"nvidia-{resource.partition('/')[2]}.sock"
        path.unlink(missing_ok=True)
        assert server.add_insecure_port(f"unix:{path}"), f"cannot serve {path}"
        server.start()
        self._served[resource] = serving, server
        with grpc.insecure_channel(f"unix:{self._kubelet / REGISTRATION}", _OPTIONS) as channel:
            RegistrationStub(channel).Register(
                RegisterRequest(
                    version="v1beta1",
                    endpoint=path.name,
                    resource_name=resource,
                    options=DevicePluginOptions(get_preferred_allocation_available=True),
                ),
                timeout=_CALL_S,
            )
        _say(f"Registered device plugin for '{resource}' with Kubelet: {len(devices)} devices")

    def _withdraw(self) -> None:
        for serving, server in self._served.values():
            serving.end()
            server.stop(None).wait()
        self._served.clear()

    def _wait(self) -> signal.Signals | None:
        try:
            return self._told.get(timeout=_LOOK_S)
        except queue.Empty:
            return None

    def _inode(self) -> tuple[int, int] | None:
        try:
            found = (self._kubelet / REGISTRATION).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def _say(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()


def main() -> int:
    """Become `nvidia-device-plugin`, and serve."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, COMMAND.encode(), 0, 0, 0)
    seen = os.environ
    host = SimHost.open(seen["SIMULATED_STATE"])
    nvml = host.nvml(command=COMMAND, container=seen.get("CONTAINER_ID", ""))
    plugin = DevicePlugin(nvml, PluginConfig(strategy=seen.get("MIG_STRATEGY", "none")))
    return Program(plugin, Path(seen["SIMULATED_ROOT"]) / "var/lib/kubelet").run()


if __name__ == "__main__":
    sys.exit(main())
