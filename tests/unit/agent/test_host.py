"""The real machine's edges: /proc as files in a folder, nvidia-smi as a program of the test's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from migd.agent.host import HostBoot, HostClock, NvidiaSmiReset
from migd.agent.ports import ResetRefusedError
from migd.agent.processes import COMMAND_MAX, ProcProcesses

CONTAINER = "0123456789abcdef" * 4


def process(proc: Path, pid: int, command: bytes, cgroup: str, opened: str = "") -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "cmdline").write_bytes(command)
    (folder / "comm").write_text("kernel-name\n")
    (folder / "cgroup").write_text(cgroup)
    if opened:
        (folder / "fd" / "3").symlink_to(opened)


@pytest.mark.parametrize(
    "cgroup",
    [
        f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{CONTAINER}.scope\n",
        f"0::/system.slice/docker-{CONTAINER}.scope\n",
        f"0::/kubepods/besteffort/pod1/{CONTAINER}\n",
        f"0::/kubepods.slice/crio-{CONTAINER}.scope/container\n",
        f"12:devices:/docker/{CONTAINER}\n0::/init\n",
    ],
)
def test_a_process_in_a_container_is_named_with_it(tmp_path: Path, cgroup: str) -> None:
    process(tmp_path, 12, b"python\0train.py\0", cgroup)
    assert ProcProcesses(tmp_path).describe(12) == ("python train.py", CONTAINER)


def test_a_process_of_the_host_has_no_container(tmp_path: Path) -> None:
    process(tmp_path, 12, b"", "0::/system.slice/nvidia-dcgm.service\n")
    assert ProcProcesses(tmp_path).describe(12) == ("kernel-name", "")


def test_a_process_that_is_gone_has_no_description(tmp_path: Path) -> None:
    assert ProcProcesses(tmp_path).describe(12) is None


def test_a_long_command_line_is_cut(tmp_path: Path) -> None:
    process(tmp_path, 12, b"java\0" + b"-Dx=y\0" * 5_000, "0::/init\n")
    found = ProcProcesses(tmp_path).describe(12)
    assert found is not None
    assert len(found[0]) == COMMAND_MAX
    assert found[0].endswith("…")


def test_our_own_process_can_be_described() -> None:
    found = ProcProcesses().describe(os.getpid())
    assert found is not None
    assert Path(sys.executable).name in found[0] or "pytest" in found[0]


def test_who_has_the_device_file_open_is_found_by_the_gpus_minor_number(tmp_path: Path) -> None:
    information = tmp_path / "driver/nvidia/gpus/0000:07:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA A100\nGPU UUID: \t GPU-1\nDevice Minor: \t 3\n")
    process(tmp_path, 12, b"nv-hostengine\0", "0::/\n", "/dev/nvidia3")
    process(tmp_path, 13, b"other\0", "0::/\n", "/dev/nvidia0")
    process(tmp_path, os.getpid(), b"migd\0", "0::/\n", "/dev/nvidia3")
    assert ProcProcesses(tmp_path).device_users("GPU-1") == (12,)
    assert ProcProcesses(tmp_path).device_users("GPU-2") == ()


def smi(tmp_path: Path, body: str) -> tuple[str, ...]:
    script = tmp_path / "nvidia-smi.py"
    script.write_text(body)
    return (sys.executable, str(script))


def test_reset_gives_fixed_arguments_for_one_gpu(tmp_path: Path) -> None:
    out = tmp_path / "arguments"
    program = smi(tmp_path, f"import sys; open({str(out)!r}, 'w').write(' '.join(sys.argv[1:]))")
    NvidiaSmiReset(program).reset("GPU-1")
    assert out.read_text() == "--gpu-reset -i GPU-1"


def test_a_refused_reset_repeats_what_the_program_said(tmp_path: Path) -> None:
    program = smi(tmp_path, "print('GPU 0 is currently in use by\\n another process.'); raise SystemExit(255)")
    with pytest.raises(ResetRefusedError, match="255: GPU 0 is currently in use by another process"):
        NvidiaSmiReset(program).reset("GPU-1")


def test_a_reset_that_never_returns_is_ended_with_its_children(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).wait()"
    with pytest.raises(ResetRefusedError, match="did not end within 0 s"):
        NvidiaSmiReset(smi(tmp_path, child), timeout_s=0).reset("GPU-1")


def test_a_missing_program_is_said_to_be_missing() -> None:
    with pytest.raises(ResetRefusedError, match="cannot run `/nowhere/nvidia-smi --gpu-reset -i GPU-1`: No such file"):
        NvidiaSmiReset(("/nowhere/nvidia-smi",)).reset("GPU-1")


def test_the_hosts_clock_moves_forward_and_its_boot_has_an_id() -> None:
    clock = HostClock()
    before = clock.now_s()
    clock.sleep(0)
    assert clock.now_s() >= before
    assert len(HostBoot().boot_id()) == 36
