"""`migd plan` and `migd import`: what would happen, and what a mig-parted file means."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from migd.agent.running import look
from migd.cli import printing
from migd.cli.exits import CliError, Exit, worst
from migd.cli.inputs import given, ordered
from migd.cli.machines import Opened, opened
from migd.cli.options import Config, File, Format, Output, Simulate, State, StateDir
from migd.mig.geometry import GpuInstance
from migd.plans.export import dump
from migd.plans.preview import GpuPreview, Preview, preview
from migd.plans.rendering import to_json


def plan(
    filename: File,
    config: Config = "",
    simulate: Simulate = "",
    state: State = None,
    state_dir: StateDir = None,
    output: Output = Format.TABLE,
) -> int:
    """Preview what `apply` would do, GPU by GPU. Changes nothing. Exit code 5 where there is something to do."""
    with opened(simulate, state, state_dir) as here:
        return show(here, filename, config, output)


def show(here: Opened, filename: str, config: str, output: Format) -> int:
    """Print the preview of a file on a machine; the exit code that says what it found."""
    what = given(filename, config)
    seen = look(here.machine)
    _, notes = ordered(what, seen.gpus)
    record = here.machine.store.load()
    found = preview(what.plan, seen.gpus, record.owned if record else {})
    printing.notes((*what.notes, *notes))
    if output is Format.TABLE:
        table(found)
    else:
        printing.document(to_json(found), output)
    return worst(_code(gpu) for gpu in found.gpus)


def _code(gpu: GpuPreview) -> Exit:
    if gpu.refused is not None:
        return Exit.INFEASIBLE
    if gpu.blocked is not None:
        return Exit.BLOCKED
    return Exit.CHANGES if gpu.changes else Exit.DONE


def table(found: Preview) -> None:
    """A preview for people: one line a GPU, then why something is refused or blocked."""
    printing.table(
        ("GPU", "MODEL", "MIG", "KEEP", "DESTROY", "CREATE", "VERDICT"),
        (
            (
                str(gpu.index),
                gpu.seen.model,
                {"Enable": "turn on", "Disable": "turn off", None: "-"}[gpu.mode_change]
                + (", reset" if gpu.reset else ""),
                _places(gpu.keep),
                _places(gpu.destroy),
                _places(gpu.create),
                verdict(gpu),
            )
            for gpu in found.gpus
        ),
    )
    for gpu in found.gpus:
        if gpu.refused is not None:
            printing.note(f"GPU {gpu.index} refused, {gpu.refused.reason}: {gpu.refused.message}")
        elif gpu.blocked is not None:
            printing.note(f"GPU {gpu.index} blocked, {gpu.blocked.reason}: {gpu.blocked.message}")
        for text in gpu.notes:
            printing.note(f"GPU {gpu.index}: {text}")


def verdict(gpu: GpuPreview) -> str:
    """One GPU's preview in a word or two."""
    if gpu.rule is None:
        return "left alone"
    if gpu.refused is not None:
        return f"refused: {gpu.refused.reason}"
    if gpu.blocked is not None:
        return f"blocked: {gpu.blocked.reason}"
    return "changes" if gpu.changes else "as wished"


def _places(instances: Sequence[GpuInstance]) -> str:
    return " ".join(map(str, instances)) or "-"


def import_(
    filename: Annotated[
        str, typer.Argument(metavar="FILE", help="A mig-parted file or a ConfigMap with one; - reads standard input.")
    ],
    config: Config = "",
) -> None:
    """Print a configuration of a mig-parted file as a GPUPartitionPlan."""
    what = given(filename, config)
    if what.file is None:
        raise CliError(Exit.USAGE, f"{what.source} is a plan already: nothing to import")
    printing.notes(what.notes)
    sys.stdout.write(dump(what.plan))
