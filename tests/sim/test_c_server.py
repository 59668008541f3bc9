"""The server and real programs: whose session is whose and how it ends, faults, restarts, holders, the log, control."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pynvml
import pytest
from c_clients import everybodys_python, python
from controlplane.processes import until

from migd.sim import Fault, ResetRefusedError, SimHost, SimulationError
from migd.sim.cface.client import ControlClient, NoServerError
from migd.sim.cface.peers import privilege_of
from migd.sim.cface.serving import AlreadyServedError, Server

BEGIN = """
import sys, pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
def say(*words):
    print(*words, flush=True)
def hear():
    return sys.stdin.readline().strip()
def attempt(name, *arguments):
    try:
        say(getattr(pynvml, name)(*arguments))
    except pynvml.NVMLError as error:
        say(type(error).__name__)
"""
WAIT_S = 20.0


@pytest.fixture
def host():
    return SimHost.fresh("2xa100-40gb", clock="real", duration_scale=0.0)


@pytest.fixture
def server(c_library, host, tmp_path):
    with Server(host, tmp_path) as server:
        yield server
    assert not server.troubles, "\n".join(server.troubles)


@pytest.fixture
def run(server):
    """Starts Python programs, with what BEGIN has before them; what still runs at the end is killed."""
    started = []

    def start(code, **options):
        started.append(python(server, BEGIN + code, **options))
        return started[-1]

    yield start
    for program in started:
        program.kill()
        program.communicate()


def line(program):
    return program.stdout.readline().decode().strip()


def say(program, word=""):
    program.stdin.write(word.encode() + b"\n")
    program.stdin.flush()


def sessions(host):
    return [client.pid for client in host.snapshot().clients.values()]


def cut(host, index=0, start=0):
    """A GPU with MIG on and one instance of three slices: its MIG UUID."""
    nvml = host.nvml(pid=99)
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    nvml.nvmlDeviceSetMigMode(gpu, 1)
    where = nvml.c_nvmlGpuInstancePlacement_t(start, 4)
    nvml.nvmlGpuInstanceCreateComputeInstance(
        nvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 9, pynvml.byref(where)), 2
    )
    nvml.nvmlShutdown()
    return host.snapshot().gpus[index].instances[-1].compute[0].uuid


# ---- sessions


def test_a_session_is_its_processs_and_ends_with_it_however_that_ends(run, host):
    for end in (signal.SIGKILL, signal.SIGTERM):
        program = run("say('here'); hear()")
        assert line(program) == "here"
        assert sessions(host) == [program.pid]
        [client] = host.snapshot().clients.values()
        assert "-c" in client.command
        program.send_signal(end)
        assert until(lambda: sessions(host) == [], WAIT_S)


def test_all_threads_of_a_process_are_one_client_and_outlive_the_thread_that_began(run, host):
    program = run("""
import threading
threads = [threading.Thread(target=lambda: attempt("nvmlDeviceGetIndex", gpu)) for _ in range(3)]
pynvml.nvmlShutdown()
first = threading.Thread(target=pynvml.nvmlInit)
first.start(); first.join()
gpu = pynvml.nvmlDeviceGetHandleByIndex(1)
for thread in threads: thread.start()
for thread in threads: thread.join()
hear()
""")
    assert [line(program) for _ in range(3)] == ["1"] * 3
    assert sessions(host) == [program.pid]


def test_a_forked_child_is_a_client_of_its_own_and_its_end_is_not_its_parents(run, host):
    program = run("""
import os
child = os.fork()
if not child:
    attempt("nvmlDeviceGetCount")       # never initialised in this process
    pynvml.nvmlInit()
    attempt("nvmlDeviceGetCount")
    hear()
    os._exit(0)
os.waitpid(child, 0)
attempt("nvmlDeviceGetCount")
hear()
""")
    assert line(program) == "NVMLError_Uninitialized"
    assert line(program) == "2"
    assert len(sessions(host)) == 2
    say(program)
    assert line(program) == "2"
    assert until(lambda: sessions(host) == [program.pid], WAIT_S)


def test_a_child_that_outlives_its_parent_does_not_keep_its_session(run, host):
    program = run("""
