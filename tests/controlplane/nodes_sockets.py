"""A simulated kubelet's unix sockets: plugins register on one, the other tells which pod holds what. Real gRPC."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from grpc.experimental import ChannelOptions

from migd.kubelet.deviceplugin_v1beta1_pb2 import (
    AllocateRequest,
    ContainerAllocateRequest,
    ContainerPreferredAllocationRequest,
    Empty,
    PreferredAllocationRequest,
    RegisterRequest,
)
from migd.kubelet.deviceplugin_v1beta1_pb2_grpc import (
    DevicePluginStub,
    RegistrationServicer,
    add_RegistrationServicer_to_server,
)
from migd.kubelet.podresources_v1_pb2 import (
    ContainerDevices,
    ContainerResources,
    ListPodResourcesResponse,
    PodResources,
)
from migd.kubelet.podresources_v1_pb2_grpc import PodResourcesListerServicer, add_PodResourcesListerServicer_to_server
from migd.sim.nodes.devices import AdmissionError, Held, Wants

PLUGINS: Final = "device-plugins"
REGISTRATION: Final = f"{PLUGINS}/kubelet.sock"
POD_RESOURCES: Final = "pod-resources/kubelet.sock"
HEALTHY: Final = "Healthy"
_CALL_S: Final = 10.0
_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
_ONE_THREAD: Final = (ChannelOptions.SingleThreadedUnaryStream, 1)
"""A stream that nothing comes on is otherwise looked at ten times a second."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A plugin sent its whole list. first: the one that comes with its registration."""

    plugin: Plugin
    devices: Mapping[str, bool]
    first: bool


@dataclass(frozen=True, slots=True)
class Closed:
    """A plugin's socket is closed."""

    plugin: Plugin


Heard = Callable[[Listed | Closed], None]
Snapshot = Callable[[], tuple[Sequence[Wants], Sequence[Held]]]
"""Who is active and what they hold, at any time and from any thread."""


class Plugin:
    """One registration of a device plugin: what it lists is heard until its socket closes, or `close`."""

    def __init__(self, resource: str, socket: Path, preferring: bool, heard: Heard) -> None:
        self.resource = resource
        self._preferring = preferring
        self._heard = heard
        self._channel = grpc.insecure_channel(f"unix:{socket}", (*_OPTIONS, _ONE_THREAD))
        self._stub = DevicePluginStub(self._channel)
        self._lists = self._stub.ListAndWatch(Empty(), wait_for_ready=False)
        threading.Thread(target=self._listen, name=f"plugin {resource}", daemon=True).start()

    def prefer(self, available: Iterable[str], number: int) -> list[str]:
        """Which of the available devices it would rather have taken."""
        left = list(available)
        if not self._preferring:
            return left[:number]
        asked = ContainerPreferredAllocationRequest(available_deviceIDs=left, allocation_size=number)
        try:
            answer = self._stub.GetPreferredAllocation(
                PreferredAllocationRequest(container_requests=[asked]), timeout=_CALL_S
            )
        except grpc.RpcError:  # a kubelet then takes any
            return left[:number]
        chosen = [one for one in answer.container_responses[0].deviceIDs if one in left][:number]
        return [*chosen, *[one for one in left if one not in chosen][: number - len(chosen)]]

    def allocate(self, device_ids: Iterable[str]) -> None:
        """Tell it which devices a container gets; AdmissionError where it refuses or does not answer."""
        asked = AllocateRequest(container_requests=[ContainerAllocateRequest(devices_ids=device_ids)])
        try:
            self._stub.Allocate(asked, timeout=_CALL_S)
        except grpc.RpcError as error:
            raise AdmissionError(f"Allocate failed due to rpc error: {error.details()}, which is unexpected") from error

    def close(self) -> None:
        """Listen no more."""
        self._channel.close()

    def _listen(self) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError):  # it ended, or we closed the channel
            for first, answer in zip(itertools.chain([True], itertools.repeat(False)), self._lists, strict=False):
                self._heard(Listed(self, {one.ID: one.health == HEALTHY for one in answer.devices}, first))
        self._heard(Closed(self))
        self._channel.close()


class Sockets:
    """Both servers of one kubelet. folder: its root folder, short enough for sockets; heard: called by many threads."""

    def __init__(self, folder: Path, heard: Heard, snapshot: Snapshot) -> None:
        self._folder = folder
        self._heard = heard
        self._snapshot = snapshot
        self._servers: list[grpc.Server] = []
        self._plugins: list[Plugin] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Serve. As a kubelet that starts does, first remove every socket that lies in the plugins' folder."""
        for path in (self._folder / REGISTRATION, self._folder / POD_RESOURCES):
            path.parent.mkdir(parents=True, exist_ok=True)
        for left in (*(self._folder / PLUGINS).glob("*.sock"), self._folder / POD_RESOURCES):
            left.unlink(missing_ok=True)
        self._serve(POD_RESOURCES, lambda server: add_PodResourcesListerServicer_to_server(_Resources(self), server))
        self._serve(REGISTRATION, lambda server: add_RegistrationServicer_to_server(_Registration(self), server))

    def stop(self) -> None:
        """Serve nobody, and listen to no plugin any more."""
        for server in self._servers:
            server.stop(None).wait()
        self._servers.clear()
        with self._lock:
            plugins, self._plugins = self._plugins, []
        for plugin in plugins:
            plugin.close()

    def registered(self, request: RegisterRequest) -> None:
        """A plugin says where it is."""
        socket = self._folder / PLUGINS / request.endpoint
        preferring = request.options.get_preferred_allocation_available
        plugin = Plugin(request.resource_name, socket, preferring, self._heard)
        with self._lock:
            self._plugins.append(plugin)

    def listed(self) -> ListPodResourcesResponse:
        """What the pod-resources API answers now."""
        active, held = self._snapshot()
        return ListPodResourcesResponse(pod_resources=[_of_pod(wants, held) for wants in active])

    def _serve(self, name: str, add: Callable[[grpc.Server], None]) -> None:
        server = grpc.server(ThreadPoolExecutor(max_workers=4), options=_OPTIONS)
        add(server)
        assert server.add_insecure_port(f"unix:{self._folder / name}"), f"cannot serve {self._folder / name}"
        server.start()
        self._servers.append(server)


class _Registration(RegistrationServicer):
    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets

    def Register(self, request: Any, context: Any) -> Empty:
        if request.version != "v1beta1":
            context.abort(grpc.StatusCode.UNKNOWN, f"requested API version {request.version!r} is not supported")
        self._sockets.registered(request)
        return Empty()


class _Resources(PodResourcesListerServicer):
    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets

    def List(self, request: Any, context: Any) -> ListPodResourcesResponse:
        return self._sockets.listed()


def _of_pod(wants: Wants, held: Sequence[Held]) -> PodResources:
    return PodResources(
        name=wants.name,
        namespace=wants.namespace,
        containers=[
            ContainerResources(
                name=container,
                devices=[
                    ContainerDevices(resource_name=one.resource, device_ids=[device])
                    for one in held
                    if (one.namespace, one.pod, one.container) == (wants.namespace, wants.name, container)
                    for device in one.device_ids
                ],
            )
            for container in wants.containers
        ],
    )
