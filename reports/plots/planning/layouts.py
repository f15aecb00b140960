"""Ranked layouts of a study with predictions and available measurements."""

from typing import TYPE_CHECKING

from reports.planning.layouts import LayoutRanking, RankedLayout
from reports.plots.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 16


def drawn_layouts(result: LayoutRanking) -> list[RankedLayout]:
    """The first of the ranking and all that were measured, as far as there is room."""
    fitting = drawable_layouts(result)
    measured = [item for item in fitting if item.measured is not None]
    others = [item for item in fitting if item.measured is None]
    kept = {item.place for item in [*measured, *others][:MOST_LINES]}
    return [item for item in fitting if item.place in kept]


def drawable_layouts(result: LayoutRanking) -> list[RankedLayout]:
    """Those with a figure that are not predicted too large for the memory."""
    rated = [item for item in result.placed if item.candidate.prediction.throughput or item.measured]
    return [item for item in rated if item.candidate.prediction.fits is not False]


def layouts_height(result: LayoutRanking) -> float:
    """Inches for so many lines and the legend."""
    return 1.3 + 0.24 * len(drawn_layouts(result))


def draw_layouts(figure: "Figure", result: LayoutRanking) -> None:
    """A line for each layout, the one predicted best on top."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    lines = drawn_layouts(result)
    labels = {"predicted, with its stated factor": True, "measured, median": True}
    for row, item in enumerate(lines):
        prediction, measured = item.candidate.prediction, item.measured
        rate = prediction.throughput
        if rate is not None:
            factor = prediction.factor or 1.0
            name = "predicted, with its stated factor"
            axes.errorbar(
                rate,
                row,
                xerr=[[rate - rate / factor], [rate * factor - rate]],
                color=COLOURS[1],
                marker="s",
                markerfacecolor="white",
                linewidth=1,
                capsize=2.5,
                label=name if labels.pop(name, False) else "_",
            )
        if measured is not None:
            low, high = measured.bounds
            name = "measured, median"
            axes.errorbar(
                measured.median,
                row,
                xerr=[[max(0.0, measured.median - low)], [max(0.0, high - measured.median)]],
                color=COLOURS[0],
                marker="o",
                linewidth=1.6,
                capsize=2.5,
                zorder=3,
                label=name if labels.pop(name, False) else "_",
            )
    axes.set_yticks(range(len(lines)), [f"{item.place}: {item.candidate.label}" for item in lines], fontsize=8)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(4))  # names of layouts leave little room
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.set_xlabel(result.unit)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
