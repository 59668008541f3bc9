"""The space that a real node lives in: namespaces of its own, in which containerd runs, and all that ends with them.

Process 1 of the space dies with whoever opened it, and the kernel then ends every other process in it: what a test run
that is killed outright leaves is a folder and an empty cgroup, which the next one clears away.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from controlplane import real_cgroups
from controlplane.building import REAL_NODE, BuildError, found_programs
from controlplane.processes import Child, until
from controlplane.real_config import (
    CGROUP,
    OWN,
    TUNABLES,
    Place,
    containerd_config,
    mounts,
    networks_config,
    snapshotter,
)
from controlplane.real_packages import PATH

INIT: Final = Path(__file__).with_name("real_init.py")
_UNSHARE: Final = ("/usr/bin/unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")
_SYSTEM: Final = Path("/proc/sys")
_START_S: Final = 60.0
_CLEAR_S: Final = 10.0


class Inside(Child):
    """A program in a space: what is sent to it reaches it, and not the nsenter that waits for its end."""

    @property
    def inner(self) -> int | None:
        """Its own process, as the machine numbers it; None where there is none yet or any more."""
        return _only_child(self.pid)

    def _signal(self, number: signal.Signals) -> None:
        inner = self.inner if self.running else None
        if inner is None:
            super()._signal(number)
            return
        with contextlib.suppress(ProcessLookupError):  # a moment ago
            os.kill(inner, number)


class Space:
    """The space of one node. Use it as a context, or call `open` and `close`.

    place: its folder, which must be there. overlays: whether overlayfs works in it. cgroup: whether there will be pods.
    """

    def __init__(self, place: Place, logs: Path, overlays: bool, cgroup: bool = True) -> None:
        self.place = place
        self._logs = logs
        self._overlays = overlays
        self._cgroup = cgroup
        self._path = f"{found_programs(group=REAL_NODE)}:{PATH}"  # containerd looks for its shim there
        self._init = Child(
            "init", [*_UNSHARE, sys.executable, "-S", INIT, self._mounts, self._ready], logs / "init.log"
        )
        self.containerd: Inside | None = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Make it, with containerd in it; StartError, with all ended again, where that fails."""
        self._lay_out()
        if self._cgroup:
            real_cgroups.remove(CGROUP)
            real_cgroups.make(CGROUP)
        try:
            self._init.start()
            self._init.wait_until(self._ready.exists, _START_S)
            self.containerd = self.child(
                "containerd", "containerd", f"--config={self.place.folder / 'containerd.toml'}"
            )
            self.containerd.start()
            self.containerd.wait_until(self._serves, _START_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process in it, at once."""
        if self._init.running:
            self._init.kill()
        if self.containerd is not None:
            self.containerd.stop()  # it is dead by now: its number is given back
        if self._cgroup:
            until(lambda: real_cgroups.remove(CGROUP), _CLEAR_S)

    def child(
        self, name: str, program: str | Path, *words: str, environment: Mapping[str, str] | None = None
    ) -> Inside:
        """A program in the space, not started yet. It has the network and the users of the machine."""
        entered = ("/usr/bin/nsenter", f"--target={self.pid}", "--pid", "--mount", "--", str(program), *words)
        seen = {**os.environ, "PATH": self._path, **(environment or {})}
        return Inside(name, entered, self._logs / f"{name}.log", environment=seen)

    @property
    def pid(self) -> int:
        """Process 1 of the space, as the machine numbers it."""
        inner = _only_child(self._init.pid)
        assert inner is not None, "the space is open"
        return inner

    def ctr(self, *words: str, stdin: bytes | None = None) -> str:
        """Ask containerd for something, about what kubelets have in it; BuildError with its words where it fails."""
        ctr = str(found_programs(group=REAL_NODE) / "ctr")
        command = [ctr, f"--address={self.place.socket}", "--namespace=k8s.io", *words]
        environment = {**os.environ, "PATH": self._path}
        done = subprocess.run(command, input=stdin, capture_output=True, env=environment, check=False)
        if done.returncode != 0:
            raise BuildError(f"`{' '.join(command)}` failed: {done.stderr.decode(errors='replace').strip()[-2000:]}")
        return done.stdout.decode(errors="replace")

    def take_image(self, archive: Path | bytes) -> None:
        """Import an image, unpacked where containers will look for it; BuildError as above."""
        how = ("--local", f"--snapshotter={snapshotter(self._overlays)}")
        if isinstance(archive, bytes):
            self.ctr("images", "import", *how, "-", stdin=archive)
        else:
            self.ctr("images", "import", *how, str(archive))

    @property
    def _mounts(self) -> Path:
        return self.place.folder / "mounts.json"

    @property
    def _ready(self) -> Path:
        return self.place.folder / "mounted"

    def _serves(self) -> bool:
        with socket.socket(socket.AF_UNIX) as trial:
            return trial.connect_ex(str(self.place.socket)) == 0

    def _lay_out(self) -> None:
        """Everything that is read at the start, and every folder that something is mounted from or on."""
        place = self.place
        for name, target in OWN.items():
            (place.folder / name).mkdir(exist_ok=True)
            Path(target).mkdir(parents=True, exist_ok=True)  # on the machine it stays as it is, or empty
        has = {name: (_SYSTEM / name).exists() for name in TUNABLES}
        for name, value in TUNABLES.items():
            file = place.folder / "tunables" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
        place.networks.mkdir()
        (place.networks / "10-none.conflist").write_text(networks_config())
        (place.folder / "containerd.toml").write_text(containerd_config(place, self._overlays))
        self._mounts.write_text(json.dumps(mounts(place, has)))


def _only_child(pid: int) -> int | None:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(found[0]) if found else None
