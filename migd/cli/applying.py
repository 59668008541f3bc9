"""`migd apply` and `migd rollback`: change this machine's GPUs, with progress while it works."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from migd.agent.deciding import accept, under_way
from migd.agent.effects import Seen
from migd.agent.orders import Order, order_id
from migd.agent.records import Cause, Outcome, Record
from migd.agent.running import look, run
from migd.cli import printing, tables, wording
from migd.cli.exits import INFEASIBLE_REASONS, CliError, Exit, exit_of, worst
from migd.cli.inputs import given, ordered
from migd.cli.machines import Opened, opened
from migd.cli.options import Config, File, Format, Output, Simulate, State, StateDir
from migd.cli.planning import show
from migd.cli.telling import Teller, changed, total
from migd.mig.observed import SeenGpu
from migd.plans.fields import TIMEOUT_MAX_S, duration_of, seconds_of
from migd.plans.rendering import layout_json

WAIT_BARE: Final = "--wait-idle=as the plan says"
"""What a bare --wait-idle stands for: as long as the plan's disruption.timeout."""


def apply(
    filename: File,
    config: Config = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done, as `plan` does.")] = False,
    wait_idle: Annotated[
        str | None,
        typer.Option(
            metavar="[=TIME]",
            help="Wait until the instances that must go are idle: for TIME (90s, 30m, 1h30m), or for the plan's "
            "disruption.timeout. Without it an instance in use ends the command at once, with 4.",
        ),
    ] = None,
    simulate: Simulate = None,
    state: State = None,
    state_dir: StateDir = None,
    output: Output = Format.TABLE,
) -> int:
    """Make this machine's GPUs as a plan says.

    Instances in use keep their place; as few idle ones as possible go.
    Nothing is touched unless every GPU of the plan can be begun. What fails on the way is put back as it was.
    """
    what = given(filename, config)
    wait_s = _wait_s(wait_idle, what.plan.spec.disruption.timeout_s)
    with opened(simulate, state, state_dir) as here:
        if dry_run:
            return show(here, what, output)
        seen = look(here.machine, waiting=printing.note)
        order, notes = ordered(what, seen.gpus, None if wait_s is None else seen.now_s + wait_s)
        printing.notes((*what.notes, *notes))
        never = _never(order, seen.gpus)
        if never:
            return _result(Ending(seen.gpus, never, Record(seen.boot_id)), output)
        if what.plan.spec.paused:
            raise CliError(Exit.BLOCKED, f"{what.source} says paused: true, so nothing is done")
        with here.exclusively():
            return _result(_carry_out(here, order, seen, _left(here, seen.gpus, order)), output)


