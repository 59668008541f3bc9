"""`python -m controlplane.exporter`: holds NVML open on every device and asks of it each second, as dcgm-exporter does.

It lets go when it is told to end, and not before: a GPU that it holds cannot be reset.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, Final

from controlplane.container_devices import mig_devices
from migd.nvml.roots import this_library

_EVERY_S: Final = 1.0


def main() -> int:
    """Ask until SIGTERM; the exit status."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    nvml: Any = this_library()
    nvml.nvmlInit()
    gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    sys.stdout.write(f"{os.getpid()} watches {len(gpus)} GPUs\n")
    sys.stdout.flush()
    while signal.sigtimedwait(ends, _EVERY_S) is None:
        for gpu in gpus:
            for device in (gpu, *mig_devices(nvml, gpu)):
                nvml.nvmlDeviceGetUUID(device)
            nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    nvml.nvmlShutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
