"""`migd gpus` and `migd export`: what is there, for people and as the contract says for programs."""

from __future__ import annotations

import pytest
import yaml
from commands import GPUS, OFF, Cli, cut

from migd.cli.exits import Exit
from migd.sim.faults import Fault


def test_a_simulated_machine_is_fresh_and_its_uuids_follow_from_model_and_index(cli: Cli) -> None:
    first, second = (cli.bare("gpus", "--simulate", "2xa100-80gb", "-o", "json") for _ in range(2))
    other = cli.bare("gpus", "--simulate", "h200,2xa100-80gb", "-o", "json")
    assert first.out == second.out
    assert [(g["mig"], g["instances"]) for g in first.json["gpus"]] == [
        ({"capable": True, "current": False, "pending": False}, [])
    ] * 2
    uuids = [g["uuid"] for g in first.json["gpus"]]
    assert len(set(uuids)) == 2
    assert other.json["gpus"][1]["uuid"] == uuids[1]


@pytest.mark.parametrize(
    ("spec", "models"),
    [
        ("8xa100-80gb", ["NVIDIA A100-SXM4-80GB"] * 8),
        ("a100-80gb,2xh200", ["NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA H200"]),
        ('2x"NVIDIA A100-PCIE-40GB"', ["NVIDIA A100-PCIE-40GB"] * 2),
        ("nvidia a30", ["NVIDIA A30"]),
        ("l40s", ["NVIDIA L40S"]),
    ],
)
def test_a_machine_is_named_by_key_nvml_name_or_a_board_without_mig(cli: Cli, spec: str, models: list[str]) -> None:
    ran = cli.bare("gpus", "--simulate", spec, "-o", "json")
    assert ran.code == Exit.DONE
    assert [g["model"] for g in ran.json["gpus"]] == models


@pytest.mark.parametrize("spec", ["9xnothing", "", "  ", ",", "0xa100-80gb", "65xa100-80gb", "a100"])
def test_a_machine_that_is_none_is_refused_and_never_the_real_one_instead(cli: Cli, spec: str) -> None:
    ran = cli.bare("gpus", "--simulate", spec)
    assert (ran.code, ran.out) == (Exit.USAGE, "")
    assert "Traceback" not in ran.err


def test_a_state_file_is_made_at_first_use_and_then_needs_no_spec(cli: Cli) -> None:
    before = cli("gpus")
    assert before.code == Exit.USAGE
    assert "no simulated machine is there yet" in before.err
    assert cli("gpus", "--simulate", "a30").code == Exit.DONE
    assert cli("gpus", "-o", "json").json["gpus"][0]["model"] == "NVIDIA A30"


def test_a_spec_that_disagrees_with_the_file_is_bad_usage(cli: Cli) -> None:
    cli.machine("2xa30")
    ran = cli("gpus", "--simulate", "a30")
    assert ran.code == Exit.USAGE
    assert "holds the machine 2xa30, not 1xa30" in ran.err
    assert cli("gpus", "--simulate", "a30,a30").code == Exit.DONE


def test_json_is_as_its_schema_says_in_every_state_of_a_machine(cli: Cli) -> None:
    host = cli.machine("2xa100-80gb,l40s,h100-sxm-80gb")
    fresh = cli("gpus", "-o", "json")
    assert cli("apply", "-f", cli.plan(cut("2×3g.40gb", "indices: [0, 3]"))).code == Exit.DONE
    host.start_process(0, 4, container="0123456789abcdef0123")
    host.start_process(3, 0, silent=True)
    host.start_process(1)
    host.lose_gpu(2)
    ran = cli("gpus", "-o", "json")
    for answer in (fresh, ran):
        GPUS.validate(answer.json)
        assert answer.json["unfinished"] is None
    assert fresh.json["gpus"][1]["free"]["7g.80gb"] == 1, "with MIG off, free tells what would fit"
    gpu = ran.json["gpus"][0]
    assert [(i["profile"], i["placement"], i["inUse"]) for i in gpu["instances"]] == [
        ("3g.40gb", {"start": 0, "size": 4}, False),
        ("3g.40gb", {"start": 4, "size": 4}, True),
    ]
    assert gpu["instances"][1]["holders"] == [
        {"pid": 40000, "command": "python train.py", "container": "0123456789abcdef0123"}
    ]
    assert yaml.safe_load(cli("gpus", "-o", "yaml").out) == ran.json


