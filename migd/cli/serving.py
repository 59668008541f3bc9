"""`migd sim serve`: a simulated machine for programs of any language, under a driver root, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from migd.cli import printing
from migd.cli.exits import CliError, Exit
from migd.cli.machines import sim_host
from migd.cli.options import folder_named
from migd.sim.errors import SimulationError

DEFAULT_SPEC = "8xa100-80gb"


def serve(
    root: Annotated[
        Path,
        typer.Option(
            "--root", metavar="FOLDER", parser=folder_named, help="The driver root: where programs find the library."
        ),
    ],
    simulate: Annotated[
        str | None,
        typer.Option("--simulate", metavar="SPEC", help=f"What machine it is; {DEFAULT_SPEC} where nothing says so."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="FILE", help="Keep the machine in this file, across restarts.", readable=False),
    ] = None,
) -> None:
    """Serve a simulated machine to programs of any language.

    They find libnvidia-ml.so.1 under FOLDER as in a driver container, or by LD_LIBRARY_PATH=FOLDER/usr/lib/…
    docs/c-face.md says how.
    """
    from migd.sim.cface.building import NotBuiltError  # here, because the other commands need no server
    from migd.sim.cface.rooted import rooted_server

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        server = rooted_server(sim_host(simulate, state, default=DEFAULT_SPEC, clock="real"), root.absolute())
        server.start()
    except SimulationError as error:
        raise CliError(Exit.USAGE, str(error)) from error
    except (NotBuiltError, OSError) as error:
        raise CliError(Exit.FAILED, str(error)) from error
    try:
        printing.line(f"serving {server.host.spec}: {server.library} {server.socket}")
        ended.wait()
    finally:
        server.stop()
