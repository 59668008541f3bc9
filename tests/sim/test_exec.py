"""`migd sim exec`: a program sees a simulated machine as if it were this one, and nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from c_built import library_or_skip
from controlplane.processes import until

from migd.sim.cface.client import ControlClient
from migd.sim.cface.rooted import rooted_server
from migd.sim.cface.serving import Server
from migd.sim.host import SimHost

CLONE = Path(__file__).parents[2]
WITHIN_S = 20.0
CARVE = """
import pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
pynvml.nvmlDeviceSetMigMode(gpu, 1)
instance = pynvml.nvmlDeviceCreateGpuInstance(gpu, 9)
pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 2)
"""
"""Makes a 3g.40gb on GPU 0 of A100s with 80 GB: GPU instance 2, whose capabilities have the minors 21 and 22."""

ITSELF = """
import subprocess, sys
subprocess.run([sys.argv[1], "-c", "import sys; open(sys.argv[1])", sys.argv[2]], check=True)
"""
"""Whether who runs this Python may run it again: setpriv's own start of it still has root's rights."""


def may_enter() -> str:
    """Why this machine cannot make private mount namespaces; "" where it can."""
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


@pytest.fixture(autouse=True, scope="module")
def _possible() -> None:
    if os.geteuid() != 0:
        pytest.skip("migd sim exec is not tried: it needs root here, to see what it leaves behind")
    if why := may_enter():
        pytest.skip(f"migd sim exec is not tried: {why}")
    library_or_skip("migd sim exec")


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Where the private driver roots of the test come to lie; it must be empty at the end."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


def words(*options: str) -> list[str]:
    return [sys.executable, "-m", "migd", "sim", "exec", *options]


def around(scratch: Path) -> dict[str, str]:
    path = os.pathsep.join([str(CLONE), str(CLONE / "operator")])
    return {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": path}


def run(scratch: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(*options), env=around(scratch), capture_output=True, text=True, check=False, timeout=WITHIN_S * 3
    )


def said(scratch: Path, *options: str) -> str:
    """What a program prints on a machine of two A100s, on which nothing takes time; it must complain of nothing."""
    state = scratch.parent / "machine.json"
    if not state.exists():
        SimHost.open(state, "2xa100-80gb", duration_scale=0.0)
    ran = run(scratch, "--state", str(state), "--", *options)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def runs(pid: str) -> bool:
    """Whether a process has not ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def begun(scratch: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """exec while its program runs; the program says a line first. It is killed at the end, if it still is there."""
    with subprocess.Popen(
        words(*options), env=around(scratch), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


@pytest.fixture
def heeded() -> Iterator[None]:
    """SIGHUP is not ignored, as it is under nohup: a shell that finds it ignored cannot trap it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with rooted_server(SimHost.fresh("2xa100-80gb", duration_scale=0.0, clock="real"), tmp_path / "root") as serving:
        yield serving


def line_of(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


# ---- what the program sees


def test_a_program_with_pynvml_sees_the_gpus(scratch: Path) -> None:
    code = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
    assert said(scratch, sys.executable, "-c", code) == "2\n"


def test_the_drivers_files_lie_over_the_kernels(scratch: Path) -> None:
    script = """
        head -4 /proc/driver/nvidia-caps/mig-minors | tail -1
        sed -n 's/^GPU UUID: *//p' /proc/driver/nvidia/gpus/0000:06:00.0/information | tr -d '\\t '
        grep -c -e nvidia-caps -e ' mem$' /proc/devices
        ls /sys/bus/pci/devices
        cat /sys/bus/pci/devices/0000:03:00.0/device
        readlink -f /sys/bus/pci/devices/0000:03:00.0/driver
        cat /sys/devices/system/cpu/online
        for node in nvidia0 nvidia1 nvidiactl nvidia-uvm nvidia-caps/nvidia-cap1 null; do
            test -c /dev/$node || echo $node
        done
        echo into >/dev/null && echo well
    """
    uuid = SimHost.fresh("2xa100-80gb").gpu_uuids()[1]
    cpus = Path("/sys/devices/system/cpu/online").read_text()
    assert said(scratch, "sh", "-c", script) == (
        f"gpu0/gi0/ci0/access 4\n{uuid}\n2\n0000:03:00.0\n0000:06:00.0\n0x20b2\n"
        f"/sys/bus/pci/drivers/nvidia\n{cpus}well\n"
    )


def test_a_terminal_can_be_opened(scratch: Path) -> None:
    assert said(scratch, sys.executable, "-c", "import os; print(os.isatty(os.openpty()[1]))") == "True\n"


def test_nvidia_smi_lists_the_gpus_and_their_mig_devices(scratch: Path) -> None:
    host = SimHost.fresh("2xa100-80gb")
    first, second = host.gpu_uuids()
    listed = said(scratch, "sh", "-c", f"nvidia-smi -L; '{sys.executable}' -c '{CARVE}' && nvidia-smi -L").splitlines()
    assert listed[:2] == [
        f"GPU 0: NVIDIA A100-SXM4-80GB (UUID: {first})",
        f"GPU 1: NVIDIA A100-SXM4-80GB (UUID: {second})",
    ]
    assert listed[2] == listed[0]
    assert listed[3].startswith("  MIG 3g.40gb     Device  0: (UUID: MIG-")
    assert listed[4:] == listed[1:2]


def test_the_view_follows_what_the_program_does_through_nvml(scratch: Path) -> None:
    code = f"""
import os
here = "/proc/driver/nvidia/capabilities/gpu0/mig"
print(os.path.exists(here), sorted(os.listdir("/dev/nvidia-caps")))
{CARVE}
print(sorted(os.listdir(here + "/gi2")), open(here + "/gi2/ci0/access").readline().strip())
print(sorted(os.listdir("/dev/nvidia-caps")), os.major(os.stat("/dev/nvidia-caps/nvidia-cap21").st_rdev) > 233)
minors = dict(line.split() for line in open("/proc/driver/nvidia-caps/mig-minors"))
print(minors["gpu0/gi2/access"], minors["gpu0/gi2/ci0/access"])
pynvml.nvmlComputeInstanceDestroy(pynvml.nvmlGpuInstanceGetComputeInstanceById(instance, 0))
pynvml.nvmlGpuInstanceDestroy(instance)
print(os.listdir(here), sorted(os.listdir("/dev/nvidia-caps")))
"""
    assert said(scratch, sys.executable, "-c", code).splitlines() == [
        "False ['nvidia-cap1', 'nvidia-cap2']",
        "['access', 'ci0'] DeviceFileMinor: 22",
        "['nvidia-cap1', 'nvidia-cap2', 'nvidia-cap21', 'nvidia-cap22'] True",
        "21 22",
        "[] ['nvidia-cap1', 'nvidia-cap2']",
    ]


def test_proc_modules_can_be_shown_also_where_the_kernel_has_none(scratch: Path) -> None:
    script = "grep -c '^nvidia ' /proc/modules; cat /proc/self/comm /proc/$$/comm; ls /proc/driver"
    ran = run(scratch, "--simulate", "t4", "--modules", "sh", "-c", script)
    assert (ran.returncode, ran.stdout) == (0, "1\ncat\nsh\nnvidia\nnvidia-caps\n")


def test_nobody_else_sees_any_of_it(scratch: Path) -> None:
    before = sorted(os.listdir("/dev")), Path("/proc/mounts").read_text(), sorted(os.listdir("/proc/driver"))
    with begun(scratch, "--simulate", "t4", "sh", "-c", "echo up; cat") as running:
        assert line_of(running) == "up"
        assert (
            sorted(os.listdir("/dev")),
            Path("/proc/mounts").read_text(),
            sorted(os.listdir("/proc/driver")),
        ) == before
        running.communicate()


def test_a_program_of_another_user_sees_it_too(scratch: Path, tmp_path: Path) -> None:
    for folder in (*tmp_path.parents, tmp_path, scratch):
        if folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    assert said(scratch, "setpriv", "--reuid=65534", "--clear-groups", "nvidia-smi", "-L").count("GPU ") == 2


def test_a_user_who_is_not_root_gets_it_by_a_user_namespace(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for folder in (*tmp_path.parents, tmp_path):
        if folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    home.chmod(0o777)
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    for needed in (
        ["unshare", "--user", "--mount", "true"],
        [sys.executable, "-c", ITSELF, sys.executable, str(CLONE / "Makefile")],
    ):
        tried = subprocess.run([*as_nobody, *needed], capture_output=True, text=True, check=False)
        if tried.returncode != 0:
            pytest.skip(f"exec by a user who is not root is not tried: {tried.stderr.strip()[-200:]}")
    script = "id -u; nvidia-smi -L | grep -c GPU; ls /sys/bus/pci/devices; test -c /dev/null && echo node; exit 3"
    around_it = {**around(home), "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    ran = subprocess.run(
        [*as_nobody, *words("--simulate", "t4", "sh", "-c", script)],
        env=around_it,
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S * 3,
    )
    assert (ran.returncode, ran.stderr) == (3, "")
    assert ran.stdout == "65534\n1\n0000:03:00.0\nnode\n"
    assert [path.name for path in home.iterdir()] == ["cache"]


# ---- a machine that is served already


def test_the_machine_of_a_server_is_the_one_that_it_serves(scratch: Path, server: Server) -> None:
    ran = run(scratch, "--root", str(server.root), sys.executable, "-c", CARVE)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [len(gpu.instances) for gpu in server.host.snapshot().gpus] == [1, 0]
    assert (server.root / "dev/nvidia-caps/nvidia-cap21").is_char_device()


def test_the_view_follows_what_others_do_meanwhile(scratch: Path, server: Server) -> None:
    script = "echo up; read go; ls /dev/nvidia-caps | grep -c cap2[12]"
    with begun(scratch, "--root", str(server.root), "sh", "-c", script) as running:
        assert line_of(running) == "up"
        assert run(scratch, "--root", str(server.root), sys.executable, "-c", CARVE).returncode == 0
        assert running.communicate("go\n")[0] == "2\n"
    assert running.returncode == 0


def test_a_reset_is_refused_while_the_gpu_is_held_and_done_after(scratch: Path, server: Server) -> None:
    uuid = server.host.gpu_uuids()[0]
    with ControlClient(server.root) as client:
        client.hold(uuid)
        ran = run(scratch, "--root", str(server.root), "nvidia-smi", "--gpu-reset", "-i", uuid)
        assert ran.returncode == 1
        assert ran.stderr.startswith("The following GPUs could not be reset:\n  GPU 00000000:03:00.0: ")
    assert until(lambda: not server.host.device_users(uuid), WITHIN_S), "a hold ends with its connection"
    ran = run(scratch, "--root", str(server.root), "nvidia-smi", "--gpu-reset", "-i", uuid)
    assert (ran.returncode, ran.stdout) == (0, "GPU 00000000:03:00.0 was successfully reset.\nAll done.\n")


def test_without_a_server_there_it_says_what_to_do(scratch: Path, tmp_path: Path) -> None:
    ran = run(scratch, "--root", str(tmp_path), "true")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        f"migd: {tmp_path}: no server answers there (No such file or directory): "
        f"start `migd sim serve --root {tmp_path}`, or leave --root out for a machine for this program alone\n"
    )


def test_a_state_file_keeps_the_machine_for_the_next(scratch: Path, tmp_path: Path) -> None:
    state = str(tmp_path / "kept.json")
    assert run(scratch, "--simulate", "a100-80gb", "--state", state, sys.executable, "-c", CARVE).returncode == 0
    assert "MIG 3g.40gb" in run(scratch, "--state", state, "nvidia-smi", "-L").stdout


def test_a_server_refuses_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    command = [sys.executable, "-m", "migd", "sim", "serve", "--simulate", "t4", "--root", str(tmp_path)]
    ran = subprocess.run(command, env=around(tmp_path), capture_output=True, text=True, check=False, timeout=WITHIN_S)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "is not empty and no driver root of ours" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


# ---- how it ends


@pytest.mark.parametrize(
    ("program", "status"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -SEGV $$"], 128 + signal.SIGSEGV),
        (["/no/such/program"], 127),
        (["/etc/passwd"], 126),
    ],
)
def test_the_exit_status_is_the_programs_as_shells_say_it(scratch: Path, program: list[str], status: int) -> None:
    assert run(scratch, "--simulate", "t4", "--", *program).returncode == status


def test_a_program_without_a_name_is_not_found(scratch: Path) -> None:
    ran = run(scratch, "--simulate", "t4", "--", "")
    assert (ran.returncode, ran.stderr) == (127, "migd: the program has no name: give one after --\n")


def test_a_python_that_cannot_be_started_is_told_of_and_leaves_nothing(scratch: Path) -> None:
    code = "import sys; sys.executable = '/nowhere/python'; from migd.__main__ import main; main()"
    command = [sys.executable, "-c", code, "sim", "exec", "--simulate", "t4", "true"]
    ran = subprocess.run(command, env=around(scratch), capture_output=True, text=True, check=False, timeout=WITHIN_S)
    assert ran.returncode == 1
    assert ran.stderr == "migd: cannot start /nowhere/python, which this takes: No such file or directory\n"


def test_options_of_the_program_are_its_own_also_without_dashes(scratch: Path) -> None:
    ran = run(scratch, "--simulate", "t4", "echo", "--state", "--wait-idle", "1s", "--help")
    assert ran.stdout == "--state --wait-idle 1s --help\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_is_the_programs(scratch: Path, heeded: None, number: signal.Signals) -> None:
    script = f"trap 'echo heard; exit 9' {int(number)}; echo up; while :; do read line; done"
    with begun(scratch, "--simulate", "t4", "sh", "-c", script) as running:
        assert line_of(running) == "up"
        running.send_signal(number)
        assert line_of(running) == "heard"
        assert running.wait(WITHIN_S) == 9


def test_a_program_finds_signals_as_they_were(scratch: Path) -> None:
    bare = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    wanted = [line.split()[1] for line in bare.splitlines() if line.startswith(("SigBlk", "SigIgn"))]
    script = ["sh", "-c", "grep -e SigBlk -e SigIgn /proc/self/status"]
    assert said(scratch, *script).split()[1::2] == wanted


def test_what_the_program_leaves_running_is_ended(scratch: Path) -> None:
    script = "{ setsid sh -c 'trap \"\" TERM; echo $$; exec sleep 1000' & } | head -1"
    (pid,) = said(scratch, "sh", "-c", script).split()
    assert not runs(pid)


def test_after_a_kill_nothing_stays(scratch: Path) -> None:
    script = "setsid sleep 1000 & echo $!; echo $$; exec cat"
    with begun(scratch, "--simulate", "t4", "sh", "-c", script) as running:
        pids = [line_of(running), line_of(running)]
        assert all(runs(pid) for pid in pids)
        assert len(list(scratch.iterdir())) == 1
        running.kill()
        assert until(lambda: not any(runs(pid) for pid in pids), WITHIN_S), "the processes are ended"
        assert until(lambda: not list(scratch.iterdir()), WITHIN_S), "the folder is removed"


def test_mistakes_are_told_before_anything_runs(scratch: Path, tmp_path: Path) -> None:
    for options, text in (
        (("--simulate", "9xquadro", "true"), "quadro"),
        (("--root", str(tmp_path), "--simulate", "t4", "true"), "--root is a machine that is served already"),
        ((), "Missing argument"),
    ):
        ran = run(scratch, *options)
        assert ran.returncode == 2
        assert text in ran.stderr


# ---- beside a client in process


def test_a_client_in_process_and_a_program_do_not_share_a_session(scratch: Path, server: Server) -> None:
    mine = server.host.nvml()
    mine.nvmlInit()
    assert run(scratch, "--root", str(server.root), "nvidia-smi", "-L").returncode == 0
    assert mine.nvmlDeviceGetCount() == 2
