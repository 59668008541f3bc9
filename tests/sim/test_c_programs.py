"""Programs as they come: pynvml on every Python that is here, forks and pools, libraries closed and opened again."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pynvml
import pytest
from c_clients import python

from migd.sim import SimHost
from migd.sim.cface.client import ControlClient
from migd.sim.cface.serving import Server

MINORS = range(8, 14)  # Pythons that NVIDIA's pynvml is used with


def found(minor):
    """This minor version of Python 3, on PATH or from pyenv; None where there is none."""
    for folder in sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin")):
        return str(folder / f"python3.{minor}")
    return shutil.which(f"python3.{minor}")


@pytest.fixture
def server(c_library, tmp_path):
    host = SimHost.fresh("2xa100-40gb", clock="real", duration_scale=0.0)
    with Server(host, tmp_path / "root") as server:
        yield server
    assert not server.troubles, "\n".join(server.troubles)


@pytest.fixture
def alone(tmp_path):
    """A folder with pynvml and nothing else, for Pythons that have none."""
    folder = tmp_path / "alone"
    folder.mkdir()
    shutil.copy(pynvml.__file__, folder / "pynvml.py")
    return {"PYTHONPATH": str(folder)}


STORY = """
import pynvml as n
from ctypes import byref, c_uint
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
assert n.nvmlDeviceSetMigMode(gpu, 1) == 0
gi = n.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 9, byref(n.c_nvmlGpuInstancePlacement_t(4, 4)))
ci = n.nvmlGpuInstanceCreateComputeInstance(gi, 2)
mig = n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
print(n.nvmlDeviceGetName(mig), n.nvmlDeviceGetUUID(mig)[:4], n.nvmlDeviceGetAttributes_v2(mig).memorySizeMB)
array, count = (n.c_nvmlGpuInstance_t * 7)(), c_uint()
n.nvmlDeviceGetGpuInstances(gpu, 9, array, byref(count))
print(count.value, n.nvmlGpuInstanceGetInfo(array[0]).placement.start)
try:
    n.nvmlGpuInstanceDestroy(gi)
except n.NVMLError_InUse as error:
    print(error)
n.nvmlComputeInstanceDestroy(ci)
n.nvmlGpuInstanceDestroy(gi)
print([v.nvmlReturn for v in n.nvmlDeviceGetFieldValues(gpu, [184, 1])])
n.nvmlDeviceSetMigMode(gpu, 0)
n.nvmlShutdown()
"""
TOLD = """\
NVIDIA A100-SXM4-40GB MIG 3g.20gb MIG- 19968
1 4
In use by another client
[0, 3]
"""


@pytest.mark.parametrize("minor", MINORS, ids=lambda minor: f"3.{minor}")
def test_pynvml_runs_on_every_python(server, alone, minor):
    interpreter = found(minor)
    if interpreter is None:
        pytest.skip(f"python3.{minor} is not here, neither on PATH nor from pyenv")
    program = python(server, STORY, interpreter=interpreter, env=alone)
    assert program.communicate()[0].decode() == TOLD


POOL = """
import multiprocessing, sys
import pynvml as n

def index(number):
    n.nvmlInit()
    return n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByIndex(number % 2))

if __name__ == "__main__":
    n.nvmlInit()
    gpu = n.nvmlDeviceGetHandleByIndex(1)
    with multiprocessing.get_context(sys.argv[1]).Pool(4) as pool:
        print(sum(pool.map(index, range(200))), n.nvmlDeviceGetIndex(gpu))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pools_of_processes_work_however_they_are_started(server, alone, tmp_path, method):
    (tmp_path / "pool.py").write_text(POOL)
    code = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    environment = {"LD_LIBRARY_PATH": str(server.library.parent), **alone}
    command = [sys.executable, str(tmp_path / "pool.py"), method] if method != "fork" else None
    if command is None:
        program = python(server, code, str(tmp_path / "pool.py"), method, env=alone)
        assert program.communicate()[0].decode() == "100 1\n"
        return
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("100 1\n", 0), done.stderr


