"""Where words go, and that nothing written to somebody who has gone ends the work."""

from __future__ import annotations

import io
import sys

import pytest

from migd.cli import printing
from migd.cli.exits import CliError, Exit
from migd.cli.options import Format


class Refusing(io.StringIO):
    """A stream that cannot be written to any more."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


def test_notes_go_to_standard_error_once_each_and_results_to_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printing.notes(["a", "b", "a"])
    printing.line("c")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("c\n", "note: a\nnote: b\n")


def test_texts_of_others_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    printing.note("held by \x1b[2Jpython\r\u202e")
    printing.table(("COMMAND",), [("\x1b]0;owned\x07",)])
    told = capsys.readouterr()
    assert told.err == "note: held by \\x1b[2Jpython\\x0d\\x202e\n"
    assert told.out == "COMMAND\n\\x1b]0;owned\\x07\n"


def test_a_json_document_is_not_touched(capsys: pytest.CaptureFixture[str]) -> None:
    printing.document({"command": "naïve ×"}, Format.JSON)
    assert capsys.readouterr().out == '{\n  "command": "naïve ×"\n}\n'


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left on device")])
def test_progress_that_cannot_be_written_does_not_end_the_work(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Refusing(error))
    printing.aside("GPU 0  created 3g.40gb@0")


def test_a_result_whose_reader_has_gone_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Refusing(BrokenPipeError()))
    printing.line("a result")


def test_a_result_that_cannot_be_written_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Refusing(OSError(28, "No space left on device")))
    with pytest.raises(CliError, match="cannot write to standard output: No space left on device") as caught:
        printing.document({}, Format.JSON)
    assert caught.value.code == Exit.FAILED


def test_closed_streams_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    printing.line("nobody reads this")
    printing.note("nor this")


def test_a_pipe_is_never_wrapped_unless_columns_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert printing.terminal_width(io.StringIO()) is None
    monkeypatch.setenv("COLUMNS", "72")
    assert printing.terminal_width(io.StringIO()) == 72
