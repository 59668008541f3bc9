"""`python -m controlplane.taking FILE`: takes the MIG device that a file names, for as long as it does.

It is a client of NVML that nobody foresees: it asks no scheduler, no kubelet and no plugin.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

from migd.nvml.roots import ROOT, this_library
from migd.sim.cface.client import ControlClient

_EVERY_S: Final = 0.02


def main(file: Path) -> int:
    """Take one device after the other until SIGTERM; the exit status."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    while signal.sigtimedwait(ends, _EVERY_S) is None:
        uuid = _named(file)
        if not uuid:
            continue
        nvml: Any = this_library()
        nvml.nvmlInit()
        nvml.nvmlDeviceGetHandleByUUID(uuid)
        with ControlClient(Path(os.environ[ROOT])) as client:
            client.hold(uuid)
            while _named(file) == uuid:
                if signal.sigtimedwait(ends, _EVERY_S) is not None:
                    return 0
        nvml.nvmlShutdown()
    return 0


def _named(file: Path) -> str:
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
