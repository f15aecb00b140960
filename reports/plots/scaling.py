"""Throughput and efficiency over the number of ranks."""

from typing import TYPE_CHECKING

from reports.plots.style import IDEAL, crosses, legend, log2, medians
from reports.scaling import Scaling, ScalingPoint
from reports.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_scaling(figure: "Figure", result: Scaling) -> None:
    """Throughput with the ideal line on the left, efficiency on the right; ranks on a scale of base 2."""
    left, right = figure.subplots(1, 2)
    points = [(point.ranks, point.throughput) for point in result.points if point.throughput]
    lost = [(point.ranks, point.result.status) for point in result.points if not point.throughput]
    ranks = [point.ranks for point in result.points]
    base = result.baseline
    if base.throughput is not None:
        ideal = [base.throughput.median * n / base.ranks for n in ranks]
        left.plot(ranks, ideal, color=IDEAL, linestyle="--", linewidth=1, label="linear")
    medians(left, points, 0, "measured, median and range")
    left.set_ylabel(f"throughput, {result.unit}")
    left.set_title("Throughput")
    efficient = [(point.ranks, _efficiency_estimate(point, base)) for point in result.measured]
    right.axhline(100, color=IDEAL, linestyle="--", linewidth=1)
    medians(right, efficient, 0, "measured")
    right.set_ylabel("efficiency, % of linear")
    right.set_title("Efficiency against the baseline's median")
    legend(figure, left)
    for axes in (left, right):
        axes.set_xlabel("ranks")
        axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.04)
        log2(axes, ranks)
        crosses(axes, lost)
    right.set_ylim(top=max(112.0, 1.08 * max((value.high for _, value in efficient), default=100)))


def _efficiency_estimate(point: ScalingPoint, base: ScalingPoint) -> Estimate:
    """Efficiency in per cent; its range is that of the point, the baseline being held at its median."""
    assert point.throughput is not None and base.throughput is not None
    scale = 100 * base.ranks / (point.ranks * base.throughput.median)
    value = point.throughput
    return Estimate(value.median * scale, value.low * scale, value.high * scale, value.count)
