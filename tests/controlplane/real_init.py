"""`python real_init.py MOUNTS READY`: process 1 of a real node: mounts what is the node's own, then buries orphans.

It runs in pid and mount namespaces of its own. When it ends, however that is, the kernel ends every process of the node
and takes its mounts away: containers, shims, kubelet and containerd.
MOUNTS: a JSON file, a list of [source, target]. READY: a file that is made once all is mounted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

_MOUNT = "/bin/mount"


def main(words: list[str]) -> None:
    """Mount, say so, and wait for SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    mounts, ready = map(Path, words)
    # volumes of pods are mounted by the kubelet and have to show where containerd looks; nothing shows outside
    subprocess.run([_MOUNT, "--make-rshared", "/"], check=True)
    for source, target in json.loads(mounts.read_text()):
        subprocess.run([_MOUNT, "--bind", source, target], check=True)
    ready.touch()
    while signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) == signal.SIGCHLD:
        _bury()


def _bury() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return  # nobody is left


if __name__ == "__main__":
    main(sys.argv[1:])
