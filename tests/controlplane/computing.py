"""`python -m controlplane.computing`: what a pod does on the GPUs that it got: it computes there until it is ended.

It finds them by the device nodes that it has, and holds them by a message to the driver's server, which shows this
process in NVML on each of them, and lets go when the connection ends: that is when the process does, however it ends.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from controlplane.container_devices import devices_of
from migd.nvml.roots import ROOT, this_library
from migd.sim.cface.client import ControlClient


def main() -> int:
    """Compute until SIGTERM; the exit status."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    root = Path(os.environ[ROOT])
    nvml: Any = this_library()
    nvml.nvmlInit()
    devices = devices_of(nvml, root)
    nvml.nvmlShutdown()
    with ControlClient(root) as client:
        for device in devices:
            client.hold(device)
        sys.stdout.write(f"computing on {' '.join(devices) or 'nothing'}\n")
        sys.stdout.flush()
        signal.sigwait(ends)
    return 0


if __name__ == "__main__":
    sys.exit(main())
