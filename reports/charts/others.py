"""Charts of training, predictions, forecasts, costs and trade-offs."""

from collections.abc import Mapping, Sequence

import numpy as np

from configs.common.arrays import Floats
from configs.common.files.reading import MIB
from configs.common.printable import plural_noun
from reports.charts.chart import MAX_ROWS, Chart, ChartPoint, ChartSeries, grows, measured_point
from reports.charts.experiments import stacked
from reports.decisions.cost import CellCost
from reports.decisions.pareto import Pareto
from reports.numbers.statistics import Estimate
from reports.planning.accuracy import MEMORY, JudgedPrediction
from reports.planning.forecast import StudyForecast
from reports.planning.layouts import LayoutRanking
from reports.plots.decisions.cost import cheapest_first
from reports.plots.experiments.profiled import parts as profile_parts
from reports.plots.planning.layouts import drawn_layouts
from reports.plots.planning.prediction import panels
from reports.plots.style import MOST_BARS
from reports.profiles.profiled import Profiled
from reports.profiles.time_split import PARTS
from reports.reading.load import CellResult, short_titles
from reports.training.cells import step_parts
from reports.training.equality import SameLearning, relative
from reports.training.strategies import Strategies

MAX_CURVES = 7
CURVE_POINTS = 200


def _curve(name: str, values: Floats) -> ChartSeries:
    """Values by step from 1 on, thinned evenly."""
    steps = np.unique(np.linspace(0, len(values) - 1, min(len(values), CURVE_POINTS)).round().astype(int))
    points = [(int(step + 1), float(values[step])) for step in steps if np.isfinite(values[step])]
    return ChartSeries(name, tuple(ChartPoint(x, y, label=f"{name}, step {x:,}") for x, y in points), marks=False)


def loss_charts(curves: Mapping[str, Floats]) -> tuple[Chart, ...]:
    """Training loss by step."""
    series = tuple(_curve(name, losses) for name, losses in list(curves.items())[:MAX_CURVES] if len(losses))
    label = "training loss, nats a token"
    return (Chart("Training loss", "optimizer step", label, series, unit="nats", from_zero=False),)


def equality_charts(found: SameLearning) -> tuple[Chart, ...]:
    """Losses, and how far each lies from the reference."""
    curves = [found.reference, *(item.curve for item in found.others)][:MAX_CURVES]
    apart = [
        _curve(curve.result.name, np.where(away > 0, away, np.nan))
        for curve in curves[1:]
        if (away := relative(curve.losses, found.reference.losses)).any()
    ]
    charts = list(loss_charts({curve.result.name: curve.losses for curve in curves}))
    if any(series.points for series in apart):
        label = "relative difference of loss"
        charts.append(Chart("Difference", "optimizer step", label, tuple(apart), log_y=True, from_zero=False))
    return tuple(charts)


def step_charts(cells: Sequence[CellResult]) -> tuple[Chart, ...]:
    """Parts of a mean step of each cell."""
    shown = cells[:MAX_ROWS]
    bars = [step_parts(result) for result in shown]
    return (stacked("Time of a mean step", short_titles(shown), list(PARTS.values()), bars),)


def strategy_charts(found: Strategies) -> tuple[Chart, ...]:
    """Step time of each strategy, measured and predicted, and its parts."""
    lost = [way for way in found.ways if way.measured is None]
    shown = [*found.ranked, *lost][:MOST_BARS]
    rows = tuple(way.name for way in shown)
    gone = tuple((float(row), way.result.status) for row, way in enumerate(shown) if way.measured is None)
    measured = tuple(
        measured_point(row, way.measured, way.result.values("step_seconds"), 1000, way.name)
        for row, way in enumerate(shown)
        if way.measured is not None
    )
    said = tuple(
        ChartPoint(row, 1000 * way.predicted, label=f"{way.name}, predicted")
        for row, way in enumerate(shown)
        if way.predicted is not None
    )
    series = [ChartSeries("measured", measured, line=False)]
    series += [ChartSeries("predicted", said, line=False, dashed=True)] if said else []
    bars = [step_parts(way.result) for way in shown]
    return (
        Chart("Step time", "", "time of a step, ms", tuple(series), "dots", "ms", rows, lost=gone),
        stacked("Time of a mean step", rows, list(PARTS.values()), bars, gone),
    )


def profile_charts(cells: Sequence[Profiled]) -> tuple[Chart, ...]:
    """Shares of the recorded pass."""
    shown = cells[:MAX_ROWS]
    bars = [profile_parts(cell) for cell in shown]
    names = list(bars[0]) if bars else []
    titles = short_titles([cell.result for cell in shown])
    return (stacked("Share of the recorded pass", titles, names, bars, scale=100.0, unit="%"),)


