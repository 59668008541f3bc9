"""`migd plan` and `migd import`: what would happen, and what a mig-parted file means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from migd.agent.records import Record
from migd.agent.running import look
from migd.cli import printing, wording
from migd.cli.exits import CliError, Exit, reason_exit, worst
from migd.cli.inputs import Given, given, ordered, print_plan
from migd.cli.listing import say_unfinished
from migd.cli.machines import Opened, opened
from migd.cli.options import Config, Document, DocumentOutput, File, Format, Output, Simulate, State, StateDir
from migd.mig.observed import SeenGpu
from migd.plans.preview import GpuPreview, Preview, preview
from migd.plans.rendering import to_json

WAITS = "needs a reboot (RebootRequired): until then apply can do no more on it"


def plan(
    filename: File,
    config: Config = None,
    simulate: Simulate = None,
    state: State = None,
    state_dir: StateDir = None,
    output: Output = Format.TABLE,
) -> int:
    """Preview what `apply` would do. Changes nothing; ends with 5 where there is something to do.

    GPUs that read the same share a line; with json and yaml every GPU has its own.
    """
    what = given(filename, config)
    with opened(simulate, state, state_dir) as here:
        return show(here, what, output)


def show(here: Opened, what: Given, output: Format) -> int:
    """Print the preview of a plan on a machine; the exit code that says what it found."""
    seen = look(here.machine, waiting=printing.note)
    order, notes = ordered(what, seen.gpus)
    record = here.machine.store.load()
    waiting = [gpu for gpu in seen.gpus if record and _awaits_reboot(record, gpu, order.id, seen.boot_id)]
    found = preview(what.plan, seen.gpus, record.owned if record else {})
    paused = ("the plan says paused: true, so apply does nothing",) if what.plan.spec.paused else ()
    printing.notes((*what.notes, *paused, *notes))
    if output is Format.TABLE:
        table(found)
    else:
        printing.document(to_json(found), output)
    for sentence in wording.said_once((gpu.index, WAITS) for gpu in waiting):
        printing.aside(sentence)
    say_unfinished(record, seen.gpus)
    return worst([*map(_code, found.gpus), *(Exit.BLOCKED for _ in waiting)])


def _awaits_reboot(record: Record, gpu: SeenGpu, order_id: str, boot_id: str) -> bool:
    """Whether this plan was applied already and only a reboot can go on with it."""
    waits = record.gpu(gpu.uuid).awaiting
    if waits is None or (waits.order_id, waits.boot_id) != (order_id, boot_id):
        return False
    return gpu.mode is not None and gpu.mode.current != waits.mig


def _code(gpu: GpuPreview) -> Exit:
    if gpu.refused is not None:
        return reason_exit(gpu.refused.reason)
    if gpu.blocked is not None:
        return Exit.BLOCKED
    return Exit.CHANGES if gpu.changes else Exit.DONE


def table(found: Preview) -> None:
    """A preview for people: what becomes of each GPU, a line that sums it up, then why what is refused or blocked."""
    rows = wording.together((gpu.index, _cells(gpu)) for gpu in found.gpus)
    printing.table(("GPU", "MODEL", "VERDICT", "MIG", "KEEP", "DESTROY", "CREATE"), rows)
    printing.line(f"\n{summed(found)}")
    for sentence in wording.said_once(_reasons(found.gpus)):
        printing.aside(sentence)
    printing.notes(wording.said_once(((g.index, text) for g in found.gpus for text in g.notes), ": "))


def _cells(gpu: GpuPreview) -> tuple[str, ...]:
    mode = {"Enable": "turn on", "Disable": "turn off", None: wording.UNKNOWN}[gpu.mode_change]
    create = wording.places(gpu.create)
    if gpu.unknown_yet and not gpu.create:
        create = "known once MIG is on"
    return (
        wording.model(gpu.seen),
        verdict(gpu),
        mode + (", reset" if gpu.reset else ""),
        wording.places(gpu.keep),
        wording.places(gpu.destroy),
        create,
    )


def verdict(gpu: GpuPreview) -> str:
    """One GPU's preview in a word."""
    if gpu.refused is not None:
        return "refused"
    if gpu.blocked is not None:
        return "blocked"
    if gpu.rule is None:
        return "left alone"
    return "change" if gpu.changes else "as wished"


def _reasons(gpus: Iterable[GpuPreview]) -> Iterable[tuple[int, str]]:
    for gpu in gpus:
        why = gpu.refused or gpu.blocked
        if why is not None:
            yield gpu.index, f"{verdict(gpu)} ({why.reason}): {why.message}"


def summed(found: Preview) -> str:
    """A whole preview in a line."""
    gpus = found.gpus
    refused = sum(gpu.refused is not None for gpu in gpus)
    blocked = sum(gpu.blocked is not None for gpu in gpus)
    changing = [gpu for gpu in gpus if gpu.changes and gpu.refused is None]
    if refused:
        return f"{wording.count(refused, 'GPU')} refused: apply would touch nothing."
    if blocked:
        return f"{wording.count(blocked, 'GPU')} blocked: apply would touch nothing now."
    if not changing:
        return "Nothing to do."
    parts = [
        wording.count(sum(len(gpu.keep) for gpu in changing), "instance") + " kept",
        f"{sum(len(gpu.destroy) for gpu in changing)} destroyed",
        f"{sum(len(gpu.create) for gpu in changing)} created",
    ]
    repaired = sum(len(gpu.repair) for gpu in changing)
    modes = [f"MIG {word} for {n}" for way, word in _MODES if (n := sum(g.mode_change == way for g in changing))]
    resets = sum(gpu.reset for gpu in changing)
    parts += [f"{repaired} repaired"] * bool(repaired) + modes + [f"{resets} reset"] * bool(resets)
    return f"{wording.count(len(changing), 'GPU')} would change: {', '.join(parts)}."


_MODES = (("Enable", "turned on"), ("Disable", "turned off"))


def import_(
    file: Annotated[
        str,
        typer.Argument(metavar="[FILE]", help="A mig-parted file or a ConfigMap with one; - reads standard input."),
    ] = "",
    filename: Annotated[
        str, typer.Option("--filename", "-f", metavar="FILE", help="The same.", show_default=False)
    ] = "",
    config: Config = None,
    output: DocumentOutput = Document.YAML,
) -> None:
    """Turn a configuration of a mig-parted file into a plan."""
    if bool(file) == bool(filename):
        raise CliError(Exit.USAGE, "name one file: migd import FILE -c NAME")
    what = given(file or filename, config)
    if what.file is None:
        raise CliError(Exit.USAGE, f"{what.source} is a plan already: nothing to import")
    printing.notes(what.notes)
    print_plan(what.plan, output)
