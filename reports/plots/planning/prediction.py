"""Predicted against measured: one panel for each kind of workload, one for memory."""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.common.files.reading import MIB
from configs.common.printable import significant
from reports.planning.accuracy import MEMORY, JudgedPrediction
from reports.plots.style import COLOURS, IDEAL, MARKERS, legend_columns, legend_height, legend_label, legend_texts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_DECADES = 3
"""From so many powers of ten on, ticks stand at those alone."""

Points = Sequence[JudgedPrediction]


def prediction_height(judged: Points) -> float:
    """Inches for the panels, two in a row, and the legend."""
    labels = ["predicted = measured", "within 1.5 times", *dict.fromkeys(item.result.model for item in judged)]
    return max(0.45, 0.05 + legend_height(labels)) + 3.1 * -(-len(panels(judged)) // 2)


def panels(judged: Points) -> dict[str, list[JudgedPrediction]]:
    """Title -> its points, in the order of the plan; memory last."""
    found: dict[str, list[JudgedPrediction]] = {}
    for item in judged:
        known = item.result.kind
        if item.figure == known.throughput:
            found.setdefault(f"{known.kind}: {item.result.unit}", []).append(item)
    memory = [item for item in judged if item.figure == MEMORY]
    return found | ({"peak memory of the fullest rank: MiB": memory} if memory else {})


def draw_predictions(figure: "Figure", judged: Points) -> None:
    """Both axes in the same unit, so that what was predicted exactly stands on the line from corner to corner."""
    found = panels(judged)
    columns = min(2, len(found))
    grid = figure.subplots(-(-len(found) // columns), columns, squeeze=False).ravel()
    for axes in grid[len(found) :]:
        axes.set_visible(False)
    models = list(dict.fromkeys(item.result.model for item in judged))
    for axes, (title, items) in zip(grid, found.items(), strict=False):
        _panel(axes, title, items, models)
    named: dict[str, Any] = {}
    for axes in grid[: len(found)]:
        handles, labels = axes.get_legend_handles_labels()
        named |= {label: handle for label, handle in zip(labels, handles, strict=True) if label not in named}
    labels = list(named)
    columns = legend_columns(labels)
    figure.legend(list(named.values()), legend_texts(labels), loc="outside lower center", ncols=columns, fontsize=8)


def _panel(axes: "Axes", title: str, items: Points, models: Sequence[str]) -> None:
    scale = 1 / MIB if items[0].figure == MEMORY else 1.0
    values = [scale * value for item in items for value in (item.predicted, *item.measured.bounds)]
    least, most = min(values) / 1.5, max(values) * 1.5
    ends = np.array([least, most])
    axes.plot(ends, ends, color=IDEAL, linewidth=1, linestyle="--", label="predicted = measured")
    factors = [item.factor for item in items if item.factor is not None]
    if factors:
        factor = median(factors)
        label = f"within {significant(factor, 2)} times" + ("" if len(set(factors)) == 1 else " (median factor)")
        axes.fill_between(ends, ends / factor, ends * factor, color=IDEAL, alpha=0.15, linewidth=0, label=label)
    for model in dict.fromkeys(item.result.model for item in items):
        index = models.index(model)
        mine = [item for item in items if item.result.model == model]
        middles = [scale * item.measured.median for item in mine]
        bounds = [item.measured.scaled(scale).bounds for item in mine]
        axes.errorbar(
            [scale * item.predicted for item in mine],
            middles,
            yerr=[
                [max(0.0, middle - low) for middle, (low, _) in zip(middles, bounds, strict=True)],
                [max(0.0, high - middle) for middle, (_, high) in zip(middles, bounds, strict=True)],
            ],
            linestyle="none",
            marker=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            capsize=2.5,
            linewidth=1,
            label=legend_label(model),
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(least, most)
    axes.set_ylim(least, most)
    axes.set_aspect("equal")
    _ticks(axes, least, most)
    axes.set_title(title)
    axes.set_xlabel("predicted")
    axes.set_ylabel("measured, median")


def _ticks(axes: "Axes", low: float, high: float) -> None:
    """1, 2 and 5 of each decade (1 and 3 over more than one, powers of ten over many), as plain numbers."""
    decades = np.log10(high / low)
    steps = (1,) if decades > MOST_DECADES else (1, 3) if decades > 1.5 else (1, 2, 5)
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    places = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    shown = [place for place in places if low <= place <= high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(shown, [f"{place:,.10g}" for place in shown])
    axes.minorticks_off()
