"""Forecast of step time and efficiency over ranks, drawn separately from the measurements."""

from typing import TYPE_CHECKING

from engine.planner.forecasting.forecast import HALF
from reports.numbers.statistics import Estimate
from reports.planning.forecast import StudyForecast
from reports.plots.experiments.laws import points_with_bars
from reports.plots.style import COLOURS, IDEAL, log_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORECAST = COLOURS[1]
EVERY_OTHER = 7
"""From so many world sizes on, every second one has a tick."""


def draw_forecast(figure: "Figure", result: StudyForecast) -> None:
    """Left seconds of a step, right efficiency; beyond the vertical line nothing was measured."""
    left, right = figure.subplots(1, 2)
    points = result.found.points
    base = result.seconds.get(points[0].ranks)
    seconds = {ranks: value.scaled(1000) for ranks, value in result.seconds.items()}
    ranks = [point.ranks for point in points]
    _line(left, result, [1000 * point.seconds for point in points])
    bounds = [point.seconds_interval for point in points]
    _band(left, ranks, [1000 * low for low, _ in bounds], [1000 * high for _, high in bounds])
    points_with_bars(left, sorted(seconds.items()))
    _line(right, result, [100 * point.efficiency for point in points])
    shares = [point.efficiency_interval for point in points]
    _band(right, ranks, [100 * low for low, _ in shares], [100 * high for _, high in shares])
    measured = [] if base is None else _efficiencies(result, base)
    points_with_bars(right, measured)
    right.axhline(100 * HALF, color=IDEAL, linewidth=1, linestyle="-.", label="50 %")
    left.set_yscale("log")
    left.set_title(f"Time of a {result.unit}")
    left.set_ylabel("ms")
    right.set_title(f"Efficiency against {points[0].ranks} rank{'' if points[0].ranks == 1 else 's'}")
    right.set_ylabel("% of linear")
    # Bounds of the forecast may lie anywhere; what was measured and what is forecast must not be cut.
    tops = [*(high for _, high in shares[:1]), *(point.efficiency for point in points)]
    tops += [value.bounds[1] / 100 for _, value in measured]
    right.set_ylim(0, max(112.0, 106 * max(tops)))
    low, high = left.get_ylim()
    left.set_ylim(low, high * (high / low) ** 0.12)  # room for the name of the border
    _ranks_axis(left, result, top=result.found.kind == "weak")
    _ranks_axis(right, result)
    log_ticks(left)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)


def _efficiencies(result: StudyForecast, base: Estimate) -> list[tuple[int, Estimate]]:
    """Medians over the baseline's median, in per cent; the section above has the paired ones."""
    first = result.found.points[0].ranks
    found = []
    for ranks, value in sorted(result.seconds.items()):
        grown = ranks / first if result.found.kind == "strong" else 1.0
        share = 100 * base.median / value.median / grown
        low, high = (100 * base.median / bound / grown for bound in reversed(value.bounds))
        found.append((ranks, Estimate(share, low, high, value.count)))
    return found


def _line(axes: "Axes", result: StudyForecast, values: list[float]) -> None:
    """Hollow markers joined by dashes beyond what was measured, a thin line where the fit runs through it."""
    ranks = [point.ranks for point in result.found.points]
    # Over links that were not measured, all of it is a forecast.
    inside = 0 if result.stated else sum(number <= result.measured_to for number in ranks)
    if inside:
        axes.plot(ranks[:inside], values[:inside], color=FORECAST, linewidth=1, label="fitted")
    first = max(0, inside - 1)
    axes.plot(ranks[first:], values[first:], color=FORECAST, linewidth=1.3, linestyle="--")
    axes.plot(
        ranks[inside:],
        values[inside:],
        color=FORECAST,
        linestyle="none",
        marker="s",
        markerfacecolor="white",
        label=f"forecast over {result.machine.name}" if result.stated and result.machine else "forecast",
    )


def _band(axes: "Axes", ranks: list[int], low: list[float], high: list[float]) -> None:
    axes.fill_between(ranks, low, high, color=FORECAST, alpha=0.15, linewidth=0, label="95 % interval")


def _ranks_axis(axes: "Axes", result: StudyForecast, top: bool = False) -> None:
    """`top`: where the border is named, away from the curve."""
    ranks = [point.ranks for point in result.found.points]
    border = result.measured_to * 2**0.5
    axes.axvline(border, color="#222222", linewidth=0.8, linestyle=":")
    wide = border**2 < ranks[0] * ranks[-1]  # on the side that has room for the words
    axes.annotate(
        "forecast →" if wide else "← measured",
        (border, 0.97 if top else 0.02),
        (5 if wide else -5, 0),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        ha="left" if wide else "right",
        va="top" if top else "bottom",
        fontsize=7.5,
        color="#222222",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
    )
    axes.set_xscale("log", base=2)
    shown = ranks[::-2][::-1] if len(ranks) >= EVERY_OTHER else ranks
    axes.set_xticks(shown, [f"{number:,}" for number in shown], fontsize=8)
    axes.minorticks_off()
    axes.set_xlim(ranks[0] / 1.3, ranks[-1] * 1.3)
    axes.set_xlabel("ranks")
