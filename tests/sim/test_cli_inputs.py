"""Bad input and usage: a sentence and exit code 2 (or 1 where a folder cannot be used), never a traceback."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml
from commands import DATA, OFF, Cli, cut
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from migd.cli.exits import Exit
from migd.cli.machines import beside
from migd.cli.main import COMMANDS

SEVERAL = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIM = ("--simulate", "a30")
YAML_WORDS = st.sampled_from(
    (
        *"-:[]{}&*!|>'\"%@`#,?\t\n ",
        *("spec", "rules", "gpus", "kind: GPUPartitionPlan", "apiVersion: migd.dev/v1alpha1", "version: v1"),
        *("mig-configs", "&a", "*a", "<<", "!!python/object:os.system", "---", "1e999", "0x", "é", "\x00"),
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def piped(cli: Cli, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Runs a command with these bytes on standard input."""

    def run(data: bytes, *words: str):  # type: ignore[no-untyped-def]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return cli.bare(*words)

    return run


def is_a_refusal(ran, code: int = Exit.USAGE) -> bool:  # type: ignore[no-untyped-def]
    assert ran.out == ""
    assert ran.err.startswith("migd: ")
    assert "Traceback" not in ran.err
    return bool(ran.code == code)


@SEVERAL
@given(data=st.binary(max_size=80) | st.lists(YAML_WORDS, max_size=24).map(lambda ws: "".join(ws).encode()))
def test_any_bytes_on_standard_input_are_refused_in_words(piped, data: bytes) -> None:  # type: ignore[no-untyped-def]
    for words in (("plan", "-f", "-", *SIM), ("import", "-")):
        assert is_a_refusal(piped(data, *words))


@SEVERAL
@given(value=VALUES, at=st.sampled_from(["", "spec", "rules", "rule", "gpus", "instances", "disruption", "metadata"]))
def test_a_plan_with_any_value_anywhere_ends_with_a_code_of_the_contract(piped, value: object, at: str) -> None:  # type: ignore[no-untyped-def]
    rule: dict[str, object] = {"gpus": {"all": True}, "instances": [{"profile": "1g.6gb"}]}
    spec: dict[str, object] = {"nodeSelector": {}, "rules": [rule]}
    body: dict[str, object] = {"apiVersion": "migd.dev/v1alpha1", "kind": "GPUPartitionPlan"}
    body |= {"metadata": {"name": "x"}, "spec": spec}
    places: dict[str, tuple[dict[str, object], str]] = {
        "spec": (body, "spec"),
        "rules": (spec, "rules"),
        "rule": (spec, "rules"),
        "gpus": (rule, "gpus"),
        "instances": (rule, "instances"),
        "disruption": (spec, "disruption"),
        "metadata": (body, "metadata"),
    }
    if at:
        inside, key = places[at]
        inside[key] = [value] if at == "rule" else value
    ran = piped(yaml.safe_dump(body if at else value, allow_unicode=True).encode(), "apply", "-f", "-", *SIM)
    assert ran.code in (Exit.DONE, Exit.USAGE, Exit.INFEASIBLE)
    assert ran.code == Exit.DONE or is_a_refusal(ran) or "refused" in ran.err


@SEVERAL
@given(value=VALUES, at=st.sampled_from(["mig-configs", "a", "entry", "devices", "mig-devices", "device-filter"]))
def test_a_mig_parted_file_with_any_value_anywhere_too(piped, value: object, at: str) -> None:  # type: ignore[no-untyped-def]
    entry: dict[str, object] = {"devices": "all", "mig-enabled": True, "mig-devices": {"1g.6gb": 4}}
    body: dict[str, object] = {"version": "v1", "mig-configs": {"a": [entry]}}
    if at == "mig-configs":
        body[at] = value
    elif at in ("a", "entry"):
        body["mig-configs"] = {"a": value if at == "a" else [value]}
    else:
        entry[at] = value
    ran = piped(yaml.safe_dump(body, allow_unicode=True).encode(), "plan", "-f", "-", "-c", "a", *SIM)
    assert ran.code in (Exit.DONE, Exit.USAGE, Exit.INFEASIBLE, Exit.CHANGES)
    assert "Traceback" not in ran.err


@SEVERAL
@given(body=VALUES | st.binary(max_size=40))
def test_any_state_file_is_refused_and_left_as_it_is(cli: Cli, body: object) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    cli.state.write_bytes(data)
    for words in (("gpus",), ("gpus", *SIM), ("apply", "-f", cli.plan(OFF)), ("sim", "show")):
        assert is_a_refusal(cli(*words))
    assert cli.state.read_bytes() == data


@settings(SEVERAL, max_examples=100)
@given(choose=st.data())
def test_a_state_file_with_one_value_changed_never_ends_in_a_traceback(cli: Cli, choose: st.DataObject) -> None:
    cli.state.unlink(missing_ok=True)
    cli.machine("a30")
    body = json.loads(cli.state.read_text())
    inside, key = body, choose.draw(st.sampled_from(sorted(body)))
    while isinstance(inside[key], dict | list) and inside[key] and choose.draw(st.booleans()):
        inside = inside[key]
        key = choose.draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else list(range(len(inside)))))
    inside[key] = choose.draw(VALUES)
    cli.state.write_text(json.dumps(body))
    ran = cli("gpus", "-o", "json")
    assert ran.code in (Exit.DONE, Exit.FAILED, Exit.USAGE)
    assert "Traceback" not in ran.err