def prediction_charts(judged: Sequence[JudgedPrediction]) -> tuple[Chart, ...]:
    """Measured over predicted, for each kind of figure."""
    charts = []
    for title, items in panels(judged).items():
        scale = 1 / MIB if items[0].figure == MEMORY else 1.0
        unit = title.rpartition(": ")[2]
        models = dict.fromkeys(item.result.model for item in items)
        series = [
            ChartSeries(
                model,
                tuple(
                    measured_point(scale * item.predicted, item.measured, scale=scale, label=item.result.title)
                    for item in items
                    if item.result.model == model
                ),
                line=False,
            )
            for model in models
        ]
        ends = [scale * value for item in items for value in (item.predicted, item.measured.median)]
        exact = tuple(ChartPoint(end, end) for end in (min(ends), max(ends)))
        series.append(ChartSeries("predicted = measured", exact, marks=False, dashed=True))
        wide = grows(ends)
        charts.append(
            Chart(
                title,
                f"predicted, {unit}",
                f"measured, {unit}",
                tuple(series),
                unit=unit,
                log_x=wide,
                log_y=wide,
                from_zero=False,
            )
        )
    return tuple(charts)


def forecast_charts(result: StudyForecast) -> tuple[Chart, ...]:
    """Step time and efficiency over ranks, measured and forecast with its band."""
    points = result.found.points
    seconds = {ranks: value.scaled(1000) for ranks, value in result.seconds.items()}
    measured = tuple(measured_point(ranks, value) for ranks, value in sorted(seconds.items()))
    ahead = tuple(ChartPoint(point.ranks, 1000 * point.seconds, *_ms(point.seconds_interval), True) for point in points)
    times = tuple((float(p.ranks), *_ms(p.seconds_interval)) for p in points)
    shares = tuple((float(p.ranks), 100 * p.efficiency_interval[0], 100 * p.efficiency_interval[1]) for p in points)
    efficient = tuple(
        ChartPoint(p.ranks, 100 * p.efficiency, shares[place][1], shares[place][2], True)
        for place, p in enumerate(points)
    )
    unit = f"time of a {result.unit}, ms"
    return (
        Chart(
            f"Time of a {result.unit}",
            "ranks",
            unit,
            (ChartSeries("measured", measured, line=False), ChartSeries("forecast", ahead, dashed=True, band=times)),
            unit="ms",
            log_x=True,
            log_y=grows([point.y for point in ahead]),
        ),
        Chart(
            "Efficiency",
            "ranks",
            "% of linear",
            (ChartSeries("forecast", efficient, dashed=True, band=shares),),
            unit="% of linear",
            log_x=True,
        ),
    )


def _ms(bounds: tuple[float, float]) -> tuple[float, float]:
    return 1000 * bounds[0], 1000 * bounds[1]


def layout_charts(result: LayoutRanking) -> tuple[Chart, ...]:
    """Predicted and measured throughput of each layout."""
    lines = drawn_layouts(result)[:MAX_ROWS]
    said, measured = [], []
    for row, item in enumerate(lines):
        rate, factor = item.candidate.prediction.throughput, item.candidate.prediction.factor or 1.0
        if rate is not None:
            said.append(ChartPoint(row, rate, rate / factor, rate * factor, label=f"{item.candidate.label}, predicted"))
        if item.measured is not None and item.result is not None:
            repeats = item.result.values("throughput")
            measured.append(measured_point(row, item.measured, repeats, label=item.candidate.label))
    series = (
        ChartSeries("measured, median", tuple(measured), line=False),
        ChartSeries("predicted, with its stated factor", tuple(said), line=False, dashed=True),
    )
    rows = tuple(f"{item.place}: {item.candidate.label}" for item in lines)
    return (Chart("Layouts", "", result.unit, series, "dots", result.unit, rows),)


def cost_charts(costs: Sequence[CellCost]) -> tuple[Chart, ...]:
    """Dollars per million units, the cheapest first."""
    drawn = cheapest_first(costs)[:MAX_ROWS]
    points = tuple(
        measured_point(row, cost.usd_per_million, label=cost.result.title)
        for row, cost in enumerate(drawn)
        if cost.usd_per_million is not None
    )
    rows, unit = tuple(cost.result.title for cost in drawn), f"USD per million {plural_noun(drawn[0].result.work_unit)}"
    return (Chart("Cost", "", unit, (ChartSeries("cost", points, line=False),), "dots", unit, rows),)


def pareto_charts(found: Pareto) -> tuple[Chart, ...]:
    """All points; those that no other beats in both are joined."""

    def point(x: Estimate, y: Estimate, label: str) -> ChartPoint:
        return measured_point(x.median, y, label=label)

    front = tuple(point(each.x, each.y, each.result.name) for each in found.front)
    beaten = tuple(point(each.x, each.y, each.result.name) for each in found.points if not each.front)
    series = [ChartSeries("not beaten in both", front)]
    series += [ChartSeries("beaten in both", beaten, line=False, dashed=True)] if beaten else []
    title = "Better is up and right" if found.more_x else "Better is up and left"
    unit = found.y_label
    return (Chart(title, found.x_label, found.y_label, tuple(series), unit=unit),)