import os
if os.fork():
    os._exit(0)
say('here'); hear()
""")
    assert line(program) == "here"
    program.wait(WAIT_S)
    assert until(lambda: sessions(host) == [], WAIT_S)
    say(program)


def test_handles_are_good_in_every_thread_and_worthless_in_another_process(run, server):
    other = run("hear(); attempt('nvmlDeviceGetIndex', pynvml.c_nvmlDevice_t.from_buffer_copy(bytes.fromhex(hear())))")
    program = run("say(bytes(gpu).hex()); attempt('nvmlDeviceGetIndex', gpu); hear()")
    handle = line(program)
    assert line(program) == "0"
    say(other)
    say(other, handle)
    assert line(other) == "NVMLError_InvalidArgument"


# ---- faults


def test_kill_ends_the_program_that_called_and_not_the_server(run, host):
    host.inject(Fault("nvmlDeviceGetCount", "kill"))
    assert run("say(pynvml.nvmlDeviceGetCount())").wait(WAIT_S) == -signal.SIGKILL
    assert until(lambda: sessions(host) == [], WAIT_S)
    assert line(run("say(pynvml.nvmlDeviceGetCount())")) == "2"


def test_a_hang_lasts_until_its_program_ends(run, host, server):
    host.inject(Fault("nvmlDeviceGetCount", "hang"))
    hung = run("say('calling'); pynvml.nvmlDeviceGetCount(); say('back')")
    assert line(hung) == "calling"
    assert line(run("say(pynvml.nvmlDeviceGetCount())")) == "2"
    assert hung.poll() is None
    hung.kill()
    assert until(lambda: sessions(host) == [], WAIT_S)


def test_a_delay_is_real_and_delays_nobody_else(run, host):
    host.inject(Fault("nvmlDeviceGetCount", "delay", delay_s=0.5))
    program = run("""
import threading, time
began, ended = time.monotonic(), []
slow = threading.Thread(target=lambda: ended.append((pynvml.nvmlDeviceGetCount(), time.monotonic() - began)))
slow.start()
while time.monotonic() - began < 0.1: pass
for _ in range(50): pynvml.nvmlDeviceGetIndex(gpu)
say(time.monotonic() - began < 0.5)
slow.join()
say(ended[0][0], ended[0][1] >= 0.5)
""")
    assert [line(program), line(program)] == ["True", "2 True"]


def test_what_is_taken_during_a_delay_before_the_effect_is_in_use_when_that_comes(run, host, server):
    """So a test can do something between a program's last look and its destroy."""
    uuid = cut(host)
    program = run("""
gi = pynvml.nvmlDeviceGetGpuInstanceById(gpu, 1)
ci = pynvml.nvmlGpuInstanceGetComputeInstanceById(gi, 0)
for _ in "again", "let go":
    hear()
    attempt("nvmlComputeInstanceDestroy", ci)
""")
    with ControlClient(server.root) as client:
        client.inject(Fault("nvmlComputeInstanceDestroy", "delay", delay_s=1.0))
        say(program)
        assert until(lambda: client.snapshot().faults[0].fired == 1, WAIT_S, 0.01)
        client.hold(uuid)
        assert line(program) == "NVMLError_InUse"
    assert until(lambda: not host.snapshot().processes, WAIT_S)
    say(program)
    assert line(program) == "0"


# ---- restarts


def test_sessions_handles_and_event_sets_outlive_a_restart_of_the_server(run, host, server):
    program = run("""
pynvml.nvmlDeviceSetMigMode(gpu, 1)
gi = pynvml.nvmlDeviceCreateGpuInstance(gpu, 9)
events = pynvml.nvmlEventSetCreate()
pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypeXidCriticalError, events)
say('here'); hear()
attempt("nvmlDeviceGetIndex", gpu)
say(pynvml.nvmlGpuInstanceGetInfo(gi).profileId)
say(pynvml.nvmlEventSetWait(events, 60000).eventData)
""")
    assert line(program) == "here"
    server.stop()
    with Server(host, server.root):
        say(program)
        assert [line(program), line(program)] == ["0", "9"]
        host.raise_xid(0, 48)
        assert line(program) == "48"


