"""Legends with many or long labels: panels keep their room, and no label runs out of the picture."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from reports.numbers.statistics import Estimate
from reports.plots.decisions.cost import cost_height, draw_costs
from reports.plots.experiments.load import draw_load, load_height
from reports.plots.experiments.sweep import draw_sweep, sweep_height
from reports.plots.experiments.targets import draw_targets, targets_height
from reports.plots.experiments.training import draw_losses
from reports.plots.planning.prediction import draw_predictions, prediction_height
from tests.support.run_folders.figures import drawn_figure

LONG = "models--example--a-very-long-name-of-a-checkpoint-of-some-language-model-with-everything-in-it-"

Drawing = tuple[Callable[[Figure], None], float]


def estimated(value: float) -> Estimate:
    return Estimate(value, 0.9 * value, 1.1 * value, 3)


def targets(count: int, name: str) -> Drawing:
    labels = [f"{name}dp={place}" for place in range(count)]
    points = [
        SimpleNamespace(
            label=label,
            throughput=estimated(1.0 + place) if place > 1 else None,
            result=SimpleNamespace(status=("timeout", "failed")[place % 2]),
        )
        for place, label in enumerate(labels)
    ]
    sides = [SimpleNamespace(target=target, link=None, points=points) for target in ("a", "b")]
    found: Any = SimpleNamespace(labels=labels, sides=sides, unit="tokens/s")
    return lambda figure: draw_targets(figure, found), targets_height(found)


def load(count: int, name: str) -> Drawing:
    point = SimpleNamespace(valid=True, value=lambda figure: estimated(1.0))
    series = {f"{name}engine {place}": [(1.0, point), (2.0, point)] for place in range(count)}
    found: Any = SimpleNamespace(series=lambda: series, axis="rate")
    return lambda figure: draw_load(figure, found), load_height(found)


def predictions(count: int, name: str) -> Drawing:
    kind = SimpleNamespace(throughput="tokens_per_second", kind="generate")
    judged: Any = [
        SimpleNamespace(
            result=SimpleNamespace(kind=kind, unit="tokens/s", model=f"{name}{place}"),
            figure="tokens_per_second",
            predicted=1.0 + place,
            measured=estimated(2.0 + place),
            factor=1.5,
        )
        for place in range(count)
    ]
    return lambda figure: draw_predictions(figure, judged), prediction_height(judged)


def costs(count: int, name: str) -> Drawing:
    priced: Any = [
        SimpleNamespace(
            usd_per_million=estimated(1.0 + place),
            result=SimpleNamespace(model=f"{name}{place}", name=f"{name}dp={place}", work_unit="token"),
        )
        for place in range(count)
    ]
    return lambda figure: draw_costs(figure, priced), cost_height(priced)


def sweep(count: int, name: str) -> Drawing:
    result = SimpleNamespace(estimate=lambda figure: estimated(1.0), peak_bytes=None, completed=True, unit="tokens/s")
    points: Any = [
        SimpleNamespace(values={"batch_size": batch, "engine": f"{name}{place}", "dtype": "float32"}, result=result)
        for place in range(count)
        for batch in (1, 2)
    ]
    return lambda figure: draw_sweep(figure, points), sweep_height(points)


@pytest.mark.parametrize(("made", "labels"), [(targets, 22), (load, 48), (sweep, 24)])
def test_grids_of_thousands_of_series_can_be_drawn(made: Callable[[int, str], Drawing], labels: int) -> None:
    """The legend named all of them: the figure was 800 inches tall, and took minutes and 30 MB."""
    draw, height = made(5000, "x ")
    assert height < 12
    figure = drawn_figure(draw, height)
    assert len(figure.legends[0].get_texts()) == labels


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-70B-Instruct-AWQ-INT4 ", LONG])
@pytest.mark.parametrize(("made", "count"), [(targets, 40), (load, 14), (predictions, 9), (costs, 12)])
def test_many_long_labels_leave_the_panels_their_room(
    made: Callable[[int, str], Drawing], count: int, name: str
) -> None:
    """Legends lay over the panels or ran out of the picture, and bars bore the same, shortened name."""
    draw, height = made(count, name)
    figure = drawn_figure(draw, height)
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y0 >= -1
    assert len({text.get_text() for text in legend.get_texts()}) == len(legend.get_texts())
    for axes in figure.axes:
        panel = axes.get_window_extent()
        assert panel.y0 > box.y1 and panel.height > 100, "the legend is below"
        ticks = [label.get_text() for label in axes.get_yticklabels()]
        assert len(set(ticks)) == len(ticks)


def losses(count: int, name: str) -> Drawing:
    curves = {f"{name}{place}": np.array([2.0, 1.0 + place]) for place in range(count)}
    return lambda figure: draw_losses(figure, curves), 3.0


@pytest.mark.parametrize(("made", "labels"), [(targets, 2), (load, 8), (predictions, 6), (costs, 4), (losses, 4)])
def test_names_that_begin_with_an_underscore_are_in_the_legend(
    made: Callable[[int, str], Drawing], labels: int
) -> None:
    """Matplotlib leaves such labels out: the bars of one of two models had no name."""
    draw, height = made(4, "_tuned ")
    (legend,) = drawn_figure(draw, height).legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert len(shown) == labels and sum("_tuned " in text for text in shown) >= 2