def rollback(
    simulate: Simulate = None, state: State = None, state_dir: StateDir = None, output: Output = Format.TABLE
) -> int:
    """Return each GPU to its previous layout; again swaps.

    Each goes back to before its own last change: all that migd has changed, not only those of the last apply. A second
    rollback undoes the first.
    """
    with opened(simulate, state, state_dir) as here, here.exclusively():
        began = look(here.machine, waiting=printing.note)
        left = _left(here, began.gpus, None)
        teller = Teller(began.gpus)
        record = run(here.machine, None, teller)
        teller.end()
        goals = {uuid: layout for uuid, gpu in record.gpus.items() if (layout := gpu.before) is not None}
        here_now = {gpu.uuid for gpu in began.gpus}
        missing = sorted(goals.keys() - here_now)
        if missing and any(gpu.lost for gpu in began.gpus):
            raise CliError(
                Exit.BLOCKED,
                f"a GPU fell off the bus and {', '.join(missing)} cannot be returned: no other was touched, because "
                "they would no longer swap together. Once it is back, roll back; meanwhile apply a plan for the others",
            )
        printing.notes(f"{uuid} is not in this machine any more and is left out" for uuid in missing)
        goals = {uuid: layout for uuid, layout in goals.items() if uuid in here_now}
        if not goals:
            raise CliError(Exit.FAILED, "there is no earlier layout to return to: migd has changed no GPU here yet")
        text = "\n".join(f"{uuid} {layout} {sorted(layout.instances)}" for uuid, layout in sorted(goals.items()))
        return _result(_carry_out(here, Order(order_id(text), goals), began, left), output)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a command ended: the GPUs as they are then, what became of each that it was about, and the record.

    changed: UUIDs of GPUs that are another than when the command began. also: of those that it was not asked about, but
    that a crash had left under way.
    """

    gpus: Sequence[SeenGpu]
    outcomes: Mapping[str, Outcome]
    record: Record
    changed: frozenset[str] = frozenset()
    also: frozenset[str] = frozenset()

    @property
    def exit(self) -> Exit:
        """The exit code. What a crash left on other GPUs counts only where it is still not over."""
        asked = [exit_of(outcome) for uuid, outcome in self.outcomes.items() if uuid not in self.also]
        return worst([*asked, *(Exit.FAILED for uuid in self.also if uuid in self.record.open)])


def _never(order: Order, gpus: Sequence[SeenGpu]) -> dict[str, Outcome]:
    """What becomes of each GPU of an order that some of them can never meet; empty where all can.

    Found before the lock is taken and before anything left over is touched: it depends on the boards alone.
    """
    refusals = {uuid: plan.refused for uuid, plan in order.plans(gpus, {}).items()}
    if not any(refused is not None and refused.reason in INFEASIBLE_REASONS for refused in refusals.values()):
        return {}
    waiting = Outcome("Blocked", Cause("Waiting", "not begun: another GPU of the plan is refused"))
    return {
        uuid: waiting if refused is None else Outcome("Failed", Cause(refused.reason, refused.message))
        for uuid, refused in refusals.items()
    }


def _left(here: Opened, gpus: Sequence[SeenGpu], order: Order | None) -> frozenset[str]:
    """UUIDs of the GPUs that an earlier command left under way and that this one goes on with, which is said."""
    record = here.machine.store.load()
    if record is None:
        return frozenset()
    left = frozenset(under_way(accept(record, order)))
    index = {gpu.uuid: gpu.index for gpu in gpus}
    if left & index.keys():
        names = wording.numbered(index[uuid] for uuid in left if uuid in index)
        printing.note(f"first, what was left under way on {names} is finished or undone")
    parked = set(record.open) - left
    if parked & index.keys():
        names = wording.numbered(index[uuid] for uuid in parked if uuid in index)
        printing.note(f"{names} stays half done: a plan that names it, or `migd rollback`, goes on there")
    return left


def _carry_out(here: Opened, order: Order, began: Seen, left: frozenset[str]) -> Ending:
    """Run an order, tell how it goes, and say what became of each GPU.

    began: as it was when the command began. left: UUIDs of GPUs that were under way then.
    """
    teller = Teller(began.gpus)
    record = run(here.machine, order, teller)
    teller.end()
    ended = look(here.machine)
    uuids = dict.fromkeys([*order.goals, *sorted(left)])
    outcomes = {uuid: outcome for uuid in uuids if (outcome := record.gpu(uuid).outcome) is not None}
    moved = changed(began.gpus, ended.gpus, outcomes)
    printing.aside(total(began.gpus, ended.gpus, outcomes, ended.now_s - began.now_s))
    return Ending(ended.gpus, outcomes, record, moved, left - order.goals.keys())


def _result(ending: Ending, output: Format) -> int:
    """Print how it ended; the exit code."""
    if output is Format.TABLE:
        _table(ending)
    else:
        printing.document(_body(ending), output)
    return ending.exit


def _wait_s(text: str | None, plan_s: int) -> float | None:
    if text is None:
        return None
    if text == WAIT_BARE.partition("=")[2]:
        return plan_s
    number = seconds_of(text)
    if number is None or number > TIMEOUT_MAX_S:
        most = duration_of(TIMEOUT_MAX_S)
        raise CliError(Exit.USAGE, f"--wait-idle={text}: write a duration up to {most}, such as 90s, 30m or 1h30m")
    return number


def _told(ending: Ending) -> Iterable[tuple[SeenGpu, Outcome]]:
    """The GPUs that a command was about and that are there, by index, with what became of them."""
    for gpu in ending.gpus:
        outcome = ending.outcomes.get(gpu.uuid)
        if outcome is not None:
            yield gpu, outcome


def _table(ending: Ending) -> None:
    rows = wording.together(
        (
            gpu.index,
            (
                wording.model(gpu),
                outcome.phase,
                str(gpu.layout),
                "yes" if gpu.uuid in ending.changed else "no",
                "" if outcome.phase == "Ready" else outcome.cause.reason,
            ),
        )
        for gpu, outcome in _told(ending)
    )
    printing.table(*tables.without_blank(("GPU", "MODEL", "PHASE", "LAYOUT", "CHANGED", "REASON"), rows, "REASON"))
    for sentence in wording.said_once(
        (gpu.index, f"{_word(outcome)} ({outcome.cause.reason}): {outcome.cause.message}")
        for gpu, outcome in _told(ending)
        if outcome.phase != "Ready"
    ):
        printing.aside(sentence)
    if any(outcome.cause.reason == "InUse" for outcome in ending.outcomes.values()):
        printing.note("end what holds them, or let `migd apply --wait-idle[=TIME]` wait until they are idle")


def _word(outcome: Outcome) -> str:
    if outcome.phase == "Failed" and outcome.cause.reason in INFEASIBLE_REASONS and not outcome.touched:
        return "refused"
    return {"RebootRequired": "needs a reboot"}.get(outcome.phase, outcome.phase.lower())


def _body(ending: Ending) -> dict[str, Any]:
    return {
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "phase": outcome.phase,
                "reason": outcome.cause.reason,
                "message": outcome.cause.message,
                "changed": gpu.uuid in ending.changed,
                "layout": layout_json(gpu.layout),
                "previous": None if (was := ending.record.gpu(gpu.uuid).before) is None else layout_json(was),
            }
            for gpu, outcome in _told(ending)
        ]
    }
