"""Options that several commands share, and reading of the files that they name."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from migd.cli.exits import CliError, Exit


def folder_named(text: str) -> Path:
    """A folder that an option names, for typer's `parser`; a blank one is a variable that is not set, not "here"."""
    if not text.strip() or "\0" in text:
        raise typer.BadParameter(f"{text!r} is not a folder's name")
    return Path(text)


class Format(StrEnum):
    """How a command prints its result."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class Document(StrEnum):
    """How a command prints a result that is a document."""

    YAML = "yaml"
    JSON = "json"


Simulate = Annotated[
    str | None,
    typer.Option(
        "--simulate",
        metavar="SPEC",
        help="Use simulated GPUs instead of this machine's, such as 8xa100-80gb or 4xh100-sxm-80gb,2xl40s: a fresh "
        "machine with MIG off, or the one in --state.",
        show_default=False,
    ),
]
State = Annotated[
    Path | None,
    typer.Option(
        "--state", metavar="FILE", help="Keep the simulated machine in this file; made at first use.", readable=False
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        help="Where migd's record and lock lie. Default: /var/lib/migd; with --state FILE, FILE.d beside it.",
        parser=folder_named,
        readable=False,  # whether it can be used is found out by using it
    ),
]
Output = Annotated[
    Format, typer.Option("--output", "-o", metavar="FORMAT", help="table (default), json or yaml.", show_default=False)
]
DocumentOutput = Annotated[
    Document, typer.Option("--output", "-o", metavar="FORMAT", help="yaml (default) or json.", show_default=False)
]
File = Annotated[
    str,
    typer.Option(
        "--filename",
        "-f",
        metavar="FILE",
        help="A GPUPartitionPlan, a mig-parted file or a ConfigMap with one; - reads standard input.",
        show_default=False,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="NAME",
        help="Which configuration of a mig-parted file; left out, they are listed.",
        show_default=False,
    ),
]

SIZE_MAX = 1 << 20


def read_text(filename: str) -> str:
    """The text of a file, or of standard input for "-"; CliError where it cannot be read or is no text."""
    source = "standard input" if filename == "-" else filename
    try:
        data = _standard_input() if filename == "-" else _read(Path(filename))
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
        why = error.strerror if isinstance(error, OSError) else error
        raise CliError(Exit.USAGE, f"cannot read {source}: {why}") from error
    if len(data) > SIZE_MAX:
        raise CliError(Exit.USAGE, f"{source} is larger than 1 MiB: no plan is")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CliError(Exit.USAGE, f"{source} is not UTF-8 text (byte {error.start})") from error


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise ValueError("it is closed")
    return sys.stdin.buffer.read(SIZE_MAX + 1)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SIZE_MAX + 1)
