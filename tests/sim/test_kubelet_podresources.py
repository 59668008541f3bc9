"""The real pod-resources client, asked over real unix sockets; and that the generated modules are those of the protos.

What the kubelet itself does behind the socket is tried with the simulated nodes in tests/integration.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from migd.kubelet import deviceplugin_v1beta1_pb2, podresources_v1_pb2
from migd.kubelet.podresources import SOCKET, KubeletPodResources
from migd.kubelet.podresources_v1_pb2 import (
    CDIDevice,
    ClaimResource,
    ContainerDevices,
    ContainerResources,
    DynamicResource,
    ListPodResourcesResponse,
    PodResources,
)
from migd.kubelet.podresources_v1_pb2_grpc import PodResourcesListerServicer, add_PodResourcesListerServicer_to_server
from migd.kubelet.ports import KubeletError, PodDevices

ROOT = Path(__file__).parents[2]
MIG = "nvidia.com/mig-1g.10gb"


class Kubelet(PodResourcesListerServicer):
    def __init__(self, *pods: PodResources, before: Callable[[], Awaitable[None]] | None = None, code=None) -> None:
        self._pods = pods
        self._before = before
        self._code = code

    async def List(self, request, context):
        if self._before is not None:
            await self._before()
        if self._code is not None:
            await context.abort(self._code, "as told")
        return ListPodResourcesResponse(pod_resources=self._pods)


@contextlib.asynccontextmanager
async def serving(folder: Path, kubelet: PodResourcesListerServicer | None) -> AsyncIterator[None]:
    server = grpc.aio.server()
    if kubelet is not None:
        add_PodResourcesListerServicer_to_server(kubelet, server)
    path = folder / SOCKET
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # as a kubelet does that finds one of before
    assert server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a test run's own folders can be longer than a socket's path may be."""
    with tempfile.TemporaryDirectory(prefix="migd-") as made:
        yield Path(made)


def pod(name: str, *containers: ContainerResources, namespace: str = "ml") -> PodResources:
    return PodResources(name=name, namespace=namespace, containers=containers)


def devices(*ids: str, resource: str = MIG) -> ContainerResources:
    return ContainerResources(name="main", devices=[ContainerDevices(resource_name=resource, device_ids=ids)])


def asked(folder: Path, kubelet: PodResourcesListerServicer | None, timeout_s: float = 10.0) -> tuple[PodDevices, ...]:
    async def ask() -> tuple[PodDevices, ...]:
        async with serving(folder, kubelet):
            return await KubeletPodResources(folder, timeout_s).held()

    return asyncio.run(ask())


def test_devices_are_told_by_pod_and_resource_in_order_whatever_order_the_kubelet_has(folder):
    kubelet = Kubelet(
        pod("b", devices("MIG-2", "MIG-1"), devices("MIG-0"), devices("GPU-1", resource="nvidia.com/gpu")),
        pod("a", devices("MIG-3")),
        pod("a", devices("MIG-4"), namespace="aa"),
        pod("none"),
    )
    assert asked(folder, kubelet) == (
        PodDevices("aa", "a", MIG, ("MIG-4",)),
        PodDevices("ml", "a", MIG, ("MIG-3",)),
        PodDevices("ml", "b", "nvidia.com/gpu", ("GPU-1",)),
        PodDevices("ml", "b", MIG, ("MIG-0", "MIG-1", "MIG-2")),
    )


def test_replicas_of_a_shared_device_are_the_device(folder):
    kubelet = Kubelet(pod("a", devices("MIG-1::0", "MIG-1::3", "MIG-2::1")))
    assert asked(folder, kubelet) == (PodDevices("ml", "a", MIG, ("MIG-1", "MIG-2")),)


def test_devices_of_resource_claims_count_though_nobody_can_say_which_they_are(folder):
    cdi = [CDIDevice(name="k8s.gpu.nvidia.com/device=gpu-0-mig-1g.10gb-7")]
    claim = ClaimResource(cdi_devices=cdi, driver_name="gpu.nvidia.com", pool_name="n", device_name="gpu-0")
    container = ContainerResources(dynamic_resources=[DynamicResource(claim_name="c", claim_resources=[claim, claim])])
    empty = ContainerResources(dynamic_resources=[DynamicResource(claim_name="c")])
    assert asked(folder, Kubelet(pod("a", container), pod("b", empty))) == (
        PodDevices("ml", "a", "gpu.nvidia.com", ()),
        PodDevices("ml", "b", "", ()),
    )


def test_a_list_of_many_pods_arrives_whole(folder):
    many = [pod(f"p{i:05}", devices(*(f"MIG-{i:05}-{'x' * 36}-{j}" for j in range(20)))) for i in range(6_000)]
    assert sum(p.ByteSize() for p in many) > 4 * 1024 * 1024, "smaller than what gRPC takes without being told"
    assert len(asked(folder, Kubelet(*many))) == 6_000


