"""Situations of configuration, locking and repeated commands from public reports, through the command line.

Left out: one plan for several nodes (the other half of B74), and the cron jobs round h05.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from staging import carry_out, changes, world_of
from worlds import World

from migd.agent.records import Outcome
from migd.cli.exits import Exit, exit_of, worst
from migd.cli.inputs import given, ordered
from migd.cli.machines import beside
from migd.cli.main import run as migd
from migd.sim.host import SimHost

DATA = Path(__file__).parents[1] / "data"


def case(name: str) -> str:
    """The path of a case's file."""
    (found,) = DATA.glob(f"{name}-*")
    return str(found)


class Box:
    """A simulated machine in a file, with a clock that nobody waits for, and commands on it."""

    def __init__(self, folder: Path, spec: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = folder / "machine.json"
        self.host = SimHost.open(self.path, spec, clock="virtual")
        self.host.log_calls(True)
        self.folder = folder
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """A command's exit code, and what it said on both streams."""
        code = migd([*arguments, "--state", str(self.path)])
        said = self._capsys.readouterr()
        return code, said.out + said.err

    def apply(self, file: str, *arguments: str) -> tuple[int, str]:
        return self("apply", "-f", file, *arguments)

    def plan(self, *rules: dict[str, Any], name: str = "plan.yaml", **spec: Any) -> str:
        """A plan file with these rules; its path."""
        path = self.folder / name
        body = {"nodeSelector": {}, "rules": list(rules), **spec}
        document = {"apiVersion": "migd.dev/v1alpha1", "kind": "GPUPartitionPlan", "metadata": {"name": "p"}}
        path.write_text(yaml.safe_dump({**document, "spec": body}))
        return str(path)

    def layouts(self) -> list[str]:
        code, text = self("gpus", "-o", "json")
        assert code == Exit.DONE
        return [_short(gpu) for gpu in json.loads(text)["gpus"]]

    def machine(self) -> str:
        """The machine's instances and modes, to see whether anything was touched."""
        return repr([(g.uuid, g.mig, g.pending, g.instances) for g in self.host.snapshot().gpus])


def _short(gpu: dict[str, Any]) -> str:
    if not gpu["mig"]["capable"]:
        return "n/a"
    if not gpu["mig"]["current"]:
        return "off"
    return " ".join(f"{i['profile']}@{i['placement']['start']}" for i in gpu["instances"])


@pytest.fixture
def box(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Box:
    return Box(tmp_path, getattr(request, "param", "8xa100-40gb"), capsys)


def apply_in_memory(world: World, file: str, config: str) -> Exit:
    """What `migd apply -f FILE -c CONFIG` does on a machine in memory, where eight GPUs are read faster."""
    order, _ = ordered(given(file, config), world.seen())
    outcomes: dict[int, Outcome] = carry_out(world, order)
    return worst(map(exit_of, outcomes.values()))


def found(world: World) -> list[str]:
    return [str(seen.layout) for seen in world.seen()]


STATION = "3xa100-80gb,dgx-display,a100-80gb"
EIGHT = "8xa100-80gb"
SEVEN = " ".join(f"1g.5gb@{i}" for i in range(7))


# --- B70, h01, h03 ---


def test_h03_a_bare_index_is_read_as_one_index_and_told(box: Box) -> None:
    """B70."""
    code, said = box.apply(case("h03"))
    assert code == Exit.DONE
    assert "7 is read as one index; write [7]" in said
    assert box.layouts() == ["off"] * 7 + [SEVEN]


@pytest.mark.parametrize("devices", ["seven", [-1], [1.5], {"0": 1}, None, [8]], ids=str)
def test_other_devices_that_are_no_list_of_indices_are_refused_at_their_path(box: Box, devices: object) -> None:
    """B70, for its whole kind."""
    file = box.folder / "config.yaml"
    entry = {"devices": devices, "mig-enabled": True, "mig-devices": {"1g.5gb": 7}}
    file.write_text(yaml.safe_dump({"version": "v1", "mig-configs": {"a": [entry]}}))
    before = box.machine()
    code, said = box.apply(str(file))
    assert code == Exit.USAGE
    assert "devices" in said or "indices" in said
    assert "Traceback" not in said
    assert box.machine() == before


def test_h01_every_config_of_a_real_file_is_applied_one_after_the_other() -> None:
    world = world_of("8xa100-40gb", duration_scale=0)
    names = [str(name) for name in yaml.safe_load(Path(case("h01")).read_text())["mig-configs"]]
    assert len(names) == 6
    for name in [*names, "all-disabled"]:
        assert apply_in_memory(world, case("h01"), name) == Exit.DONE, name
    assert found(world) == ["MIG off"] * 8
    assert apply_in_memory(world, case("h01"), "custom-config") == Exit.DONE
    assert found(world)[3:] == ["MIG off", "7×1g.5gb", "3×2g.10gb", "2×3g.20gb", "3g.20gb 2g.10gb 2×1g.5gb"]


def test_h02_only_the_config_that_does_not_fit_is_refused_and_touches_nothing() -> None:
    """B03 from the file as published."""
    world = world_of(EIGHT, duration_scale=0)
    names = [str(name) for name in yaml.safe_load(_inner("h02"))["mig-configs"]]
    assert "all-3g.40gb" in names
    for name in names:
        begun = len(world.host.calls)
        code = apply_in_memory(world, case("h02"), name)
        assert code == (Exit.INFEASIBLE if name == "all-3g.40gb" else Exit.DONE), name
        assert code == Exit.DONE or changes(world.host, begun) == []


def _inner(name: str) -> str:
    document = yaml.safe_load(Path(case(name)).read_text())
    return next(iter(document["data"].values())) if "data" in document else Path(case(name)).read_text()


# --- B72 ---


@pytest.mark.parametrize("box", [EIGHT], indirect=True)
@pytest.mark.parametrize("name", ["all-1g.10gb", "all-3g.40gb"])
@pytest.mark.parametrize("command", ["plan", "apply"])
def test_h04_misspelt_keys_are_refused_with_what_was_meant_and_touch_nothing(box: Box, name: str, command: str) -> None:
    """B72: never read as MIG off."""
    assert box.apply(box.plan({"gpus": {"indices": [0]}, "instances": [{"profile": "1g.10gb", "count": 7}]}))[0] == 0
    before = box.machine()
    code, said = box(command, "-f", case("h04"), "-c", name)
    assert code == Exit.USAGE
    assert "did you mean mig-enabled?" in said
    assert "did you mean mig-devices?" in said
    assert box.machine() == before


def test_h04_the_entry_that_is_right_is_applied() -> None:
    """B72."""
    world = world_of(EIGHT)
    assert apply_in_memory(world, case("h04"), "all-disabled") == Exit.DONE


@pytest.mark.parametrize(
    ("where", "meant"),
    [
        ({"foriegnInstances": "Adopt"}, "foreignInstances"),
        ({"disruption": {"timeOut": "5m"}}, "timeout"),
        ({"onFailures": "Hold"}, "onFailure"),
    ],
)
def test_a_misspelt_key_of_a_plan_is_refused_with_what_was_meant(box: Box, where: dict[str, Any], meant: str) -> None:
    """B72, in our own format."""
    before = box.machine()
    code, said = box.apply(box.plan({"gpus": {"all": True}, "mig": "Disabled"}, **where))
    assert code == Exit.USAGE
    assert f"did you mean {meant}?" in said
    assert box.machine() == before


# --- B74 ---


@pytest.mark.parametrize("box", ["a100-40gb"], indirect=True)
@pytest.mark.parametrize("command", ["plan", "apply"])
def test_h05_a_name_that_is_not_in_the_file_is_refused_with_those_that_are(box: Box, command: str) -> None:
    """B74: the current layout stays."""
    assert box.apply(case("h05"), "-c", "mig-on")[0] == Exit.DONE
    before = box.machine()
    code, said = box(command, "-f", case("h05"), "-c", "all-1g.5gb")
    assert code == Exit.USAGE
    assert "mig-on, mig-off" in said
    assert box.machine() == before
    assert box.layouts() == [SEVEN]


def test_h05_day_and_night_are_toggled_and_back() -> None:
    """B74's file, used as it was meant."""
    world = world_of("8xa100-40gb", duration_scale=0)
    for _ in range(2):
        assert apply_in_memory(world, case("h05"), "mig-on") == Exit.DONE
        assert found(world) == ["7×1g.5gb"] * 8
        assert apply_in_memory(world, case("h05"), "mig-off") == Exit.DONE
        assert found(world) == ["MIG off"] * 8


# --- B77 ---


@pytest.mark.parametrize("box", [STATION], indirect=True)
def test_h06_indices_are_node_wide_and_the_display_gpu_never_gets_mig(box: Box) -> None:
    """B77."""
    code, said = box.apply(case("h06"), "-c", "balanced-station")
    assert code == Exit.DONE, said
    layouts = box.layouts()
    assert layouts[0] == "off"
    assert layouts[3] == "n/a"
    assert layouts[4].count("1g.10gb") == 7


def test_h06_every_config_of_the_station_is_valid_there() -> None:
    """B77."""
    world = world_of(STATION, duration_scale=0)
    for name in yaml.safe_load(Path(case("h06")).read_text())["mig-configs"]:
        begun = len(world.host.calls)
        assert apply_in_memory(world, case("h06"), name) == Exit.DONE, name
        assert 3 not in {index for index, _ in changes(world.host, begun)}


@pytest.mark.parametrize("box", [STATION], indirect=True)
@pytest.mark.parametrize("form", ["0x20B210DE", ["0x20B210DE"], ["0x20B510DE", "0x20b210de"]], ids=str)
def test_both_forms_of_a_filter_work_and_count_indices_over_the_whole_node(box: Box, form: object) -> None:
    """B77."""
    file = box.folder / "config.yaml"
    entry = {"device-filter": form, "devices": [4], "mig-enabled": True, "mig-devices": {"7g.80gb": 1}}
    file.write_text(yaml.safe_dump({"version": "v1", "mig-configs": {"a": [entry]}}))
    assert box.apply(str(file))[0] == Exit.DONE
    assert box.layouts() == ["off", "off", "off", "n/a", "7g.80gb@0"]


@pytest.mark.parametrize("box", [STATION], indirect=True)
def test_a_filter_that_matches_nothing_is_reported_and_changes_nothing(box: Box) -> None:
    """B77."""
    file = box.folder / "config.yaml"
    entry = {"device-filter": "0x233010DE", "devices": "all", "mig-enabled": True, "mig-devices": {"7g.80gb": 1}}
    file.write_text(yaml.safe_dump({"version": "v1", "mig-configs": {"a": [entry]}}))
    before = box.machine()
    code, said = box.apply(str(file))
    assert code == Exit.DONE
    assert "decides on no GPU of this machine" in said
    assert box.machine() == before


@pytest.mark.parametrize("box", [STATION], indirect=True)
def test_mig_on_the_display_gpu_is_refused_and_nothing_is_touched(box: Box) -> None:
    """B77."""
    file = box.folder / "config.yaml"
    entry = {"devices": [3, 4], "mig-enabled": True, "mig-devices": {"7g.80gb": 1}}
    file.write_text(yaml.safe_dump({"version": "v1", "mig-configs": {"a": [entry]}}))
    before = box.machine()
    code, said = box.apply(str(file))
    assert code == Exit.INFEASIBLE
    assert "NVIDIA DGX Display is not MIG-capable" in said
    assert box.machine() == before


# --- B68 ---

HOLD = """
import sys
from pathlib import Path
from migd.agent.locking import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("box", ["a100-40gb"], indirect=True)
def test_a_lock_held_by_a_live_process_is_named_and_ends_with_its_holder(box: Box) -> None:
    """B68: killed with the lock in hand; the next start takes it at once."""
    file = box.plan({"gpus": {"all": True}, "instances": [{"profile": "1g.5gb", "count": 7}]})
    beside(box.path).mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(beside(box.path))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        before = box.machine()
        for words in (("apply", "-f", file), ("apply", "-f", file, "--wait-idle=1h"), ("rollback",)):
            code, said = box(*words)
            assert code == Exit.BLOCKED
            assert f"process {holder.pid} holds" in said
        assert box.machine() == before
        assert box("gpus")[0] == Exit.DONE, "looking needs no lock"
        assert box("plan", "-f", file)[0] == Exit.CHANGES
        holder.kill()
    assert box.apply(file)[0] == Exit.DONE


# --- B15, B60, B69 as a person meets them ---


@pytest.mark.parametrize("box", ["h100-sxm-80gb"], indirect=True)
def test_a_converged_machine_is_told_so_again_and_again_and_nothing_is_written(box: Box) -> None:
    """B69."""
    file = box.plan({"gpus": {"all": True}, "instances": [{"profile": "1g.10gb", "count": 7}]})
    assert box.apply(file)[0] == Exit.DONE
    record = beside(box.path) / "record.json"
    before = (box.machine(), record.stat().st_mtime_ns, record.read_bytes())
    for _ in range(10):
        assert box.apply(file)[0] == Exit.DONE
        assert box.apply(file, "--dry-run")[0] == Exit.DONE
        assert (box.machine(), record.stat().st_mtime_ns, record.read_bytes()) == before


@pytest.mark.parametrize("box", ["a100-40gb"], indirect=True)
def test_a_reboot_that_is_needed_is_exit_4_until_it_has_happened(box: Box) -> None:
    """B15."""
    box("sim", "switch", "vm=true")
    file = box.plan({"gpus": {"all": True}, "instances": [{"profile": "1g.5gb", "count": 7}]})
    for _ in range(2):
        code, said = box.apply(file)
        assert code == Exit.BLOCKED
        assert "RebootRequired" in said
    box("sim", "reboot")
    assert box.apply(file)[0] == Exit.DONE
    assert box.layouts() == [SEVEN]


@pytest.mark.parametrize("box", ["a100-40gb"], indirect=True)
def test_a_wish_found_impossible_after_the_mode_changed_is_exit_1(box: Box) -> None:
    """An older driver: 3 would say that nothing was touched."""
    box("sim", "switch", "profiles_while_off=false")
    file = box.plan({"gpus": {"all": True}, "instances": [{"profile": "3g.20gb", "count": 3}]})
    assert box("plan", "-f", file)[0] == Exit.CHANGES
    code, said = box.apply(file)
    assert code == Exit.FAILED
    assert "put back as it was" in said
    assert box.layouts() == ["off"]


@pytest.mark.parametrize("box", ["2xa100-40gb"], indirect=True)
def test_one_gpu_that_fails_midway_is_exit_1_and_the_other_is_done(box: Box) -> None:
    """B53."""
    box("sim", "fault", "nvmlGpuInstanceCreateComputeInstance", "--gpu", "0", "--times", "3")
    file = box.plan({"gpus": {"all": True}, "instances": [{"profile": "3g.20gb", "count": 2}]})
    code, said = box.apply(file)
    assert code == Exit.FAILED
    assert "failed (NVMLError)" in said
    assert box.layouts() == ["off", "3g.20gb@0 3g.20gb@4"]
    assert box.apply(file)[0] == Exit.DONE


@pytest.mark.parametrize("box", ["a100-40gb"], indirect=True)
def test_waiting_without_a_time_waits_as_long_as_the_plan_says(box: Box) -> None:
    """B25 and the wait of a plan's own timeout."""
    everywhere = {"gpus": {"all": True}}
    half = box.plan({**everywhere, "instances": [{"profile": "3g.20gb", "count": 2}]})
    assert box.apply(half)[0] == Exit.DONE
    box("sim", "hold", "--gpu", "0", "--start", "0", "--for", "5m")
    whole = {**everywhere, "instances": [{"profile": "7g.40gb"}]}
    assert box.apply(box.plan(whole, name="w.yaml"))[0] == Exit.BLOCKED
    code, said = box.apply(box.plan(whole, name="w.yaml", disruption={"timeout": "1m"}), "--wait-idle")
    assert code == Exit.BLOCKED
    assert "NeverIdle" in said
    assert box.apply(box.plan(whole, name="w.yaml", disruption={"timeout": "10m"}), "--wait-idle")[0] == Exit.DONE
    assert box.layouts() == ["7g.40gb@0"]


@pytest.mark.parametrize("box", ["2xa100-40gb"], indirect=True)
def test_a_gpu_that_stays_half_done_is_told_by_a_command_that_does_not_name_it(box: Box) -> None:
    """B63: what fails for ever on one GPU neither holds up nor spoils the others' commands."""
    first = box.plan({"gpus": {"indices": [0]}, "instances": [{"profile": "3g.20gb", "count": 2}]}, name="0.yaml")
    then = box.plan({"gpus": {"indices": [0]}, "instances": [{"profile": "1g.5gb", "count": 7}]}, name="1.yaml")
    other = box.plan({"gpus": {"indices": [1]}, "instances": [{"profile": "1g.5gb", "count": 7}]}, name="2.yaml")
    assert box.apply(first)[0] == Exit.DONE
    box("sim", "fault", "nvmlGpuInstanceCreateComputeInstance", "--gpu", "0", "--times", "0")
    assert box.apply(then)[0] == Exit.FAILED
    code, said = box.apply(other)
    assert code == Exit.DONE
    assert "GPU 0 stays half done" in said
    box("sim", "clear")
    assert box("rollback")[0] == Exit.DONE
    assert "unfinished" not in box("gpus")[1]
