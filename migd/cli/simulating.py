"""`migd sim`: seed a simulated machine with holders and faults, reboot it, reset it, switch its behaviour."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from migd.cli import printing
from migd.cli.executing import exec_
from migd.cli.exits import CliError, Exit
from migd.cli.machines import sim_host
from migd.cli.options import Document, DocumentOutput, Format
from migd.cli.serving import serve
from migd.plans.fields import seconds_of
from migd.sim.errors import ResetRefusedError, SimulationError
from migd.sim.faults import ACTIONS, POINTS, Fault, check_point, code_named
from migd.sim.host import SimHost
from migd.sim.machine import to_json

app = typer.Typer(
    name="sim",
    help="Simulated machines: what happens to them, and who may use them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command()(serve)
app.command("exec", context_settings={"allow_interspersed_args": False})(exec_)  # the program's options are its own

MachineFile = Annotated[
    Path, typer.Option("--state", metavar="FILE", help="The simulated machine's file.", readable=False)
]
Spec = Annotated[
    str | None,
    typer.Option("--simulate", metavar="SPEC", help="What machine it is; needed where the file is not there yet."),
]
Gpu = Annotated[int, typer.Option("--gpu", help="The GPU's index.")]
AnyGpu = Annotated[int | None, typer.Option("--gpu", help="Only this GPU, by index.")]


@contextmanager
def _host(state: Path, simulate: str | None = None) -> Iterator[SimHost]:
    try:
        yield sim_host(simulate, state)
    except ResetRefusedError as error:
        raise CliError(Exit.BLOCKED, str(error)) from error
    except SimulationError as error:
        raise CliError(Exit.USAGE, str(error)) from error


@app.command()
def show(state: MachineFile, simulate: Spec = None, output: DocumentOutput = Document.YAML) -> None:
    """Print the machine as it is, behind NVML's back."""
    with _host(state, simulate) as host:
        body = to_json(host.snapshot())
    printing.document(body, Format(output))


@app.command()
def hold(
    state: MachineFile,
    gpu: Gpu,
    start: Annotated[
        int | None, typer.Option(help="The first memory slice of the instance to hold; left out: the whole GPU.")
    ] = None,
    command: Annotated[str, typer.Option(help="What the process runs.")] = "python train.py",
    container: Annotated[str, typer.Option(help="The id of its container.")] = "",
    silent: Annotated[bool, typer.Option("--silent", help="Not in NVML's process list, like a monitor.")] = False,
    for_: Annotated[str, typer.Option("--for", metavar="TIME", help="It ends by itself after this time.")] = "",
    simulate: Spec = None,
) -> None:
    """Start a process that holds an instance or a GPU.

    Prints its pid, which `release` takes.
    """
    with _host(state, simulate) as host:
        pid = host.start_process(gpu, start, command, container, silent, _seconds(for_, "--for") if for_ else None)
    printing.line(str(pid))


@app.command()
def release(
    state: MachineFile, pid: Annotated[int, typer.Argument(help="As `hold` printed it.")], simulate: Spec = None
) -> None:
    """End a process that `hold` started."""
    with _host(state, simulate) as host:
        host.end_process(pid)


@app.command()
def reboot(state: MachineFile, simulate: Spec = None) -> None:
    """Reboot the machine.

    Instances and processes are gone; on Hopper and later MIG is off, before that it stays as it was set.
    """
    with _host(state, simulate) as host:
        host.reboot()


@app.command("reload-driver")
def reload_driver(
    state: MachineFile,
    seconds: Annotated[str, typer.Option("--for", metavar="TIME", help="How long it is away.")] = "0s",
    simulate: Spec = None,
) -> None:
    """Unload and load the driver."""
    with _host(state, simulate) as host:
        host.reload_driver(_seconds(seconds, "--for"))


@app.command()
def reset(state: MachineFile, gpu: Gpu, simulate: Spec = None) -> None:
    """Reset one GPU, as nvidia-smi --gpu-reset does.

    Refused while anybody has it open.
    """
    with _host(state, simulate) as host:
        uuids = host.gpu_uuids()
        if not 0 <= gpu < len(uuids):
            raise SimulationError(f"this machine has no GPU {gpu}: it is {host.spec}")
        host.reset(uuids[gpu])


@app.command()
def lose(state: MachineFile, gpu: Gpu, simulate: Spec = None) -> None:
    """Let a GPU fall off the bus, until a reboot or `find`."""
    with _host(state, simulate) as host:
        host.lose_gpu(gpu)


@app.command()
def find(state: MachineFile, gpu: Gpu, simulate: Spec = None) -> None:
    """Bring a lost GPU back."""
    with _host(state, simulate) as host:
        host.find_gpu(gpu)


@app.command()
def fault(
    state: MachineFile,
    call: Annotated[
        str, typer.Argument(help=f"A glob of NVML function names (nvmlDeviceCreate*), or of {', '.join(POINTS)}.")
    ],
    action: Annotated[str, typer.Option(help=f"One of {', '.join(ACTIONS)}.")] = "error",
    error: Annotated[str, typer.Option(help="For error: the NVML error, such as IN_USE or 19.")] = "UNKNOWN",
    after: Annotated[bool, typer.Option("--after", help="After the call's effect instead of before.")] = False,
    gpu: AnyGpu = None,
    nth: Annotated[int, typer.Option(min=1, help="At the nth matching call from now.")] = 1,
    times: Annotated[int, typer.Option(min=0, help="So many times in a row; 0: for ever.")] = 1,
    delay: Annotated[str, typer.Option(metavar="TIME", help="For delay: how long.")] = "1s",
    simulate: Spec = None,
) -> None:
    """Let something go wrong at a call.

    Before its effect, or after it. Faults count in the file, across processes. docs/simulator.md has examples.
    """
    with _host(state, simulate) as host:
        when = "after" if after else "before"
        code = code_named(error)
        check_point(call)
        host.inject(Fault(call, action, code, gpu, when, nth, times, _seconds(delay, "--delay")))


@app.command()
def clear(state: MachineFile, simulate: Spec = None) -> None:
    """Take back all faults."""
    with _host(state, simulate) as host:
        host.clear_faults()


@app.command()
def switch(
    state: MachineFile,
    setting: Annotated[
        str, typer.Argument(metavar="NAME=VALUE", help="Such as placement=adversarial; see docs/simulator.md.")
    ],
    gpu: AnyGpu = None,
    simulate: Spec = None,
) -> None:
    """Switch a behaviour that differs in the field."""
    name, equals, value = setting.partition("=")
    if not equals:
        raise CliError(Exit.USAGE, f"{setting!r} is not NAME=VALUE")
    with _host(state, simulate) as host:
        host.switch(name, _value(value), gpu)


@app.command()
def clock(
    state: MachineFile,
    kind: Annotated[
        str, typer.Argument(help="real: the host's time, really slept. virtual: waiting moves it at once.")
    ],
    simulate: Spec = None,
) -> None:
    """Choose how time passes in the machine."""
    with _host(state, simulate) as host:
        host.use_clock(kind)


def _value(text: str) -> Any:
    """A switch's value as YAML reads it: true, 2, 0.3, a word, [a, b], {a: b}."""
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text


def _seconds(text: str, option: str) -> float:
    seconds = 0 if text == "0s" else seconds_of(text)
    if seconds is None:
        raise CliError(Exit.USAGE, f"{option} {text} is not a duration: write 90s, 30m or 1h30m")
    return seconds
