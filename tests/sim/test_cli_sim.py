"""`migd sim`: holders, faults, reboots and switches of the machine in a file, as other commands then meet them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import OFF, Cli, cut

from migd.cli.exits import Exit
from migd.cli.main import run


@pytest.fixture
def cut_in_two(cli: Cli) -> Cli:
    """An A100 and an H100, each cut in two."""
    cli.machine("a100-80gb,h100-sxm-80gb")
    cli("apply", "-f", cli.plan(cut("2×3g.40gb")))
    return cli


def in_use(cli: Cli, gpu: int) -> list[bool]:
    return [instance["inUse"] for instance in cli("gpus", "-o", "json").json["gpus"][gpu]["instances"]]


def test_a_holder_holds_an_instance_until_it_is_released(cut_in_two: Cli) -> None:
    held = cut_in_two("sim", "hold", "--gpu", "1", "--start", "4", "--command", "vllm", "--container", "abc")
    assert held.code == Exit.DONE
    assert in_use(cut_in_two, 1) == [False, True]
    assert in_use(cut_in_two, 0) == [False, False]
    assert cut_in_two("apply", "-f", cut_in_two.plan(OFF)).code == Exit.BLOCKED
    assert cut_in_two("sim", "release", held.out.strip()).code == Exit.DONE
    assert in_use(cut_in_two, 1) == [False, False]
    assert cut_in_two("apply", "-f", cut_in_two.plan(OFF)).code == Exit.DONE


def test_a_holder_may_hold_a_whole_gpu_be_silent_or_end_by_itself(cut_in_two: Cli) -> None:
    cli = cut_in_two
    cli("apply", "-f", cli.plan(OFF))
    whole = cli("sim", "hold", "--gpu", "0")
    ran = cli("apply", "-f", cli.plan(cut("7g.80gb")))
    assert ran.code == Exit.BLOCKED
    assert f"the GPU as a whole by pid {whole.out.strip()}" in ran.err
    cli("sim", "release", whole.out.strip())
    assert cli("apply", "-f", cli.plan(cut("2×3g.40gb"))).code == Exit.DONE
    silent = cli("sim", "hold", "--gpu", "0", "--start", "0", "--silent", "--command", "dcgm")
    assert in_use(cli, 0) == [False, False], "NVML names no monitor"
    ran = cli("apply", "-f", cli.plan(cut("7g.80gb")))
    assert ran.code == Exit.BLOCKED
    assert "put back as it was" in ran.err
    cli("sim", "release", silent.out.strip())
    cli("sim", "hold", "--gpu", "0", "--start", "0", "--for", "90s")
    assert cli("apply", "-f", cli.plan(cut("7g.80gb")), "--wait-idle").code == Exit.DONE


@pytest.mark.parametrize(
    "words",
    [
        ("hold", "--gpu", "7"),
        ("hold", "--gpu", "0", "--start", "1"),
        ("hold", "--gpu", "0", "--for", "soon"),
        ("release", "1"),
        ("reset", "--gpu", "9"),
        ("lose", "--gpu", "9"),
        ("fault", "nvmlDeviceSetMigMod"),
        ("fault", "nvmlDevice*Geometry"),
        ("fault", "nvmlInit_v2", "--action", "explode"),
        ("fault", "nvmlInit_v2", "--error", "NO_SUCH_CODE"),
        ("fault", "nvmlInit_v2", "--nth", "0"),
        ("switch", "nonsense=1"),
        ("switch", "vm"),
        ("switch", "vm=perhaps"),
        ("switch", "vm=true", "--gpu", "0"),
        ("clock", "sundial"),
        ("reload-driver", "--for", "soon"),
    ],
)
def test_what_no_machine_does_is_bad_usage_and_changes_nothing(cut_in_two: Cli, words: tuple[str, ...]) -> None:
    before = json.loads(cut_in_two.state.read_text())
    ran = cut_in_two("sim", *words)
    assert ran.code == Exit.USAGE
    assert ran.err.startswith("migd: ")
    assert "Traceback" not in ran.err
    assert json.loads(cut_in_two.state.read_text()) == before


def test_a_reboot_takes_instances_and_after_hopper_the_mode(cut_in_two: Cli) -> None:
    assert cut_in_two("sim", "reboot").code == Exit.DONE
    found = cut_in_two("gpus", "-o", "json").json["gpus"]
    assert [(g["mig"]["current"], g["instances"]) for g in found] == [(True, []), (False, [])]
    assert cut_in_two("apply", "-f", cut_in_two.plan(cut("2×3g.40gb"))).code == Exit.DONE


def test_a_reset_is_refused_while_anybody_holds_the_gpu(cut_in_two: Cli) -> None:
    pid = cut_in_two("sim", "hold", "--gpu", "0", "--start", "0").out.strip()
    refused = cut_in_two("sim", "reset", "--gpu", "0")
    assert refused.code == Exit.BLOCKED
    cut_in_two("sim", "release", pid)
    assert cut_in_two("sim", "reset", "--gpu", "0").code == Exit.DONE
    assert cut_in_two("gpus", "-o", "json").json["gpus"][0]["instances"] == []


def test_a_fault_strikes_another_process_once_and_can_be_taken_back(cut_in_two: Cli) -> None:
    cli = cut_in_two
    create = "nvmlDeviceCreateGpuInstanceWithPlacement"
    assert cli("sim", "fault", create, "--error", "NO_PERMISSION", "--gpu", "1").code == Exit.DONE
    ran = cli("apply", "-f", cli.plan(cut("7g.80gb")))
    assert ran.code == Exit.FAILED
    assert "GPU 1 failed (NoPermission)" in ran.err
    cli("sim", "fault", create, "--action", "error", "--times", "0")
    cli("sim", "clear")
    assert cli("apply", "-f", cli.plan(cut("7g.80gb"))).code == Exit.DONE


def test_a_driver_that_is_away_for_a_moment_is_waited_for(cut_in_two: Cli) -> None:
    cut_in_two("sim", "reload-driver", "--for", "5s")
    ran = cut_in_two("gpus", "-o", "json")
    assert ran.code == Exit.DONE
    assert ran.err.count("waiting for the driver") == 1
    cut_in_two("sim", "reload-driver", "--for", "10m")
    ran = cut_in_two("gpus")
    assert ran.code == Exit.FAILED
    assert "the NVIDIA kernel driver is not loaded" in ran.err


def test_a_machine_can_be_made_by_any_of_its_commands(cli: Cli) -> None:
    assert cli("sim", "switch", "vm=true", "--simulate", "2xa100-80gb").code == Exit.DONE
    assert cli("sim", "clock", "virtual", "--simulate", "2xa100-80gb").code == Exit.DONE
    assert cli("sim", "clock", "virtual", "--simulate", "a30").code == Exit.USAGE
    shown = yaml.safe_load(cli("sim", "show").out)
    assert shown["machine"]["switches"]["vm"] is True
    assert json.loads(cli("sim", "show", "-o", "json").out) == shown


def test_a_lost_gpu_can_be_found_again(cut_in_two: Cli) -> None:
    cut_in_two("sim", "lose", "--gpu", "1")
    assert "lost" in cut_in_two("gpus").out
    cut_in_two("sim", "find", "--gpu", "1")
    assert "lost" not in cut_in_two("gpus").out


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("nosuch", "nothing is called 'nosuch'"),
        ("record.sav", "nothing is called 'record.sav'; did you mean record.save?"),
        ("nvmlDeviceCreateGpuInstnce", "did you mean nvmlDeviceCreateGpuInstance"),
    ],
)
def test_a_fault_that_could_never_fire_is_refused(cli: Cli, call: str, says: str) -> None:
    cli.machine("h200")
    ran = cli("sim", "fault", call)
    assert ran.code == Exit.USAGE
    assert says in ran.err


@pytest.mark.parametrize("call", ["reset", "record.*", "devices.refresh", "signal.hang_up", "nvmlDeviceSet*", "*"])
def test_a_fault_can_be_armed_at_every_point_that_migd_passes(cli: Cli, call: str) -> None:
    cli.machine("h200")
    assert cli("sim", "fault", call).code == Exit.DONE


@pytest.mark.parametrize("content", [None, "no machine"])
def test_a_file_that_is_no_machine_gets_nothing_put_beside_it(cli: Cli, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "other" / "some.json"
    path.parent.mkdir()
    if content is not None:
        path.write_text(content)
    before = sorted(path.parent.iterdir())
    assert run(["sim", "show", "--state", str(path)]) == Exit.USAGE
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize(
    "words",
    [
        ["gpus", "--simulate", "h200", "--state-dir", ""],
        ["sim", "serve", "--root", ""],
        ["sim", "serve", "--root", "folder", "--state", ""],
        ["sim", "serve", "--root", "folder", "--simulate", ""],
        ["sim", "exec", "--root", " ", "--", "true"],
        ["sim", "exec", "--state", "", "--", "true"],
    ],
)
def test_a_blank_name_is_refused_and_never_means_here(words: list[str], tmp_path: Path) -> None:
    """As a process of its own: `serve` and `exec` take the signals of the one that they run in."""
    command = [sys.executable, "-m", "migd", *words]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == Exit.USAGE
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []
