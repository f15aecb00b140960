"""The history: what goes in comes out, names move, files of others are refused, writers wait for each other."""

import sqlite3
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from configs.common.base import WrongArgument
from configs.records.record import SchemaError
from reports.charts.chart import Chart
from reports.document.between import history_document
from reports.plots.runs.history import draw_history, history_height
from reports.plots.style import drawn
from reports.reading.run_figures import FIGURE_KINDS, RunFigures
from reports.runs import history as history_module
from reports.runs.compare import compare
from reports.runs.history import HISTORY_VERSION, KeptRun, open_history
from reports.text import UNKNOWN
from tests.support.run_folders.compared_runs import HOME, around, cell_of, run_of


def at(hour: int, middle: float = 100, **fields: object) -> RunFigures:
    """A run of two cells that began at an hour."""
    cells = cell_of("aaaa1", figures={"throughput": around(middle), "peak_memory_bytes": [1e8]}), cell_of("bbbb2")
    return run_of(*cells, name=f"runs/{hour}", started_at=f"2026-11-21T{hour:02}:00:00+00:00", **fields)


def test_a_run_comes_out_as_it_went_in(tmp_path: Path) -> None:
    run = at(1, environments={"e1": HOME, "lost": None}, finished_at="2026-11-21T01:30:00+00:00")
    cell = replace(run.cells["aaaa1"], hosts=("n1", "n2"), failed=2, confidence=0.96)
    run = replace(run, cells={"aaaa1": cell, "gone": cell_of("gone", status="out_of_memory")})
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        assert history.add(run, "main").state == "new"
    with open_history(tmp_path / "h.sqlite") as history:
        kept = history.run("main")
    assert kept.figures == replace(run, name="main (runs/1)") and kept.source == "runs/1" and kept.title == "main"
    assert list(kept.figures.cells) == ["aaaa1", "gone"]
    before, after = compare(run, at(2, 90)), compare(kept.figures, at(2, 90))
    assert before.cells == after.cells


def test_names_move_and_runs_are_kept_once(tmp_path: Path) -> None:
    with open_history(tmp_path / "sub" / "h.sqlite", create=True) as history:
        first = history.add(at(1), "main")
        again = history.add(replace(at(1), name="elsewhere"), "old")
        moved = history.add(at(2), "main")
        assert (first.number, again.number, moved.number) == (1, 1, 2)
        assert (again.state, moved.state, moved.moved_from) == ("known", "new", 1)
        assert [run.title for run in history.runs()] == ["old", "main"]
        history.add(at(0))
        assert [run.title for run in history.runs()] == ["run 3", "old", "main"]
        assert history.run("2").title == "main"


