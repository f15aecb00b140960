"""Figures whose names or values are long: nothing runs out of the picture, and names below an axis stay apart."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from configs.common.printable import terminal_columns
from reports.charts.chart import Chart, ChartPoint, ChartSeries
from reports.document.album import Album
from reports.document.svg import svg
from reports.plots.style import crosses, legend_columns, tick_text
from reports.reading.load import load_run
from reports.sections.experiments import experiment_sections
from tests.support.run_folders.figures import drawn_figure
from tests.support.run_folders.report_runs import experiment, generate, plan_of, write_measurements, write_plan

LONG = "models--example--a-very-long-name-of-a-checkpoint-of-some-language-model-with-everything-in-it-"


def texts(figure: Figure) -> Iterator[Text]:
    """Names of axes, titles, legends, and ticks with a name: a tick of a number may lie beyond the end of its axis."""
    for found in figure.findobj(Text):
        assert isinstance(found, Text)
        if any(letter.isalpha() for letter in found.get_text()):
            yield found


@pytest.fixture
def laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures of a sweep over long texts and of variants with long names, laid out as the report does."""
    cells = [generate(batch_size=size) for size in (1, 2, 4)]
    swept = [(cell, {"model": f"{LONG}{place}"}, f"{LONG}{place}") for place, cell in enumerate(cells)]
    tried = [(cell, {"variant": f"{LONG}{place}"}, f"{LONG}{place}") for place, cell in enumerate(cells)]
    experiments = [experiment("names", "sweep", swept), experiment("ways", "optimization", tried)]
    run = write_plan(tmp_path / "run", plan_of(cells, experiments))
    for cell in cells:
        write_measurements(run, cell, [1.0, 1.1, 0.9], peak_mib=100)
    figures: list[Figure] = []

    def draws(draw: Callable[[Figure], None], height: float) -> dict[str, bytes]:
        figures.append(drawn_figure(draw, height))
        return {}

    monkeypatch.setattr("reports.document.album.drawn", draws)
    experiment_sections(load_run(run), Album())
    return figures


def test_no_text_is_cut_at_the_edge(laid_out: list[Figure]) -> None:
    """Names ran out to the left, over each other, and the name of an axis out at the top."""
    assert len(laid_out) == 4
    for figure in laid_out:
        whole = figure.bbox
        for text in texts(figure):
            box = text.get_window_extent()
            assert box.x0 >= -1 and box.x1 <= whole.x1 + 1, text.get_text()
            assert box.y0 >= -1 and box.y1 <= whole.y1 + 1, text.get_text()


def test_names_below_an_axis_are_slanted_apart(laid_out: list[Figure]) -> None:
    (names,) = (figure for figure in laid_out if figure.axes[0].get_xlabel() == "model")
    for axes in names.axes:
        labels = axes.get_xticklabels()
        assert all(label.get_rotation() == 30 for label in labels)
        assert len({label.get_text() for label in labels}) == 3, "names that differ in their ends stay different"
        assert all(one.get_position()[0] < two.get_position()[0] for one, two in pairwise(labels))


def test_a_name_loses_its_middle_and_a_legend_its_columns() -> None:
    assert tick_text("short", 10) == "short" and tick_text("abcdefghijklmnop-v2", 9) == "abcd…p-v2"
    assert [tick_text("abcdef", most) for most in (3, 2, 1, 0)] == ["a…f", "a…", "…", "…"]
    assert legend_columns(["a", "b"]) == 3 and legend_columns(["x" * 40]) == 2 and legend_columns(["x" * 400]) == 1


def test_large_values_beside_an_axis_have_an_exponent() -> None:
    """`1,000,000,000` began left of the picture."""
    points = tuple(ChartPoint(float(x), y) for x, y in enumerate((1e9, 2.5e9, 4e9)))
    drawn = svg(Chart("t", "x", "y", (ChartSeries("a", points),)))
    assert ">1e9</text>" in drawn and ">1,000,000,000</text>" not in drawn
    rows = svg(Chart("t", "", "y", (ChartSeries("a", (ChartPoint(0.0, 2e9),)),), "dots", rows=("a",)))
    assert ">1e9</text>" in rows and ">1,000,000,000</text>" not in rows
    assert ">200,000</text>" in svg(Chart("t", "x", "y", (ChartSeries("a", (ChartPoint(0.0, 9e5),)),)))


def test_the_name_of_a_row_is_no_wider_than_a_narrow_picture() -> None:
    """Of 70 signs, or of 40 Chinese ones, a fifth lay beyond its edge; and names differ in their ends."""
    names = (f"{LONG}0", f"{LONG}1", "\u6a21" * 60)
    points = tuple(ChartPoint(float(row), 1.0 + row) for row in range(3))
    drawn = svg(Chart("t", "", "y", (ChartSeries("a", points),), "dots", rows=names))
    shown = re.findall(r'class="row"[^>]*>([^<]*)</text>', drawn)
    assert len(set(shown)) == 3 and all(terminal_columns(name) <= 54 for name in shown)


