"""Numbers below an axis do not run into each other."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from reports.document.svg import Scale
from reports.numbers.statistics import Estimate
from reports.plots.experiments.time_split import draw_time_split
from reports.plots.experiments.training import draw_equality, draw_losses
from reports.plots.planning.layouts import draw_layouts
from reports.plots.style import STYLE, bars_text, log2, log_ticks, numeric, wrapped


def laid_out(draw: Callable[[Figure], None]) -> list[Axes]:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(7.2, 3.1), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.05))
        FigureCanvasAgg(figure)
        draw(figure)
        figure.canvas.draw()
    return list(figure.axes)


def numbers(axes: Axes) -> Iterator[str]:
    """Texts of the ticks, which are checked to stand apart."""
    labels = axes.get_xticklabels()
    for one, two in pairwise(labels):
        assert one.get_window_extent().x1 + 2 < two.get_window_extent().x0, (one.get_text(), two.get_text())
    yield from (label.get_text() for label in labels)


@pytest.mark.parametrize("panels", [1, 2])
@pytest.mark.parametrize(
    "values",
    [
        [128 * 2**power for power in range(11)],
        [1000 * 2**power for power in range(20)],
        [1, 10, 33.25, 33.5, 34.125, 1000],
        [10_000, 10_001, 10_002, 10_500, 30_000],
        [1e-5, 3e-5, 1e-4, 3e-4],
        [16_384],
    ],
)
def test_swept_values_stand_apart(values: Sequence[float], panels: int) -> None:
    """Of eleven lengths of prompts the last six lay on each other, and so did the rates that a search closed in on."""

    def draw(figure: Figure) -> None:
        for place, axes in enumerate(figure.subplots(1, panels, squeeze=False)[0]):
            axes.plot(values, values)
            (log2 if place else numeric)(axes, values)

    for axes in laid_out(draw):
        shown = list(numbers(axes))
        assert {float(text) for text in shown} <= {float(value) for value in values}
        assert float(shown[0]) == values[0] and float(shown[-1]) == values[-1], "no number is rounded"


@pytest.mark.parametrize(
    "ranks", [[2**place for place in range(count)] for count in (3, 10, 11, 13, 17)] + [range(1, 41)]
)
def test_numbers_of_ranks_below_a_time_split_stand_apart(ranks: Sequence[int]) -> None:
    points = [SimpleNamespace(ranks=number, seconds=1.0, parts={"decode": 1.0}) for number in ranks]
    result: Any = SimpleNamespace(unit="pass", points=points, names=["decode"])
    for axes in laid_out(lambda figure: draw_time_split(figure, result)):
        shown = list(numbers(axes))
        assert shown[0] == "1" and len(shown) >= 3


@pytest.mark.parametrize("rate", [0.011, 0.8, 2.0, 450.0, 2_300_000.0])
def test_rates_below_layouts_are_read_as_they_are(rate: float) -> None:
    """Of a model that gives 2 tokens/s the axis read `0, 0, 1, 2, 2`, and millions ran into each other."""
    estimate = Estimate(rate, 0.95 * rate, 1.05 * rate, 3)
    prediction = SimpleNamespace(throughput=1.1 * rate, factor=1.3, fits=True)
    label = "dp=16 tp=8 pp=4, fsdp, 64 nodes, bfloat16"
    candidate = SimpleNamespace(label=label, prediction=prediction)
    placed = [SimpleNamespace(place=place, measured=estimate, candidate=candidate) for place in (1, 2, 3)]
    result: Any = SimpleNamespace(unit="tokens/s", placed=placed)
    (axes,) = laid_out(lambda figure: draw_layouts(figure, result))
    low, high = axes.get_xlim()
    places = [float(place) for place in axes.get_xticks() if low <= place <= high]
    shown = [float(text.replace(",", "")) for text in numbers(axes)][: len(places)]
    assert shown == pytest.approx(places) and len(set(shown)) == len(shown) > 2


@pytest.mark.parametrize(("count", "told"), [(24, ""), (25, " The figure shows the first 24 of 25 cells.")])
def test_a_figure_of_bars_says_what_it_leaves_out(count: int, told: str) -> None:
    assert bars_text(range(count), "cells") == told


def test_names_of_bars_keep_their_ends() -> None:
    """Two lines of a name that begins with a long word were its beginning and an ellipsis, the same of all cells."""
    assert wrapped("short name", 42, 2) == "short name"
    assert wrapped("a b c d e f", 5, 3) == "a b c\nd e f"
    names = [wrapped(f"models--{'very-' * 20}long, dp={place}, bfloat16, batch 4", 42, 2) for place in (2, 4)]
    assert names[0] != names[1] and all(len(line) <= 42 for name in names for line in name.split("\n"))
    assert names[0].endswith("dp=2, bfloat16, batch 4") and names[0].count("\n") == 1


@pytest.mark.parametrize(("losses", "dots"), [([3.0], [0]), ([3.0, np.inf, 2.0], [0, 2]), ([3.0, 2.5, np.nan], [])])
def test_a_loss_without_a_neighbour_is_drawn(losses: list[float], dots: list[int]) -> None:
    """The figure of a training of one measured step was empty, its steps numbered 0.945, 0.960, ..."""
    (axes,) = laid_out(lambda figure: draw_losses(figure, {"ddp": np.array(losses)}))
    (line,) = axes.lines
    assert line.get_markevery() == dots and (line.get_marker() == ".") == bool(dots)
    assert all(float(text).is_integer() for text in numbers(axes))


@pytest.mark.parametrize("ends", [(120, 180), (12, 85), (30, 30.2), (4e-5, 9e-5), (0.5, 4e4), (1e-12, 1e3)])
def test_a_logarithmic_axis_has_numbers(ends: tuple[float, float]) -> None:
    """Latencies within a decade stood beside an axis without any; differences of losses beside unset formulas."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(ends)
        axes.set_yscale("log")
        log_ticks(axes)

    (axes,) = laid_out(draw)
    texts = [label.get_text() for label in (*axes.get_yticklabels(), *axes.get_yticklabels(minor=True))]
    low, high = axes.get_ylim()
    assert low <= ends[0] and high >= ends[1]
    shown = [float(text.replace(",", "")) for text in texts]
    assert 2 <= len(shown) <= 12 and shown == pytest.approx(axes.get_yticks())
    assert shown[0] == pytest.approx(low) and shown[-1] == pytest.approx(high)
    page = Scale(ends[0] / 1.15, ends[1] * 1.15, 256, 12, True).ticks()
    assert 2 <= len(page) <= 12 and page == sorted(page) and min(page) > 0


