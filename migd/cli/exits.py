"""Exit codes, and errors that a command ends with: what is wrong, where, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from migd.agent.records import Outcome


class Exit(IntEnum):
    """What a command's exit code means; of several the first of USAGE, INFEASIBLE, FAILED, BLOCKED, CHANGES.

    INTERRUPTED is how shells write SIGINT; it is no outcome of GPUs.
    """

    DONE = 0
    FAILED = 1
    USAGE = 2
    INFEASIBLE = 3
    BLOCKED = 4
    CHANGES = 5
    INTERRUPTED = 130


ORDER = (Exit.USAGE, Exit.INFEASIBLE, Exit.FAILED, Exit.BLOCKED, Exit.CHANGES, Exit.DONE)

INFEASIBLE_REASONS = frozenset({"Infeasible", "UnknownProfile", "NotCapable"})


class CliError(Exception):
    """Ends a command with a message on standard error and an exit code; never a traceback."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


def worst(codes: Iterable[Exit]) -> Exit:
    """The exit code that applies first."""
    return min(codes, key=ORDER.index, default=Exit.DONE)


def reason_exit(reason: str) -> Exit:
    """The exit code of a wish that is refused for this reason."""
    return Exit.INFEASIBLE if reason in INFEASIBLE_REASONS else Exit.FAILED


def exit_of(outcome: Outcome) -> Exit:
    """The exit code for one GPU's outcome."""
    if outcome.phase == "Ready":
        return Exit.DONE
    if outcome.cause.reason in INFEASIBLE_REASONS and not outcome.touched:
        return Exit.INFEASIBLE
    if outcome.phase in ("Blocked", "RebootRequired"):
        return Exit.BLOCKED
    return Exit.FAILED