def test_a_process_forks_while_its_threads_call(server, alone):
    program = python(
        server,
        """
import os, threading, warnings
import pynvml as n
warnings.simplefilter("ignore")
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(1)
over = []
def call():
    while not over:
        assert n.nvmlDeviceGetIndex(gpu) == 1
threads = [threading.Thread(target=call) for _ in range(8)]
for thread in threads: thread.start()
codes = []
for _ in range(40):
    child = os.fork()
    if not child:
        n.nvmlInit()
        os._exit(n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByIndex(1)))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.append(1)
for thread in threads: thread.join()
print(set(codes), n.nvmlDeviceGetIndex(gpu))
""",
        env=alone,
    )
    assert program.communicate()[0].decode() == "{1} 1\n"


def test_the_library_is_closed_and_opened_again_as_go_programs_do(server):
    program = python(
        server,
        """
import ctypes, _ctypes, os, threading
def files(): return len(os.listdir("/proc/self/fd"))
def cycle():
    lib = ctypes.CDLL("libnvidia-ml.so.1", mode=os.RTLD_LAZY | os.RTLD_GLOBAL)
    assert lib.nvmlInit_v2() == 0
    count = ctypes.c_uint()
    def call():
        for _ in range(20):
            assert lib.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert lib.nvmlShutdown() == 0
    _ctypes.dlclose(lib._handle)
    return count.value
cycle()
before = files()
print({cycle() for _ in range(30)}, files() - before <= 4)
""",
    )
    assert program.communicate()[0].decode() == "{2} True\n"


def test_a_library_behind_a_link_finds_the_server_of_its_own_root(server, tmp_path):
    pod = tmp_path / "pod" / "usr" / "lib64"
    pod.mkdir(parents=True)
    (pod / "libnvidia-ml.so.1").symlink_to(server.library)
    program = python(
        server, "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount())", env={"LD_LIBRARY_PATH": str(pod)}
    )
    assert program.communicate()[0].decode() == "2\n"


def test_signals_do_not_disturb_a_call(server):
    program = python(
        server,
        """
import pynvml as n, signal, time
heard = []
signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
n.nvmlInit()
gpu, until = n.nvmlDeviceGetHandleByIndex(1), time.monotonic() + 0.3
while time.monotonic() < until:
    assert n.nvmlDeviceGetIndex(gpu) == 1
events = n.nvmlEventSetCreate()
try:
    n.nvmlEventSetWait(events, 100)
except n.NVMLError_Timeout:
    print(len(heard) > 50)
""",
    )
    assert program.communicate()[0].decode() == "True\n"


# ---- migd sim serve


@contextmanager
def serve(root, *words):
    command = [sys.executable, "-m", "migd", "sim", "serve", "--root", str(root), *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield server
        finally:
            server.kill()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_serve_says_when_it_is_ready_and_ends_when_told_to(c_library, tmp_path, end):
    with serve(tmp_path, "--simulate", "h200") as served:
        ready = served.stdout.readline()
        assert ready.startswith("serving 1xh200: ")
        library, socket = map(Path, ready.split()[2:])
        assert library.exists()
        assert socket == tmp_path / "run/migd/nvml.sock"
        served.send_signal(end)
        assert served.wait(10) == 0
        assert not socket.exists()


def test_a_machine_in_a_file_outlives_its_server(c_library, tmp_path):
    for session in ("pynvml.nvmlDeviceSetMigMode(gpu, 1)", "print(pynvml.nvmlDeviceGetMigMode(gpu))"):
        root = tmp_path / "root"
        with serve(root, "--simulate", "a100-40gb", "--state", tmp_path / "machine.json") as served:
            library = Path(served.stdout.readline().split()[2])
            with ControlClient(root) as control:
                control.switch("duration_scale", 0.0)
            code = f"import pynvml; pynvml.nvmlInit(); gpu = pynvml.nvmlDeviceGetHandleByIndex(0); {session}"
            environment = {"LD_LIBRARY_PATH": str(library.parent)}
            told = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            )
            served.terminate()
            assert served.wait(10) == 0
    assert told.stdout == "[1, 1]\n"


def test_serve_says_what_is_wrong(c_library, tmp_path):
    for words, said in (
        (("--simulate", "potato"), "no GPU called 'potato'"),
        (("--simulate", "a100-40gb", "--state", tmp_path), "cannot be read"),
    ):
        with serve(tmp_path / "root", *words) as served:
            assert said in served.communicate()[1]
            assert served.returncode == 2
