"""The command `migd`: its commands put together, and every expected error turned into a sentence and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

from migd.agent.locking import LockHeldError, StateDirError
from migd.agent.store import RecordError
from migd.cli import printing
from migd.cli.exits import CliError, Exit
from migd.nvml.errors import GpuError, NoDriverError

COMMANDS: Final = {
    "gpus": ("migd.cli.listing", "gpus"),
    "plan": ("migd.cli.planning", "plan"),
    "apply": ("migd.cli.applying", "apply"),
    "rollback": ("migd.cli.applying", "rollback"),
    "import": ("migd.cli.planning", "import_"),
    "export": ("migd.cli.listing", "export"),
    "agent": ("migd.cli.agent", "agent"),
    "release": ("migd.cli.releasing", "release"),
    "sim": ("migd.cli.simulating", "app"),
}
"""Where each command is. Only what is asked for is imported: a command line should answer at once."""

HELP: Final = """\
Changes how NVIDIA GPUs are partitioned (MIG), on a running machine, without breaking anything.

\b
Exit codes, first that applies:
  2  bad input or usage
  3  the wish cannot be met on this hardware: nothing is touched
  1  something failed
  4  blocked: in use, foreign, another migd at work, reboot required
  5  plan, apply --dry-run: changes would be made
  0  done, or nothing to do
"""


def main() -> None:
    """Run the command line and end the process with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without × is no reason to fail
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code."""
    words = _wait_joined(arguments)
    try:
        code = application(words[0] if words else "")(words, prog_name="migd", standalone_mode=False)
    except CliError as error:
        return _say(str(error), error.code)
    except LockHeldError as error:
        return _say(str(error), Exit.BLOCKED)
    except (RecordError, StateDirError) as error:
        return _say(str(error), Exit.FAILED)
    except NoDriverError as error:
        return _say(f"{error}. To see migd at work without GPUs: migd gpus --simulate 8xa100-80gb", Exit.FAILED)
    except GpuError as error:
        return _say(_with_what_follows(f"{error}.", words), Exit.FAILED)
    except (typer.Abort, KeyboardInterrupt):
        code = Exit.INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's usage errors
            if type(error).__name__ == "NoArgsIsHelpError":  # its text is the help itself
                printing.aside(error.format_message())
                return Exit.USAGE
            context = getattr(error, "ctx", None)
            path = context.command_path if context is not None else "migd"
            message = str(error.format_message()).replace("Value error, ", "")
            return _say(f"{message}\nTry: {path} --help", Exit.USAGE)
        if _is_simulators(error):
            return _say(str(error), Exit.FAILED)
        raise
    if code == Exit.INTERRUPTED:  # typer makes this number of an interrupt within a command
        return _say(_with_what_follows("interrupted.", words), Exit.INTERRUPTED)
    return int(code or 0)


def application(first: str = "") -> typer.Typer:
    """The command line: only the command of this name, where there is one; else all of them."""
    app = typer.Typer(
        name="migd",
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def _several(
        _version: Annotated[
            bool,
            typer.Option("--version", is_eager=True, callback=_say_version, help="Say which version this is, and end."),
        ] = False,
    ) -> None:
        # Also keeps typer from making a single command the whole program.
        return

    for name in [first] if first in COMMANDS else COMMANDS:
        module, attribute = COMMANDS[name]
        found = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    return app


def _say_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version  # here, because few ask

        printing.line(f"migd {version('migd')}")
        raise typer.Exit


def _wait_joined(arguments: Sequence[str]) -> list[str]:
    """The words with --wait-idle and a time after it as one, and a bare --wait-idle spelt out."""
    if "--wait-idle" not in arguments or arguments[:1] == [
        "sim"
    ]:  # `sim exec` may run another migd, with its own words
        return list(arguments)
    from migd.cli.applying import WAIT_BARE  # here, because few commands need them
    from migd.plans.fields import seconds_of

    words: list[str] = []
    for word in arguments:
        if words and words[-1] == WAIT_BARE and seconds_of(word) is not None:
            words[-1] = f"--wait-idle={word}"
        else:
            words.append(WAIT_BARE if word == "--wait-idle" else word)
    return words


def _with_what_follows(message: str, words: Sequence[str]) -> str:
    """The message; after a command that changes GPUs, with what becomes of a change that was under way."""
    if words[:1] not in (["apply"], ["rollback"]):
        return message
    return f"{message} The next `migd apply` or `migd rollback` finishes or undoes what was under way, if anything"


def _is_simulators(error: Exception) -> bool:
    """Whether the simulated machine cannot go on, as when its file cannot be written any more."""
    found = sys.modules.get("migd.sim.errors")
    return found is not None and isinstance(error, found.SimulationError)


def _say(message: str, code: int) -> int:
    printing.unline()  # a step that was under way may stand there
    printing.aside(f"migd: {message}")
    return int(code)
