"""What commands print: results on standard output, everything else on standard error; neither ever ends a command.

A reader that has gone (`migd gpus | head -1`) is no reason to stop half way through a change, so writing never raises
for it. Texts from elsewhere, such as the commands of processes, cannot steer the terminal.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

from migd.cli import tables
from migd.cli.exits import CliError, Exit
from migd.cli.options import Format


def document(body: Mapping[str, Any], output: Format) -> None:
    """Print a document as JSON or YAML on standard output."""
    if output is Format.JSON:
        _result(json.dumps(body, indent=2, ensure_ascii=False) + "\n")
        return
    import yaml  # here, because most commands end sooner without it

    _result(yaml.safe_dump(dict(body), sort_keys=False, allow_unicode=True))


def text(whole: str) -> None:
    """Print a result as it is on standard output."""
    _result(whole)


def line(sentence: str) -> None:
    """Print a line of a result for people on standard output."""
    _result(printable(sentence) + "\n")


def table(titles: tables.Row, rows: Sequence[tables.Row]) -> None:
    """Print a table on standard output: wrapped to a terminal's width, never for a reader that is none."""
    cells = [tuple(printable(cell) for cell in row) for row in rows]
    _result("".join(f"{each}\n" for each in tables.lines(titles, cells, terminal_width(sys.stdout))))


def terminal_width(stream: TextIO | None) -> int | None:
    """How wide the terminal is that a stream goes to; COLUMNS says it too. None for files and pipes."""
    if os.environ.get("COLUMNS", "").isdecimal() or is_terminal(stream):
        return max(shutil.get_terminal_size().columns, 40)
    return None


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody may be reading along."""
    return stream is not None and stream.isatty()


def note(sentence: str) -> None:
    """Say something to a person, on standard error, apart from the result."""
    aside(f"note: {sentence}")


def notes(sentences: Iterable[str]) -> None:
    """Say several things, each once."""
    for sentence in dict.fromkeys(sentences):
        note(sentence)


def aside(sentence: str, end: str = "\n") -> None:
    """Write a line to standard error, after all that was printed before it. Never fails: work goes on without it.

    On a terminal it is wrapped between words.
    """
    with suppress(OSError, ValueError):  # the reader has gone, the disk is full, or the stream is closed
        _write(sys.stdout, "")
    with suppress(OSError, ValueError):
        _write(sys.stderr, _wrapped(printable(sentence), terminal_width(sys.stderr)) + end)


def shows_live() -> bool:
    """Whether standard error is a terminal on which a line can be replaced."""
    return is_terminal(sys.stderr) and os.environ.get("TERM", "dumb") != "dumb"


def unline() -> None:
    """Clear the line that standard error stands in, on a terminal."""
    if shows_live():
        with suppress(OSError, ValueError):
            _write(sys.stderr, "\r\x1b[K")


def printable(sentence: str) -> str:
    """The text without what would steer a terminal: line ends stay, other control characters are written out."""
    return "".join(c if c.isprintable() or c in f"\n{tables.GLUE}" else f"\\x{ord(c):02x}" for c in sentence)


def _wrapped(sentence: str, width: int | None) -> str:
    """The lines of a text, those that are too long for a terminal broken between words and indented."""
    if width is None:
        return sentence
    return "\n".join(
        line
        if len(line) <= width
        else textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in sentence.split("\n")
    )


def _result(whole: str) -> None:
    try:
        _write(sys.stdout, whole)
    except OSError as error:
        _to_nowhere(sys.stdout)
        raise CliError(Exit.FAILED, f"cannot write to standard output: {error.strerror}") from error


def _write(stream: TextIO | None, whole: str) -> None:
    if stream is None:  # started with the stream closed
        return
    try:
        stream.write(whole)
        stream.flush()
    except BrokenPipeError:
        _to_nowhere(stream)


def _to_nowhere(stream: TextIO | None) -> None:
    """What is written from here on goes nowhere: some Pythons keep what failed, and would fail once more at the end."""
    if stream is not None:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
