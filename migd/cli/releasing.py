"""`migd release`: an admin gives a node back what a dead agent owes it."""

from __future__ import annotations

import asyncio
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from migd.cli import printing
from migd.cli.agent import NAMESPACE
from migd.cli.exits import CliError, Exit

if TYPE_CHECKING:
    from migd.kube.nodes import NodeChange

KUBECONFIG: Final = Path("~/.kube/config")


def release(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name in the cluster.")],
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig",
            envvar="KUBECONFIG",
            metavar="FILE",
            help="How to reach the API server, as an admin. Default: ~/.kube/config.",
            readable=False,
        ),
    ] = None,
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="NAMESPACE", help="Where the agents' leases lie.")
    ] = NAMESPACE,
    force: Annotated[
        bool, typer.Option("--force", help="Do not look first whether the node's agent is alive.")
    ] = False,
) -> int:
    """Give NODE back what a dead agent owes it.

    migd's taint goes, and paused GPU clients run again.
    For an agent that is dead while the operator, which does it by itself after some minutes, is away too. GPUs stay as
    they are. An agent that is alive does it by itself, so then this is refused (exit code 4).
    """
    from migd.agent.node.releasing import AgentAliveError, NodeMissingError  # here: the command line should start fast
    from migd.kube.connecting import ConnectError
    from migd.kube.errors import KubeError

    try:
        done = asyncio.run(_release(kubeconfig or KUBECONFIG.expanduser(), node, namespace, force))
    except (ConnectError, NodeMissingError) as error:
        raise CliError(Exit.USAGE, str(error)) from error
    except AgentAliveError as error:
        raise CliError(
            Exit.BLOCKED, f"{error}, and gives back by itself what it owes. --force does it all the same"
        ) from error
    except KubeError as error:
        raise CliError(Exit.FAILED, str(error)) from error
    printing.line(f"node {node} is owed nothing" if done is None else f"node {node}: {_said(done)}")
    return Exit.DONE


async def _release(kubeconfig: Path, node: str, namespace: str, force: bool) -> NodeChange | None:
    from migd.agent.node.releasing import release as released
    from migd.kube.cluster import ApiCluster, Identity
    from migd.kube.connecting import HttpTransport

    def waiting(seconds: float) -> None:
        printing.aside(f"looking for up to {seconds:.0f} s whether the agent of node {node} is alive; --force does not")

    identity = Identity("migd", "migd.dev/cli", socket.gethostname())
    async with (
        await HttpTransport.connect("migd", kubeconfig) as transport,
        ApiCluster(transport, identity, lambda: datetime.now(UTC)) as cluster,
    ):
        return await released(cluster, node, namespace, force, waiting)


def _said(done: NodeChange) -> str:
    labels = [f"{key}={value}" if value is not None else f"{key} removed" for key, value in sorted(done.labels.items())]
    return ", ".join(["open", *labels])
