"""`migd apply` and `migd rollback`: what they do, say and end with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from commands import APPLY, DATA, GPUS, OFF, Cli, cut
from worlds import serials

from migd.agent.locking import exclusive
from migd.cli.exits import Exit
from migd.cli.machines import beside
from migd.sim.errors import SimulatedCrash
from migd.sim.faults import Fault

H02 = str(DATA / "h02-gpuop-configmap-3gx2-1g.yaml")


def layouts(cli: Cli) -> list[str]:
    """Every GPU's instances, as "profile@start"."""
    return [
        " ".join(f"{i['profile']}@{i['placement']['start']}" for i in gpu["instances"]) or str(gpu["mig"]["current"])
        for gpu in cli("gpus", "-o", "json").json["gpus"]
    ]


def test_a_plan_is_carried_out_with_progress_and_a_total_and_once_more_is_nothing_to_do(cli: Cli) -> None:
    cli.machine("2xa100-80gb")
    plan = cli.plan(cut("3g.40gb 3×1g.10gb"))
    ran = cli("apply", "-f", plan)
    assert ran.code == Exit.DONE
    assert ran.out.splitlines() == [
        "GPU  MODEL                  PHASE  LAYOUT             CHANGED",
        "0–1  NVIDIA A100-SXM4-80GB  Ready  3g.40gb 3×1g.10gb  yes",
    ]
    told = ran.err.splitlines()
    assert [line.rsplit("  ", 1)[0] for line in told[:-1]] == [
        "GPU 0  MIG mode on",
        "GPU 0  created 1g.10gb@0,1,2 3g.40gb@4",
        "GPU 1  MIG mode on",
        "GPU 1  created 1g.10gb@0,1,2 3g.40gb@4",
    ]
    assert all(line.endswith(" s") for line in told[:-1])
    assert told[-1].startswith("done in ")
    assert told[-1].endswith(": 2 GPUs changed")
    again = cli("apply", "-f", plan)
    assert (again.code, again.err) == (Exit.DONE, "nothing was changed: 2 GPUs as wished already\n")


def test_an_instance_in_use_that_fits_is_kept_with_its_identity(cli: Cli) -> None:
    host = cli.machine("a100-40gb")
    cli("apply", "-f", cli.plan(cut("3g.20gb 2g.10gb 2×1g.5gb")))
    host.start_process(0, 3)
    before = serials(cli.host)
    ran = cli("apply", "-f", cli.plan(cut("7×1g.5gb")))
    assert ran.code == Exit.DONE
    assert ran.err.splitlines()[-1].endswith(": 1 GPU changed, 2 instances kept")
    after = serials(cli.host)
    uuid = cli.host.gpu_uuids()[0]
    assert after[uuid, 3] == before[uuid, 3]


def test_an_instance_in_use_that_must_go_blocks_at_once_and_is_named(cli: Cli) -> None:
    host = cli.machine("2xa100-80gb")
    cli("apply", "-f", cli.plan(cut("7×1g.10gb")))
    host.start_process(1, 2, command="vllm serve", container="0123456789abcdef")
    before = layouts(cli)
    ran = cli("apply", "-f", cli.plan(cut("7g.80gb")))
    assert ran.code == Exit.BLOCKED
    assert "GPU 1 blocked (InUse): in use: 1g.10gb@2 by pid 40000 (vllm serve) in container 0123456789ab" in ran.err
    assert "GPU 0 blocked (Waiting): not begun" in ran.err
    assert "migd apply --wait-idle[=TIME]" in ran.err
    assert "nothing was changed: 2 GPUs blocked" in ran.err
    assert layouts(cli) == before


@pytest.mark.parametrize("wait", [["--wait-idle"], ["--wait-idle=5m"], ["--wait-idle", "5m"]])
def test_with_wait_idle_it_waits_until_the_holder_has_gone(cli: Cli, wait: list[str]) -> None:
    host = cli.machine("a100-80gb")
    cli("apply", "-f", cli.plan(cut("7×1g.10gb")))
    host.start_process(0, 2, ends_after_s=60)
    ran = cli("apply", "-f", cli.plan(cut("7g.80gb")), *wait)
    assert ran.code == Exit.DONE
    assert sum("waiting: in use: 1g.10gb@2 by pid 40000" in line for line in ran.err.splitlines()) == 1
    assert layouts(cli) == ["7g.80gb@0"]


