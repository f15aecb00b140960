"""Scaling laws through measured points: throughput and efficiency over ranks.

    images = drawn(lambda figure: draw_laws(figure, laws), laws_height(laws))

Bars are intervals (ranges where there are none), the line is a law, its band the law's 95 % interval.
"""

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING

import numpy as np

from configs.common.arrays import Floats
from reports.laws.fit import Fit
from reports.laws.laws import TITLES, ScalingLaws, scaled
from reports.numbers.statistics import Estimate, Ratio
from reports.plots.style import COLOURS, IDEAL, LINES, MARKERS, crosses, log2

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IDEAL_LABEL = "ideal: linear"
MOST_ABOVE = 1.8
"""How far the ideal line may go above all points, as a share of the highest."""

MANY_POINTS = 15


def draw_laws(figure: "Figure", laws: ScalingLaws) -> None:
    """Throughput on the left, efficiency on the right, with every law that was fitted; a band round the supported."""
    left, right = figure.subplots(1, 2)
    ranks = [point.ranks for point in laws.points]
    base = laws.points[0]
    fits = [fit for name, fit in laws.fits.items() if name != "linear"]
    chosen = laws.drawn
    if chosen is not None and chosen not in fits:
        fits.append(chosen)
    for axes in (left, right):
        over = None if axes is left else base.throughput.median / base.ranks
        ideal(axes, ranks, base.throughput.median / base.ranks, over)
        for index, fit in enumerate(sorted(fits, key=lambda fit: fit is not chosen)):
            law_line(axes, fit, ranks, over, index, band=fit is chosen)
    points_with_bars(left, [(point.ranks, point.throughput) for point in laws.points])
    points_with_bars(right, [(point.ranks, percents(point.efficiency)) for point in laws.points if point.efficiency])
    mark_changed(left, [(point.ranks, point.throughput) for point in laws.points if point.changed])
    left.set_ylabel("throughput, in the unit of the file")
    finish_axes(figure, left, right, ranks, [], base.ranks)


def laws_height(laws: ScalingLaws) -> float:
    """Inches: the legend has a line for two laws."""
    return 3.2 + 0.17 * (len(laws.fits) // 2)


def ideal(axes: "Axes", ranks: Sequence[int], each: float, over: float | None) -> None:
    """The line of linear scaling from a throughput of `each` rank; 100 % where shares of `over` are drawn."""
    if over is not None:
        axes.axhline(100 * each / over, color=IDEAL, linestyle="--", linewidth=1)
        return
    grown = _grid(ranks)
    axes.plot(grown, each * grown, color=IDEAL, linestyle="--", linewidth=1, label=IDEAL_LABEL)


def law_line(axes: "Axes", fit: Fit, ranks: Sequence[int], over: float | None, index: int, band: bool) -> None:
    """A law as a line; as per cent of linear where `over`, a rank's throughput at the baseline, is given."""
    grown = _grid(ranks)
    share = 1.0 if over is None else 100 / (over * grown)
    colour = COLOURS[(index + 1) % len(COLOURS)]
    if band:
        low, high = fit.band(grown, relative=over is not None)
        axes.fill_between(grown, low * share, high * share, color=colour, alpha=0.18, linewidth=0)
    label = TITLES[fit.law] + (", 95 % band" if band else "")
    axes.plot(
        grown, fit.throughput(grown) * share, color=colour, linestyle=LINES[index % 4], linewidth=1.3, label=label
    )


def points_with_bars(axes: "Axes", points: Sequence[tuple[int, Estimate]]) -> None:
    """Measured points, not joined: a law is what joins them."""
    if not points:
        return
    ordered = sorted(points, key=lambda point: point[0])
    axes.errorbar(
        [x for x, _ in ordered],
        [value.median for _, value in ordered],
        yerr=[
            [_bar(value, value.median - value.bounds[0]) for _, value in ordered],
            [_bar(value, value.bounds[1] - value.median) for _, value in ordered],
        ],
        label="measured, median",
        capsize=3,
        linewidth=1.2,
        color=COLOURS[0],
        marker=MARKERS[0],
        markersize=5 if len(ordered) <= MANY_POINTS else 3.5,
        linestyle="none",
        zorder=3,
    )


def _bar(value: Estimate, length: float) -> float:
    """Not a number for a single value, which has no bar; never below 0, which rounding could leave."""
    return nan if value.count == 1 else max(0.0, length)


def mark_changed(axes: "Axes", points: Sequence[tuple[int, Estimate]]) -> None:
    """A ring round points where not only the ranks changed."""
    if points:
        axes.plot(
            [x for x, _ in points],
            [value.median for _, value in points],
            linestyle="none",
            marker="o",
            markersize=11,
            markerfacecolor="none",
            markeredgecolor="#222222",
            label="not only the ranks changed",
        )


def percents(efficiency: Ratio) -> Estimate:
    """An efficiency in per cent, as an estimate to draw."""
    ratio = scaled(efficiency, 100)
    return Estimate(ratio.value, ratio.low, ratio.high, ratio.count, ratio.interval)


def finish_axes(
    figure: "Figure",
    left: "Axes",
    right: "Axes",
    ranks: Sequence[int],
    lost: Sequence[tuple[float, str]],
    base_ranks: int,
) -> None:
    """Scales, titles, crosses and the legend, which both kinds of figure share."""
    left.set_title("Throughput")
    right.set_title(f"Efficiency against {base_ranks} rank{'' if base_ranks == 1 else 's'}")
    right.set_ylabel("efficiency, % of linear")
    for axes in (left, right):
        axes.set_xlabel("ranks")
        log2(axes, ranks)
        axes.set_ylim(bottom=0, top=_top(axes))
        crosses(axes, lost)
    right.set_ylim(top=max(112.0, right.get_ylim()[1]))
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3 if max(map(len, labels), default=0) < 26 else 2)


def _top(axes: "Axes") -> float:
    """Room above points and laws; the ideal line is cut where it would press them to the floor."""
    heights = [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines if line.get_label() != IDEAL_LABEL]
    highest = max((float(values.max()) for values in heights if values.size), default=0.0)
    linear = max((float(np.max(line.get_ydata())) for line in axes.lines if line.get_label() == IDEAL_LABEL), default=0)
    return 1.12 * (min(linear, MOST_ABOVE * highest) if linear > highest else highest) or 1.0


def _grid(ranks: Sequence[int]) -> Floats:
    return np.geomspace(min(ranks), max(ranks), 120)
