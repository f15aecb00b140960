"""Throughput and efficiency over the number of ranks, with the law that the points support."""

from typing import TYPE_CHECKING

from reports.experiments.scaling import Scaling
from reports.plots.experiments.laws import finish_axes, ideal, law_line, mark_changed, percents, points_with_bars
from reports.plots.style import medians

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_scaling(figure: "Figure", result: Scaling) -> None:
    """Throughput with the ideal line on the left, efficiency on the right; ranks on a scale of base 2.

    Points are joined by the law that they support, with its band; where there is none, by straight lines.
    """
    left, right = figure.subplots(1, 2)
    points = [(point.ranks, point.throughput) for point in result.points if point.throughput]
    lost = [(point.ranks, point.result.status) for point in result.points if not point.throughput]
    ranks = [point.ranks for point in result.points]
    base, law = result.baseline, result.laws.drawn
    each = base.throughput.median / base.ranks if base.throughput is not None and base.throughput.median > 0 else None
    efficient = [(point.ranks, percents(point.efficiency)) for point in result.measured if point.efficiency]
    for axes, values, over in ((left, points, None), (right, efficient, each)):
        if each is not None:
            ideal(axes, ranks, each, over)
        if law is not None and (each is not None or axes is left):
            law_line(axes, law, [point.ranks for point in result.laws.points], over, 0, band=True)
            points_with_bars(axes, values)
        else:
            medians(axes, values, 0, "measured, median")
    mark_changed(
        left, [(point.ranks, point.throughput) for point in result.points if point.changed and point.throughput]
    )
    left.set_ylabel(f"throughput, {result.unit}")
    finish_axes(figure, left, right, ranks, lost, base.ranks)
