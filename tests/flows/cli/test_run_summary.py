"""The summary that `rankwise run` prints at its end."""

import io
from pathlib import Path

from rich.console import Console

from flows.cli.run import SOME_UNMEASURED, _print_summary


def test_a_folder_in_brackets_is_named_as_it_is() -> None:
    written = io.StringIO()
    console = Console(file=written, width=200, highlight=False)
    folder = Path("[old]/[/b]/run")
    assert _print_summary(console, ["fine"], {"completed": 1, "failed": 2}, folder / "report.md", folder) == (
        SOME_UNMEASURED
    )
    assert "Not measured: 2 failed (see [old]/[/b]/run/report.md)" in written.getvalue()
