"""Who holds a GPU: commands, containers and open device files, from /proc."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_CONTAINER: Final = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?:/|$)")
"""A container's id in a cgroup path, as containerd, CRI-O and Docker write it."""


COMMAND_MAX: Final = 200
"""Of a command line, so much is told; some are tens of thousands of characters long."""


class ProcProcesses:
    """Processes as /proc shows them. proc: its folder, for tests and for agents that mount it elsewhere.

    Processes of other users are seen only by root; what cannot be read is left out, never guessed.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def describe(self, pid: int) -> tuple[str, str] | None:
        """The command line (or the kernel's name for it) and the container id of a process; None where it is gone."""
        folder = self._proc / str(pid)
        try:
            words = (folder / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
            command = _cut(words.decode("utf-8", "replace")) or (folder / "comm").read_text(errors="replace").strip()
            found = _CONTAINER.findall((folder / "cgroup").read_text(errors="replace").replace("\n", "/\n"))
        except OSError:
            return None
        return command, found[-1] if found else ""

    def device_users(self, gpu_uuid: str) -> tuple[int, ...]:
        """Processes other than this one that have the GPU's /dev/nvidiaN open, ascending.

        Source: proc(5); the minor number stands in /proc/driver/nvidia/gpus/*/information.
        """
        minor = self._minor(gpu_uuid)
        if minor is None:
            return ()
        device = f"/dev/nvidia{minor}"
        pids = (int(entry.name) for entry in self._proc.iterdir() if entry.name.isdigit())
        return tuple(sorted(pid for pid in pids if pid != os.getpid() and self._has_open(pid, device)))

    def _has_open(self, pid: int, device: str) -> bool:
        try:
            return any(os.readlink(link) == device for link in (self._proc / str(pid) / "fd").iterdir())
        except OSError:
            return False  # ended meanwhile, or not ours to read

    def _minor(self, gpu_uuid: str) -> str | None:
        for information in sorted(self._proc.glob("driver/nvidia/gpus/*/information")):
            try:
                lines = [line.partition(":") for line in information.read_text(errors="replace").splitlines()]
            except OSError:
                continue
            fields = {name.strip(): value.strip() for name, _, value in lines}
            if fields.get("GPU UUID") == gpu_uuid:
                return fields.get("Device Minor")
        return None


def _cut(command: str) -> str:
    return command if len(command) <= COMMAND_MAX else command[: COMMAND_MAX - 1] + "…"