def test_a_run_that_was_measured_on_takes_its_own_place(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        history.add(at(1, 100), "main")
        added = history.add(at(1, 50))
        assert (added.number, added.state) == (1, "grown")
        (kept,) = history.runs()
        value = kept.figures.cells["aaaa1"].estimate("throughput")
        assert kept.names == ("main",) and value is not None and value.median == pytest.approx(50, rel=0.01)


def test_a_list_of_runs_reads_no_figures(tmp_path: Path) -> None:
    """Years of runs have millions, and none of them is listed."""
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        for hour in range(3):
            history.add(at(hour, environments={"e1": HOME}))
        asked: list[str] = []
        history._connection.set_trace_callback(asked.append)
        runs = history.listed()
        assert len(asked) > 3 and not [query for query in asked if "FROM figures" in query]
        for short, whole in zip(runs, history.runs(), strict=True):
            assert (short.title, short.source, short.added_at) == (whole.title, whole.source, whole.added_at)
            assert short.figures.environment == whole.figures.environment
            told = [[cell.completed for cell in run.figures.cells.values()] for run in (short, whole)]
            assert told[0] == told[1] and len(told[0]) == 2
        assert [query for query in asked if "FROM figures" in query]


def test_what_a_text_names(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        added = history.add(at(1))
        with pytest.raises(
            WrongArgument, match=r"called 7; none has a name\. Use: rankwise history add RUN --as NAME$"
        ):
            history.run("7")
        assert history.run(str(added.number)).names == ()
        history.add(at(1), "main")
        main = history.run_or_key("main")
        assert not isinstance(main, str) and main.number == 1
        assert history.run_or_key("aaaa") == "aaaa1" == history.run_or_key("tiny, aaaa1")
        with pytest.raises(WrongArgument, match=r"could be any of 2 cells.*\n  aaaa1  tiny, aaaa1\n"):
            history.run_or_key("tiny")
        with pytest.raises(WrongArgument, match="no run or cell of the history is called so"):
            history.run_or_key("nothing")
        with pytest.raises(WrongArgument, match="called nothing; there are: main"):
            history.run("nothing")
        assert [list(run.figures.cells) for run in history.runs(["aaaa1"])] == [["aaaa1"]]
        assert history.runs(["cccc"]) == []


@pytest.mark.parametrize("name", ["", " x", "12", "a\nb", "aaaa"])
def test_names_that_could_be_something_else(tmp_path: Path, name: str) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        with pytest.raises(WrongArgument, match="--as"):
            history.add(at(1), name)
        assert history.runs() == []


def test_a_run_without_any_figure_is_refused(tmp_path: Path) -> None:
    empty = run_of(cell_of(status="missing"))
    with (
        open_history(tmp_path / "h.sqlite", create=True) as history,
        pytest.raises(ValueError, match="nothing to keep"),
    ):
        history.add(empty)


def test_files_that_are_no_history(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no history here; `rankwise history add"), open_history(tmp_path / "none"):
        pass
    assert not (tmp_path / "none").exists()
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_text("not a database, and longer than the hundred bytes of a header. " * 10)
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    for file in (text, other):
        for create in (False, True):
            with pytest.raises(ValueError, match="not a history of runs"), open_history(file, create=create):
                pass


def test_a_newer_history_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    with open_history(file, create=True) as history:
        history.add(at(1))
    connection = sqlite3.connect(file)
    connection.execute(f"PRAGMA user_version = {HISTORY_VERSION + 1}")
    connection.close()
    with pytest.raises(SchemaError, match="reads 2 only"), open_history(file):
        pass


def test_an_addition_that_fails_leaves_nothing(tmp_path: Path) -> None:
    broken = at(1)
    figures = dict(broken.cells["bbbb2"].figures) | {"throughput": {0: None}}
    broken = replace(broken, cells={**broken.cells, "bbbb2": replace(broken.cells["bbbb2"], figures=figures)})  # type: ignore[arg-type]
    file = tmp_path / "h.sqlite"
    with pytest.raises(ValueError, match="cannot be used"), open_history(file, create=True) as history:
        history.add(broken, "main")
    with open_history(file) as history:
        assert history.runs() == []


@pytest.mark.slow
def test_writers_wait_for_each_other(tmp_path: Path) -> None:
    """Four processes make the file and add five runs each; all twenty are there."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tests.reports.runs.test_history import at, open_history\n"
        "for hour in range(5):\n"
        "    with open_history(Path(sys.argv[2]), create=True) as history:\n"
        "        history.add(at(hour, 100 + float(sys.argv[3]), study=sys.argv[3]), 'main')\n"
    )
    file = tmp_path / "h.sqlite"
    command = [sys.executable, "-c", code, str(Path(__file__).parents[3]), str(file)]
    writers = [subprocess.Popen([*command, str(number)], stderr=subprocess.PIPE, text=True) for number in range(4)]
    for writer in writers:
        _, said = writer.communicate(timeout=600)
        assert writer.returncode == 0, said
    with open_history(file) as history:
        runs = history.runs()
        assert len(runs) == 20 and sum(run.names == ("main",) for run in runs) == 1
        assert {run.figures.study for run in runs} == {"0", "1", "2", "3"}


def test_what_is_read_is_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that another process replaced while it was read had cells of its later state, without any figure."""
    file = tmp_path / "h.sqlite"
    early = at(1)
    later = replace(early, cells=early.cells | {"cccc3": cell_of("cccc3", figures={"throughput": around(7)})})
    monkeypatch.setattr(history_module, "BUSY_SECONDS", 0.1)
    with open_history(file, create=True) as history:
        history.add(early, "main")

    def add_later(statement: str) -> None:
        if statement.startswith("SELECT * FROM cells"):
            with suppress(ValueError), open_history(file) as other:  # it waits for who reads
                other.add(later)

    with open_history(file) as history:
        history._connection.set_trace_callback(add_later)
        read = history.run("main").figures
        history._connection.set_trace_callback(None)
    assert read.cells == early.cells
    with open_history(file) as history:
        history.add(later)
        assert history.run("main").figures.cells == later.cells


def test_the_figure_over_runs(tmp_path: Path) -> None:
    """One line for each environment, a cross where there is no figure, a mark for what changed."""
    runs = [
        at(1),
        at(2),
        at(3, environment={"torch": "2.10", "hostname": "b"}),
        at(4, environment={"torch": "2.10", "hostname": "b"}),
    ]
    lost = at(5)
    runs.append(replace(lost, cells={"aaaa1": cell_of("aaaa1", status="out_of_memory"), "bbbb2": cell_of("bbbb2")}))
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        for run in runs:
            history.add(run)
        kept = history.runs(["aaaa1"])
    images = drawn(partial(draw_history, runs=kept, key="aaaa1", kind=FIGURE_KINDS[0]), history_height(len(kept)))
    assert images["png"].startswith(b"\x89PNG") and b"<svg" in images["svg"]
    figure = Figure()
    draw_history(figure, kept, "aaaa1", FIGURE_KINDS[0])
    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["hostname and torch", "out of memory"]
    assert len(axes.containers) == 2 and axes.get_ylabel() == "throughput, tokens/s"
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert len(dashed) == 1 and dashed[0].get_xdata()[0] == 1.5  # type: ignore[index]


def test_many_changes_of_the_environment_leave_room_for_the_figure(tmp_path: Path) -> None:
    """Forty runs on forty hosts of a cluster: what changed filled the picture, whose panel was a strip."""
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        for place in range(40):
            day = f"2026-10-{1 + place % 28:02}T{place // 28:02}:00:00+00:00"
            facts = {"hostname": f"node{place}", "torch": f"2.{place}", "kernel": str(place)}
            history.add(run_of(cell_of("aaaa1"), environment=facts, started_at=day))
        kept = history.runs(["aaaa1"])
    figure = Figure(figsize=(7.2, history_height(len(kept))), layout=ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)
    draw_history(figure, kept, "aaaa1", FIGURE_KINDS[0])
    figure.canvas.draw()
    (axes,) = figure.axes
    assert axes.get_window_extent().height > 0.3 * figure.bbox.height
    assert [text.get_text() for text in axes.texts] == list("abcdefghijkl")
    assert axes.get_xlabel().replace("\n", " ").endswith("; 27 earlier changes without a letter")
    assert sum(line.get_linestyle() == "--" for line in axes.lines) == 39


def test_the_figure_without_any_value(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        history.add(run_of(cell_of("aaaa1", status="timeout"), cell_of("other")))
        kept = history.runs(["aaaa1"])
    assert drawn(partial(draw_history, runs=kept, key="aaaa1", kind=FIGURE_KINDS[4]))["png"]


def test_a_run_whose_memory_pass_left_nothing_is_not_said_to_be_completed_on_the_page(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        history.add(at(1))
        history.add(at(2, 101))
        history.add(run_of(cell_of("aaaa1"), started_at="2026-11-21T03:00:00+00:00"))
        kept = history.runs(["aaaa1"])
    document = history_document(kept, kind=FIGURE_KINDS[4], key="aaaa1")
    ((chart,),) = document.charts.values()
    assert [label.rpartition(": ")[2] for _, label in chart.lost] == ["no figure"]


def test_runs_on_different_devices_share_no_line_and_no_ratio_on_the_page(tmp_path: Path) -> None:
    with open_history(tmp_path / "h.sqlite", create=True) as history:
        for hour, device in enumerate(("A10G", "H100", "A10G"), 1):
            history.add(at(hour, 100 * hour, environments={"e1": HOME | {"device": device}}))
        several = history.runs(["aaaa1"])
    chart, ratio = trend_of(several)
    assert [(series.name, [point.x for point in series.points]) for series in chart.series] == [
        ("throughput on A10G", [1, 3]),
        ("throughput on H100", [2]),
    ]
    assert ratio == UNKNOWN
    chart, ratio = trend_of([several[0], several[2]])
    assert [series.name for series in chart.series] == ["throughput"] and ratio == "200 %"


def trend_of(runs: list[KeptRun]) -> tuple[Chart, str]:
    """The one cell's chart, and the ratio of its largest median to its smallest."""
    document = history_document(runs, key="aaaa1")
    ((chart,),) = document.charts.values()
    (part,) = document.sections[1].more
    assert part.table is not None
    return chart, part.table.rows[0][-1]
