"""`migd gpus` and `migd export`: what is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from migd.agent.records import Record
from migd.agent.running import look
from migd.cli import printing, tables, wording
from migd.cli.exits import CliError, Exit
from migd.cli.inputs import print_plan
from migd.cli.machines import opened
from migd.cli.options import Document, DocumentOutput, Format, Output, Simulate, State, StateDir
from migd.mig.geometry import summary
from migd.mig.observed import Holder, SeenGpu
from migd.plans.export import plan_from
from migd.plans.plan import Plan
from migd.plans.preview import by_pid
from migd.plans.problems import BadInput, problems_of
from migd.plans.rendering import gpus_json, layout_json

NOBODY_NAMED = "not known: NVML names nobody, as for monitors, or this user may not ask"


def gpus(
    simulate: Simulate = None, state: State = None, state_dir: StateDir = None, output: Output = Format.TABLE
) -> None:
    """Show the GPUs: MIG mode, instances, holders, free room.

    GPUs that read the same share a line; with json and yaml every GPU has its own.
    """
    with opened(simulate, state, state_dir) as here:
        seen = look(here.machine, waiting=printing.note).gpus
        record = here.machine.store.load()
    body = gpus_json(seen, unfinished(record, seen))
    if output is not Format.TABLE:
        printing.document(body, output)
        return
    if not seen:
        printing.line("no NVIDIA GPU is in this machine")
    else:
        rows = wording.together((gpu.index, _cells(gpu, shown)) for gpu, shown in zip(seen, body["gpus"], strict=True))
        titles = ("GPU", "MODEL", "MIG", "INSTANCES", "IN USE", "FREE", "FRAGMENTED")
        printing.table(*tables.without_blank(titles, rows, "FRAGMENTED"))
    holders = list(_holders(seen))
    if holders:
        printing.line("")
        printing.table(*tables.without_blank(("HELD", "PID", "COMMAND", "CONTAINER"), holders, "CONTAINER"))
    printing.notes(wording.said_once(_remarks(seen), ": "))
    say_unfinished(record, seen)


def unfinished(record: Record | None, gpus: Sequence[SeenGpu]) -> dict[str, Any] | None:
    """What a crash left under way, for programs: None at rest, or the GPUs, where each goes and its last step."""
    if record is None or not record.open:
        return None
    index = {gpu.uuid: gpu.index for gpu in gpus}
    found = [
        {
            "index": index.get(uuid),
            "uuid": uuid,
            "going": "back" if transaction.back else "forward",
            "step": transaction.step or None,
            "before": layout_json(transaction.before),
            "target": None if transaction.target is None else layout_json(transaction.target),
        }
        for uuid in sorted(record.open, key=lambda uuid: (index.get(uuid, len(index)), uuid))
        if (transaction := record.gpu(uuid).transaction) is not None
    ]
    return {"gpus": found}


def say_unfinished(record: Record | None, gpus: Sequence[SeenGpu]) -> None:
    """The same for people, in one note; nothing at rest."""
    left = unfinished(record, gpus)
    if left is not None:
        steps = wording.said_once(
            (f["index"], f"({f['step'] or 'not begun'})") for f in left["gpus"] if f["index"] is not None
        )
        away = [f"{f['uuid']}, which is away," for f in left["gpus"] if f["index"] is None]
        names = ", ".join([*steps, *away])
        printing.note(f"unfinished: {names}. The next `migd apply` or `migd rollback` finishes or undoes it first")


def export(
    simulate: Simulate = None,
    state: State = None,
    state_dir: StateDir = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The plan's name.")] = "as-found",
    output: DocumentOutput = Document.YAML,
) -> None:
    """Print what is there as a plan, to keep or to apply elsewhere."""
    with opened(simulate, state, state_dir) as here:
        seen = look(here.machine, waiting=printing.note).gpus
    try:
        plan = plan_from(seen, name)
    except BadInput as error:
        raise CliError(Exit.FAILED, error.problems[0].message) from error
    except ValidationError as error:
        raise CliError(Exit.USAGE, f"--name: {problems_of(error, Plan)[0].message}") from error
    left_out = [(gpu.index, "cannot do MIG, or is lost, and is left out") for gpu in seen if gpu.mode is None]
    printing.notes(wording.said_once(left_out, ": "))
    print_plan(plan, output)


def _cells(gpu: SeenGpu, shown: dict[str, Any]) -> tables.Row:
    used = sum(instance.in_use for instance in gpu.instances)
    scattered = shown["fragmentation"]
    return (
        wording.model(gpu),
        mode_of(gpu),
        summary(gpu.geometry) or wording.UNKNOWN,
        f"{used}/{len(gpu.instances)}" if gpu.instances else "yes" if gpu.in_use else "no",
        wording.room(gpu, shown["free"]),
        wording.UNKNOWN if scattered is None else f"{scattered:.0%}",
    )


def mode_of(gpu: SeenGpu) -> str:
    """The MIG mode in a word or two: on, off, n/a, or what is pending."""
    if gpu.lost:
        return "lost"
    if gpu.unreadable:
        return "?"
    if gpu.mode is None:
        return "n/a"
    now = "on" if gpu.mode.current else "off"
    return now if gpu.mode.settled else f"{now}, {'on' if gpu.mode.pending else 'off'} pending"


def _holders(gpus: Iterable[SeenGpu]) -> Iterable[tables.Row]:
    """Who holds what, a row each: what is in use without a known holder has one too."""
    for gpu in gpus:
        if gpu.in_use:
            yield from (_holder(f"GPU {gpu.index}", holder) for holder in by_pid(gpu.holders) or (Holder(None),))
        for there in gpu.instances:
            if there.in_use:
                what = f"GPU {gpu.index} {there.instance}"
                yield from (_holder(what, holder) for holder in by_pid(there.holders) or (Holder(None),))


def _holder(what: str, holder: Holder) -> tables.Row:
    if holder.pid is None:
        return (what, wording.UNKNOWN, NOBODY_NAMED, "")
    return (what, str(holder.pid), holder.command, holder.container[:12])


def _remarks(gpus: Iterable[SeenGpu]) -> Iterable[tuple[int, str]]:
    for gpu in gpus:
        broken = [there.instance for there in gpu.instances if not there.whole]
        if broken:
            yield gpu.index, f"{wording.places(broken)} cannot be used: no whole compute instance; apply repairs it"
        if gpu.trouble:
            yield gpu.index, f"must not be worked on: {gpu.trouble}"
        if gpu.unreadable:
            yield gpu.index, f"cannot be read: {gpu.unreadable}"
