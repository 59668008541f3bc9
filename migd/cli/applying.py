"""`migd apply` and `migd rollback`: change this machine's GPUs, with progress while it works."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from migd.agent.deciding import Pause
from migd.agent.orders import Order, order_id
from migd.agent.records import Outcome, Record
from migd.agent.running import Listener, Progress, look, run
from migd.cli import printing
from migd.cli.exits import CliError, Exit, exit_of, worst
from migd.cli.inputs import given, ordered
from migd.cli.machines import Opened, opened
from migd.cli.options import Config, File, Format, Output, Simulate, State, StateDir
from migd.cli.planning import show
from migd.mig.observed import SeenGpu
from migd.plans.fields import seconds_of

WAIT_BARE: Final = "--wait-idle=plan"
"""What a bare --wait-idle stands for: as long as the plan's disruption.timeout."""


def apply(
    filename: File,
    config: Config = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done, as `plan` does.")] = False,
    wait_idle: Annotated[
        str,
        typer.Option(
            metavar="[=TIME]",
            help="Wait until the instances that must go are idle, for TIME (90s, 30m, 2h) or the plan's "
            "disruption.timeout. Without it an instance in use is exit code 4 at once.",
        ),
    ] = "",
    simulate: Simulate = "",
    state: State = None,
    state_dir: StateDir = None,
    output: Output = Format.TABLE,
) -> int:
    """Make this machine's GPUs as a plan says. Nothing is touched unless all of it can be begun."""
    with opened(simulate, state, state_dir) as here:
        if dry_run:
            return show(here, filename, config, output)
        what = given(filename, config)
        if what.plan.spec.paused:
            raise CliError(Exit.BLOCKED, f"{what.source} says paused: true, so nothing is applied")
        wait_s = _wait_s(wait_idle, what.plan.spec.disruption.timeout_s)
        with here.exclusively():
            seen = look(here.machine)
            until = None if wait_s is None else seen.now_s + wait_s
            order, notes = ordered(what, seen.gpus, until)
            printing.notes((*what.notes, *notes))
            return _carry_out(here, order, seen.gpus, output)


def rollback(
    simulate: Simulate = "", state: State = None, state_dir: StateDir = None, output: Output = Format.TABLE
) -> int:
    """Return every GPU that migd changed to the layout it had before; once more swaps the two again."""
    with opened(simulate, state, state_dir) as here, here.exclusively():
        seen = look(here.machine)
        left = here.machine.store.load()
        if left is not None and left.open:
            printing.note("first, what was under way is finished or undone")
        record = run(here.machine, None, progress(seen.gpus))
        goals = {uuid: layout for uuid, gpu in record.gpus.items() if (layout := gpu.before) is not None}
        here_now = {gpu.uuid for gpu in seen.gpus}
        for uuid in sorted(goals.keys() - here_now):
            printing.note(f"{uuid} is not in this machine any more and is left out")
        goals = {uuid: layout for uuid, layout in goals.items() if uuid in here_now}
        if not goals:
            raise CliError(Exit.FAILED, "there is no earlier layout to return to: migd has changed no GPU here yet")
        text = "\n".join(f"{uuid} {layout} {sorted(layout.instances)}" for uuid, layout in sorted(goals.items()))
        return _carry_out(here, Order(order_id(text), goals), look(here.machine).gpus, output)


def _carry_out(here: Opened, order: Order, gpus: Sequence[SeenGpu], output: Format) -> int:
    """Run an order and print what became of each GPU."""
    record = run(here.machine, order, progress(gpus))
    after = look(here.machine).gpus
    outcomes = {uuid: outcome for uuid in order.goals if (outcome := record.gpu(uuid).outcome) is not None}
    if output is Format.TABLE:
        _table(after, outcomes)
    else:
        printing.document(_body(after, outcomes, record), output)
    return worst(exit_of(outcome) for outcome in outcomes.values())


def _wait_s(text: str, plan_s: int) -> float | None:
    if not text:
        return None
    if text == WAIT_BARE.partition("=")[2]:
        return plan_s
    seconds = seconds_of(text)
    if seconds is None:
        raise CliError(Exit.USAGE, f"--wait-idle={text} is not a duration: write 90s, 30m or 1h30m")
    return seconds


def progress(gpus: Sequence[SeenGpu]) -> Listener:
    """Tells on standard error what is being done: a line when an effect ends, or when a wait begins."""
    index = {gpu.uuid: gpu.index for gpu in gpus}
    told: set[str] = set()

    def listen(step: Progress) -> None:
        effect = step.effect
        if isinstance(effect, Pause):
            if not step.done and effect.why not in told:
                told.add(effect.why)
                _line(f"GPU {index.get(effect.uuid, '?')}  waiting: {effect.why}")
        elif step.done:
            result = f"failed: {step.error}" if step.error else f"{step.seconds:.2f} s"
            _line(f"GPU {index.get(effect.gpu_uuid, '?')}  {effect}  {result}")

    return listen


def _line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - this is the program's voice


def _table(gpus: Sequence[SeenGpu], outcomes: dict[str, Outcome]) -> None:
    printing.table(
        ("GPU", "MODEL", "PHASE", "LAYOUT", "CHANGED", "REASON"),
        (
            (
                str(gpu.index),
                gpu.model,
                outcome.phase,
                str(gpu.layout),
                "yes" if outcome.changed else "no",
                "" if outcome.phase == "Ready" else outcome.cause.reason,
            )
            for gpu in gpus
            if (outcome := outcomes.get(gpu.uuid)) is not None
        ),
    )
    for gpu in gpus:
        outcome = outcomes.get(gpu.uuid)
        if outcome is not None and outcome.phase != "Ready":
            printing.note(f"GPU {gpu.index} {outcome.phase}, {outcome.cause.reason}: {outcome.cause.message}")


def _body(gpus: Sequence[SeenGpu], outcomes: dict[str, Outcome], record: Record) -> dict[str, Any]:
    return {
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "phase": outcome.phase,
                "reason": outcome.cause.reason,
                "message": outcome.cause.message,
                "changed": outcome.changed,
                "layout": str(gpu.layout),
                "previous": None if (before := record.gpu(gpu.uuid).previous) is None else str(before),
            }
            for gpu in gpus
            if (outcome := outcomes.get(gpu.uuid)) is not None
        ]
    }