def test_state_files_that_are_none_are_refused(cli: Cli, tmp_path: Path) -> None:
    cli.machine("a30")
    whole = cli.state.read_bytes()
    folder, empty, half = (tmp_path / name for name in ("folder", "empty", "half"))
    folder.mkdir()
    empty.touch()
    half.write_bytes(whole[: len(whole) // 2])
    for path in (folder, empty, half, tmp_path / "no" / "where", tmp_path / ("x" * 300), Path("/dev/null")):
        for words in (("gpus", *SIM), ("sim", "reboot")):
            assert is_a_refusal(cli.bare(*words, "--state", str(path))), path
    for odd in ("", ".", "/", "a\0b"):
        assert is_a_refusal(cli.bare("gpus", *SIM, "--state", odd)), odd


def test_a_machine_behind_a_link_is_the_machine_that_the_link_names(cli: Cli, tmp_path: Path) -> None:
    cli.machine("a30")
    link = tmp_path / "other" / "link.json"
    link.parent.mkdir()
    link.symlink_to(cli.state)
    assert cli.bare("apply", "-f", cli.plan(cut("4g.24gb")), "--state", str(link)).code == Exit.DONE
    assert link.is_symlink()
    assert cli("gpus", "-o", "json").json["gpus"][0]["mig"]["current"] is True
    assert cli("rollback").code == Exit.DONE, "the record is the same one, too"


def test_files_that_are_none_are_refused(cli: Cli, tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(b"#" * (1 << 21))
    latin = tmp_path / "latin"
    latin.write_bytes("kind: é".encode("latin-1"))
    for path in (tmp_path, tmp_path / "nowhere", big, latin, "", "a\0b", "/dev/null"):
        assert is_a_refusal(cli.bare("plan", "-f", str(path), *SIM)), path
        assert is_a_refusal(cli.bare("apply", "-f", str(path), *SIM)), path


def test_a_closed_standard_input_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert is_a_refusal(cli.bare("plan", "-f", "-", *SIM))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"version": 1}', '{"version": 99, "gpus": {}}', "null", "{", "\x00", '{"version":1,"bootId":3}'],
)
def test_a_damaged_record_stops_everything_and_is_left_as_it_is(cli: Cli, text: str) -> None:
    cli.machine("a30")
    cli("apply", "-f", cli.plan(cut("4g.24gb")))
    record = beside(cli.state) / "record.json"
    record.write_text(text)
    for words in (("gpus",), ("plan", "-f", cli.plan(OFF)), ("apply", "-f", cli.plan(OFF)), ("rollback",)):
        ran = cli(*words)
        assert is_a_refusal(ran, Exit.FAILED)
        assert str(record) in ran.err
    assert record.read_text() == text


def test_a_state_dir_that_cannot_be_one_is_refused(cli: Cli, tmp_path: Path) -> None:
    cli.machine("a30")
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below", Path("/proc/migd"), tmp_path / ("x" * 300)):
        for words in (("apply", "-f", cli.plan(cut("4g.24gb"))), ("rollback",)):
            assert is_a_refusal(cli(*words, "--state-dir", str(folder)), Exit.FAILED), folder
    assert cli("gpus", "-o", "json").json["gpus"][0]["mig"]["current"] is False


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("gpus", "--nonsense"),
        ("gpus", "more"),
        ("gpus", "-o", "xml"),
        ("plan",),
        ("apply", "-f"),
        ("import", "a", "b"),
        ("sim", "nonsense"),
        ("sim", "hold"),
        ("sim", "hold", "--gpu", "x"),
        ("--nonsense",),
    ],
)
def test_wrong_usage_is_2_and_says_where_help_is(cli: Cli, words: tuple[str, ...]) -> None:
    ran = cli.bare(*words)
    assert is_a_refusal(ran)
    assert "--help" in ran.err


@pytest.mark.parametrize("words", [(), ("sim",)])
def test_no_command_shows_the_help(cli: Cli, words: tuple[str, ...]) -> None:
    ran = cli.bare(*words)
    assert (ran.code, ran.out) == (Exit.USAGE, "")
    assert ran.err.startswith("Usage: migd ")


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), ("sim", "hold"), ("sim", "fault")])
def test_every_command_explains_itself_within_80_columns(
    cli: Cli, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    ran = cli.bare(*command, "--help")
    assert (ran.code, ran.err) == (Exit.DONE, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "..." not in ran.out.replace("[ARGS]...", "").replace("COMMAND ...", ""), "no summary is cut off"


def test_the_help_tells_the_exit_codes_in_the_order_in_which_they_apply(cli: Cli) -> None:
    lines = cli.bare("--help").out.splitlines()
    codes = [line.split()[0] for line in lines if line.startswith("    ") and line.split()[0].isdigit()]
    assert codes == ["2", "3", "1", "4", "5", "0"]


def test_the_examples_of_real_files_are_treated_as_their_index_says(cli: Cli) -> None:
    def planned(name: str, config: str, spec: str) -> int:
        return cli.bare("plan", "-f", str(DATA / name), "-c", config, "--simulate", spec).code

    h01 = yaml.safe_load((DATA / "h01-migparted-a100-40gb.yaml").read_text())["mig-configs"]
    assert {planned("h01-migparted-a100-40gb.yaml", name, "8xa100-40gb") for name in h01} <= {0, 5}
    assert planned("h05-daynight-toggle.yaml", "all-1g.5gb", "8xa100-40gb") in (Exit.USAGE, Exit.INFEASIBLE)