@pytest.mark.parametrize(("wait", "timeout", "seconds"), [("--wait-idle=90s", "30m", 90), ("--wait-idle", "2m", 120)])
def test_a_wait_ends_after_its_time_or_the_plans(cli: Cli, wait: str, timeout: str, seconds: float) -> None:
    host = cli.machine("a100-80gb")
    cli("apply", "-f", cli.plan(cut("7×1g.10gb")))
    host.start_process(0, 2)
    began = cli.host.clock.now_s()
    ran = cli("apply", "-f", cli.plan(cut("7g.80gb"), disruption={"timeout": timeout}), wait)
    assert ran.code == Exit.BLOCKED
    assert "GPU 0 blocked (NeverIdle): the wait is over" in ran.err
    assert seconds <= cli.host.clock.now_s() - began < seconds + 5


@pytest.mark.parametrize("wait", ["--wait-idle=", "--wait-idle=soon", "--wait-idle=200h", "--wait-idle=-5m"])
def test_a_time_to_wait_that_is_none_is_bad_usage(cli: Cli, wait: str) -> None:
    cli.machine("a100-80gb")
    ran = cli("apply", "-f", cli.plan(OFF), wait)
    assert ran.code == Exit.USAGE
    assert "write a duration up to 168h" in ran.err


def test_a_wish_that_cannot_be_met_is_found_before_the_lock_the_journal_and_the_hardware(cli: Cli) -> None:
    host = cli.machine("2xa100-80gb")
    host.log_calls(True)
    with exclusive(beside(cli.state)):
        ran = cli("apply", "-f", H02, "-c", "all-3g.40gb")
        assert ran.code == Exit.INFEASIBLE, "3 applies before 4"
        assert cli("apply", "-f", H02, "-c", "all-2g.20gb").code == Exit.BLOCKED
    assert layouts(cli) == ["False", "False"]
    assert not (beside(cli.state) / "record.json").exists()
    assert not [call.name for call in cli.host.calls if "Create" in call.name or "SetMigMode" in call.name]


def test_one_gpu_that_cannot_stops_all_and_each_says_why(cli: Cli) -> None:
    cli.machine("2xa100-80gb,l40s")
    ran = cli("apply", "-f", cli.plan(cut("7×1g.10gb")), "-o", "json")
    assert ran.code == Exit.INFEASIBLE
    APPLY.validate(ran.json)
    assert [(g["phase"], g["reason"], g["changed"]) for g in ran.json["gpus"]] == [
        ("Blocked", "Waiting", False),
        ("Blocked", "Waiting", False),
        ("Failed", "NotCapable", False),
    ]
    assert layouts(cli) == ["False", "False", "None"]


def test_a_paused_plan_is_blocked_but_can_be_previewed(cli: Cli) -> None:
    cli.machine("a100-80gb")
    plan = cli.plan(cut("7×1g.10gb"), paused=True)
    ran = cli("apply", "-f", plan)
    assert ran.code == Exit.BLOCKED
    assert "paused: true" in ran.err
    assert cli("apply", "-f", plan, "--dry-run").code == Exit.CHANGES
    never = cli.plan(cut("3×3g.40gb"), paused=True)
    assert cli("apply", "-f", never).code == Exit.INFEASIBLE


def test_foreign_instances_block_unless_they_fit_or_are_adopted(cli: Cli) -> None:
    cli.machine("a100-80gb")
    cli("apply", "-f", cli.plan(cut("2×3g.40gb")))
    (beside(cli.state) / "record.json").unlink()
    refuse = cli.plan(cut("7g.80gb"))
    ran = cli("apply", "-f", refuse)
    assert ran.code == Exit.BLOCKED
    assert "GPU 0 blocked (ForeignInstances): not made by migd: 3g.40gb@0, 3g.40gb@4" in ran.err
    assert "end what holds them" not in ran.err
    assert cli("apply", "-f", cli.plan(cut("2×3g.40gb"))).code == Exit.DONE
    assert cli("apply", "-f", cli.plan(cut("7g.80gb"), foreignInstances="Adopt")).code == Exit.DONE


