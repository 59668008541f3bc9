"""SIGHUP to the plugins of pods: which processes are meant, by what /proc says of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from migd.agent.node.signals import ProcSignals, SignalError, pod_uid_of

UID = "5c89852c-8268-c4e4-41f0-2e1dd3a7d26a"
LOW = UID.replace("-", "_")
ID = "c" * 64
SLICE = "kubepods.slice/kubepods-burstable.slice"
CGROUPS = {
    "systemd, cgroup v2": f"0::/{SLICE}/kubepods-burstable-pod{LOW}.slice/cri-containerd-{ID}.scope\n",
    "systemd, guaranteed": f"0::/kubepods.slice/kubepods-pod{LOW}.slice/crio-{ID}.scope\n",
    "cgroupfs, cgroup v2": f"0::/kubepods/burstable/pod{UID}/{ID}\n",
    "from a private namespace": f"0::/../../kubepods-besteffort-pod{LOW}.slice/cri-containerd-{ID}.scope\n",
    "cgroup v1": f"12:devices:/kubepods/besteffort/pod{UID}/{ID}\n11:memory:/kubepods/besteffort/pod{UID}/{ID}\n",
    "systemd in the pod": f"0::/kubepods.slice/kubepods-pod{LOW}.slice/cri-containerd-{ID}.scope/init.scope\n",
    "the pod itself": f"0::/kubepods.slice/kubepods-pod{LOW}.slice\n",
}


@pytest.mark.parametrize("text", CGROUPS.values(), ids=CGROUPS.keys())
def test_the_pod_of_a_process_is_read_from_every_form_of_its_cgroup(text):
    assert pod_uid_of(text) == UID


def test_a_static_pod_has_a_hash_and_a_process_of_the_host_has_no_pod():
    assert pod_uid_of(f"0::/kubepods/burstable/pod{'ab' * 16}/{ID}\n") == "ab" * 16
    for text in ("0::/system.slice/nvidia-persistenced.service\n", "0::/\n", "", "0::/user.slice/podman-123.scope\n"):
        assert pod_uid_of(text) is None


@pytest.fixture
def child():
    """A process that says which signal it got."""
    code = (
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})\n"  # a handler that prints may come into a print
        "print('ready', flush=True)\n"
        "signal.sigwait({signal.SIGHUP})\n"
        "print('hung up', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def described(proc, pid, comm, cgroup):
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "comm").write_text(f"{comm}\n")
    (folder / "cgroup").write_text(cgroup)


def test_the_plugin_of_the_pod_is_told_and_nobody_else(tmp_path, child):
    described(tmp_path, child.pid, "nvidia-device-p", CGROUPS["systemd, cgroup v2"])
    described(tmp_path, os.getpid(), "pause", CGROUPS["systemd, cgroup v2"])  # in the pod, but not the plugin
    (tmp_path / "self").mkdir()
    assert ProcSignals(tmp_path).hang_up({UID}) == 1
    assert child.communicate(timeout=30)[0] == "hung up\n"


def test_the_plugin_of_another_pod_and_a_process_that_ended_are_left_alone(tmp_path):
    sent = []
    described(tmp_path, os.getpid(), "nvidia-device-p", CGROUPS["cgroup v1"])
    described(tmp_path, 2**22 + 1, "nvidia-device-p", CGROUPS["systemd, cgroup v2"])  # above every possible pid
    signals = ProcSignals(tmp_path, lambda *what: sent.append(what))
    assert signals.hang_up({"11111111-2222-3333-4444-555555555555"}) == 0
    (tmp_path / str(os.getpid()) / "comm").write_text("bash\n")
    assert signals.hang_up({UID}) == 0
    assert sent == []


def test_feature_discovery_is_told_too_and_a_process_that_may_not_be_signalled_is_named(tmp_path):
    def refuse(handle, number):
        assert number == signal.SIGHUP
        raise PermissionError(1, "Operation not permitted")

    described(tmp_path, os.getpid(), "gpu-feature-dis", CGROUPS["cgroupfs, cgroup v2"])
    with pytest.raises(SignalError, match=f"process {os.getpid()}: Operation not permitted"):
        ProcSignals(tmp_path, refuse).hang_up({UID})
