"""What `rankwise run` shows while it works: a live table on a terminal, plain lines elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tasks.board import Board, Row, current_board

_COLOURS = {"completed": "green", "running": "cyan", "starting": "cyan", "queued": "blue", "waiting": "dim"}
_UNDER_WAY = ("running", "starting", "queued")
_ROWS_SHOWN = 30
_FAILED_SHOWN = 5


@contextmanager
def show_progress(console: Console) -> Iterator[None]:
    """Show the current board until the block ends."""
    if console.is_terminal:
        with Live(get_renderable=lambda: table_of(current_board()), console=console, refresh_per_second=2):
            yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_print_lines, args=(console, stop), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def duration(seconds: float | None) -> str:
    """`1:05` for 65 seconds; `?` for what is not known."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def summary_line(board: Board) -> str:
    """`29 of 42 visits, 0 failed, 1:12 elapsed, about 0:34 to go`."""
    if not board.rows:
        return board.stage or "starting"
    running = sum(1 for row in board.rows if row.state in ("running", "starting"))
    done = board.done + sum(row.done for row in board.rows if row.state == "running")
    queued = sum(1 for row in board.rows if row.state == "queued")
    line = f"{done} of {board.total} visits, {board.failed} failed, {running} running"
    line += f", {queued} queued" if queued else ""
    line += f", {duration(board.elapsed_seconds)} elapsed"
    return line if board.ended else f"{line}, about {duration(board.remaining_seconds)} to go"


def table_of(board: Board) -> Group:
    """The launches, one a line, and a summary below."""
    table = Table(box=None, pad_edge=False)
    for name, justify in (("launch", "left"), ("cells", "right"), ("visit", "left"), ("state", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in _interesting(board.rows):
        colour = _COLOURS.get(row.state, "red")
        state = Text(row.state, style=colour) + Text(f"  {row.note}" if row.note else "", style="dim")
        table.add_row(row.label, f"{row.done}/{row.visits}", _block(row), state)
    return Group(table, Text("-" * 72, style="dim"), Text(summary_line(board)))


def _interesting(rows: list[Row]) -> list[Row]:
    """All rows, or, of a long list, what failed, what is under way, and what lies around that."""
    if len(rows) <= _ROWS_SHOWN:
        return rows
    going = [i for i, row in enumerate(rows) if row.state in _UNDER_WAY]
    # Those that run come before those that wait in a queue, which may be many.
    going.sort(key=lambda i: _UNDER_WAY.index(rows[i].state))
    now = next((i for i, row in enumerate(rows) if row.state in (*_UNDER_WAY, "waiting")), len(rows))
    start = max(0, min(now - _ROWS_SHOWN // 2, len(rows) - _ROWS_SHOWN))
    failed = [i for i, row in enumerate(rows[:start]) if row.failed][-_FAILED_SHOWN:]
    shown = list(dict.fromkeys([*failed, *going, *range(start, start + _ROWS_SHOWN)]))[:_ROWS_SHOWN]
    return [rows[i] for i in sorted(shown)]


def _block(row: Row) -> str:
    return f"{row.block} of {row.blocks}" if row.measuring_pass == "timed" else row.measuring_pass


def _print_lines(console: Console, stop: threading.Event) -> None:
    """A line whenever a launch begins or ends."""
    seen: dict[int, str] = {}
    last = False
    while not last:
        last = stop.wait(0.3)
        board = current_board()
        for row in list(board.rows):
            state = "starting" if row.state == "running" else row.state
            if state == "waiting" or seen.get(id(row)) == state:
                continue
            seen[id(row)] = state
            cells = f"{row.done}/{row.visits} cells" if state != "starting" else f"{row.visits} cells"
            note = f"  {row.note}" if row.note else ""
            console.print(f"  {row.label:<44} {_block(row):<8} {cells:<12} {state}{note}", soft_wrap=True, markup=False)
    if current_board().rows:
        console.print(f"  {summary_line(current_board())}")
