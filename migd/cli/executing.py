"""`migd sim exec`: a program on a simulated machine, in a mount namespace of its own, of which nothing stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Annotated, Any, Final

import typer

from migd.cli.exits import CliError, Exit
from migd.cli.machines import sim_host
from migd.cli.options import folder_named
from migd.cli.serving import DEFAULT_SPEC
from migd.sim.errors import SimulationError
from migd.sim.files import entering, guarding

_WATCHED: Final = (*entering.FORWARDED, signal.SIGCHLD)
_BARE_PYTHON: Final = (sys.executable, "-I", "-S")


def exec_(
    program: Annotated[list[str], typer.Argument(metavar="PROGRAM", help="What to run, and its arguments.")],
    simulate: Annotated[
        str | None,
        typer.Option(
            "--simulate",
            metavar="SPEC",
            help=f"A machine for this program alone; {DEFAULT_SPEC} where nothing says which.",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="FILE", help="Keep that machine in this file.", readable=False),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            "--root",
            metavar="FOLDER",
            parser=folder_named,
            help="Use the machine that `migd sim serve --root FOLDER` serves.",
        ),
    ] = None,
    modules: Annotated[
        bool,
        typer.Option(
            "--modules",
            help="Show /proc/modules also where the kernel has none, as mig-parted needs it; /proc then lacks the "
            "folders of other processes.",
        ),
    ] = False,
) -> None:
    """Run a program as if a simulated machine were this one.

    It finds libnvidia-ml.so.1, nvidia-smi, and what a driver shows under /proc, /sys/bus/pci and /dev; nobody else
    does. Its exit status is passed on (128 + N where signal N ended it), as are signals to it. What it leaves running
    is ended with it. Needs root, or a kernel that lets users make namespaces.
    Example: migd sim exec --simulate 2xh200 -- nvidia-smi -L
    """
    if root is not None and (simulate is not None or state is not None):
        raise CliError(Exit.USAGE, "--root is a machine that is served already: leave --simulate and --state out")
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)  # before any thread: they go to whoever waits for them
    with ExitStack() as stack:
        if root is not None:
            folder = _served(root)
            lifeline = stack.enter_context(_guarded(""))
        else:
            folder = Path(tempfile.mkdtemp(prefix="migd-exec-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)  # where the guard does not even start
            folder.chmod(0o755)  # the program may run as another user
            lifeline = stack.enter_context(_guarded(str(folder)))
            stack.enter_context(_serving(simulate, state, folder))
        status = _run(folder, program, lifeline, modules)
    raise SystemExit(status)  # past what migd makes of its own exit codes


def _served(root: Path) -> Path:
    """The driver root, of which a server is at work; CliError where there is none."""
    from migd.sim.cface.wire import connect, socket_of  # here and below, because the other commands need no server

    folder = Path(os.path.realpath(root))
    try:
        connect(socket_of(folder)).close()
    except OSError as error:
        raise CliError(
            Exit.FAILED,
            f"{root}: no server answers there ({error.strerror}): start `migd sim serve --root {root}`, "
            "or leave --root out for a machine for this program alone",
        ) from error
    return folder


@contextmanager
def _serving(simulate: str | None, state: Path | None, folder: Path) -> Iterator[None]:
    from migd.sim.cface.building import NotBuiltError
    from migd.sim.cface.rooted import rooted_server

    try:
        server = rooted_server(sim_host(simulate, state, default=DEFAULT_SPEC, clock="real"), folder)
        server.start()
    except SimulationError as error:
        raise CliError(Exit.USAGE, str(error)) from error
    except (NotBuiltError, OSError) as error:
        raise CliError(Exit.FAILED, str(error)) from error
    try:
        yield
    finally:
        server.stop()


@contextmanager
def _guarded(folder: str) -> Iterator[IO[bytes]]:
    """A process that outlives this one, to end and remove what is left; what is written tells it of namespaces."""
    guard = _python(
        (guarding.__file__, folder),
        stdin=subprocess.PIPE,
        cwd="/",
        env={},
        start_new_session=True,  # so that what ends our whole group does not end it
    )
    assert guard.stdin is not None
    try:
        yield guard.stdin
    finally:
        with suppress(OSError):
            guard.stdin.close()
        guard.wait()


def _python(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A Python of its own; CliError where it cannot be started."""
    try:
        return subprocess.Popen([*_BARE_PYTHON, *words], **options)
    except OSError as error:
        raise CliError(Exit.FAILED, f"cannot start {_BARE_PYTHON[0]}, which this takes: {error.strerror}") from error


def _run(root: Path, program: Sequence[str], lifeline: IO[bytes], modules: bool) -> int:
    """Run the program to its end; its exit status as shells say it. Signals that come meanwhile are its."""
    early = [number for number in entering.FORWARDED if number in signal.sigpending()]
    if early:
        return 128 + early[0]
    report = lifeline.fileno()
    words = (entering.__file__, str(root), str(os.getpid()), str(report), str(int(modules)), *program)
    running = _python(words, env=environment(root, os.environ), pass_fds=(report,))
    while running.poll() is None:
        told = signal.sigwaitinfo(_WATCHED)
        if told.si_signo == signal.SIGCHLD or told.si_code > 0:
            continue  # from the kernel: a terminal sends to its whole group, so the program has it already
        running.send_signal(told.si_signo)
    status: int = running.returncode
    return status if status >= 0 else 128 - status


def environment(root: Path, before: Mapping[str, str]) -> dict[str, str]:
    """The program's environment: the library and nvidia-smi of the root come first; MIGD_DRIVER_ROOT names the root."""
    folders = [str(folder) for folder in sorted((root / "usr/lib").iterdir()) if folder.is_dir()]
    found = {name: value for name, value in before.items() if name != "MIGD_SIM_SOCKET"}  # another server's, if any
    found["LD_LIBRARY_PATH"] = ":".join([*folders, *filter(None, [before.get("LD_LIBRARY_PATH")])])
    found["PATH"] = ":".join([str(root / "usr/bin"), before.get("PATH", os.defpath)])
    found["MIGD_DRIVER_ROOT"] = str(root)
    return found
