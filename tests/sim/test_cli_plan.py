"""`migd plan` and `apply --dry-run`: what would happen, the exit code that says so, and nothing touched."""

from __future__ import annotations

import io
import shutil
import sys
from itertools import permutations
from pathlib import Path

import pytest
import yaml
from commands import DATA, OFF, PLAN, Cli, cut

from migd.cli.exits import Exit
from migd.cli.machines import beside

H01, H02 = str(DATA / "h01-migparted-a100-40gb.yaml"), str(DATA / "h02-gpuop-configmap-3gx2-1g.yaml")


def test_changes_are_5_and_nothing_to_do_is_0_for_plan_and_dry_run_alike(cli: Cli) -> None:
    cli.machine("2xa100-80gb")
    plan = cli.plan(cut("3g.40gb 3×1g.10gb", "indices: [0]"))
    for output in ("table", "json"):
        shown = cli("plan", "-f", plan, "-o", output)
        dry = cli("apply", "--dry-run", "-f", plan, "-o", output)
        assert (shown.code, dry.code) == (Exit.CHANGES, Exit.CHANGES)
        assert (shown.out, shown.err) == (dry.out, dry.err)
    assert cli("apply", "-f", plan).code == Exit.DONE
    ran = cli("plan", "-f", plan)
    assert ran.code == Exit.DONE
    assert ran.out.endswith("\nNothing to do.\n")


def test_a_preview_shows_what_is_kept_destroyed_and_created_and_sums_it_up(cli: Cli) -> None:
    cli.machine("2xa100-80gb")
    first = cli("plan", "-f", cli.plan(cut("3g.40gb 3×1g.10gb")))
    assert first.out.splitlines() == [
        "GPU  MODEL                  VERDICT  MIG             KEEP  DESTROY  CREATE",
        "0–1  NVIDIA A100-SXM4-80GB  change   turn on, reset  -     -        1g.10gb@0,1,2 3g.40gb@4",
        "",
        "2 GPUs would change: 0 instances kept, 0 destroyed, 8 created, MIG turned on for 2, 2 reset.",
    ]
    cli("apply", "-f", cli.plan(cut("3g.40gb 3×1g.10gb")))
    second = cli("plan", "-f", cli.plan(cut("7×1g.10gb", "indices: [1]")))
    assert second.out.splitlines()[1:] == [
        "0    NVIDIA A100-SXM4-80GB  left alone  -    1g.10gb@0,1,2 3g.40gb@4  -          -",
        "1    NVIDIA A100-SXM4-80GB  change      -    1g.10gb@0,1,2            3g.40gb@4  1g.10gb@3,4,5,6",
        "",
        "1 GPU would change: 3 instances kept, 1 destroyed, 4 created.",
    ]


def test_a_preview_touches_nothing(cli: Cli) -> None:
    cli.machine("2xa100-80gb")
    before = cli("gpus", "-o", "json").out
    for rule in (cut("7×1g.10gb"), cut("3×3g.40gb"), OFF):
        cli("plan", "-f", cli.plan(rule))
    assert cli("gpus", "-o", "json").out == before
    assert not beside(cli.state).exists(), "not even the state folder is made"


def test_several_configs_and_none_chosen_are_listed(cli: Cli) -> None:
    for command in (("plan",), ("apply",), ("apply", "--dry-run")):
        ran = cli.bare(*command, "-f", H02, "--simulate", "8xa100-80gb")
        assert (ran.code, ran.out) == (Exit.USAGE, "")
        assert "all-1g.10gb, all-2g.20gb, all-3g.40gb, all-7g.80gb, all-disabled" in ran.err
        assert "choose one with -c NAME" in ran.err


def test_a_config_that_does_not_exist_is_refused_with_those_that_do(cli: Cli) -> None:
    ran = cli.bare("plan", "-f", H02, "-c", "all-3g.40g", "--simulate", "8xa100-80gb")
    assert ran.code == Exit.USAGE
    assert "all-1g.10gb" in ran.err
    assert "did you mean all-3g.40gb?" in ran.err


def test_an_infeasible_entry_is_refused_once_for_all_gpus_with_the_nearest_that_fits(cli: Cli) -> None:
    for command in ("plan", "apply"):
        ran = cli.bare(command, "-f", H02, "-c", "all-3g.40gb", "--simulate", "8xa100-80gb")
        assert ran.code == Exit.INFEASIBLE
        (line,) = ran.err.splitlines()
        assert line == (
            "GPU 0–7 refused (Infeasible): NVIDIA A100-SXM4-80GB: 2×3g.40gb + 1g.10gb does not fit on this GPU: no "
            "place is left for 1g.10gb. Nearest that fits: 2×3g.40gb or 3g.40gb + 1g.10gb or 3g.40gb + 1g.10gb + "
            "1g.10gb+me."
        )


def test_its_siblings_in_the_same_file_are_accepted(cli: Cli) -> None:
    for config in ("all-1g.10gb", "all-2g.20gb", "all-7g.80gb"):
        assert cli.bare("plan", "-f", H02, "-c", config, "--simulate", "8xa100-80gb").code == Exit.CHANGES
    assert cli.bare("plan", "-f", H02, "-c", "all-disabled", "--simulate", "8xa100-80gb").code == Exit.DONE


