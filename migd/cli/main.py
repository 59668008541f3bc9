"""The command `migd`: its commands put together, and every expected error turned into a sentence and an exit code."""

from __future__ import annotations

import os
import sys

import typer

from migd.agent.locking import LockHeldError, StateDirError
from migd.agent.store import RecordError
from migd.cli import applying, listing, planning, simulating
from migd.cli.exits import CliError, Exit
from migd.nvml.errors import GpuError

app = typer.Typer(
    name="migd",
    help="Changes how NVIDIA GPUs are partitioned (MIG), on a running machine, without breaking anything.\n\n"
    "Exit codes, first that applies: 2 bad input or usage; 3 the wish cannot be met on this hardware (nothing is "
    "touched); 1 something failed; 4 blocked: in use, foreign, locked, reboot required; 5 (plan, apply --dry-run) "
    "changes would be made; 0 done, or nothing to do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("gpus")(listing.gpus)
app.command("plan")(planning.plan)
app.command("apply")(applying.apply)
app.command("rollback")(applying.rollback)
app.command("import")(planning.import_)
app.command("export")(listing.export)
app.add_typer(simulating.app, name="sim")


def main() -> None:
    """Run the command line and end the process with its exit code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; its exit code."""
    words = [applying.WAIT_BARE if word == "--wait-idle" else word for word in arguments]
    try:
        code = app(words, prog_name="migd", standalone_mode=False)
    except CliError as error:
        return _say(str(error), error.code)
    except LockHeldError as error:
        return _say(str(error), Exit.BLOCKED)
    except (RecordError, StateDirError) as error:
        return _say(str(error), Exit.FAILED)
    except GpuError as error:
        return _say(
            f"{error}. If an operation was under way, `migd apply` or `migd rollback` goes on from there", Exit.FAILED
        )
    except typer.Abort:
        return _say("interrupted", Exit.FAILED)
    except KeyboardInterrupt:
        return _say(
            "interrupted; what was under way is finished or undone by the next `migd apply` or `migd rollback`", 130
        )
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of a pipe has gone: no noise
        return Exit.DONE
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's usage errors
            return _say(f"{error.format_message()}\nTry 'migd --help', or --help after a command.", Exit.USAGE)
        raise
    return int(code or 0)


def _say(message: str, code: int) -> int:
    print(f"migd: {message}", file=sys.stderr)  # noqa: T201 - this is the program's voice
    return int(code)
