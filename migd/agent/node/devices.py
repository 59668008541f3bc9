"""Device nodes and CDI after instances were created: what containers need before they can open a new instance."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from migd.agent.host import ProgramError, run_program

TIMEOUT_S: Final = 60.0
_MINOR: Final = re.compile(r"^DeviceFileMinor:\s*(\d+)\s*$", re.MULTILINE)


class DeviceFiles(Protocol):
    """The device nodes of this machine's GPU instances, and what describes them to container runtimes."""

    def refresh(self) -> None:
        """Have them as the GPUs are now. DevicesError where that fails; it may be called again."""
        ...


class DevicesError(Exception):
    """Device nodes or CDI could not be refreshed; the text says what failed and what it said."""


Runner = Callable[[Sequence[str], float], None]
"""Runs one program to its end, within so many seconds; ProgramError where that fails."""


class HostDeviceFiles:
    """This machine's, by NVIDIA's own programs, each with fixed arguments.

    `nvidia-smi` makes the nodes under /dev/nvidia-caps as a side effect, which mig-manager relies on too;
    `nvidia-modprobe` makes one that is missing still. A host-wide CDI specification is written again where there is
    one: it lists instances by UUID. (The device plugin writes its own at each start.)
    root: under which /proc, /dev and /var/run lie, for tests.
    """

    def __init__(self, run: Runner = run_program, root: Path = Path("/")) -> None:
        self._run = run
        self._capabilities = root / "proc/driver/nvidia/capabilities"
        self._nodes = root / "dev/nvidia-caps"
        self._specification = root / "var/run/cdi/nvidia.yaml"

    def refresh(self) -> None:
        """See `DeviceFiles`."""
        self._program("nvidia-smi", "-L", needed=False)  # with a driver in a container of its own the next one does it
        for capability in self._missing():
            self._program("nvidia-modprobe", "-f", str(capability))
        missing = self._missing()
        if missing:
            raise DevicesError(f"no device node was made under {self._nodes} for {', '.join(map(str, missing))}")
        if self._specification.exists():
            self._program("nvidia-ctk", "cdi", "generate", f"--output={self._specification}")

    def _program(self, *command: str, needed: bool = True) -> None:
        try:
            self._run(command, TIMEOUT_S)
        except ProgramError as error:
            if needed or not error.missing:
                raise DevicesError(str(error)) from error

    def _missing(self) -> tuple[Path, ...]:
        """The access files of instances whose device node is not there.

        Source: the MIG user guide, /proc/driver/nvidia/capabilities/gpu*/mig/gi*/[ci*/]access, "DeviceFileMinor: 12".
        """
        found = [
            *self._capabilities.glob("gpu*/mig/gi*/access"),
            *self._capabilities.glob("gpu*/mig/gi*/ci*/access"),
        ]
        return tuple(path for path in sorted(found) if not self._is_there(path))

    def _is_there(self, access: Path) -> bool:
        try:
            minor = _MINOR.search(access.read_text(errors="replace"))
        except OSError:
            return True  # the instance is gone again
        return minor is None or (self._nodes / f"nvidia-cap{minor[1]}").exists()
