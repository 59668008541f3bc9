"""What the C face costs: the same calls on the face in process, and through library, socket and server.

Both sides are in one process of their own, which `python -m benchmarks.faces` is: it has the real pynvml on the library
of a driver root, and a SimHost on a machine of the same seed. They take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pynvml

from benchmarks.footprint import ROOT
from benchmarks.measuring import Times, timed
from benchmarks.transactions import Kept
from migd.nvml.gpus import NvmlGpus
from migd.sim.cface.client import ControlClient
from migd.sim.host import SimHost

SPEC: Final = "8xa100-80gb"
SEVEN: Final = 19, 7
"""1g.10gb, by its profile id."""


@dataclass(frozen=True, slots=True)
class Faces:
    """One kind of work on both faces. calls: NVML calls in it, as the server counted them; ratio: of the medians."""

    what: str
    kept: Kept
    calls: int
    process: Times
    c: Times
    ratio: float


def faces(kept: Kept, runs: int) -> list[Faces]:
    """Each kind of work so often on either face."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        root = where / "root"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
        state = [f"--state={where / 'served.json'}"] if kept == "file" else []
        serve = [sys.executable, "-m", "migd", "sim", "serve", f"--root={root}", f"--simulate={SPEC}", *state]
        with subprocess.Popen(serve, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                said = server.stdout.readline()
                assert said.startswith("serving"), f"no server: {said}"
                environment["LD_LIBRARY_PATH"] = str(Path(said.split()[2]).parent)
                client = [sys.executable, "-m", "benchmarks.faces", str(root), str(where), kept, str(runs)]
                done = subprocess.run(client, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            finally:
                server.terminate()
    return [_told(kept, one) for one in json.loads(done.stdout)]


def _told(kept: Kept, told: dict[str, Any]) -> Faces:
    process, c = Times.of(told["process"]), Times.of(told["c"])
    return Faces(told["what"], kept, told["calls"], process, c, c.p50_s / process.p50_s)


def _works(nvml: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The kinds of work, on GPUs of which all but the first are cut into seven."""
    nvml.nvmlInit()
    profile, number = SEVEN
    gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    for gpu in gpus:
        nvml.nvmlDeviceSetMigMode(gpu, 1)
    for gpu in gpus[1:]:
        for _ in range(number):
            nvml.nvmlGpuInstanceCreateComputeInstance(nvml.nvmlDeviceCreateGpuInstance(gpu, profile), 0)

    def recut() -> None:
        nvml.nvmlGpuInstanceDestroy(nvml.nvmlDeviceCreateGpuInstance(gpus[0], profile))

    yield "read a UUID", lambda: nvml.nvmlDeviceGetUUID(gpus[0])
    yield "create and destroy an instance", recut
    yield "migd looks at 8 GPUs, 49 instances", NvmlGpus(nvml).look


def main(words: list[str]) -> None:
    """ROOT FOLDER KEPT RUNS: the client; prints the times of both sides as JSON."""
    root, folder, kept, runs = Path(words[0]), Path(words[1]), words[2], int(words[3])
    host = SimHost.open(folder / "own.json", SPEC) if kept == "file" else SimHost.fresh(SPEC, clock="real")
    host.switch("duration_scale", 0.0)
    told = []
    with ControlClient(root) as control:
        control.switch("duration_scale", 0.0)
        for (what, ours), (_, theirs) in zip(_works(host.nvml()), _works(pynvml), strict=True):
            seen = control.newest()
            assert ours() == theirs(), f"{what}: the faces differ"
            calls = len(control.calls(after=seen))
            for work in (ours, theirs):
                work()
            pairs = [(timed(ours)[0], timed(theirs)[0]) for _ in range(runs)]
            process, c = zip(*pairs, strict=True)
            told.append({"what": what, "calls": calls, "process": process, "c": c})
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1:])
