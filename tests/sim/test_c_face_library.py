"""Where the library of a driver root lies, and under which names."""

from __future__ import annotations

import platform
from pathlib import Path

from migd.sim import SimHost
from migd.sim.cface.serving import Server


def test_the_library_has_the_drivers_version_in_its_name_and_the_name_that_programs_ask_for_is_a_link(tmp_path: Path):
    host = SimHost.fresh("1xa100-80gb")
    version = host.snapshot().switches.driver_version
    folder = tmp_path / "usr/lib" / f"{platform.machine()}-linux-gnu"
    for _ in range(2):  # also where an earlier server has been
        with Server(host, tmp_path) as server:
            assert server.library == folder / "libnvidia-ml.so.1"
            assert server.library.readlink() == Path(f"libnvidia-ml.so.{version}")
            assert (folder / f"libnvidia-ml.so.{version}").read_bytes()[:4] == b"\x7fELF"
    assert sorted(path.name for path in folder.iterdir()) == ["libnvidia-ml.so.1", f"libnvidia-ml.so.{version}"]
