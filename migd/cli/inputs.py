"""From a file on the command line to a plan, and to the order it means on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from migd.agent.orders import Order, order_id
from migd.cli import printing
from migd.cli.exits import CliError, Exit
from migd.cli.options import Document, Format, read_text
from migd.mig.observed import SeenGpu
from migd.plans.export import dump
from migd.plans.matching import match
from migd.plans.migparted import MigParted, conflicts, to_plan
from migd.plans.plan import Plan, cluster_notes, document_of
from migd.plans.problems import BadInput, Problem
from migd.plans.reading import read


@dataclass(frozen=True, slots=True)
class Given:
    """What was given: a plan, and what should be said about it. file: the mig-parted file it came from."""

    plan: Plan
    source: str
    notes: tuple[str, ...]
    file: MigParted | None = None
    config: str | None = None


def given(filename: str, config: str | None) -> Given:
    """Read a plan, or one configuration of a mig-parted file as a plan; CliError for anything else."""
    source = "standard input" if filename == "-" else filename
    try:
        found = read(read_text(filename), source)
        if isinstance(found, Plan):
            if config is not None:
                raise CliError(Exit.USAGE, f"{source} is a plan; -c NAME is for mig-parted files: leave it out")
            return Given(found, source, cluster_notes(found))
        plan, warnings = to_plan(found, config)
        return Given(plan, source, warnings, found, config)
    except BadInput as error:
        raise CliError(Exit.USAGE, str(error)) from error


def print_plan(plan: Plan, output: Document) -> None:
    """Print a plan as a document that reads back equal."""
    if output is Document.JSON:
        printing.document(document_of(plan), Format.JSON)
    else:
        printing.text(dump(plan))


def ordered(what: Given, gpus: Sequence[SeenGpu], wait_until_s: float | None = None) -> tuple[Order, tuple[str, ...]]:
    """The order that a plan means on a machine with these GPUs, and notes; CliError where it names what is not here."""
    matching = match(what.plan, gpus)
    problems: tuple[Problem, ...] = matching.problems
    if what.file is not None:
        problems = (*conflicts(what.file, what.config, gpus), *problems)
    if problems:
        raise CliError(Exit.USAGE, str(BadInput(what.source, problems)))
    spec = what.plan.spec
    goals = {gpu.uuid: spec.rules[rule] for gpu, rule in zip(gpus, matching.rules, strict=True) if rule is not None}
    order = Order(order_id(dump(what.plan)), goals, spec.foreign_instances, spec.on_failure, wait_until_s)
    return order, matching.notes
