"""One migd at a time: the lock is the kernel's, so it ends with its holder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from migd.agent.locking import LockHeldError, StateDirError, exclusive

HOLD = """
import sys
from pathlib import Path
from migd.agent.locking import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    running = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "held\n"
    return running


def test_a_live_holder_is_named_by_pid(tmp_path: Path) -> None:
    with holder(tmp_path) as running:
        with pytest.raises(LockHeldError, match=f"process {running.pid} holds") as caught, exclusive(tmp_path):
            pass
        assert caught.value.pid == running.pid
        running.kill()


def test_the_lock_of_a_killed_holder_is_free_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as running:
        running.kill()
    with exclusive(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_the_lock_can_be_taken_again_and_again(tmp_path: Path) -> None:
    for _ in range(3):
        with exclusive(tmp_path / "made" / "when" / "missing"):
            pass


def test_a_disk_that_is_full_when_the_lock_is_taken_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("/dev/full")
    with pytest.raises(StateDirError, match="--state-dir"), exclusive(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirError, match="--state-dir"), exclusive(tmp_path / "file" / "below"):
        pass
