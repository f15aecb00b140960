"""Tables on a terminal and elsewhere, whatever the names in them are written with."""

import os
import sys

import pytest

from configs.common.printable import terminal_columns
from flows.cli.tables import print_table

ROWS = [("\u6a21\u578b" * 10, "2.6", "12345678"), ("opt" * 20, "13.1", "x")]


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_no_figure_is_cut_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: str
) -> None:
    """Behind a name of wide signs a column was gone, and `1234...` stood for a figure."""
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((30, 24)))
    print_table(("name", "GB", "more"), ROWS)
    out = capsys.readouterr().out
    assert all(figure in out for row in ROWS for figure in row) and "\u2026" not in out


def test_columns_stand_in_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "GB", "more"), ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert len({terminal_columns(line) for line in lines}) == 1
