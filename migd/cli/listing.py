"""`migd gpus` and `migd export`: what is there."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from migd.agent.records import Record
from migd.agent.running import look
from migd.cli import printing
from migd.cli.exits import CliError, Exit
from migd.cli.machines import opened
from migd.cli.options import Format, Output, Simulate, State, StateDir
from migd.mig.geometry import summary
from migd.mig.observed import SeenGpu
from migd.plans.export import dump, plan_from
from migd.plans.problems import BadInput
from migd.plans.rendering import gpus_json


def gpus(
    simulate: Simulate = "", state: State = None, state_dir: StateDir = None, output: Output = Format.TABLE
) -> None:
    """Show the GPUs of this machine: MIG mode, instances, who holds them, and how much room is left."""
    with opened(simulate, state, state_dir) as here:
        seen = look(here.machine)
        record = here.machine.store.load()
    left = unfinished(record)
    body = gpus_json(seen.gpus, left)
    if output is not Format.TABLE:
        printing.document(body, output)
        return
    printing.table(
        ("GPU", "MODEL", "MIG", "INSTANCES", "IN USE", "FREE", "FRAGMENTED"),
        (_row(gpu, shown) for gpu, shown in zip(seen.gpus, body["gpus"], strict=True)),
    )
    for gpu in seen.gpus:
        for line in _holders(gpu):
            printing.note(line)
    if left is not None:
        names = ", ".join(f"{open_['uuid']} ({open_['step'] or 'not begun'})" for open_ in left["gpus"])
        printing.note(f"unfinished: {names}. `migd apply` or `migd rollback` finishes or undoes it first")


def unfinished(record: Record | None) -> dict[str, Any] | None:
    """What a crash left under way, for people and programs: null, or the GPUs, where each goes and its last step."""
    if record is None or not record.open:
        return None
    return {
        "gpus": [
            {
                "uuid": uuid,
                "going": "back" if transaction.back else "forward",
                "before": str(transaction.before),
                "target": str(transaction.target) if transaction.target else "known once MIG is on",
                "step": transaction.step,
            }
            for uuid in record.open
            if (transaction := record.gpu(uuid).transaction) is not None
        ]
    }


def export(
    simulate: Simulate = "",
    state: State = None,
    state_dir: StateDir = None,
    name: Annotated[str, typer.Option("--name", help="The plan's name.")] = "as-found",
) -> None:
    """Print what is there as a GPUPartitionPlan, ready to be applied elsewhere or kept."""
    with opened(simulate, state, state_dir) as here:
        seen = look(here.machine)
    try:
        sys.stdout.write(dump(plan_from(seen.gpus, name)))
    except BadInput as error:
        raise CliError(Exit.FAILED, error.problems[0].message) from error


def _row(gpu: SeenGpu, shown: dict[str, Any]) -> tuple[str, ...]:
    used = sum(instance.in_use for instance in gpu.instances)
    room = " ".join(f"{number}×{profile}" for profile, number in shown["free"].items() if number)
    scattered = shown["fragmentation"]
    return (
        str(gpu.index),
        gpu.model or gpu.uuid,
        mode_of(gpu),
        summary(gpu.geometry) or "-",
        f"{used}/{len(gpu.instances)}" if gpu.instances else "yes" if gpu.in_use else "no",
        room or "-",
        "-" if scattered is None or not gpu.mig_on else f"{scattered:.0%}",
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


def _holders(gpu: SeenGpu) -> list[str]:
    lines = [f"GPU {gpu.index} is held by {holder}" for holder in gpu.holders]
    lines += [f"GPU {gpu.index}: {i.instance} is held by {holder}" for i in gpu.instances for holder in i.holders]
    lines += [
        f"GPU {gpu.index}: {i.instance} has no compute instance and cannot be used"
        for i in gpu.instances
        if not i.compute_instances
    ]
    if gpu.trouble or gpu.unreadable:
        lines.append(f"GPU {gpu.index}: {gpu.trouble or f'cannot be read: {gpu.unreadable}'}")
    return lines
