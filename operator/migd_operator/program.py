"""The program migd-operator: options, the parts put together, and how it ends."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from migd.kube.cluster import ApiCluster, Identity
from migd.kube.connecting import ConnectError, HttpTransport, in_cluster
from migd.kube.transport import Throttle
from migd_operator.asking import main as preview
from migd_operator.logs import log_json
from migd_operator.metering import Meters
from migd_operator.probing import pages, serving
from migd_operator.reconciling import NAMESPACE, Operator, Setup, in_a_thread
from migd_operator.shell import run_shell

MANAGER: Final = "migd-operator"
_END_S: Final = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """What the program was started with. kubeconfig: None for the pod's ServiceAccount."""

    kubeconfig: Path | None
    namespace: str
    host: str
    port: int
    identity: str


def options_of(words: Sequence[str]) -> Options:
    """The options of a command line; SystemExit with 2 where they cannot be used, as argparse has it."""
    parser = argparse.ArgumentParser(
        prog="migd-operator", description="Decides for GPUPartitionPlans which node gets which wish, and when."
    )
    parser.add_argument(
        "--kubeconfig", type=Path, metavar="FILE", help="how to reach the API server; in a pod its ServiceAccount does"
    )
    parser.add_argument(
        "--namespace", default=NAMESPACE, help="of the leases, its own and the agents' (default %(default)s)"
    )
    parser.add_argument(
        "--listen",
        default="0.0.0.0:8080",
        metavar="ADDR:PORT",
        help="for /healthz, /readyz and /metrics (default %(default)s)",
    )
    parser.add_argument(
        "--identity",
        default=os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        help="who holds the lease; no two may have the same (default $POD_NAME, else host and process id)",
    )
    found = parser.parse_args(words)
    host, colon, port = found.listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65_535:
        parser.error(f"--listen {found.listen}: write it as ADDR:PORT, such as 0.0.0.0:8080")
    if found.kubeconfig is None and not in_cluster():
        parser.error("this is no pod of a cluster: say how to reach the API server, with --kubeconfig FILE")
    return Options(found.kubeconfig, found.namespace, host.strip("[]"), int(port), found.identity)


async def serve(options: Options) -> None:
    """Run until SIGTERM or SIGINT. ConnectError without usable credentials, OSError where the port is taken."""
    stop = asyncio.Event()
    for word in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(word, stop.set)
    meters = Meters()
    identity = Identity(MANAGER, "migd.dev/operator", options.identity)
    transport = await HttpTransport.connect(MANAGER, options.kubeconfig)
    throttle = Throttle(per_s=50.0, burst=100)
    async with transport, ApiCluster(transport, identity, _utc, throttle=throttle) as cluster:
        operator = Operator(cluster, Setup(options.identity, options.namespace), _utc, in_a_thread, meters)
        async with (
            serving(options.host, options.port, pages(lambda: operator.health, meters)) as port,
            asyncio.TaskGroup() as group,
        ):
            _log.info("started as %s; pages on port %d", options.identity, port)
            working = group.create_task(operator.run())
            watching = group.create_task(run_shell(options.kubeconfig, operator.wake))
            await stop.wait()
            _log.info("ending")
            for task in (working, watching):
                task.cancel()
            _, late = await asyncio.wait((working, watching), timeout=_END_S)
            for task in late:  # such as a lease that cannot be given up, since nobody answers: it expires
                task.cancel()


def main(words: Sequence[str] | None = None) -> int:
    """The command; its exit code: 0 after a signal, 1 where it cannot work, 2 for options that cannot be used."""
    words = sys.argv[1:] if words is None else words
    if list(words[:1]) == ["preview"]:
        return preview(words[1:])
    options = options_of(words)
    log_json(sys.stderr)
    try:
        asyncio.run(serve(options))
    except (ConnectError, OSError) as error:
        _log.error("%s", error)
        return 1
    except BaseExceptionGroup as bug:
        _log.error("a bug: the next start recovers", exc_info=bug)
        return 1
    return 0


def _utc() -> datetime:
    return datetime.now(UTC)