def test_a_session_outlives_the_only_connection_that_its_process_had_when_that_breaks_on_our_side(run, host, server):
    program = run("say('here'); hear(); attempt('nvmlDeviceGetIndex', gpu); hear()")
    assert line(program) == "here"
    (link,) = server.links
    link.cut()
    assert until(lambda: not server.links, WAIT_S)
    say(program)
    assert line(program) == "0"
    assert len(sessions(host)) == 1


def test_an_event_wait_goes_on_while_the_server_is_away_and_hears_what_comes_after(run, host, server):
    program = run("""
events = pynvml.nvmlEventSetCreate()
pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypeXidCriticalError, events)
say('waiting')
say(pynvml.nvmlEventSetWait(events, 60000).eventData)
""")
    assert line(program) == "waiting"
    server.stop()
    host.raise_xid(0, 48)
    with Server(host, server.root):
        assert line(program) == "48"


def test_an_event_wait_without_a_server_lasts_as_long_as_it_was_to(run, server):
    program = run("""
import time
events = pynvml.nvmlEventSetCreate()
say('here'); hear()
began = time.monotonic()
attempt("nvmlEventSetWait", events, 300)
say(time.monotonic() - began >= 0.3)
""")
    assert line(program) == "here"
    server.stop()
    say(program)
    assert [line(program), line(program)] == ["NVMLError_Timeout", "True"]


def test_a_call_waits_a_little_for_a_server_that_is_restarted(run, host, server):
    program = run("say('here'); hear(); say('calling'); say(pynvml.nvmlDeviceGetCount())")
    assert line(program) == "here"
    server.stop()
    say(program)
    assert line(program) == "calling"
    with Server(host, server.root):
        assert line(program) == "2"


def test_a_server_that_stays_away_is_a_driver_that_is_not_loaded(run, server):
    program = run("""
import time
say('here'); hear()
attempt("nvmlDeviceGetCount")
began = time.monotonic()
attempt("nvmlDeviceGetCount")
say(time.monotonic() - began < 1)
""")
    assert line(program) == "here"
    server.stop()
    say(program)
    assert [line(program) for _ in range(3)] == ["NVMLError_DriverNotLoaded"] * 2 + ["True"]


def test_the_session_of_a_program_that_ended_meanwhile_does_not_outlive_the_restart(run, c_library, tmp_path):
    path = tmp_path / "machine.json"
    with Server(SimHost.open(path, "a100-40gb"), tmp_path / "root") as server:
        program = python(server, BEGIN + "say('here'); hear()")
        assert line(program) == "here"
        server.stop()
    program.kill()
    program.communicate()
    host = SimHost.open(path)
    with Server(host, server.root):
        assert until(lambda: sessions(host) == [], WAIT_S)


def test_two_servers_of_one_root_are_refused(server, host):
    with pytest.raises(AlreadyServedError, match="a server is at work there already"):
        Server(host, server.root).start()


# ---- what follows the machine


def test_who_follows_the_machine_is_told_before_a_change_is_answered(c_library, host, tmp_path):
    told = []
    with Server(host, tmp_path, lambda machine: told.append(machine.gpus)) as server:
        assert len(told) == 1
        program = python(
            server,
            BEGIN + "pynvml.nvmlDeviceSetMigMode(gpu, 1); pynvml.nvmlDeviceCreateGpuInstance(gpu, 9); say('made')",
        )
        assert line(program) == "made"
        assert [len(gpus[0].instances) for gpus in told] == [0, 0, 1]
        program.communicate()
        host.reboot()  # behind the server's back
        assert until(lambda: told[-1][0].instances == [], WAIT_S)