def test_a_config_for_a_plan_is_a_mistake(cli: Cli) -> None:
    ran = cli.bare("plan", "-f", cli.plan(OFF), "-c", "x", "--simulate", "a30")
    assert ran.code == Exit.USAGE
    assert "leave it out" in ran.err


@pytest.mark.parametrize("given", [Path(H02).read_bytes(), b"\xef\xbb\xbf" + Path(H02).read_bytes()])
def test_standard_input_is_read_for_a_dash(cli: Cli, given: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    named = cli.bare("plan", "-f", H02, "-c", "all-2g.20gb", "--simulate", "2xa100-80gb", "-o", "json")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    piped = cli.bare("plan", "-f", "-", "-c", "all-2g.20gb", "--simulate", "2xa100-80gb", "-o", "json")
    assert (piped.code, piped.out) == (Exit.CHANGES, named.out)


def test_what_concerns_clusters_is_ignored_with_one_note(cli: Cli) -> None:
    plan = cli.plan(
        cut("7g.80gb"),
        nodeSelector={"matchLabels": {"pool": "inference"}},
        priority=5,
        rollout={"maxUnavailable": "25%"},
        approval="Manual",
        disruption={"policy": "Evict", "maxEvictions": 3},
    )
    for command, code in (("plan", Exit.CHANGES), ("apply", Exit.DONE)):
        ran = cli.bare(command, "-f", plan, "--simulate", "a100-80gb")
        assert ran.code == code
        (note,) = (line for line in ran.err.splitlines() if "ignored" in line)
        for field in ("nodeSelector", "priority", "rollout", "approval", "Evict", "maxEvictions"):
            assert field in note


def test_json_is_as_its_schema_says_for_every_verdict_and_lists_every_gpu(cli: Cli) -> None:
    host = cli.machine("6xa100-80gb,l40s")
    cli("apply", "-f", cli.plan(cut("3g.40gb 3×1g.10gb", "indices: [0, 1, 2, 3]")))
    host.start_process(1, 4, container="0123456789abcdef")
    host.start_process(4)
    plans = [
        cli.plan(cut("7×1g.10gb", "indices: [0, 1]"), cut("7g.80gb", "indices: [2, 4]"), OFF, name="a.yaml"),
        cli.plan(cut("3×3g.40gb", "indices: [0]"), cut("1g.5gb", "indices: [3, 6]"), name="b.yaml"),
        cli.plan(cut("3g.40gb 3×1g.10gb", "indices: [0, 1]"), name="c.yaml"),
    ]
    for plan, code in zip(plans, (Exit.BLOCKED, Exit.INFEASIBLE, Exit.DONE), strict=True):
        ran = cli("plan", "-f", plan, "-o", "json")
        assert ran.code == code
        PLAN.validate(ran.json)
        assert [gpu["index"] for gpu in ran.json["gpus"]] == list(range(7))
        assert yaml.safe_load(cli("plan", "-f", plan, "-o", "yaml").out) == ran.json
    blocked = cli("plan", "-f", plans[0], "-o", "json").json["gpus"]
    assert [(b["pid"], b["container"], b["instance"]) for b in blocked[1]["blockedBy"]] == [
        (40000, "0123456789abcdef", "3g.40gb@4")
    ]
    assert [(b["pid"], b["instance"]) for b in blocked[4]["blockedBy"]] == [(40001, None)]
    refused = cli("plan", "-f", plans[1], "-o", "json").json["gpus"]
    assert refused[0]["refused"]["leftOver"] == {"3g.40gb": 1}
    assert {"3g.40gb": 2} in refused[0]["refused"]["nearest"]
    assert [refused[i]["refused"]["reason"] for i in (3, 6)] == ["UnknownProfile", "NotCapable"]
    assert [gpu["matched"] for gpu in refused] == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("rules", list(permutations(["infeasible", "blocked", "change"])))
def test_of_several_verdicts_the_first_that_applies_is_the_exit_code(cli: Cli, rules: tuple[str, ...]) -> None:
    host = cli.machine("3xa100-80gb")
    cli("apply", "-f", cli.plan(cut("7×1g.10gb")))
    for gpu in range(3):
        host.start_process(gpu, 0)
    wishes = {"infeasible": "3×3g.40gb", "blocked": "7g.80gb", "change": "2g.20gb 1g.10gb"}
    for number in (1, 2, 3):
        plan = cli.plan(*(cut(wishes[rule], f"indices: [{i}]") for i, rule in enumerate(rules[:number])))
        expected = (
            Exit.INFEASIBLE
            if "infeasible" in rules[:number]
            else Exit.BLOCKED
            if "blocked" in rules[:number]
            else Exit.CHANGES
        )
        assert cli("plan", "-f", plan).code == expected
        applied = cli("apply", "-f", plan)
        assert applied.code == (Exit.DONE if expected is Exit.CHANGES else expected)
    assert cli("plan", "-f", cli.plan(*(cut("3×3g.40gb", f"indices: [{i}]") for i in (0, 9)))).code == Exit.USAGE


def test_an_index_the_machine_lacks_is_bad_input_and_named_with_what_it_has(cli: Cli) -> None:
    ran = cli.bare("plan", "-f", cli.plan(cut("7g.80gb", "indices: [0, 8]")), "--simulate", "8xa100-80gb")
    assert ran.code == Exit.USAGE
    assert "plan names GPU index 8; this machine has 0–7" in ran.err


def test_an_older_driver_that_lists_no_profiles_is_said_instead_of_guessed(cli: Cli) -> None:
    cli.machine("a100-80gb", profiles_while_off=False)
    plan = cli.plan(cut("3g.40gb 3×1g.10gb"))
    ran = cli("plan", "-f", plan)
    assert ran.code == Exit.CHANGES
    assert "known once MIG is on" in ran.out
    assert "this driver lists no profiles while MIG is off" in ran.err
    assert cli("gpus", "-o", "json").json["gpus"][0]["free"] == {}
    assert cli("apply", "-f", plan).code == Exit.DONE
    assert cli("gpus", "-o", "json").json["gpus"][0]["free"]["1g.10gb"] == 1


def test_a_plan_that_waits_for_a_reboot_is_blocked_until_then(cli: Cli) -> None:
    cli.machine("2xa100-80gb", vm=True)
    plan = cli.plan(cut("2×3g.40gb"))
    assert cli("plan", "-f", plan).code == Exit.CHANGES
    assert cli("apply", "-f", plan).code == Exit.BLOCKED
    ran = cli("plan", "-f", plan)
    assert ran.code == Exit.BLOCKED
    assert "GPU 0–1 needs a reboot (RebootRequired)" in ran.err
    assert cli("plan", "-f", cli.plan(OFF, name="off.yaml")).code == Exit.CHANGES, "another plan is free to begin"
    cli("sim", "reboot")
    assert cli("plan", "-f", plan).code == Exit.CHANGES
    assert cli("apply", "-f", plan).code == Exit.DONE


def test_equal_input_gives_equal_output_to_the_byte(cli: Cli, tmp_path: Path) -> None:
    body = {
        "apiVersion": "migd.dev/v1alpha1",
        "kind": "GPUPartitionPlan",
        "metadata": {"name": "x"},
        "spec": {
            "nodeSelector": {},
            "rules": [
                {"gpus": {"indices": [1]}, "instances": [{"profile": "3g.40gb"}, {"profile": "1g.10gb", "count": 2}]},
                {"gpus": {"all": True}, "instances": [{"memoryGB": 20, "count": 2}]},
            ],
        },
    }
    cli.machine("3xa100-80gb")
    plan = tmp_path / "shuffled.yaml"
    outs = set()
    for reverse in (False, True):
        shuffled = _reversed(body) if reverse else body
        plan.write_text(yaml.safe_dump(shuffled, sort_keys=False))
        for output in ("json", "table"):
            outs.add((output, cli("plan", "-f", str(plan), "-o", output).out))
    assert len(outs) == 2


def _reversed(value: object) -> object:
    if isinstance(value, dict):
        return {key: _reversed(inner) for key, inner in reversed(value.items())}
    return [_reversed(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_preview_fits_the_terminal(cli: Cli, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    cli.machine("8xa100-80gb")
    cli("apply", "-f", cli.plan(cut("3g.40gb 3×1g.10gb")))
    ran = cli("plan", "-f", cli.plan(cut("2×2g.20gb 3×1g.10gb")))
    assert max(map(len, ran.out.splitlines())) <= int(columns)


def test_an_imported_plan_means_what_the_file_means(cli: Cli) -> None:
    cli.machine("8xa100-40gb")
    for config in ("all-disabled", "all-balanced", "custom-config"):
        imported = cli.bare("import", H01, "-c", config)
        assert imported.code == Exit.DONE
        path = cli.folder / "imported.yaml"
        path.write_text(imported.out)
        direct = cli("plan", "-f", H01, "-c", config, "-o", "json")
        assert cli("plan", "-f", str(path), "-o", "json").out == direct.out
        path.write_text(cli.bare("import", "-f", H01, "-c", config, "-o", "json").out)
        assert cli("plan", "-f", str(path), "-o", "json").out == direct.out


def test_an_import_needs_one_file_and_no_plan(cli: Cli) -> None:
    assert cli.bare("import").code == Exit.USAGE
    assert cli.bare("import", H01, "-f", H01).code == Exit.USAGE
    assert "is a plan already" in cli.bare("import", cli.plan(OFF)).err
    listed = cli.bare("import", H02)
    assert listed.code == Exit.USAGE
    assert "choose one with -c NAME" in listed.err


def test_a_copied_machine_is_the_same_machine(cli: Cli, tmp_path: Path) -> None:
    cli.machine("a100-80gb")
    plan = cli.plan(cut("7×1g.10gb"))
    cli("apply", "-f", plan)
    other = tmp_path / "other.json"
    shutil.copy(cli.state, other)
    shutil.copytree(beside(cli.state), beside(other))
    assert cli.bare("plan", "-f", plan, "--state", str(other)).code == Exit.DONE
