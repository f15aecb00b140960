"""What `rankwise run` shows of a long list of launches, and of what waits in a scheduler's queue."""

import io
import re
import time

import pytest
from rich.console import Console
from rich.live import Live

from flows.cli.live import _changed, _noteworthy, _printing, show_progress, summary_line, table_of
from tasks.campaign.progress import ProgressRow, RunProgress, new_progress


def run_progress(states: dict[int, str], count: int = 100) -> RunProgress:
    """Launches named by their place; before the first that is not done all are completed."""
    now = min(states, default=count)
    rows = []
    for place in range(count):
        state = states.get(place, "completed" if place < now else "waiting")
        rows.append(
            ProgressRow(f"launch-{place}", 1, 1, 1, done=state == "completed", failed=state == "failed", state=state)
        )
    return RunProgress(total=count, rows=rows)


def shown(made: RunProgress) -> list[int]:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(table_of(made))
    lines = captured.get().splitlines()
    return [int(line.split()[0].removeprefix("launch-")) for line in lines if line.startswith("launch-")]


def test_a_short_list_is_shown_whole() -> None:
    assert shown(run_progress({3: "running"}, count=20)) == list(range(20))


def test_of_a_long_list_what_is_under_way_is_shown_wherever_it_is() -> None:
    states = {50: "running", 51: "queued", 80: "running", 99: "queued"}
    rows = shown(run_progress(states))
    assert len(rows) == 30 and set(states) <= set(rows) and rows == sorted(rows)
    assert {49, 52} <= set(rows), "and what lies around the first of them"


def test_more_queued_jobs_than_lines_do_not_hide_those_that_run() -> None:
    states = {place: "queued" for place in range(10, 90)} | {60: "running", 89: "running"}
    rows = shown(run_progress(states))
    assert len(rows) == 30 and {60, 89} <= set(rows)


def test_a_failure_stays_in_sight() -> None:
    made = run_progress({70: "running"})
    made.rows[5].state, made.rows[5].failed = "failed", 1
    assert 5 in shown(made)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (40, 24), (200, 12)])
def test_the_summary_stands_on_a_terminal_of_few_lines(columns: int, lines: int) -> None:
    """Under a list longer than the terminal it was cut off: how far the run is, and how long the rest takes."""
    made = run_progress({20: "running", 21: "queued"}, count=40)
    made.rows[3].state, made.rows[3].failed = "failed", 1
    stream = io.StringIO()
    console = Console(width=columns, height=lines, file=stream, force_terminal=True, color_system=None)
    with Live(table_of(made, console.height), console=console, auto_refresh=False) as live:
        live.refresh()
        shown_now = stream.getvalue()
    assert "remaining" in shown_now and "launch-20" in shown_now and "launch-3 " in shown_now


def test_the_summary_tells_queued_from_running() -> None:
    assert "1 running, 2 queued" in summary_line(run_progress({50: "running", 51: "queued", 80: "queued"}))
    assert "queued" not in summary_line(run_progress({50: "running"}))
    assert [row["launch"] for row in run_progress({50: "running", 51: "queued"}).under_way()] == [
        "launch-50",
        "launch-51",
    ]


def test_what_remains_is_predicted_until_the_first_measurement_is_done() -> None:
    """It said `about ? remaining`, for as long as the first launch took."""
    made = run_progress({0: "running"})
    made.total = 100
    assert "about ? remaining" in summary_line(made)
    made.expect(599.9)
    assert "about 10:00 remaining" in summary_line(made)
    made.expected_since -= 3600  # it waited for another run on this machine
    assert "about ? remaining" in summary_line(made) and "to go" not in made.description
    made.done, made.started = 50, time.monotonic() - 30
    assert "about 0:30 remaining" in summary_line(made)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_launch_that_ended_shows_what_it_measured(terminal: bool) -> None:
    made, stream = new_progress(), io.StringIO()
    row = ProgressRow("launch", 1, 1, 1, done=1, state="completed", speed="48.1 to 412 tokens/s")
    made.rows = [row]
    console = Console(file=stream, width=120, force_terminal=False)
    if terminal:
        console.print(table_of(made))
    else:
        with show_progress(console):
            pass
    assert re.search(r"completed +48\.1 to 412 tokens/s", stream.getvalue())


def test_the_predicted_duration_is_printed_once() -> None:
    stream = io.StringIO()
    with show_progress(Console(file=stream, width=200, force_terminal=False)):
        new_progress().expect(7200)
        time.sleep(0.7)
    assert stream.getvalue().count("measuring takes about 2 h") == 1


def printed(told: list[tuple[str, str, str]], terminal: bool = False) -> list[str]:
    """What is printed of a launch that goes through these states, notes and reasons."""
    made, stream = new_progress(), io.StringIO()
    row = ProgressRow("launch", 1, 1, 1)
    made.rows = [row]
    console = Console(file=stream, width=200, force_terminal=False)
    with _printing(console, _noteworthy if terminal else _changed):
        for row.state, row.note, row.reason in told:
            time.sleep(0.4)
    return [re.split(r"\bcells?\b", line)[-1].strip() for line in stream.getvalue().splitlines()]


WAY = [
    ("queued", "job 7 pending: Priority", "Priority"),
    ("queued", "job 7 pending: Resources", "Resources"),
    ("queued", "job 7 pending: Priority", "Priority"),
    ("queued", "job 7 held: JobHeldUser", "JobHeldUser"),
    ("waiting", "the scheduler accepts no such jobs now: sbatch: busy", "sbatch: busy"),
    ("running", "job 7 on n1", ""),
]


def test_each_reason_to_wait_is_a_line_once_where_there_is_no_terminal() -> None:
    assert printed(WAY) == [
        "queued  job 7 pending: Priority",
        "queued  job 7 pending: Resources",
        "queued  job 7 held: JobHeldUser",
        "waiting  the scheduler accepts no such jobs now: sbatch: busy",
        "starting  job 7 on n1",
    ]


def test_on_a_terminal_only_what_needs_a_person_stays_above_the_table() -> None:
    assert printed(WAY, terminal=True) == [
        "queued  job 7 held: JobHeldUser",
        "waiting  the scheduler accepts no such jobs now: sbatch: busy",
    ]


@pytest.mark.parametrize(
    ("variables", "is_tty"), [({"TERM": "dumb"}, True), ({"TERM": "xterm", "FORCE_COLOR": "1"}, False)]
)
def test_progress_is_lines_where_nothing_can_be_drawn_over(
    variables: dict[str, str], is_tty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal without a cursor showed nothing before the end; a CI's log had the table twice a second."""
    made, stream = new_progress(), io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_tty)
    made.rows = [ProgressRow("launch", 1, 1, 1, state="waiting")]
    with show_progress(Console(file=stream, width=200, _environ=variables)):
        made.rows[0].state = "running"
        time.sleep(0.7)
        said = stream.getvalue()
    assert [line.split()[-1] for line in said.splitlines()] == ["starting"]
