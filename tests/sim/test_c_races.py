"""`migd apply` as a process on the C face, racing another NVML client: what comes in between stays, and is named.

What comes in between is put there by a delay: a call of migd's waits before its effect while the other one acts.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pynvml
import pytest
from c_clients import python
from commands import cut
from controlplane.processes import until

from migd.cli.exits import Exit
from migd.sim import Fault, SimHost
from migd.sim.cface.client import ControlClient
from migd.sim.cface.serving import Server

WAIT_S = 20.0
CREATE, DESTROY = "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlComputeInstanceDestroy"
CHANGES = ("Destroy", "CreateGpuInstanceWithPlacement", "CreateComputeInstance")


@pytest.fixture
def host():
    return SimHost.fresh("a100-80gb", clock="real", duration_scale=0.0)


@pytest.fixture
def server(c_library, host, tmp_path):
    with Server(host, tmp_path / "root") as server:
        yield server
    assert not server.troubles, "\n".join(server.troubles)


@pytest.fixture
def client(server):
    with ControlClient(server.root) as client:
        yield client


@pytest.fixture
def migd(server, tmp_path):
    """Starts `migd apply` for these instances on every GPU; its Popen."""

    def start(wanted, *words):
        path = tmp_path / "plan.yaml"
        kind = "apiVersion: migd.dev/v1alpha1\nkind: GPUPartitionPlan\nmetadata: {name: races}\n"
        path.write_text(f"{kind}spec:\n  nodeSelector: {{}}\n  rules:\n  - {cut(wanted)}\n")
        command = [sys.executable, "-m", "migd", "apply", f"--state-dir={tmp_path / 'state'}", "-f", str(path), *words]
        environment = {**os.environ, "MIGD_DRIVER_ROOT": str(server.root)}
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    return start


def ended(program):
    """Its exit status and what it said."""
    said, _ = program.communicate(timeout=60)
    return program.returncode, said


def struck(client):
    """Whether the fault has struck: the call waits now."""
    return client.snapshot().faults[0].fired == 1


def instances(host):
    """The instances by place: (serial number, size, the UUID of its MIG device or "")."""
    (gpu,) = host.snapshot().gpus
    return {one.start: (one.serial, one.size, next((c.uuid for c in one.compute), "")) for one in gpu.instances}


def theirs_id(host):
    """The id of the GPU instance at place 4."""
    (gpu,) = host.snapshot().gpus
    return next(one.gi_id for one in gpu.instances if one.start == 4)


def creates(server, profile, start, size, compute):
    """Another client creates an instance with its compute instance, and has ended then."""
    code = f"""
import pynvml as n
from ctypes import byref
n.nvmlInit()
gpu = n.nvmlDeviceGetHandleByIndex(0)
where = n.c_nvmlGpuInstancePlacement_t({start}, {size})
made = n.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, {profile}, byref(where))
n.nvmlGpuInstanceCreateComputeInstance(made, {compute})
"""
    done = python(server, code)
    said, _ = done.communicate(timeout=WAIT_S)
    assert done.returncode == 0, said


HOLDS = """
import sys
from pathlib import Path
from migd.sim.cface.client import ControlClient
with ControlClient(Path(sys.argv[1])) as client:
    client.hold(sys.argv[2])
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("nth", [1, 3])
def test_an_instance_taken_just_before_its_destroy_is_kept_and_its_taker_named(server, host, client, migd, nth):
    assert ended(migd("7×1g.10gb"))[0] == Exit.DONE
    before = instances(host)
    begun = client.newest()
    client.inject(Fault(DESTROY, "delay", nth=nth, delay_s=1.5))
    apply = migd("7g.80gb")
    assert until(lambda: struck(client), WAIT_S, 0.01)
    taken = sorted(before)[nth - 1]
    taker = python(server, HOLDS, str(server.root), before[taken][2])
    assert taker.stdout.readline() == b"held\n"
    code, said = ended(apply)
    assert code == Exit.BLOCKED, said
    assert f"1g.10gb@{taken} is in use by pid {taker.pid} ({sys.executable} -c" in said
    after = instances(host)
    assert after[taken] == before[taken]
    assert {start: one[:2] for start, one in after.items()} == {start: one[:2] for start, one in before.items()}
    assert all(uuid for _, _, uuid in after.values()), "what was destroyed before is there again"
    calls = [call for call in client.calls(pid=apply.pid, after=begun) if any(word in call.name for word in CHANGES)]
    assert [(call.name, call.code) for call in calls] == [
        *[(DESTROY, 0)] * (nth - 1),
        (DESTROY, pynvml.NVML_ERROR_IN_USE),
        *[("nvmlGpuInstanceCreateComputeInstance", 0)] * (nth - 1),
    ]
    taker.communicate(b"\n")
    assert ended(migd("7g.80gb"))[0] == Exit.DONE
    assert [size for _, size, _ in instances(host).values()] == [8]


