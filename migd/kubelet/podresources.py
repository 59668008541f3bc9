"""The real kubelet's pod-resources API over its unix socket.

A connection is kept as long as the kubelet answers on it: to make one takes most of what a question costs. A kubelet
that restarts makes its socket anew, which shows in the file, and is then connected to anew: a connection from before
would wait for its backoff first.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import grpc

from migd.kubelet.podresources_v1_pb2 import ListPodResourcesRequest, ListPodResourcesResponse, PodResources
from migd.kubelet.podresources_v1_pb2_grpc import PodResourcesListerStub
from migd.kubelet.ports import KubeletError, PodDevices

SOCKET: Final = "pod-resources/kubelet.sock"
TIMEOUT_S: Final = 10.0
PATH_BYTES_MAX: Final = 107  # unix(7): sun_path has 108 bytes, the last one a zero
_MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024  # as Kubernetes' own client allows
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the backoff of an old one
    ("grpc.enable_http_proxy", 0),
)


class KubeletPodResources:
    """`migd.kubelet.ports.PodResources` of a real kubelet.

    kubelet_dir: the kubelet's root folder, in which it makes `pod-resources/kubelet.sock`; mount that folder, not the
    socket, which is another file after each restart. Raises KubeletError at once where the path is too long to connect
    to. timeout_s: for one question, connecting included. It belongs to the event loop that it is first asked in.
    """

    def __init__(self, kubelet_dir: str | Path, timeout_s: float = TIMEOUT_S) -> None:
        self._socket = Path(os.path.abspath(kubelet_dir)) / SOCKET
        self._timeout_s = timeout_s
        self._kept: tuple[tuple[int, int], grpc.aio.Channel] | None = None  # which socket it leads to, and the channel
        length = len(os.fsencode(self._socket))
        if length > PATH_BYTES_MAX:
            raise KubeletError(
                f"{self._socket} is {length} bytes long, and a unix socket's path has at most {PATH_BYTES_MAX}: "
                "give a shorter kubelet folder, such as a symbolic link to it"
            )

    async def held(self) -> tuple[PodDevices, ...]:
        """What every active pod of this node holds, by namespace, pod and resource; KubeletError with the reason."""
        try:
            found = self._socket.stat()
        except (FileNotFoundError, NotADirectoryError):
            await self._hang_up()
            raise KubeletError(
                f"there is no {self._socket}: the kubelet does not run, or its folder pod-resources is not mounted here"
            ) from None
        return _held(await self._list((found.st_ino, found.st_ctime_ns)))

    async def _list(self, socket: tuple[int, int]) -> ListPodResourcesResponse:
        channel = await self._channel(socket)
        try:
            answer = await PodResourcesListerStub(channel).List(ListPodResourcesRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            await self._hang_up()
            raise KubeletError(self._sentence(error.code(), error.details() or "")) from error
        except asyncio.CancelledError:
            await self._hang_up()
            raise
        assert isinstance(answer, ListPodResourcesResponse)
        return answer

    async def _channel(self, socket: tuple[int, int]) -> grpc.aio.Channel:
        """The kept one where it leads to this socket, else a new one, which is kept."""
        if self._kept is not None and self._kept[0] != socket:
            await self._hang_up()
        if self._kept is None:
            self._kept = socket, grpc.aio.insecure_channel(f"unix:{self._socket}", _OPTIONS)
        return self._kept[1]

    async def _hang_up(self) -> None:
        if self._kept is not None:
            (_, channel), self._kept = self._kept, None
            await channel.close()

    def _sentence(self, code: object, details: str) -> str:
        match code:
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"the kubelet did not answer on {self._socket} within {self._timeout_s:g} s"
            case grpc.StatusCode.UNAVAILABLE:
                return f"nobody answers on {self._socket}: is the kubelet restarting? ({details})"
            case grpc.StatusCode.UNIMPLEMENTED:
                return (
                    f"what answers on {self._socket} has no pod-resources API v1: it is no kubelet, or one before 1.20"
                )
            case _:
                name = code.name if isinstance(code, grpc.StatusCode) else str(code)
                return f"the kubelet refused to list pod resources on {self._socket}: {name}: {details}"


def _held(answer: ListPodResourcesResponse) -> tuple[PodDevices, ...]:
    found: dict[tuple[str, str, str], set[str]] = {}
    for pod in answer.pod_resources:
        for resource, ids in _resources(pod):
            found.setdefault((pod.namespace, pod.name, resource), set()).update(ids)
    return tuple(PodDevices(*key, tuple(sorted(ids))) for key, ids in sorted(found.items()))


def _resources(pod: PodResources) -> Iterator[tuple[str, Iterable[str]]]:
    """(resource, device ids) of the pod, each as often as a container has it."""
    for container in pod.containers:
        for devices in container.devices:
            # a replica of a shared device is called UUID::n; the device is what matters. Source: k8s-device-plugin
            yield devices.resource_name, [device.partition("::")[0] for device in devices.device_ids]
        for claim in container.dynamic_resources:
            # a driver names its devices as it likes: which GPU is meant cannot be told from here
            for driver in {found.driver_name for found in claim.claim_resources} or {""}:
                yield driver, ()
