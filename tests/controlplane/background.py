"""A cluster in the background, to play with: `make cluster` starts it, `make cluster-down` ends it.

One process of ours outlives the command and holds the rest: what it started dies with it, however it ends. It holds a
file lock as long as it lives, so that a folder left by one that was killed is known for what it is.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from controlplane.building import NotBuiltError, found_programs
from controlplane.clusters import Cluster
from controlplane.deploying import DeployError
from controlplane.nodes import SPEC
from controlplane.nodes_styles import STYLES
from controlplane.processes import StartError, until

UP_S: Final = 300.0
DOWN_S: Final = 60.0
DOWN: Final = "make cluster-down"


def state_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where it is kept: $XDG_STATE_HOME/migd/cluster, or ~/.local/state/migd/cluster."""
    base = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "migd" / "cluster"


def up(words: Sequence[str]) -> int:
    """Start it and wait until it is ready; the exit status. The last line on standard output is to be evaluated."""
    options = _options().parse_args(words)
    try:
        found_programs()
    except NotBuiltError as missing:
        return _failed(str(missing))
    state = State(state_folder())
    if state.held():
        if not state.ready():
            return _failed(f"a cluster is being started right now; its log is {state.log}")
        _say(f"the cluster runs already, with {', '.join(state.told()['nodes'])}; `{DOWN}` ends it")
        return _shown(state)
    state.clear()
    command = [sys.executable, "-m", "controlplane", "cluster-run", *_words(options)]
    with state.log.open("wb") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    shown = 0
    give_up_s = time.monotonic() + UP_S

    def look() -> bool:
        nonlocal shown
        lines = state.progress()
        for line in lines[shown:]:
            _say(line)
        shown = len(lines)
        return state.ready() or child.poll() is not None

    until(look, max(0.0, give_up_s - time.monotonic()))
    if state.ready():
        return _shown(state)
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(DOWN_S)
        except subprocess.TimeoutExpired:
            child.kill()
        return _failed(f"the cluster was not ready within {UP_S:.0f} s; its log is {state.log}")
    tail = "\n".join(state.log.read_text(errors="replace").splitlines()[-15:])
    return _failed(f"the cluster did not start; the end of {state.log}:\n{tail}")


def down() -> int:
    """End it, and leave nothing of it but its log; the exit status."""
    state = State(state_folder())
    if not state.held():
        left = state.exists()
        state.clear()
        _say("no cluster runs here" + ("; what a crash left of one is cleared away" if left else ""))
        return 0
    pid = state.pid()
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        if not until(lambda: not state.held(), DOWN_S):
            _say(f"it did not end within {DOWN_S:.0f} s, and is killed; its log is {state.log}")
            os.kill(pid, signal.SIGKILL)
    if not until(lambda: not state.held(), DOWN_S):
        return _failed(f"the cluster does not end; its log is {state.log}")
    state.clear()
    _say("the cluster has ended")
    return 0


def run(words: Sequence[str]) -> int:
    """Be the process that holds the cluster, until SIGTERM."""
    options = _options().parse_args(words)
    state = State(state_folder())
    if not state.hold():
        return _failed("another process holds the cluster")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: _interrupt(stop))
    names = [f"node-{i + 1}" for i in range(options.nodes)]
    told: dict[str, Any] = {"pid": os.getpid(), "nodes": names}
    state.remember(told)
    cluster = None
    try:
        cluster = Cluster(
            state.folder / "run", names, options.style, spec=options.gpus, migd=not options.bare, say=state.say
        )
        told["roots"] = str(cluster.roots)
        state.remember(told)
        cluster.start()
        plane = cluster.plane
        told |= {"kubeconfig": str(plane.kubeconfig), "logs": str(plane.logs), "programs": str(found_programs())}
        state.remember(told)
        stop.wait()
    except (StartError, DeployError) as error:
        return _failed(str(error))
    except _InterruptedError:
        return 0
    finally:
        if cluster is not None:
            cluster.stop()
    return 0


class _InterruptedError(BaseException):
    """SIGTERM came while it was being started."""


def _interrupt(stop: threading.Event) -> None:
    started = stop.is_set()
    stop.set()
    if not started:
        raise _InterruptedError


class State:
    """The folder of the one cluster of this user. folder: made at first need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self._lock = folder / "lock"
        self._told = folder / "cluster.json"
        self._progress = folder / "progress"
        self._holding: IO[bytes] | None = None

    def exists(self) -> bool:
        """Whether something of a cluster is here."""
        return self._told.exists() or (self.folder / "run").exists()

    def held(self) -> bool:
        """Whether the process that holds a cluster lives."""
        if not self._lock.exists():
            return False
        with self._lock.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def hold(self) -> bool:
        """Be the process that holds it, until this one ends."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._holding = self._lock.open("wb")
        try:
            fcntl.flock(self._holding, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def clear(self) -> None:
        """Remove what a cluster left that is no more; an empty folder is ready for the next."""
        roots = self.told().get("roots") if self._told.exists() else None
        if roots is not None:
            shutil.rmtree(roots, ignore_errors=True)
        for left in (self._told, self._progress):
            left.unlink(missing_ok=True)
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def remember(self, told: Mapping[str, Any]) -> None:
        """Keep what others need to know."""
        new = self._told.with_suffix(".new")
        new.write_text(json.dumps(dict(told), indent=1))
        os.replace(new, self._told)

    def told(self) -> dict[str, Any]:
        """What was kept."""
        found: dict[str, Any] = json.loads(self._told.read_text())
        return found

    def ready(self) -> bool:
        """Whether it is up."""
        return self._told.exists() and "kubeconfig" in self.told()

    def pid(self) -> int | None:
        """The process that holds it."""
        return int(self.told()["pid"]) if self._told.exists() else None

    def say(self, line: str) -> None:
        """A line of progress."""
        with self._progress.open("a") as file:
            file.write(f"{line}\n")

    def progress(self) -> list[str]:
        """The lines so far."""
        return self._progress.read_text().splitlines() if self._progress.exists() else []


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m controlplane cluster", description="A cluster to play with.")
    parser.add_argument("--nodes", type=int, default=3, help="how many nodes with GPUs (3)")
    parser.add_argument("--gpus", default=SPEC, help=f"the GPUs of each ({SPEC})")
    parser.add_argument(
        "--style", choices=sorted(STYLES), default="helm", help="how the device plugin is installed (helm)"
    )
    parser.add_argument("--bare", action="store_true", help="without migd")
    return parser


def _words(options: argparse.Namespace) -> list[str]:
    words = [f"--nodes={options.nodes}", f"--gpus={options.gpus}", f"--style={options.style}"]
    return [*words, "--bare"] if options.bare else words


def _shown(state: State) -> int:
    told = state.told()
    _say(f"logs: {told['logs']}")
    _say(f'export PATH="{told["programs"]}:$PATH"')
    _say(f"export KUBECONFIG={told['kubeconfig']}")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _failed(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return 1
