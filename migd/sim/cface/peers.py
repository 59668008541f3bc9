"""Who is at the other end of a connection: its process, as the kernel and /proc tell, and what it may do."""

from __future__ import annotations

import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from migd.sim.processes import started_at

CONFIG, MONITOR = "dev/nvidia-caps/nvidia-cap1", "dev/nvidia-caps/nvidia-cap2"
"""The files of the two MIG capabilities, under a driver root. Source: nvidia-caps numbering of mig-minors."""

COMMAND_MAX: Final = 200
_CONTAINER: Final = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?:/|$)")
_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class Peer:
    """One process. started: its start time in clock ticks, None where it is not a real one that can be seen.

    real: the kernel says who it is; else it was stated, as only tests may. privilege: as in SimHost.nvml.
    """

    pid: int
    started: int | None
    real: bool
    privilege: str
    command: str
    container: str
    uid: int


def peer_of(link: socket.socket, root: Path) -> Peer:
    """The process that opened this connection. Of another pid namespace that cannot be seen from here: pid 0."""
    size = _CREDENTIALS.size
    pid, uid, gid = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    command, container = describe(pid)
    return Peer(pid, started_at(pid) if pid else None, True, privilege_of(uid, gid, root), command, container, uid)


def privilege_of(uid: int, gid: int, root: Path) -> str:
    """What a user may do: root all; others what the mode of the capability's file lets them, config before monitor."""
    if uid == 0:
        return "root"
    for name, file in (("config", CONFIG), ("monitor", MONITOR)):
        try:
            state = (root / file).stat()
        except OSError:
            continue
        if state.st_mode & (0o400 if state.st_uid == uid else 0o040 if state.st_gid == gid else 0o004):
            return name
    return "none"


def describe(pid: int, proc: Path = Path("/proc")) -> tuple[str, str]:
    """The command line and the container id of a process; "" for what cannot be read."""
    folder = proc / str(pid)
    try:
        words = (folder / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
        command = words.decode("utf-8", "replace")[:COMMAND_MAX] or (folder / "comm").read_text().strip()
        found = _CONTAINER.findall((folder / "cgroup").read_text(errors="replace").replace("\n", "/\n"))
    except OSError:
        return "", ""
    return command, found[-1] if found else ""


def gone(peer: Peer) -> bool:
    """Whether a real process that could be seen has ended."""
    return peer.started is not None and peer.pid != os.getpid() and started_at(peer.pid) != peer.started