def test_a_change_that_needs_a_reboot_says_so_and_goes_on_after_it(cli: Cli) -> None:
    cli.machine("a100-80gb", vm=True)
    plan = cli.plan(cut("7×1g.10gb"))
    ran = cli("apply", "-f", plan, "-o", "json")
    assert ran.code == Exit.BLOCKED
    APPLY.validate(ran.json)
    assert ran.json["gpus"][0]["phase"] == "RebootRequired"
    table = cli("apply", "-f", plan)
    assert table.code == Exit.BLOCKED
    assert "GPU 0 needs a reboot (RebootRequired)" in table.err
    assert " off, on pending " in cli("gpus").out
    cli("sim", "reboot")
    assert cli("apply", "-f", plan).code == Exit.DONE


def test_what_fails_on_the_way_is_put_back_and_is_1(cli: Cli) -> None:
    host = cli.machine("2xa100-80gb")
    cli("apply", "-f", cli.plan(cut("2×3g.40gb")))
    host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", code=999, gpu=1, times=3))
    ran = cli("apply", "-f", cli.plan(cut("7×1g.10gb")), "-o", "json")
    assert ran.code == Exit.FAILED
    APPLY.validate(ran.json)
    assert [(g["phase"], g["changed"]) for g in ran.json["gpus"]] == [("Ready", True), ("Failed", False)]
    assert "put back as it was" in ran.json["gpus"][1]["message"]
    assert layouts(cli)[1] == "3g.40gb@0 3g.40gb@4"
    failures = [line for line in ran.err.splitlines() if "failed: " in line]
    assert len(failures) == 1, "one failure that repeats is told once"
    assert ran.err.splitlines()[-1].startswith("ended after ")


@pytest.mark.parametrize("going_on", ["apply", "rollback"])
def test_what_a_crash_left_is_finished_or_undone_first_and_said(cli: Cli, going_on: str) -> None:
    host = cli.machine("2xa100-80gb")
    cli("apply", "-f", cli.plan(cut("2×3g.40gb")))
    plan = cli.plan(cut("7×1g.10gb"))
    host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", "crash", when="after", gpu=1, nth=3))
    with pytest.raises(SimulatedCrash):
        cli("apply", "-f", plan)
    assert cli("gpus", "-o", "json").json["unfinished"] is not None
    ran = cli("rollback") if going_on == "rollback" else cli("apply", "-f", plan)
    assert ran.code == Exit.DONE
    assert "note: first, what was left under way on GPU 1 is finished or undone" in ran.err
    found = cli("gpus", "-o", "json")
    GPUS.validate(found.json)
    assert found.json["unfinished"] is None
    small, large = " ".join(f"1g.10gb@{n}" for n in range(7)), "3g.40gb@0 3g.40gb@4"
    assert layouts(cli) == [large if going_on == "rollback" else small] * 2


def test_what_a_crash_left_on_another_gpu_than_the_plans_is_reported_too(cli: Cli) -> None:
    host = cli.machine("2xa100-80gb")
    host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", "crash", when="after"))
    with pytest.raises(SimulatedCrash):
        cli("apply", "-f", cli.plan(cut("7×1g.10gb", "indices: [1]")))
    ran = cli("apply", "-f", cli.plan(cut("2×3g.40gb", "indices: [0]")), "-o", "json")
    assert ran.code == Exit.DONE
    assert [(g["index"], g["phase"]) for g in ran.json["gpus"]] == [(0, "Ready"), (1, "Ready")]


def test_rollback_swaps_the_current_and_the_previous_layout(cli: Cli) -> None:
    cli.machine("2xa100-80gb")
    cli("apply", "-f", cli.plan(cut("2×3g.40gb")))
    cli("apply", "-f", cli.plan(cut("7×1g.10gb", "indices: [0]")))
    small = " ".join(f"1g.10gb@{n}" for n in range(7))
    for expected in (["3g.40gb@0 3g.40gb@4", "False"], [small, "3g.40gb@0 3g.40gb@4"]) * 2:
        ran = cli("rollback", "-o", "json")
        assert ran.code == Exit.DONE
        APPLY.validate(ran.json)
        assert layouts(cli) == expected
    previous = cli("rollback", "-o", "json").json["gpus"][0]["previous"]
    assert len(previous["instances"]) == 7


