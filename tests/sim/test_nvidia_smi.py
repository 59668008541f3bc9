"""What stands for nvidia-smi under a driver root: it lists and resets, and says of the rest that it cannot."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from c_built import library_or_skip

from migd.sim.cface.client import ControlClient
from migd.sim.cface.rooted import NVIDIA_SMI, rooted_server
from migd.sim.cface.serving import Server
from migd.sim.host import SimHost


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    library_or_skip("nvidia-smi's stand-in")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    host = SimHost.fresh("2xa100-80gb,t4", duration_scale=0.0, clock="real")
    with rooted_server(host, tmp_path / "root") as serving:
        yield serving


def smi(root: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error), with an environment of these variables alone."""
    ran = subprocess.run(
        [str(root / NVIDIA_SMI), *words], env=environment, capture_output=True, text=True, check=False, timeout=30
    )
    return ran.returncode, ran.stdout, ran.stderr


def test_it_finds_library_and_server_by_where_it_lies(server: Server) -> None:
    uuids = server.host.gpu_uuids()
    names = ["NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", "Tesla T4"]
    listed = "".join(f"GPU {i}: {name} (UUID: {uuids[i]})\n" for i, name in enumerate(names))
    assert smi(server.root, "-L") == smi(server.root, "--list-gpus") == (0, listed, "")


def test_of_a_lost_gpu_it_says_that_it_cannot_be_listed_and_lists_the_others(server: Server) -> None:
    server.host.lose_gpu(0)
    status, listed, complaint = smi(server.root, "-L")
    assert (status, listed.count("GPU ")) == (1, 2)
    assert complaint == "Unable to determine the device handle for GPU 0: GPU is lost\n"


@pytest.mark.parametrize("how", [["-r", "-i"], ["--gpu-reset", "-i"], ["-i"], ["--gpu-reset", "--id"]])
@pytest.mark.parametrize("which", ["index", "uuid", "0000:06:00.0", "00000000:06:00.0", "06:00.0"])
def test_a_gpu_is_reset_by_any_of_its_names(server: Server, how: list[str], which: str) -> None:
    name = {"index": "1", "uuid": server.host.gpu_uuids()[1]}.get(which, which)
    more = ["-r"] if how == ["-i"] else []
    assert smi(server.root, *how, name, *more) == (0, "GPU 00000000:06:00.0 was successfully reset.\nAll done.\n", "")


def test_without_names_all_are_reset(server: Server) -> None:
    status, told, _ = smi(server.root, "-r")
    assert (status, told.count("was successfully reset")) == (0, 3)


def test_of_several_those_that_can_be_reset_are_and_the_rest_is_told(server: Server) -> None:
    with ControlClient(server.root) as client:
        client.hold(server.host.gpu_uuids()[0])
        status, told, complaint = smi(server.root, "-r", "-i", "0,1")
    assert (status, told) == (1, "GPU 00000000:06:00.0 was successfully reset.\n")
    assert complaint.startswith("The following GPUs could not be reset:\n  GPU 00000000:03:00.0: ")
    assert len(complaint.splitlines()) == 2


def test_with_an_unknown_name_none_is_reset(server: Server) -> None:
    assert smi(server.root, "-r", "-i", "0,7") == (6, "", "No devices were found: there is no GPU 7\n")


@pytest.mark.parametrize(
    "words", [["-q"], ["mig", "-lgi"], ["--query-gpu=name", "--format=csv"], [], ["-L", "-r"], ["-i", "0"]]
)
def test_what_it_cannot_do_it_says(server: Server, words: list[str]) -> None:
    status, told, complaint = smi(server.root, *words)
    assert (status, told) == (2, "")
    assert complaint.startswith("nvidia-smi: ")
    assert "This is not NVIDIA's nvidia-smi: it stands for it on GPUs that migd simulates, and can only\n" in complaint


def test_help_is_no_mistake(server: Server) -> None:
    status, told, complaint = smi(server.root, "--help")
    assert (status, complaint) == (0, "")
    assert "--gpu-reset" in told


def test_without_a_server_it_says_so_as_without_a_driver(server: Server) -> None:
    server.stop()
    for words, why in ((["-L"], "no server answers, or it refuses"), (["-r"], f"no server answers at {server.socket}")):
        status, told, complaint = smi(server.root, *words)
        assert (status, told) == (9, "")
        assert complaint.startswith("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
        assert complaint.endswith(f"(It is migd's simulated one: {why}.)\n")


def test_a_server_is_found_by_the_environment_too_and_at_a_path_of_any_length(tmp_path: Path) -> None:
    root = tmp_path / ("deep" * 40)
    with rooted_server(SimHost.fresh("t4", duration_scale=0.0, clock="real"), root) as serving:
        assert smi(root, "-r")[0] == 0
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes((root / NVIDIA_SMI).read_bytes())
        elsewhere.chmod(0o755)
        ran = subprocess.run([elsewhere, "-r"], env={"MIGD_SIM_SOCKET": str(serving.socket)}, check=False)
        assert ran.returncode == 0
