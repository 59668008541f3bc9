"""Many threads and processes on the C face, with faults, cut connections and restarts: no crash, lie, or leak.

A storm (c_programs/storm.c) knows what is true of its GPU and ends at the first wrong answer. `--soak` takes 26
threads a process instead of 13, and looks at memory over a million calls.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from controlplane.processes import until

from migd.sim import Fault, SimHost
from migd.sim.cface.client import ControlClient
from migd.sim.cface.header import find_compiler, find_header
from migd.sim.cface.serving import Server

PROCESSES = 8
SOURCE = Path(__file__).parent / "c_programs" / "storm.c"
WAIT_S = 300.0


@pytest.fixture
def storm(c_library, tmp_path):
    """The compiled program."""
    made = tmp_path / "storm"
    folder = c_library.parent
    flags = ["-O1", "-Wall", "-Werror", "-pthread", f"-I{find_header().parent}", f"-L{folder}"]
    subprocess.run([find_compiler(), *flags, "-o", made, SOURCE, "-l:libnvidia-ml.so.1"], check=True)
    return made


def start(storm, library, *words):
    environment = {"LD_LIBRARY_PATH": str(library.parent)}
    command = [str(storm), *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def switch_on(host):
    """MIG on everywhere."""
    nvml = host.nvml(pid=1)
    nvml.nvmlInit()
    for index in range(nvml.nvmlDeviceGetCount()):
        nvml.nvmlDeviceSetMigMode(nvml.nvmlDeviceGetHandleByIndex(index), 1)
    nvml.nvmlShutdown()


def places(host, index):
    """A bit for each place of a GPU that is taken."""
    return sum(1 << instance.start for instance in host.snapshot().gpus[index].instances)


def faults(dice):
    """Something for calls to come; never a success without effect, which is a lie on purpose."""
    return [
        Fault("nvmlDeviceCreateGpuInstanceWithPlacement", code=19, when="before", nth=dice.randint(1, 20)),
        Fault("nvmlGpuInstanceDestroy", code=19, when="after", nth=dice.randint(1, 20)),
        Fault("nvmlDeviceCreateGpuInstance*", "crash", when=dice.choice(["before", "after"]), nth=dice.randint(1, 9)),
        Fault("nvmlGpuInstanceDestroy", "crash", when=dice.choice(["before", "after"]), nth=dice.randint(1, 9)),
        Fault("nvmlDeviceGet*", "delay", delay_s=0.05, nth=dice.randint(1, 500), times=3),
        Fault("nvmlDeviceGet*", code=999, nth=dice.randint(1, 500)),
    ]


def test_no_answer_is_wrong_whatever_breaks(storm, tmp_path, soak):
    threads, calls, rest = (26, 60_000, 3) if soak > 1 else (13, 6_000, 1)
    host = SimHost.fresh(f"{PROCESSES}xa100-40gb", clock="real", duration_scale=0.0)
    switch_on(host)
    dice, before = random.Random(6), len(os.listdir("/proc/self/fd"))
    ended, restarts = threading.Event(), 0
    server = Server(host, tmp_path / "root")
    server.start()
    programs = [start(storm, server.library, n, threads, calls, *host.gpu_uuids()) for n in range(PROCESSES)]
    told: dict[int, str] = {}

    def gather(number):
        told[number] = programs[number].communicate()[0]
        if all(n in told for n in range(PROCESSES)):
            ended.set()

    gatherers = [threading.Thread(target=gather, args=(n,)) for n in range(PROCESSES)]
    try:
        for gatherer in gatherers:
            gatherer.start()
        troubles, until_s = [], time.monotonic() + WAIT_S
        while time.monotonic() < until_s and not ended.wait(rest * dice.uniform(0.05, 0.4)):
            host.clear_faults()
            host.inject(*faults(dice))
            if dice.random() < 0.4:
                server.stop()
                troubles += server.troubles
                server = Server(host, tmp_path / "root")
                server.start()
                restarts += 1
            elif dice.random() < 0.5:
                for link in dice.sample(sorted(server.links, key=id), k=len(server.links) // 4):
                    link.cut()
        assert until(lambda: not host.snapshot().clients and not server.links, 10.0)
    finally:
        server.stop()
        for program, gatherer in zip(programs, gatherers, strict=True):
            program.kill()
            gatherer.join()
    for number, program in enumerate(programs):
        assert program.returncode == 0, told[number]
        known = json.loads(told[number].splitlines()[-1])
        assert known["taken"] == places(host, number)
        assert known["codes"]["0"] >= calls
    codes = [json.loads(text.splitlines()[-1])["codes"] for text in told.values()]
    assert sum(code.get("999", 0) for code in codes), "nothing broke: this tried nothing"
    sys.stdout.write(f"{PROCESSES}x{threads} threads, {restarts} restarts, answers by code: {codes}\n")
    assert restarts > 2
    assert not troubles + server.troubles
    assert len(os.listdir("/proc/self/fd")) == before


def resident_kib(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


def test_memory_is_flat_on_both_sides(storm, tmp_path, soak):
    root = tmp_path / "root"
    warming, calls = (400_000, 1_000_000) if soak > 1 else (110_000, 100_000)  # then the log of calls is full
    command = [sys.executable, "-m", "migd", "sim", "serve", "--root", str(root), "--simulate", "2xa100-40gb"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            library = Path(server.stdout.readline().split()[2])
            with ControlClient(root) as control:
                control.switch("duration_scale", 0.0)
                uuids = [gpu.uuid for gpu in control.snapshot().gpus]
            on = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceSetMigMode(n.nvmlDeviceGetHandleByIndex(0), 1))"
            subprocess.run([sys.executable, "-c", on], env={"LD_LIBRARY_PATH": str(library.parent)}, check=True)
            start(storm, library, 0, 4, warming, *uuids).communicate()
            before = resident_kib(server.pid)
            told = start(storm, library, 0, 4, calls, *uuids).communicate()[0]
            after = resident_kib(server.pid)
        finally:
            server.terminate()
        assert server.wait(10) == 0
    known = json.loads(told.splitlines()[-1])
    sys.stdout.write(
        f"{calls} calls: server {before} -> {after} KiB, program {known['early_kib']} -> {known['late_kib']} KiB\n"
    )
    assert known["codes"].keys() == {"0"}
    assert known["late_kib"] - known["early_kib"] < 256
    assert after - before < 2048