def test_a_kubelet_that_restarted_is_asked_on_its_new_socket_at_once(folder):
    async def story() -> None:
        client = KubeletPodResources(folder)
        async with serving(folder, Kubelet(pod("a", devices("MIG-1")))):
            assert await client.held() == (PodDevices("ml", "a", MIG, ("MIG-1",)),)
        for _ in range(5):  # a kept channel would now wait longer and longer
            with pytest.raises(KubeletError, match="does not run|nobody answers"):
                await client.held()
        async with serving(folder, Kubelet(pod("b", devices("MIG-2")))):
            assert await client.held() == (PodDevices("ml", "b", MIG, ("MIG-2",)),)

    asyncio.run(story())


def test_a_kubelet_that_goes_on_is_asked_on_one_connection(folder):
    made: list[asyncio.StreamWriter] = []

    async def forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while some := await source.read(65536):
            sink.write(some)
        sink.close()

    async def story() -> None:
        (folder / "behind").mkdir()
        async with serving(folder / "behind", Kubelet(pod("a", devices("MIG-1")))):

            async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                made.append(writer)
                behind, onward = await asyncio.open_unix_connection(str(folder / "behind" / SOCKET))
                with contextlib.closing(writer), contextlib.closing(onward):
                    await asyncio.gather(forward(reader, onward), forward(behind, writer))

            (folder / SOCKET).parent.mkdir()
            async with await asyncio.start_unix_server(connected, str(folder / SOCKET)):
                client = KubeletPodResources(folder)
                for _ in range(3):
                    assert await client.held() == (PodDevices("ml", "a", MIG, ("MIG-1",)),)
                assert len(made) == 1
                made[0].transport.abort()
                for _ in range(2):  # told of once at most, then on another connection
                    with contextlib.suppress(KubeletError):
                        await client.held()
                assert await client.held() == (PodDevices("ml", "a", MIG, ("MIG-1",)),)
                assert len(made) == 2

    asyncio.run(story())


def test_a_socket_that_is_not_there_is_named(folder):
    with pytest.raises(
        KubeletError, match=rf"there is no {folder}/pod-resources/kubelet.sock: the kubelet does not run"
    ):
        asyncio.run(KubeletPodResources(folder).held())


def test_a_socket_that_nobody_serves_any_more_is_told_of(folder):
    path = folder / SOCKET
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with pytest.raises(KubeletError, match="nobody answers on .*: is the kubelet restarting"):
        asyncio.run(KubeletPodResources(folder).held())


def test_a_kubelet_that_hangs_is_left_after_the_timeout(folder):
    kubelet = Kubelet(before=asyncio.Event().wait)
    with pytest.raises(KubeletError, match=r"did not answer on .* within 0\.05 s"):
        asked(folder, kubelet, timeout_s=0.05)


def test_a_refusal_keeps_its_words(folder):
    with pytest.raises(KubeletError, match="RESOURCE_EXHAUSTED: as told"):
        asked(folder, Kubelet(code=grpc.StatusCode.RESOURCE_EXHAUSTED))


def test_something_that_is_no_kubelet_is_said_to_be_none(folder):
    with pytest.raises(KubeletError, match="has no pod-resources API v1"):
        asked(folder, None)


def test_a_path_too_long_for_a_socket_is_refused_with_the_way_out():
    rest = len("/") + len(f"/{SOCKET}")
    KubeletPodResources("/" + "k" * (107 - rest))
    with pytest.raises(KubeletError, match="is 108 bytes long, and .* at most 107: give a shorter kubelet folder"):
        KubeletPodResources("/" + "k" * (108 - rest))
    with pytest.raises(KubeletError, match="is 108 bytes long"):  # bytes, not letters
        KubeletPodResources("/" + "é" * ((108 - rest) // 2))


@pytest.mark.parametrize("generated", [podresources_v1_pb2, deviceplugin_v1beta1_pb2], ids=lambda m: m.__name__)
def test_the_generated_modules_are_those_of_the_protos(generated, tmp_path):
    name = generated.DESCRIPTOR.name
    out = tmp_path / "set"
    assert protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={out}", name]) == 0
    (found,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto.FromString(generated.DESCRIPTOR.serialized_pb)
    found.ClearField("source_code_info")
    for message in (
        m for file in (found, committed) for outer in file.message_type for m in (outer, *outer.nested_type)
    ):
        for field in message.field:
            field.ClearField("json_name")  # compilers differ in whether they spell it out
    assert found == committed, "run `make protos`"
    assert os.path.basename(name) != "api.proto", "two files of one name do not load into one process"
