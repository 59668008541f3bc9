"""`migd agent`: the program that runs on every node of a cluster."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Final

import typer

from migd.cli.exits import CliError, Exit
from migd.cli.machines import STATE_DIR, beside, sim_host
from migd.cli.options import Simulate, State, StateDir

NAMESPACE: Final = "migd-system"
KUBELET_DIR: Final = Path("/var/lib/kubelet")
PORT_MAX: Final = 65535


def agent(
    node: Annotated[
        str | None,
        typer.Option("--node", envvar="NODE_NAME", metavar="NODE", help="This machine's name in the cluster."),
    ] = None,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig",
            metavar="FILE",
            help="How to reach the API server. Default: as a pod of the cluster.",
            readable=False,
        ),
    ] = None,
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="NAMESPACE", help="Where the agent's lease lies.")
    ] = NAMESPACE,
    state_dir: StateDir = None,
    kubelet_dir: Annotated[
        Path,
        typer.Option(
            "--kubelet-dir", metavar="DIR", help="Where the kubelet's pod-resources socket lies.", readable=False
        ),
    ] = KUBELET_DIR,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="ADDR:PORT", help="Answer /healthz, /readyz and /metrics there. Default: nowhere."
        ),
    ] = None,
    pod: Annotated[
        str | None,
        typer.Option("--pod", envvar="POD_NAME", metavar="POD", help="Who holds the lease. Default: the host's name."),
    ] = None,
    simulate: Simulate = None,
    state: State = None,
) -> int:
    """Run on a cluster's node: make its GPUs as plans say.

    It runs until it is ended, breaks nothing that works, and closes and opens the node as needed. It logs to standard
    error.
    """
    if not node:
        raise CliError(Exit.USAGE, "which node is this? Name it with --node, or in NODE_NAME as the DaemonSet does")
    address = None if listen is None else _address(listen)
    host = None if simulate is None and state is None else sim_host(simulate, state)
    folder = state_dir or (STATE_DIR if state is None else beside(state))
    if host is not None and state_dir is None and state is None:
        raise CliError(Exit.USAGE, "--simulate needs --state FILE here: the node's device plugin reads it too")
    from migd.agent.node.program import Options, run_program  # here: the command line should start fast
    from migd.agent.node.running import Identified, NoNodeError
    from migd.agent.node.serving import ListenError
    from migd.kube.connecting import ConnectError, in_cluster
    from migd.kubelet.ports import KubeletError

    if kubeconfig is None and not in_cluster():
        raise CliError(
            Exit.USAGE, "which API server? Name a kubeconfig with --kubeconfig, or run as a pod of a cluster"
        )
    me = Identified(node, namespace, pod or socket.gethostname())
    options = Options(me, folder, kubelet_dir, kubeconfig, address)
    try:
        return run_program(options, host)
    except (ConnectError, KubeletError, NoNodeError) as error:
        raise CliError(Exit.USAGE, str(error)) from error
    except ListenError as error:
        raise CliError(Exit.FAILED, str(error)) from error


def _address(text: str) -> tuple[str, int]:
    """ADDR:PORT, :PORT or [ADDR]:PORT as a host and a port."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not port.isascii() or int(port) > PORT_MAX:
        raise CliError(Exit.USAGE, f"--listen {text}: write ADDR:PORT, such as 127.0.0.1:8080 or :8080")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)  # noqa: S104  asked for