def test_who_follows_the_machine_and_fails_is_told_again_and_the_failure_is_said_once(c_library, host, tmp_path):
    told = []

    def follow(machine):
        told.append(machine)
        if len(told) < 4:
            raise OSError("no space left")

    with Server(host, tmp_path, follow) as server:
        assert until(lambda: len(told) == 4, WAIT_S)
        assert server.troubles == ["what follows the machine failed: OSError('no space left')"]


# ---- control


def test_a_hold_is_its_holders_and_ends_with_release_or_with_its_connection(server, host):
    uuid = cut(host)
    instance = host.snapshot().gpus[0].instances[0]
    nvml = host.nvml(pid=99)
    nvml.nvmlInit()
    ci = nvml.nvmlGpuInstanceGetComputeInstanceById(
        nvml.nvmlDeviceGetGpuInstanceById(nvml.nvmlDeviceGetHandleByIndex(0), instance.gi_id), 0
    )
    with ControlClient(server.root) as first, ControlClient(server.root) as second:
        assert first.hold(uuid) == second.hold(uuid) == os.getpid()
        [one, other] = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(0))
        assert (one.pid, other.gpuInstanceId) == (os.getpid(), instance.gi_id)
        assert host.describe(os.getpid())[0]
        first.release(uuid)
        with pytest.raises(pynvml.NVMLError_InUse):
            nvml.nvmlComputeInstanceDestroy(ci)
    assert until(lambda: host.snapshot().processes == {}, WAIT_S)
    nvml.nvmlComputeInstanceDestroy(ci)


def test_nobody_holds_what_is_not_there(server, host):
    cut(host)
    with ControlClient(server.root) as control:
        with pytest.raises(SimulationError, match="there is no GPU or MIG device MIG-x here"):
            control.hold("MIG-x")
        with pytest.raises(SimulationError, match="has MIG on: hold one of its MIG devices"):
            control.hold(host.gpu_uuids()[0])
        control.hold(host.gpu_uuids()[1])
        assert [p.gpu_uuid for p in host.snapshot().processes.values()] == [host.gpu_uuids()[1]]


def test_a_hold_can_be_silent_as_monitors_are(server, host):
    uuid = cut(host)
    nvml = host.nvml(pid=99)
    nvml.nvmlInit()
    with ControlClient(server.root) as control:
        control.hold(uuid, silent=True)
        assert nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(0)) == []
        assert len(host.snapshot().processes) == 1


def test_a_reset_is_refused_with_the_reason_or_done(server, host, run):
    uuid = host.gpu_uuids()[0]
    program = run("say('here'); hear()")
    assert line(program) == "here"
    with ControlClient(server.root) as control:
        with pytest.raises(ResetRefusedError, match=f"in use by one or more clients: pid {program.pid}"):
            control.reset(uuid)
        with pytest.raises(ResetRefusedError, match="GPU 7 is not found"):
            control.reset(7)
        program.kill()
        assert until(lambda: sessions(host) == [], WAIT_S)
        assert [control.reset(each) for each in (uuid, 0, "0000:03:00.0")] == [uuid] * 3


def test_faults_and_switches_are_set_from_outside(server, host, run):
    with ControlClient(server.root) as control:
        control.inject(Fault("nvmlDeviceGetCount", code=pynvml.NVML_ERROR_IN_USE))
        assert line(run("attempt('nvmlDeviceGetCount')")) == "NVMLError_InUse"
        control.switch("driver_version", "570.1")
        assert line(run("attempt('nvmlSystemGetDriverVersion')")) == "570.1"
        control.inject(Fault("nvmlDeviceGetCount", code=pynvml.NVML_ERROR_IN_USE))
        control.clear_faults()
        assert control.snapshot() == host.snapshot()
        with pytest.raises(SimulationError, match="no switch is called 'vmm'; did you mean vm"):
            control.switch("vmm", True)
        with pytest.raises(SimulationError, match="nothing is called 'dance'; known: calls, clear, "):
            control.ask("dance")


