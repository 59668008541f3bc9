"""What was built, at its place under a driver root: whole at any moment, and who has the old one open keeps that."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def place(built: Path, where: Path) -> None:
    """A program or library at this path; nothing is written where it is there already."""
    where.parent.mkdir(parents=True, exist_ok=True)
    if where.exists() and where.read_bytes() == built.read_bytes():
        return
    part = _part(where)
    shutil.copyfile(built, part)
    part.chmod(0o755)
    part.replace(where)


def place_library(built: Path, name: Path, version: str) -> None:
    """The library as a driver installs it: a file with the driver's version in its name, and `name`, a link to it.

    NVIDIA's CDI generator looks for the former.
    """
    where = name.with_name(f"{name.stem}.{version}")
    place(built, where)
    if not name.is_symlink() or os.readlink(name) != where.name:
        link = _part(name)
        link.symlink_to(where.name)
        link.replace(name)


def _part(where: Path) -> Path:
    return where.with_name(f".{where.name}.{os.getpid()}.new")
