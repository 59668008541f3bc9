"""The one cgroup that all of a real node's pods are in: made in every hierarchy, and removed with all that is in it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_CONTROLLERS: Final = ("cpu", "cpuset", "memory", "pids")


def hierarchies(root: Path = _ROOT) -> list[Path]:
    """The roots of all hierarchies: one with cgroup v2, one a controller with v1."""
    if (root / "cgroup.controllers").exists():
        return [root]
    return sorted(found.parent for found in root.glob("*/cgroup.procs"))


def make(name: str, root: Path = _ROOT) -> None:
    """Make it, or leave it where it is there; OSError where that is not allowed."""
    found = hierarchies(root)
    if not found:
        raise OSError(f"{root} has no cgroups")
    for hierarchy in found:
        (hierarchy / name).mkdir(exist_ok=True)
        if hierarchy == root:
            there = (root / "cgroup.controllers").read_text().split()
            wanted = " ".join(f"+{one}" for one in _CONTROLLERS if one in there)
            for folder in (root, root / name):
                (folder / "cgroup.subtree_control").write_text(wanted)


def remove(name: str, root: Path = _ROOT) -> bool:
    """Remove it with all cgroups in it, as far as no process is left in them; whether nothing of it is left."""
    for hierarchy in hierarchies(root):
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            with contextlib.suppress(OSError):  # a process in it is dying this moment
                os.rmdir(folder)
    return not any((hierarchy / name).exists() for hierarchy in hierarchies(root))


def hindrance(name: str, root: Path = _ROOT) -> str:
    """Why it cannot be made, "" where it can: tried under another name, since this one may be in use."""
    try:
        make(f"{name}-trial", root)
    except OSError as error:
        return f"{error.strerror or error}: {error.filename or root}"
    remove(f"{name}-trial", root)
    return ""