def test_differences_of_losses_within_a_decade_have_plain_numbers() -> None:
    """They were `$\\mathdefault{6\\times10^{-5}}$`, which took half of the panel."""
    losses = np.linspace(4, 3, 20)

    def curve(name: str, share: float) -> SimpleNamespace:
        result = SimpleNamespace(name=name, cell=SimpleNamespace(dtype="float32"))
        return SimpleNamespace(losses=losses * (1 + share * np.linspace(0.4, 0.9, 20)), result=result)

    found: Any = SimpleNamespace(reference=curve("ddp", 0), others=[SimpleNamespace(curve=curve("fsdp", 1e-4))])
    _, right = laid_out(lambda figure: draw_equality(figure, found))
    texts = [label.get_text() for label in (*right.get_yticklabels(), *right.get_yticklabels(minor=True))]
    assert len(texts) >= 2 and not any("$" in text for text in texts)


def test_numbers_beside_an_axis_are_whole_ones() -> None:
    """Gains of 1.0001 and 0.9999 stood at 0.00010 and -0.00010, with a small +1 in the corner."""
    (axes,) = laid_out(lambda figure: figure.subplots().plot([0.9999, 1.0001, 1.0002], [0, 1, 2]))
    assert axes.xaxis.get_offset_text().get_text() == ""
    assert all(0.99 < float(text) < 1.01 for text in numbers(axes))