def test_the_table_tells_holders_and_gpus_alike_share_a_line(cli: Cli) -> None:
    host = cli.machine("8xa100-80gb")
    cli("apply", "-f", cli.plan(cut("3g.40gb 3×1g.10gb", "indices: [0, 1, 2]")))
    host.start_process(1, 0, container="0123456789abcdef")
    ran = cli("gpus")
    lines = ran.out.splitlines()
    assert any(line.startswith("0, 2  ") and "3g.40gb 3×1g.10gb  0/4" in line for line in lines)
    assert any(line.startswith("1     ") and "3g.40gb 3×1g.10gb  1/4" in line for line in lines)
    assert any(line.startswith("3–7   ") and " off " in line for line in lines)
    assert lines[-2].split() == ["HELD", "PID", "COMMAND", "CONTAINER"]
    assert lines[-1] == "GPU 1 1g.10gb@0  40000  python train.py  0123456789ab"


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_table_fits_the_terminal(cli: Cli, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    ran = cli.bare("gpus", "--simulate", "8xa100-80gb,2xl40s")
    assert max(map(len, ran.out.splitlines())) <= int(columns)
    if columns == "200":
        assert len(ran.out.splitlines()) == 3


def test_what_a_crash_left_is_only_told(cli: Cli) -> None:
    host = cli.machine("2xa100-40gb")
    plan = cli.plan(cut("3g.20gb", "indices: [1]"))
    host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", "crash", when="after"))
    with pytest.raises(BaseException, match="nvmlDeviceCreateGpuInstanceWithPlacement"):
        cli("apply", "-f", plan)
    ran = cli("gpus", "-o", "json")
    GPUS.validate(ran.json)
    (left,) = ran.json["unfinished"]["gpus"]
    assert (left["index"], left["going"], left["step"]) == (1, "forward", "create GPU instance 3g.20gb@4")
    assert left["before"] == {"mig": False, "instances": []}
    assert left["target"] == {
        "mig": True,
        "instances": [{"profile": "3g.20gb", "placement": {"start": 4, "size": 4}}],
    }
    table = cli("gpus")
    assert table.code == Exit.DONE
    assert "note: unfinished: GPU 1 (create GPU instance 3g.20gb@4)" in table.err
    assert "GPU 1: 3g.20gb@4 cannot be used: no whole compute instance" in table.err
    assert "note: unfinished: GPU 1" in cli("plan", "-f", plan).err
    assert cli("gpus", "-o", "json").json == ran.json, "looking changes nothing"


def test_an_export_applies_back_as_nothing_to_do(cli: Cli) -> None:
    cli.machine("3xa100-80gb,l40s")
    cli("apply", "-f", cli.plan(cut("3g.40gb 1g.10gb+me 2×1g.10gb", "indices: [1]"), cut("7g.80gb", "indices: [2]")))
    exported = cli("export", "--name", "kept")
    assert exported.code == Exit.DONE
    assert "GPU 3: cannot do MIG" in exported.err
    path = cli.folder / "kept.yaml"
    path.write_text(exported.out)
    assert yaml.safe_load(exported.out)["metadata"] == {"name": "kept"}
    assert cli("plan", "-f", str(path)).code == Exit.DONE
    again = cli("apply", "-f", str(path))
    assert again.code == Exit.DONE
    assert "nothing was changed: 3 GPUs as wished already" in again.err
    path.write_text(cli("export", "-o", "json").out)
    assert cli("plan", "-f", str(path)).code == Exit.DONE


def test_there_is_nothing_to_export_where_no_gpu_can_do_mig(cli: Cli) -> None:
    ran = cli.bare("export", "--simulate", "2xl40s")
    assert (ran.code, ran.out) == (Exit.FAILED, "")
    assert "no GPU of this machine can do MIG" in ran.err


def test_a_plan_name_that_is_none_is_bad_usage(cli: Cli) -> None:
    ran = cli.bare("export", "--simulate", "a30", "--name", "Not A Name")
    assert ran.code == Exit.USAGE
    assert "--name" in ran.err


def test_a_fragmented_gpu_says_how_much(cli: Cli) -> None:
    cli.machine("a100-40gb")
    cli("apply", "-f", cli.plan(cut("7×1g.5gb")))
    host = cli.host
    for start in (0, 2, 4, 6):
        host.start_process(0, start)
    assert cli("apply", "-f", cli.plan(cut("4×1g.5gb"))).code == Exit.DONE
    ran = cli("gpus", "-o", "json")
    assert ran.json["gpus"][0]["fragmentation"] > 0.5
    assert f"{ran.json['gpus'][0]['fragmentation']:.0%}" in cli("gpus").out
    assert cli("apply", "-f", cli.plan(OFF)).code == Exit.BLOCKED
