"""Progress display of `rankwise run`: a live table on a terminal, plain lines elsewhere."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from configs.common.printable import duration_text, plural, printable
from flows.cli.console import redraws
from slurm.schedulers.commands.pending import is_ordinary
from tasks.campaign.progress import ProgressRow, RunProgress, current_progress

if TYPE_CHECKING:
    from flows.scaling_study import RunSummary

_COLOURS = {"completed": "green", "running": "cyan", "starting": "cyan", "queued": "blue", "waiting": "dim"}
_COLOURS |= {"suspended": "yellow"}
_UNDER_WAY = ("running", "starting", "suspended", "queued")
_ROWS_SHOWN = 30
_FAILED_SHOWN = 5
_OTHER_LINES = 6
"""Of a terminal: the header, the rule, the summary where it is wrapped twice, and the cursor."""
_QUIET_SECONDS = 3.0


class RunDisplay:
    """What a run shows: its progress, and the result as soon as the report is written, before the API is told.

    Args:
        print_result: prints the result and returns the exit code, which is then `code`; None before.
    """

    def __init__(self, console: Console, print_result: "Callable[[RunSummary], int]") -> None:
        self.code: int | None = None
        self._console, self._print_result = console, print_result
        self._progress, self._publishing = ExitStack(), ExitStack()

    def __enter__(self) -> None:
        self._progress.enter_context(show_progress(self._console))

    def __exit__(self, *_: object) -> None:
        self._publishing.close()
        self._progress.close()

    def print_result(self, result: "RunSummary") -> None:
        """Print the result in place of the progress, and later a line if the API keeps the run from ending."""
        self._progress.close()
        self.code = self._print_result(result)
        note = "  note: the report is complete; telling the Prefect API about it"
        timer = threading.Timer(_QUIET_SECONDS, self._console.print, (note,))
        timer.daemon = True
        self._publishing.callback(timer.cancel)
        timer.start()


@contextmanager
def show_progress(console: Console) -> Iterator[None]:
    """Show the progress of the run until the block ends."""
    if redraws(console):
        renderable = lambda: table_of(current_progress(), console.height)  # noqa: E731
        live = Live(get_renderable=renderable, console=console, refresh_per_second=2)
        with live, _printing(console, _noteworthy):  # above the table, where it stays
            yield
        return
    with _printing(console, _changed):
        yield
    if current_progress().rows:
        console.print(f"  {summary_line(current_progress())}")


@contextmanager
def _printing(console: Console, wanted: Callable[[ProgressRow], tuple[str, str] | None]) -> Iterator[None]:
    """Print each row in a thread of its own, once for each of its states and reasons that are wanted."""
    stop = threading.Event()
    thread = threading.Thread(target=_print_lines, args=(console, stop, wanted), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def duration(seconds: float | None) -> str:
    """Format seconds: `1:05` for 65, `?` for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def summary_line(run_progress: RunProgress) -> str:
    """Return `29 of 42 measurements, 0 failed, 1:12 elapsed, about 0:34 remaining`."""
    if not run_progress.rows:
        return run_progress.stage or "starting"
    running = sum(1 for row in run_progress.rows if row.state in ("running", "starting"))
    done = run_progress.done + sum(row.done for row in run_progress.rows if row.state == "running")
    queued = sum(1 for row in run_progress.rows if row.state == "queued")
    line = f"{done} of {plural(run_progress.total, 'measurement')}, {run_progress.failed} failed, {running} running"
    line += f", {queued} queued" if queued else ""
    line += f", {run_progress.cancelled} cancelled" if run_progress.cancelled else ""
    line += f", {duration(run_progress.elapsed_seconds)} elapsed"
    return line if run_progress.ended else f"{line}, about {duration(run_progress.remaining_seconds)} remaining"


def table_of(run_progress: RunProgress, terminal_lines: int = _ROWS_SHOWN + _OTHER_LINES) -> Group:
    """Return a table with one launch per row and a summary line; of a long list as many rows as the terminal holds."""
    table = Table(box=None, pad_edge=False)
    for name, justify in (("launch", "left"), ("cells", "right"), ("measurement", "left"), ("state", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in _interesting(run_progress.rows, max(1, min(_ROWS_SHOWN, terminal_lines - _OTHER_LINES))):
        colour = _COLOURS.get(row.state, "red")
        state = Text(row.state, style=colour) + Text(f"  {row.speed}" if row.speed else "")
        state += Text(f"  {printable(row.note)}" if row.note else "", style="dim")
        table.add_row(Text(printable(row.label)), f"{row.done}/{row.measurements}", _block(row), state)
    return Group(table, Text("-" * 72, style="dim", no_wrap=True, overflow="crop"), Text(summary_line(run_progress)))


def _interesting(rows: list[ProgressRow], count: int) -> list[ProgressRow]:
    """Return all rows, or `count` of a longer list: the failed and active ones and their neighbours."""
    if len(rows) <= count:
        return rows
    going = [i for i, row in enumerate(rows) if row.state in _UNDER_WAY]
    # Running launches come before queued ones, of which there may be many.
    going.sort(key=lambda i: _UNDER_WAY.index(rows[i].state))
    now = next((i for i, row in enumerate(rows) if row.state in (*_UNDER_WAY, "waiting")), len(rows))
    start = max(0, min(now - count // 2, len(rows) - count))
    failed = [i for i, row in enumerate(rows[:start]) if row.failed][::-1][: min(_FAILED_SHOWN, count // 4)]
    shown = list(dict.fromkeys([*failed, *going, *range(start, start + count)]))[:count]
    return [rows[i] for i in sorted(shown)]


def _block(row: ProgressRow) -> str:
    return f"{row.block} of {row.blocks}" if row.measuring_pass == "timed" else row.measuring_pass


def _changed(row: ProgressRow) -> tuple[str, str] | None:
    """What a line is printed for, once: a launch's state, and where it waits the reason; None for nothing."""
    if row.state == "waiting" and not row.note:
        return None
    return ("starting" if row.state == "running" else row.state, row.reason)


def _noteworthy(row: ProgressRow) -> tuple[str, str] | None:
    """The same on a terminal, whose table shows all: what no table should have scrolled away."""
    waits = row.state == "queued" or (row.state == "waiting" and row.reason)
    return (row.state, row.reason) if waits and not is_ordinary(row.reason) else None


def _print_lines(
    console: Console, stop: threading.Event, wanted: Callable[[ProgressRow], tuple[str, str] | None]
) -> None:
    """Print how long measuring will take, and a line whenever a launch starts, ends, or waits for another reason."""
    seen: set[tuple[int, tuple[str, str]]] = set()
    last = is_told = False
    while not last:
        last = stop.wait(0.3)
        expected = current_progress().expected_seconds
        if expected is not None and not is_told:
            is_told = True
            console.print(f"  measuring takes about {duration_text(expected)}", markup=False)
        for row in list(current_progress().rows):
            told = wanted(row)
            if told is None or (id(row), told) in seen:
                continue
            seen.add((id(row), told))
            state = told[0]
            cells = (
                f"{row.done}/{plural(row.measurements, 'cell')}"
                if state != "starting"
                else plural(row.measurements, "cell")
            )
            note = "".join(f"  {text}" for text in (row.speed, printable(row.note)) if text)
            console.print(
                f"  {printable(row.label):<44} {_block(row):<8} {cells:<12} {state}{note}", soft_wrap=True, markup=False
            )