def test_the_log_says_who_called_what_in_order_and_what_came_of_it(server, host, run):
    cut(host)
    first = run("hear(); attempt('nvmlDeviceGetMigMode', gpu); attempt('nvmlDeviceSetMigMode', gpu, 0); hear()")
    second = run("attempt('nvmlDeviceGetTemperature', gpu, 0); hear()")
    assert line(second) == "NVMLError_NotSupported"
    say(first)
    assert [line(first), line(first)] == ["[1, 1]", "NVMLError_InUse"]
    with ControlClient(server.root) as control:
        calls = control.calls()
        assert [call.began_s for call in calls] == sorted(call.began_s for call in calls)
        told = [(c.name, c.code, c.gpu) for c in control.calls(pid=first.pid)]
        assert told == [
            ("nvmlInitWithFlags", 0, ""),
            ("nvmlDeviceGetHandleByIndex_v2", 0, ""),
            ("nvmlDeviceGetMigMode", 0, host.gpu_uuids()[0]),
            ("nvmlDeviceSetMigMode", pynvml.NVML_ERROR_IN_USE, host.gpu_uuids()[0]),
        ]
        newest = max(call.number for call in calls)
        assert {c.pid for c in calls} == {first.pid, second.pid}
        assert control.calls(after=newest) == []
        assert control.newest() == newest
        assert control.unsimulated() == {"nvmlDeviceGetTemperature": 1}


def test_what_is_larger_than_a_packet_is_told_in_several(server, run):
    program = run("for _ in range(2000): pynvml.nvmlDeviceGetIndex(gpu)\nsay('done'); hear()")
    assert line(program) == "done"
    with ControlClient(server.root) as control:
        assert len(control.calls()) == 2002  # some 300 KB


def test_a_client_says_where_it_found_no_server(tmp_path):
    with pytest.raises(NoServerError, match=r"nvml.sock: no server answers there .*migd sim serve --root ROOT"):
        ControlClient(tmp_path)


# ---- who may what


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to start a program as somebody else")
def test_other_users_read_and_change_nothing(server, host, run, tmp_path):
    interpreter = everybodys_python()
    if interpreter is None:
        pytest.skip("no Python here that other users than root may run")
    uuid = cut(host)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    program = run(
        """
attempt("nvmlDeviceGetMigMode", gpu)
attempt("nvmlDeviceSetMigMode", gpu, 0)
attempt("nvmlDeviceGetGpuInstanceById", gpu, 1)
import os, socket
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect(os.environ["SOCKET"])
for message in (b'{"do":"reset","gpu":1}', b'{"do":"hold","uuid":"%s"}' % os.environ["MIG"].encode()):
    link.send(message)
    say(link.recv(1000).decode())
hear()
""",
        interpreter=interpreter,
        user=65534,
        group=65534,
        env={"SOCKET": str(server.socket), "MIG": uuid, "PYTHONPATH": str(tmp_path)},
    )
    (tmp_path / "pynvml.py").write_bytes(Path(pynvml.__file__).read_bytes())
    assert [line(program) for _ in range(3)] == ["[1, 1]", "NVMLError_NoPermission", "NVMLError_NoPermission"]
    assert "reset is for root" in line(program)
    assert str(program.pid) in line(program)


@pytest.mark.parametrize(
    ("config", "monitor", "uid", "gid", "allowed"),
    [
        (0o400, 0o400, 0, 0, "root"),
        (0o400, 0o400, 12345, 12345, "none"),
        (0o444, 0o400, 12345, 12345, "config"),
        (0o400, 0o444, 12345, 12345, "monitor"),
        (None, None, 12345, 12345, "none"),
    ],
)
def test_a_capabilitys_file_says_who_has_it(tmp_path, config, monitor, uid, gid, allowed):
    folder = tmp_path / "dev" / "nvidia-caps"
    folder.mkdir(parents=True)
    for name, mode in (("nvidia-cap1", config), ("nvidia-cap2", monitor)):
        if mode is not None:
            (folder / name).touch()
            (folder / name).chmod(mode)
    assert privilege_of(uid, gid, tmp_path) == allowed