def test_whole_numbers_of_an_axis_are_not_rounded() -> None:
    """16,384 tokens stood as 16,400 below the axis, and the point of 1,024 ranks was read as that of 1,020."""
    points = tuple(ChartPoint(float(x), 1.0) for x in (16_384, 32_768, 131_072))
    drawn = svg(
        Chart("t", "prompt tokens", "y", (ChartSeries("a", points),), log_x=True, lost=((65_536.0, "timeout"),))
    )
    assert re.findall(r'class="mid">([\d,]+)</text>', drawn) == ["16,384", "32,768", "65,536", "131,072"]
    assert 'data-t="a, 16,384: 1.00"' in drawn and 'data-t="65,536: timeout"' in drawn


@pytest.mark.parametrize("middle", [2e-4, 1.0, 123_456.0, 1_234_567.0])
def test_ticks_of_close_values_differ(middle: float) -> None:
    """Beside values that differ by a few in a thousand stood one number several times."""
    points = tuple(ChartPoint(float(x), middle * (1 + x / 2000)) for x in range(3))
    drawn = svg(Chart("t", "run", "y", (ChartSeries("a", points),), from_zero=False))
    ticks = re.findall(r'dy="4">([^<]+)</text>', drawn.partition('class="ticks log"')[0])
    assert len(ticks) > 2 and len({float(tick.replace(",", "")) for tick in ticks}) == len(ticks)


def test_the_script_finds_marks_where_they_are_drawn() -> None:
    """It places them by their values when the scale changes; of close ones four digits were left, so they moved."""
    points = tuple(ChartPoint(float(x), 1000.0 + x / 4, 999.9 + x / 4, 1000.1 + x / 4) for x in range(8))
    drawn = svg(Chart("t", "run", "y", (ChartSeries("a", points),), from_zero=False))
    (ends,) = re.findall(r'data-lin="([^"]+)" data-px="([^"]+)"', drawn)
    (low, high), (start, end) = (map(float, pair.split(",")) for pair in ends)
    marks = re.findall(r'cy="([^"]+)" r="5" data-v="([^"]+)"', drawn)
    marks += re.findall(r'y1="([^"]+)"[^>]*data-v="([^",]+),', drawn)
    assert len(marks) == 16
    for at, value in marks:
        assert start + (float(value) - low) / (high - low) * (end - start) == pytest.approx(float(at), abs=0.1)


def test_statuses_of_one_place_do_not_cover_each_other() -> None:
    """Two engines failed with one dtype: "out of memory" was printed over "timeout", in the figure and on the page."""
    lost = ((2.0, "out_of_memory"), (2.0, "timeout"), (2.0, "timeout"), (0.0, "failed"))
    axes = Figure().subplots()
    crosses(axes, lost)
    assert [text.get_text() for text in axes.texts] == ["out of memory and timeout", "failed"]
    assert len(axes.lines) == 2
    series = (ChartSeries("a", (ChartPoint(1.0, 3.0),)),)
    rows = svg(Chart("t", "", "y", series, "dots", rows=("float32", "bfloat16", "float16"), lost=lost))
    assert re.findall(r'class="row why"[^>]*>([^<]*)<', rows) == ["out of memory and timeout", "failed"]
    assert 'data-t="float16: out of memory and timeout"' in rows
    named = svg(Chart("t", "x", "y", series, lost=((1.0, "nightly_build, 2026-11-04: timeout"),)))
    assert 'data-t="1: nightly_build, 2026-11-04: timeout"' in named, "a run keeps its name"
    told = svg(Chart("t", "x", "y", series, lost=lost))
    assert re.findall(r'class="m lost"[^>]*data-t="([^"]*)"', told) == ["2: out of memory and timeout", "0: failed"]


def test_numbers_below_an_axis_are_whole() -> None:
    """Of the last one, which lay near the edge, the picture had half."""
    points = (ChartPoint(1000.5, 50.0), ChartPoint(1000.5, 100.0))
    told = svg(Chart("t", "latency, ms", "y", (ChartSeries("a", points),)))
    told += svg(Chart("t", "latency, ms", "y", (ChartSeries("a", (ChartPoint(1e-6, 1.0),)),)))
    places = re.findall(r'<text x="([\d.]+)" y="[^"]+" class="mid">([^<]+)</text>', told)
    assert len(places) > 6
    assert all(3.5 * len(text) <= float(at) <= 480 - 3.5 * len(text) for at, text in places)