def test_a_rollback_is_blocked_by_what_is_in_use(cli: Cli) -> None:
    host = cli.machine("a100-80gb")
    cli("apply", "-f", cli.plan(cut("2×3g.40gb")))
    cli("apply", "-f", cli.plan(cut("7×1g.10gb")))
    pid = host.start_process(0, 0)
    ran = cli("rollback")
    assert ran.code == Exit.BLOCKED
    assert f"1g.10gb@0 by pid {pid}" in ran.err
    host.end_process(pid)
    assert cli("rollback").code == Exit.DONE


def test_there_is_nothing_to_roll_back_to_before_the_first_change(cli: Cli) -> None:
    cli.machine("a100-80gb")
    ran = cli("rollback")
    assert (ran.code, ran.out) == (Exit.FAILED, "")
    assert "migd has changed no GPU here yet" in ran.err


def test_a_machine_without_a_state_file_lives_as_long_as_the_command(cli: Cli) -> None:
    ran = cli.bare("apply", "-f", H02, "-c", "all-2g.20gb", "--simulate", "2xa100-80gb", "-o", "yaml")
    assert ran.code == Exit.DONE
    APPLY.validate(yaml.safe_load(ran.out))
    assert cli.bare("plan", "-f", H02, "-c", "all-2g.20gb", "--simulate", "2xa100-80gb").code == Exit.CHANGES


def test_the_record_lies_beside_the_state_file_or_in_the_state_dir(cli: Cli, tmp_path: Path) -> None:
    cli.machine("a100-80gb")
    cli("apply", "-f", cli.plan(cut("7×1g.10gb")))
    assert (tmp_path / "machine.json.d" / "record.json").exists()
    other = tmp_path / "deep" / "er"
    ran = cli("apply", "-f", cli.plan(OFF), "--state-dir", str(other))
    assert ran.code == Exit.BLOCKED, "another record knows nothing of these instances"
    assert "not made by migd" in ran.err
    assert (other / "record.json").exists()


def test_a_lock_that_a_live_process_holds_is_4_and_names_it(cli: Cli) -> None:
    cli.machine("a100-80gb")
    with exclusive(beside(cli.state)):
        for words in (("apply", "-f", cli.plan(OFF)), ("rollback",)):
            ran = cli(*words)
            assert ran.code == Exit.BLOCKED
            assert "it is changing this machine's GPUs" in ran.err
        assert cli("gpus").code == Exit.DONE
        assert cli("plan", "-f", cli.plan(cut("7g.80gb"))).code == Exit.CHANGES
    assert cli("apply", "-f", cli.plan(OFF)).code == Exit.DONE


def test_a_lost_gpu_blocks_and_is_told(cli: Cli) -> None:
    host = cli.machine("2xa100-80gb")
    host.lose_gpu(1)
    ran = cli("apply", "-f", cli.plan(cut("7g.80gb")))
    assert ran.code == Exit.BLOCKED
    assert "GPU 1 blocked (GPUUnhealthy)" in ran.err
    assert "lost" in cli("gpus").out
    assert cli("apply", "-f", cli.plan(cut("7g.80gb", "indices: [0]"))).code == Exit.DONE


def test_a_rollback_that_would_leave_a_lost_gpu_out_touches_no_other(cli: Cli) -> None:
    host = cli.machine("2xh100-sxm-80gb")
    assert cli("apply", "-f", cli.plan(cut("3g.40gb"))).code == Exit.DONE
    host.lose_gpu(1)
    ran = cli("rollback")
    assert ran.code == Exit.BLOCKED
    assert "a GPU fell off the bus" in ran.err
    host.find_gpu(1)
    assert {len(gpu["instances"]) for gpu in cli("gpus", "-o", "json").json["gpus"]} == {1}
    assert cli("rollback").code == Exit.DONE
    assert {len(gpu["instances"]) for gpu in cli("gpus", "-o", "json").json["gpus"]} == {0}
