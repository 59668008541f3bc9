"""Requests that break off: each is done once at most, and SUCCESS is never said of what was not done."""

from __future__ import annotations

import threading

import pynvml
import pytest
from c_clients import Raw, served
from controlplane.processes import until

from migd.sim import Fault, SimHost
from migd.sim.cface.programs import ANSWERS_KEPT, Answers
from migd.sim.cface.serving import Server

SUCCESS, UNKNOWN, UNINITIALIZED = pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_UNINITIALIZED
SOMEWHERE = 0x1000
THREE_G = 9


@pytest.fixture
def box(c_library, tmp_path):
    with served(SimHost.fresh("a100-40gb"), tmp_path) as box:
        yield box


def ready(server):
    """A client on a GPU with MIG on: (client, handle, the next number)."""
    raw = Raw(server)
    assert raw.call("nvmlInit_v2", 1) == (SUCCESS, {})
    _, written = raw.call("nvmlDeviceGetHandleByIndex_v2", 2, 0, SOMEWHERE)
    gpu = int.from_bytes(written[1], "little")
    assert raw.call("nvmlDeviceSetMigMode", 3, gpu, 1, SOMEWHERE)[0] == SUCCESS
    return raw, gpu, 4


def instances(box):
    return len(box.snapshot().gpus[0].instances)


def test_a_request_that_comes_again_is_answered_as_before_and_done_once(box):
    raw, gpu, number = ready(box.server)
    first = raw.call("nvmlDeviceCreateGpuInstance", number, gpu, THREE_G, SOMEWHERE)
    other = Raw(box.server, upcoming=number + 1)
    assert other.call("nvmlDeviceCreateGpuInstance", number, gpu, THREE_G, SOMEWHERE, again=True) == first
    assert (first[0], instances(box)) == (SUCCESS, 1)


def test_a_refused_request_that_comes_again_is_refused_again(box):
    raw, gpu, number = ready(box.server)
    box.inject(Fault("nvmlDeviceCreateGpuInstance", code=19, when="after"))
    assert raw.call("nvmlDeviceCreateGpuInstance", number, gpu, THREE_G, SOMEWHERE)[0] == 19
    assert raw.call("nvmlDeviceCreateGpuInstance", number, gpu, THREE_G, SOMEWHERE, again=True)[0] == 19
    assert instances(box) == 1


def test_a_request_that_never_arrived_is_done_when_it_comes_again(box):
    raw, gpu, number = ready(box.server)
    assert raw.call("nvmlDeviceCreateGpuInstance", number, gpu, THREE_G, SOMEWHERE, again=True)[0] == SUCCESS
    assert instances(box) == 1


def test_a_request_that_comes_again_while_it_is_done_waits_for_its_answer(box):
    raw, gpu, number = ready(box.server)
    box.use_clock("real")
    box.inject(Fault("nvmlDeviceCreateGpuInstance", "delay", delay_s=0.3))
    raw.send("nvmlDeviceCreateGpuInstance", number, gpu, THREE_G, SOMEWHERE)
    other = Raw(box.server, upcoming=number + 1)
    second = other.call("nvmlDeviceCreateGpuInstance", number, gpu, THREE_G, SOMEWHERE, again=True)
    assert second == raw.answer()
    assert (second[0], instances(box)) == (SUCCESS, 1)


@pytest.mark.parametrize("done", [True, False])
def test_of_a_request_from_before_a_restart_nobody_knows(box, done):
    raw, gpu, number = ready(box.server)
    if done:
        raw.call("nvmlDeviceCreateGpuInstance", number, gpu, THREE_G, SOMEWHERE)
    box.server.stop()
    with Server(box._host, box.server.root, trusting=True) as server:
        again = Raw(server, upcoming=number + 1)
        assert again.call("nvmlInit_v2", number + 1)[0] == SUCCESS
        assert again.call("nvmlDeviceCreateGpuInstance", number, gpu, THREE_G, SOMEWHERE, again=True) == (UNKNOWN, {})
        assert instances(box) == int(done)
        assert (
            again.call("nvmlDeviceGetCount_v2", number - 1, SOMEWHERE, again=True)[0] == SUCCESS
        )  # it changes nothing


def test_an_answer_that_is_forgotten_is_never_made_up():
    answers = Answers()
    answers.meet(1, 1)
    for number in range(1, ANSWERS_KEPT + 3):
        request, fresh = answers.begin(1, number, again=False)
        assert fresh
        request.settle(b"done")
    first, fresh = answers.begin(1, 1, again=True)
    assert not fresh
    assert first.reply != b"done"
    assert answers.begin(1, ANSWERS_KEPT, again=True)[0].reply == b"done"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_loses_the_answer_and_nobody_knows_what_became_of_the_call(box, when):
    nvml = box.nvml()
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    nvml.nvmlDeviceSetMigMode(gpu, 1)
    box.inject(Fault("nvmlDeviceCreateGpuInstance", "crash", when=when))
    with pytest.raises(pynvml.NVMLError_Unknown):
        nvml.nvmlDeviceCreateGpuInstance(gpu, THREE_G)
    assert instances(box) == int(when == "after")
    assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]  # its session has outlived that


def test_kill_ends_a_stated_program_with_all_it_has_open_and_not_the_server(box):
    nvml, other = box.nvml(pid=100), box.nvml(pid=200)
    for each in (nvml, other):
        each.nvmlInit()
    box.inject(Fault("nvmlDeviceGetCount", "kill"))
    with pytest.raises(pynvml.NVMLError_Uninitialized):  # asked again it is a new program, that never said nvmlInit
        nvml.nvmlDeviceGetCount()
    assert other.nvmlDeviceGetCount() == 1
    assert [client.pid for client in box.snapshot().clients.values()] == [200]


def test_nonsense_ends_its_connection_and_nothing_else(box):
    raw, gpu, number = ready(box.server)
    for packet in (b"?", b"C", b"C" + bytes([9]) + bytes(60), b"H" * 7, b"{nonsense"):
        other = Raw(box.server, token=8)
        other._link.sendall(packet)
        other._link.settimeout(5)
        told = other._link.recv(65536)
        assert told == b"" or b"error" in told
    assert raw.call("nvmlDeviceGetMigMode", number, gpu, SOMEWHERE, SOMEWHERE)[0] == SUCCESS


def test_a_hanging_call_holds_up_nobody_else_and_ends_with_its_caller(box):
    raw, gpu, number = ready(box.server)
    before = threading.active_count()
    box.inject(Fault("nvmlDeviceGetName", "hang"))
    raw.send("nvmlDeviceGetName", number, gpu, SOMEWHERE, 64)
    other = box.nvml(pid=200)
    other.nvmlInit()
    assert other.nvmlDeviceGetCount() == 1
    raw.close()
    assert until(lambda: threading.active_count() <= before, 5.0)  # its own thread is gone, the other's has come
