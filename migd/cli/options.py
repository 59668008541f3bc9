"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from migd.cli.exits import CliError, Exit


class Format(StrEnum):
    """How a command prints its result."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Simulate = Annotated[
    str,
    typer.Option(
        "--simulate",
        metavar="SPEC",
        help="Use simulated GPUs instead of this machine's, such as 8xa100-80gb or 4xh100-sxm-80gb,2xl40s: a fresh "
        "machine with MIG off, or the one in --state.",
    ),
]
State = Annotated[
    Path | None,
    typer.Option("--state", metavar="FILE", help="Keep the simulated machine in this file; made at first use."),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        help="Where the record and the lock lie. Default: /var/lib/migd, or FILE.d beside a --state FILE.",
    ),
]
Output = Annotated[Format, typer.Option("--output", "-o", help="table, json or yaml.")]
File = Annotated[
    str,
    typer.Option(
        "--filename",
        "-f",
        metavar="FILE",
        help="A GPUPartitionPlan, a mig-parted file or a ConfigMap with one; - reads standard input.",
    ),
]
Config = Annotated[
    str,
    typer.Option("--config", "-c", metavar="NAME", help="Which configuration of a mig-parted file."),
]


def read_text(filename: str) -> str:
    """The text of a file, or of standard input for "-"; CliError where it cannot be read or is no text."""
    source = "standard input" if filename == "-" else filename
    try:
        data = typer.get_binary_stream("stdin").read(SIZE_MAX + 1) if filename == "-" else _read(Path(filename))
    except OSError as error:
        raise CliError(Exit.USAGE, f"cannot read {source}: {error.strerror}") from error
    if len(data) > SIZE_MAX:
        raise CliError(Exit.USAGE, f"{source} is larger than 1 MiB: no plan is")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CliError(Exit.USAGE, f"{source} is not UTF-8 text (byte {error.start})") from error


SIZE_MAX = 1 << 20


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SIZE_MAX + 1)
