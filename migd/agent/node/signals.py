"""SIGHUP to the device plugin and to GPU feature discovery: they enumerate their GPUs anew, in place."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Protocol

COMMANDS: Final = ("nvidia-device-plugin", "gpu-feature-discovery")
"""The programs that read their GPUs again on SIGHUP, and go on. Source: k8s-device-plugin, cmd/*/main.go."""
_COMM_MAX: Final = 15
"""So many characters of a program's name the kernel keeps. Source: proc(5), TASK_COMM_LEN."""
_POD: Final = re.compile(
    r"(?:^|[/-])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?:/|$)"
)


class Signals(Protocol):
    """Reaches the processes of pods on this node."""

    def hang_up(self, pod_uids: Collection[str]) -> int:
        """SIGHUP to the GPU clients of these pods; how many were reached. SignalError where one may not be."""
        ...


class SignalError(Exception):
    """A process could not be signalled; the text says which and why."""


def pod_uid_of(cgroup: str) -> str | None:
    """The uid of the pod that a process is in, from its /proc/PID/cgroup; None for a process of the host.

    As systemd's and cgroupfs' drivers write it, with cgroup v1 or v2, also from within another cgroup namespace. A
    static pod has the hash of its configuration there, and no uid that the API server knows.
    """
    found = [match for line in cgroup.splitlines() for match in _POD.findall(line.rpartition(":")[2])]
    return found[-1].replace("_", "-") if found else None


class ProcSignals:
    """Processes as /proc shows them; those of other pods are seen only with the host's process ids (hostPID).

    A process is held by its pidfd before it is looked at, so that no other one can have got its number meanwhile.
    """

    def __init__(self, proc: Path = Path("/proc"), send: Callable[[int, int], None] = signal.pidfd_send_signal) -> None:
        self._proc = proc
        self._send = send

    def hang_up(self, pod_uids: Collection[str]) -> int:
        """See `Signals`."""
        pids = sorted(int(entry.name) for entry in self._proc.iterdir() if entry.name.isdigit())
        return sum(self._hang_up(pid, pod_uids) for pid in pids)

    def _hang_up(self, pid: int, pod_uids: Collection[str]) -> bool:
        """Whether it was one of them."""
        if not self._is_one(pid, pod_uids):
            return False  # nearly all: a pidfd for each would be a waste
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return False  # ended meanwhile
        try:
            if not self._is_one(pid, pod_uids):
                return False
            self._send(handle, signal.SIGHUP)
        except ProcessLookupError:
            return False
        except OSError as error:
            raise SignalError(f"cannot send SIGHUP to process {pid}: {error.strerror}") from error
        finally:
            os.close(handle)
        return True

    def _is_one(self, pid: int, pod_uids: Collection[str]) -> bool:
        folder = self._proc / str(pid)
        try:
            comm = (folder / "comm").read_text(errors="replace").rstrip("\n")
            if comm not in _COMMS:
                return False
            return pod_uid_of((folder / "cgroup").read_text(errors="replace")) in pod_uids
        except OSError:
            return False  # ended meanwhile


_COMMS: Final = frozenset(command[:_COMM_MAX] for command in COMMANDS)
