"""Pareto plot: the front connected and numbered, dominated points faint."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.decisions.pareto import Pareto
from reports.numbers.statistics import Estimate
from reports.plots.style import COLOURS, IDEAL, tick_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NAMES = 8
"""More points than these are named in the table only."""


def pareto_height(pareto: Pareto) -> float:
    """Inches: a line of the legend for each named point."""
    named = len(pareto.front) if len(pareto.front) <= MOST_NAMES else 0
    return 3.1 + 0.17 * named


def draw_pareto(figure: "Figure", pareto: Pareto) -> None:
    """Numbers stand beside the front's points, in the order of the table; up to MOST_NAMES are named below."""
    axes = figure.subplots()
    beaten = [point for point in pareto.points if not point.front]
    axes.plot(
        [point.x.median for point in beaten],
        [point.y.median for point in beaten],
        linestyle="none",
        marker="o",
        markersize=4,
        markerfacecolor="none",
        color=IDEAL,
        alpha=0.6,
    )
    front = pareto.front
    axes.errorbar(
        [point.x.median for point in front],
        [point.y.median for point in front],
        xerr=_bars([point.x for point in front]),
        yerr=_bars([point.y for point in front]),
        color=COLOURS[0],
        ecolor=COLOURS[5],
        elinewidth=1,
        capsize=2,
        marker="D",
        linewidth=1.4,
        zorder=3,
    )
    axes.set_xlabel(pareto.x_label)
    axes.set_ylabel(pareto.y_label)
    axes.margins(x=0.1, y=0.14)
    left, bottom = axes.get_xlim()[0], axes.get_ylim()[0]
    axes.set_xlim(left=max(0.0, left))
    axes.set_ylim(bottom=max(0.0, bottom))
    _numbers(axes, pareto)
    better = "Better is up and right" if pareto.more_x else "Better is up and left"
    axes.set_title(f"{better}; faint: beaten in both" if beaten else better)
    names = []
    if len(front) <= MOST_NAMES:
        names = [f"{position}  {tick_text(point.result.name, 100)}" for position, point in enumerate(front, start=1)]
    if names:
        figure.supxlabel("\n".join(names), x=0.02, ha="left", fontsize=8)


def _bars(values: Sequence[Estimate]) -> list[list[float]]:
    """Distances from the medians to the bounds, below and above."""
    below = [value.median - value.bounds[0] for value in values]
    return [below, [value.bounds[1] - value.median for value in values]]


def _numbers(axes: "Axes", pareto: Pareto) -> None:
    """The position of each point on the front, on its outer side, save where it would cover the last."""
    front = pareto.front
    scale = axes.transData.transform
    last: tuple[float, float] | None = None
    for position, point in enumerate(front, start=1):
        place = scale((point.x.median, point.y.median))
        near = last is not None and abs(place[0] - last[0]) < 26 and abs(place[1] - last[1]) < 18
        if not near or position == len(front):
            axes.annotate(
                str(position),
                (point.x.median, point.y.median),
                (5 if pareto.more_x else -5, 5),
                textcoords="offset points",
                ha="left" if pareto.more_x else "right",
                fontsize=8.5,
                color=COLOURS[0],
                weight="bold",
                zorder=4,
            )
            last = (float(place[0]), float(place[1]))
