"""Forked programs are processes like any other: their own session, words, environment, output, signals and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from controlplane.nodes_programs import python_path
from controlplane.nursery import Nursery
from controlplane.processes import Child, until

WITHIN_S = 30.0
TELL = """
import json, os, sys, uuid
import controlplane.processes
told = {
    "words": sys.argv, "name": __name__, "seen": dict(os.environ), "pid": os.getpid(), "session": os.getsid(0),
    "folder": os.getcwd(), "input": sys.stdin.read(), "dice": str(uuid.uuid4()),
}
print(json.dumps(told))
sys.exit(int(sys.argv[1]))
"""
WAIT = """
import signal, sys, threading
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
print("here", flush=True)
stop.wait()
"""


@pytest.fixture(scope="module")
def few() -> Iterator[Nursery]:
    with Nursery(python_path(), ["controlplane.processes", "migd.cli.main"]) as running:
        yield running


def child(nursery: Nursery, folder: Path, *words: str, text: str = "") -> Child:
    """A process that runs this text, or `python WORDS`."""
    program = folder / "program.py"
    program.write_text(text)
    command = [sys.executable, *([str(program)] if text else []), *words]
    made = Child("forked", command, folder / "log", environment={"WHO": folder.name}, forking=nursery)
    made.start()
    return made


def ended(one: Child) -> int | None:
    assert until(lambda: one.exit_status is not None, WITHIN_S), one.tail()
    return one.exit_status


def test_it_sees_what_it_is_given_and_nothing_of_who_it_comes_from(few: Nursery, tmp_path: Path):
    first, second = (child(few, tmp_path, status, "b", text=TELL) for status in ("3", "0"))
    assert (ended(first), ended(second)) == (3, 0)
    told: list[Any] = [json.loads(line) for line in first.log.read_text().splitlines()]
    assert {one["pid"] for one in told} == {one["session"] for one in told} == {first.pid, second.pid}
    assert len({one["dice"] for one in told}) == 2
    assert [one["words"][2] for one in told] == ["b", "b"]
    for one in told:
        seen = (one["name"], one["seen"], one["folder"], one["input"])
        assert seen == ("__main__", {"WHO": tmp_path.name}, str(tmp_path), "")


def test_a_module_with_arguments_runs_as_python_runs_it(few: Nursery, tmp_path: Path):
    one = child(few, tmp_path, "-m", "migd", "gpus", "--no-such-option")
    assert ended(one) == 2
    assert "Try: migd gpus --help" in one.tail()


def test_an_error_is_told_and_is_the_exit_status(few: Nursery, tmp_path: Path):
    one = child(few, tmp_path, text="raise ValueError('said so')")
    assert ended(one) == 1
    assert one.tail().endswith("ValueError: said so")
    assert ended(child(few, tmp_path, text="import sys; sys.exit('a reason')")) == 1
    assert one.tail().endswith("a reason")
    assert ended(child(few, tmp_path, "-m", "nowhere")) == 1
    assert one.tail().endswith("No module named nowhere")


def test_a_signal_reaches_it_and_a_kill_is_told_as_one(few: Nursery, tmp_path: Path):
    waits, dies = (child(few, folder, text=WAIT) for folder in made(tmp_path, "a", "b"))
    assert until(lambda: waits.tail() == dies.tail() == "here", WITHIN_S)
    assert (waits.running, dies.running) == (True, True)
    waits.send(signal.SIGTERM)
    dies.send(signal.SIGKILL)
    assert (ended(waits), ended(dies)) == (0, -signal.SIGKILL)
    dies.stop()
    dies.start()
    assert until(lambda: dies.tail() == "here\nhere", WITHIN_S)
    dies.kill()
    assert not dies.running


@pytest.mark.parametrize("way", ["closed", "killed"])
def test_all_end_with_it(tmp_path: Path, way: str):
    with Nursery(python_path(), ["signal"]) as nursery:
        one = child(nursery, tmp_path, text=WAIT)
        assert until(lambda: one.tail() == "here", WITHIN_S)
        assert Path(f"/proc/{one.pid}/comm").read_text() == "program\n"
        if way == "killed":
            os.kill(nursery.pid, signal.SIGKILL)
            assert until(lambda: not alive(one.pid), WITHIN_S)
    assert until(lambda: not alive(one.pid), WITHIN_S)


def alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def made(folder: Path, *names: str) -> list[Path]:
    """Folders in it."""
    found = [folder / name for name in names]
    for one in found:
        one.mkdir()
    return found


@pytest.mark.parametrize("forked", [True, False])
def test_what_its_leader_leaves_is_ended_with_it(few: Nursery, tmp_path: Path, forked: bool):
    (tmp_path / "leaves.py").write_text(
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)\n"
    )
    command = [sys.executable, str(tmp_path / "leaves.py")]
    child = Child("leaves", command, tmp_path / "leaves.log", leashed=False, forking=few if forked else None)
    child.start()
    assert until(lambda: not child.running, WITHIN_S)
    left = Path(f"/proc/{(tmp_path / 'leaves.log').read_text().strip()}/stat")
    assert until(lambda: not left.exists() or left.read_text().rpartition(")")[2].split()[0] == "Z", WITHIN_S)


class _Ended:
    """A process that has ended, whose number another has by now."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def start(self, *_: object) -> _Ended:
        return self


def test_nothing_is_sent_to_the_number_of_what_has_ended(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as other:
        child = Child("ended", [sys.executable], tmp_path / "ended.log", forking=_Ended(other.pid))
        child.start()
        child.send(signal.SIGKILL)
        child.kill()
        child.stop()
        assert other.communicate(b"\n", timeout=WITHIN_S) is not None
    assert other.returncode == 0