def test_one_that_waits_for_idle_goes_on_by_itself_once_the_taker_has_gone(server, host, client, migd):
    assert ended(migd("7×1g.10gb"))[0] == Exit.DONE
    before = instances(host)
    client.inject(Fault(DESTROY, "delay", delay_s=1.5))
    apply = migd("7g.80gb", "--wait-idle=1m")
    assert until(lambda: struck(client), WAIT_S, 0.01)
    taker = python(server, HOLDS, str(server.root), before[0][2])
    assert taker.stdout.readline() == b"held\n"
    assert until(lambda: any(call.code == pynvml.NVML_ERROR_IN_USE for call in client.calls(apply.pid)), WAIT_S, 0.05)
    assert instances(host) == before
    taker.communicate(b"\n")
    code, said = ended(apply)
    assert (code, list(instances(host))) == (Exit.DONE, [0]), said


def test_a_place_that_somebody_takes_between_our_destroy_and_our_create_is_left_to_them(server, host, client, migd):
    assert ended(migd("7×1g.10gb"))[0] == Exit.DONE
    before = instances(host)
    client.inject(Fault(CREATE, "delay", delay_s=1.5))
    apply = migd("3g.40gb 3×1g.10gb")
    assert until(lambda: struck(client), WAIT_S, 0.01)
    assert 4 not in instances(host)
    creates(server, 14, 4, 2, 1)
    theirs = instances(host)[4]
    code, said = ended(apply)
    assert code == Exit.FAILED, said
    assert "GPU 0 failed (ForeignInstances): somebody else made or changed 2g.20gb@4; going back failed too: " in said
    assert "1g.10gb@4, 1g.10gb@5 cannot be put back beside somebody else's 2g.20gb@4" in said
    now = instances(host)
    assert now[4] == theirs
    kept = {start: one for start, one in before.items() if start < 3}
    assert kept.items() <= now.items()
    assert sorted(now) == [0, 1, 2, 3, 4, 6], "all is put back that they leave room for"
    created = [call.code for call in client.calls(apply.pid) if call.name == CREATE]
    assert created == [pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES, 0, 0], "and nothing is tried in vain"

    nvml = host.nvml(pid=99)
    nvml.nvmlInit()
    gone = nvml.nvmlDeviceGetGpuInstanceById(nvml.nvmlDeviceGetHandleByIndex(0), theirs_id(host))
    nvml.nvmlComputeInstanceDestroy(nvml.nvmlGpuInstanceGetComputeInstanceById(gone, 0))
    nvml.nvmlGpuInstanceDestroy(gone)
    nvml.nvmlShutdown()
    assert ended(migd("3g.40gb 3×1g.10gb"))[0] == Exit.DONE
    assert sorted(instances(host)) == [0, 1, 2, 4]
    assert kept.items() <= instances(host).items()


def test_one_of_just_our_shape_in_our_place_is_theirs_all_the_same(server, host, client, migd):
    assert ended(migd("7×1g.10gb"))[0] == Exit.DONE
    client.inject(Fault(CREATE, "delay", delay_s=1.5))
    apply = migd("3g.40gb 3×1g.10gb")
    assert until(lambda: struck(client), WAIT_S, 0.01)
    creates(server, 19, 4, 1, 0)
    theirs = instances(host)[4]
    code, said = ended(apply)
    assert code != Exit.DONE, said
    assert "somebody else made or changed 1g.10gb@4" in said
    assert instances(host)[4] == theirs
    assert sorted(instances(host)) == list(range(7)), "all others are there as before"
    code, said = ended(migd("7g.80gb"))
    assert (code, instances(host)[4]) == (Exit.BLOCKED, theirs), said
