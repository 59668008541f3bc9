"""Prepares a machine for a real node: packages, programs, the image, containerd's folder; or says what hinders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from controlplane.building import REAL_NODE, build, cache_home, found_programs
from controlplane.real_images import build_image
from controlplane.real_packages import hindrance, install, installable, missing, seen
from controlplane.real_roots import FOLDER, found_root, make_root


def prepare(say: Callable[[str], None]) -> None:
    """Prepare it where that is possible; PackageError or BuildError where it should be, and fails.

    Cold it takes seven to eight minutes on 2 cores; where nothing has changed, a moment.
    """
    machine = seen()
    if hindrance(machine) and installable(machine):
        install(missing(machine), say)
        machine = seen()
    hinders = hindrance(machine)
    if hinders:
        say(f"tests on a real node will be skipped: {hinders}")
        return
    build(say, group=REAL_NODE)
    build_image(say)
    make_root(folder(), say)


def hinders() -> str:
    """Why there can be no real node here, in a sentence, or "". NotBuiltError where it was not prepared."""
    found = hindrance(seen())
    if not found:
        found_programs()
        found_programs(group=REAL_NODE)
        found_root(folder())
    return found


def folder() -> Path:
    """Where real nodes are, and what they start from."""
    return cache_home() / FOLDER
