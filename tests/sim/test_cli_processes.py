"""`migd` as a process: interrupts, readers that go, closed streams, missing rights, and no driver at all.

Left out: SIGKILL at every point, which test_kills.py has.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from commands import Cli, Ran, cut

from migd.cli.exits import Exit
from migd.cli.machines import beside
from migd.cli.main import COMMANDS
from migd.sim.faults import Fault

MIGD = (sys.executable, "-m", "migd")
NOBODY = 65534


def as_a_user(deed: Callable[[], object]) -> object:
    """What a deed answers when it is done by somebody who is not root, as JSON can carry it."""
    if os.geteuid() != 0:
        return deed()
    for module, _ in COMMANDS.values():
        import_module(module)  # the interpreter's folders may be closed to others
    "".encode("utf-8-sig")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(NOBODY)
            os.write(writer, json.dumps(deed()).encode())
        except BaseException as error:
            os.write(writer, json.dumps([type(error).__name__, str(error)]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as answer:
        return json.load(answer)


def _passable(folder: Path) -> None:
    """Let other users through to a folder of this test's; pytest closes them."""
    for each in (folder, *folder.parents):
        if "pytest-of-" in str(each):
            each.chmod(0o755)


def told(command: Callable[[], Ran]) -> object:
    """The exit code and standard error of a command that somebody gives who is not root."""

    def deed() -> object:
        ran = command()
        return [ran.code, ran.err]

    return as_a_user(deed)


@pytest.fixture
def prepared(cli: Cli) -> Cli:
    """Two GPUs on which nothing takes time but what a fault says, in real time."""
    host = cli.machine("2xa100-40gb", duration_scale=0)
    host.use_clock("real")
    return cli


def test_an_interrupt_ends_with_130_and_the_next_command_finishes(prepared: Cli) -> None:
    plan = prepared.plan(cut("3g.20gb 2g.10gb"))
    prepared.host.inject(Fault("nvmlDeviceCreateGpuInstanceWithPlacement", "hang", gpu=1))
    words = [*MIGD, "apply", "-f", plan, "--state", str(prepared.state)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit "ignore"
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    with process:
        assert process.stderr is not None
        assert process.stdout is not None
        for line in process.stderr:
            if line.startswith("GPU 1  MIG mode on"):
                break  # what follows on GPU 1 hangs, or is about to
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.stdout.read() == ""
    assert process.returncode == Exit.INTERRUPTED
    assert said.startswith("migd: interrupted. The next `migd apply` or `migd rollback` finishes or undoes what was")
    assert prepared("gpus", "-o", "json").json["unfinished"]["gpus"][0]["index"] == 1
    prepared.host.clear_faults()
    assert prepared("apply", "-f", plan).code == Exit.DONE
    assert prepared("gpus", "-o", "json").json["unfinished"] is None


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_goes_does_not_stop_a_change_half_way(prepared: Cli, stream: str) -> None:
    plan = prepared.plan(cut("7×1g.5gb"))
    reader, writer = os.pipe()
    os.close(reader)
    words = [*MIGD, "apply", "-f", plan, "--state", str(prepared.state)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: writer}
    ran = subprocess.run(words, check=False, text=True, **streams)  # type: ignore[call-overload]
    os.close(writer)
    assert ran.returncode == Exit.DONE
    assert "Error" not in (ran.stdout or "") + (ran.stderr or "")
    assert prepared("plan", "-f", plan).code == Exit.DONE


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_a_closed_stream_is_no_error(descriptor: int) -> None:
    ran = subprocess.run(
        [*MIGD, "gpus", "--simulate", "a30"],
        check=False,
        capture_output=True,
        preexec_fn=lambda: os.close(descriptor),
    )
    assert ran.returncode == Exit.DONE
    assert b"Traceback" not in ran.stderr


def test_a_full_disk_is_a_failure_and_not_a_short_result() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [*MIGD, "gpus", "--simulate", "a30", "-o", "json"],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ran.returncode == Exit.FAILED
    assert ran.stderr.startswith("migd: cannot write to standard output: No space left on device")
    assert "Traceback" not in ran.stderr


def test_a_terminal_without_our_signs_gets_others() -> None:
    ran = subprocess.run(
        [*MIGD, "gpus", "--simulate", "8xa100-80gb"],
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (ran.returncode, ran.stderr) == (Exit.DONE, b"")
    assert b"NVIDIA A100-SXM4-80GB" in ran.stdout


def test_a_state_file_that_can_be_written_no_more_is_a_failure_in_words(prepared: Cli) -> None:
    plan = prepared.plan(cut("7×1g.5gb"))

    (prepared.folder / "own").mkdir()
    (prepared.folder / "own").chmod(0o777)
    for path in (prepared.state, prepared.state.with_name(f".{prepared.state.name}.lock")):
        path.chmod(0o666)
    _passable(prepared.folder)
    prepared.folder.chmod(0o555)
    try:
        words = ("apply", "-f", plan, "--state", str(prepared.state), "--state-dir", str(prepared.folder / "own"))
        code, said = told(lambda: prepared.bare(*words))  # type: ignore[misc]
        assert code == Exit.FAILED
        assert "cannot be written: Permission denied" in said
    finally:
        prepared.folder.chmod(0o755)


def test_files_and_folders_without_permission_are_refused_in_words(prepared: Cli) -> None:
    plan = prepared.plan(cut("7×1g.5gb"))
    prepared("apply", "-f", plan)
    record = beside(prepared.state) / "record.json"
    _passable(prepared.folder)
    prepared.folder.chmod(0o777)
    beside(prepared.state).chmod(0o755)
    for path in (prepared.state, prepared.state.with_name(f".{prepared.state.name}.lock")):
        path.chmod(0o666)
    record.chmod(0)
    on_it = ["--state", str(prepared.state)]
    assert told(lambda: prepared.bare("gpus", *on_it)) == [
        Exit.FAILED,
        f"migd: cannot read the record {record}: permission denied. Run as root\n",
    ]
    Path(plan).chmod(0)
    assert told(lambda: prepared.bare("plan", "-f", plan, *on_it)) == [
        Exit.USAGE,
        f"migd: cannot read {plan}: Permission denied\n",
    ]
    prepared.state.chmod(0)
    assert told(lambda: prepared.bare("gpus", *on_it)) == [
        Exit.USAGE,
        f"migd: {prepared.state}: cannot be read: Permission denied\n",
    ]


def test_somebody_who_is_not_root_is_told_so_before_anything_is_looked_at(cli: Cli) -> None:
    folder = "/var/lib/migd-of-root/x"
    why = f"cannot use the state folder {folder}: Permission denied. Run as root, or name another with --state-dir"
    assert told(lambda: cli.bare("rollback", "--state-dir", folder)) == [Exit.FAILED, f"migd: {why}\n"]


def test_without_a_driver_it_says_so_at_once_and_how_to_try_it_nevertheless() -> None:
    began = time.monotonic()
    ran = subprocess.run([*MIGD, "gpus", "--state-dir", "/nonexistent"], check=False, capture_output=True, text=True)
    assert "Traceback" not in ran.stderr
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        assert (ran.returncode, ran.stdout) == (Exit.FAILED, "")
        assert "libnvidia-ml.so.1 not found" in ran.stderr
        assert "migd gpus --simulate 8xa100-80gb" in ran.stderr
        assert time.monotonic() - began < 10, "waiting does not bring a library"
