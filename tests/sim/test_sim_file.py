"""The simulated machine in a file: several processes see one machine, killed ones too; nothing is overwritten."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref
from pathlib import Path

import pynvml
import pytest

from migd.nvml.gpus import NvmlGpus
from migd.sim import Fault, SimFileError, SimHost, SimulatedCrash, SpecMismatchError

ROOT = Path(__file__).parent.parent.parent
ONE_G, THREE_G = 19, 9


@pytest.fixture
def path(tmp_path):
    return tmp_path / "machine.json"


def opened(path, spec="2xa100-40gb", **switches):
    return SimHost.open(path, spec, duration_scale=0.0, **switches)


def mig_gpu(host):
    nvml = host.nvml()
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    nvml.nvmlDeviceSetMigMode(gpu, 1)
    return nvml, gpu


def create(nvml, gpu, profile_id, start, size):
    return nvml.nvmlDeviceCreateGpuInstanceWithPlacement(
        gpu, profile_id, byref(pynvml.c_nvmlGpuInstancePlacement_t(start, size))
    )


def script(path, body):
    """A Python program on the machine in the file: `host`, `nvml` (initialised), `gpu`."""
    text = (
        "import sys\nfrom migd.sim import Fault, SimHost\n"
        f"host = SimHost.open({str(path)!r})\nnvml = host.nvml()\nnvml.nvmlInit()\n"
        f"gpu = nvml.nvmlDeviceGetHandleByIndex(0)\n{body}\n"
    )
    return [sys.executable, "-c", text]


def run(path, body, **options):
    return subprocess.run(script(path, body), cwd=ROOT, capture_output=True, text=True, timeout=60, **options)


def test_two_hosts_on_one_file_are_one_machine(path):
    one, other = opened(path), SimHost.open(path)
    nvml, gpu = mig_gpu(one)
    create(nvml, gpu, THREE_G, 4, 4)
    theirs = other.nvml()
    theirs.nvmlInit()
    seen = theirs.nvmlDeviceGetHandleByIndex(0)
    theirs.nvmlGpuInstanceDestroy(theirs.nvmlDeviceGetGpuInstanceById(seen, 2))
    with pytest.raises(pynvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetGpuInstanceById(gpu, 2)
    other.switch("names", {"3g.20gb": "3g.21gb"})
    assert nvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, 2).name == "3g.21gb"
    assert one.boot_id() == other.boot_id()
    other.reboot()
    assert one.boot_id() == other.boot_id()


def test_the_machine_is_made_once_and_must_be_the_one_asked_for(path):
    with pytest.raises(SimFileError, match="no simulated machine is there yet: --simulate 8xa100-80gb makes one"):
        SimHost.open(path)
    first = opened(path)
    assert SimHost.open(path, "a100-40gb,a100-40gb").gpu_uuids() == first.gpu_uuids()
    with pytest.raises(SpecMismatchError, match="holds the machine 2xa100-40gb, not 1xh200"):
        SimHost.open(path, "h200")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no JSON"),
        ("hello", "no JSON"),
        ("[1, 2]", "not a simulated machine"),
        ('{"format": "migd-sim-machine", "version": 99}', "version 99"),
        ('{"format": "migd-sim-machine", "version": 1, "machine": {"spec": "h200"}}', "damaged"),
    ],
)
def test_a_file_that_is_no_machine_is_refused_and_left_alone(path, text, says):
    path.write_text(text)
    with pytest.raises(SimFileError, match=says):
        SimHost.open(path, "h200")
    assert path.read_text() == text


def test_a_file_that_turns_bad_in_use_is_refused_and_left_alone(path):
    nvml, gpu = mig_gpu(opened(path))
    path.write_text("half a docu")
    for _ in range(2):
        with pytest.raises(SimFileError, match=r"machine\.json"):
            nvml.nvmlDeviceGetMigMode(gpu)
    assert path.read_text() == "half a docu"


def test_an_unreadable_place_is_an_error_for_people(tmp_path):
    with pytest.raises(SimFileError, match="cannot be locked"):
        SimHost.open(tmp_path / "no" / "such" / "folder.json", "h200")
    with pytest.raises(SimFileError, match="cannot be read"):
        SimHost.open(tmp_path, "h200")


def test_reading_writes_nothing(path):
    nvml, gpu = mig_gpu(opened(path))
    before = path.stat()
    for _ in range(3):
        nvml.nvmlDeviceGetMigMode(gpu)
        nvml.nvmlDeviceGetName(gpu)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert os.listdir(path.parent) != []
    json.loads(path.read_text())


def test_other_processes_see_and_make_the_same_instances(path):
    host = opened(path)
    nvml, gpu = mig_gpu(host)
    done = run(path, "gi = nvml.nvmlDeviceCreateGpuInstance(gpu, 9)\nprint(nvml.nvmlGpuInstanceGetInfo(gi).id)")
    assert done.stdout == "2\n", done.stderr
    assert nvml.nvmlGpuInstanceGetInfo(nvml.nvmlDeviceGetGpuInstanceById(gpu, 2)).profileId == THREE_G


def test_many_processes_at_once_never_overlap(path):
    host = opened(path)
    mig_gpu(host)
    body = (
        "made = 0\n"
        "for _ in range(7):\n"
        "    try:\n"
        "        nvml.nvmlDeviceCreateGpuInstance(gpu, 19)\n"
        "        made += 1\n"
        "    except nvml.NVMLError_InsufficientResources:\n"
        "        break\n"
        "print(made)"
    )
    with ThreadPoolExecutor(3) as pool:
        made = [int(done.stdout) for done in pool.map(lambda _: run(path, body), range(3))]
    assert sum(made) == 7
    assert sorted(i.start for i in host.snapshot().gpus[0].instances) == list(range(7))


def test_the_session_of_a_dead_process_is_gone(path):
    host = opened(path)
    [uuid, _] = host.gpu_uuids()
    other = subprocess.Popen(
        script(path, "print('up', flush=True)\nsys.stdin.read()"),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "up\n"
        assert host.device_users(uuid) == (other.pid,)
    finally:
        other.kill()
        other.communicate()
    assert host.device_users(uuid) == ()
    host.reset(uuid)


def test_the_session_of_a_process_in_another_pid_namespace_is_kept_though_its_pid_is_nobodys_here(path):
    """As of containers that share the file: only who is in its namespace can tell whether a process lives."""
    host = opened(path)
    child = subprocess.Popen(script(path, "print(1, flush=True)\nsys.stdin.read()"), cwd=ROOT, stdin=-1, stdout=-1)
    child.stdout.readline()
    document = json.loads(path.read_text())
    child.kill()
    child.communicate()
    (client,) = document["machine"]["clients"].values()
    assert client["space"] == os.stat("/proc/self/ns/pid").st_ino
    client["space"] += 1
    path.write_text(json.dumps(document))
    assert [one.pid for one in host.snapshot().clients.values()] == [child.pid]


@pytest.mark.parametrize(("when", "made"), [("before", 0), ("after", 1)])
def test_a_killed_process_leaves_what_it_did_and_the_fault_does_not_come_again(path, when, made):
    host = opened(path)
    mig_gpu(host)
    host.inject(Fault("nvmlDeviceCreateGpuInstance", "kill", when=when))
    body = "nvml.nvmlDeviceCreateGpuInstance(gpu, 9)\nprint('alive')"
    assert run(path, body).returncode == -signal.SIGKILL
    assert len(host.snapshot().gpus[0].instances) == made
    assert run(path, body).stdout == "alive\n"
    assert len(host.snapshot().gpus[0].instances) == made + 1
    assert list(path.parent.glob(".*.new")) == []


def test_a_crash_in_a_file_is_counted_before_it_fires(path):
    nvml, gpu = mig_gpu(host := opened(path))
    host.inject(Fault("nvmlDeviceCreateGpuInstance", "crash", when="after"))
    with pytest.raises(SimulatedCrash):
        nvml.nvmlDeviceCreateGpuInstance(gpu, THREE_G)
    again = SimHost.open(path)
    assert [f.fired for f in again.snapshot().faults] == [1]
    assert len(again.snapshot().gpus[0].instances) == 1


def test_a_virtual_clock_can_live_in_a_file(path):
    host = opened(path, clock="virtual")
    other = SimHost.open(path)
    before = other.clock.now_s()
    pid = host.start_process(0, ends_after_s=100)
    host.clock.sleep(100)
    assert other.clock.now_s() - before == pytest.approx(100)
    assert other.describe(pid) is None


def test_calls_are_logged_in_a_file_only_when_asked(path):
    host = opened(path)
    mig_gpu(host)
    assert list(host.calls) == []
    host.log_calls(True)
    mig_gpu(host)
    assert [c.name for c in host.calls][:1] == ["nvmlInit"]


def test_a_look_writes_nothing_and_leaves_nothing_unsaved(path):
    host = opened(path)
    nvml, gpu = mig_gpu(host)
    made = create(nvml, gpu, ONE_G, 0, 1)
    nvml.nvmlGpuInstanceCreateComputeInstance(made, 0)
    gpus = NvmlGpus(host.nvml(), host.caller)
    gpus.look()  # opens a session, which is written
    before, inode = path.read_bytes(), path.stat().st_ino
    gpus.look()
    assert path.stat().st_ino == inode, "each write replaces the file"
    host.snapshot()  # compares everything, and writes what differs
    assert path.read_bytes() == before


def test_a_query_saves_what_happened_by_itself_and_what_faults_counted(path):
    host = opened(path, clock="virtual")
    nvml, gpu = mig_gpu(host)
    instance = create(nvml, gpu, ONE_G, 0, 1)
    nvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    host.start_process(0, 0, ends_after_s=5.0)
    assert json.loads(path.read_text())["machine"]["processes"]
    host.clock.sleep(6.0)
    nvml.nvmlDeviceGetMigMode(gpu)
    assert json.loads(path.read_text())["machine"]["processes"] == {}
    host.inject(Fault("nvmlDeviceGetMigMode", nth=9))
    nvml.nvmlDeviceGetMigMode(gpu)
    assert json.loads(path.read_text())["machine"]["faults"][0]["seen"] == 1
