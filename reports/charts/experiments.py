"""Charts of the experiments: scaling, sweeps, gains, compression, targets, latency, time split."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from configs.common.files.reading import MIB
from reports.charts.chart import MAX_ROWS, Chart, ChartForm, ChartPoint, ChartSeries, grows, measured_point
from reports.experiments.comparison import Gain, SweepPoint
from reports.experiments.compression import CompressionResult
from reports.experiments.latency import LatencyCurves
from reports.experiments.load.experiment import LoadExperiment, LoadPoint
from reports.experiments.scaling import Scaling
from reports.experiments.targets import SideBySide
from reports.laws.laws import TITLES
from reports.plots.experiments.compression import drawn_rows
from reports.plots.experiments.load import lost_points
from reports.plots.experiments.sweep import drawn_axes
from reports.plots.experiments.targets import drawn_labels
from reports.plots.style import first_series, is_numeric, spread_by_logarithm
from reports.profiles.time_split import TimeSplit
from reports.text import number

CURVE_POINTS = 100
"""Of a distribution: enough for its tail."""


def scaling_charts(result: Scaling) -> tuple[Chart, ...]:
    """Throughput and efficiency over ranks, with the ideal line and the law that the points support."""
    points = [point for point in result.points if point.throughput is not None]
    lost = tuple((float(point.ranks), point.result.status) for point in result.points if point.throughput is None)
    each = [measured_point(p.ranks, p.throughput, p.result.values("throughput")) for p in points if p.throughput]
    efficient = [
        measured_point(point.ranks, point.efficiency, scale=100) for point in result.measured if point.efficiency
    ]
    ranks = [float(point.ranks) for point in result.points]
    speed, share = [ChartSeries("measured", tuple(each))], [ChartSeries("measured", tuple(efficient))]
    base, law = result.baseline, result.laws.drawn
    if base.throughput is not None and base.throughput.median > 0:
        one = base.throughput.median / base.ranks
        speed.append(_line("ideal: linear", [(x, one * x) for x in ranks]))
    if law is not None:
        # Not over ranks that failed: there nothing was measured that a law could be drawn through.
        fitted = [float(point.ranks) for point in result.laws.points]
        grid = np.array(fitted)
        values, (low, high) = law.throughput(grid), law.band(grid)
        band = tuple(zip(fitted, map(float, low), map(float, high), strict=True))
        drawn = tuple(ChartPoint(x, float(y)) for x, y in zip(fitted, values, strict=True))
        speed.append(ChartSeries(TITLES[law.law], drawn, marks=False, band=band))
    wide = grows(ranks)
    return (
        Chart(
            "Throughput", "ranks", f"throughput, {result.unit}", tuple(speed), unit=result.unit, log_x=wide, lost=lost
        ),
        Chart("Efficiency", "ranks", "% of linear", tuple(share), unit="% of linear", log_x=wide, lost=lost),
    )


def _line(name: str, points: Sequence[tuple[float, float]]) -> ChartSeries:
    return ChartSeries(name, tuple(ChartPoint(x, y) for x, y in points), marks=False, dashed=True)


def load_charts(found: LoadExperiment) -> tuple[Chart, ...]:
    """Tokens per second, P99 of TTFT and of ITL, over the rate or the users; and the loads that have no result."""
    speed, slow = [], []
    for title, points in first_series(found.series()).items():
        valid = [(at, point) for at, point in points if point.valid]
        named = f"{title}, " if title else ""
        speed.append(_of_load(title or "tokens/s", valid, "tokens", 1.0))
        slow.append(_of_load(f"{named}TTFT P99", valid, "ttft_p99", 1000.0))
        slow.append(_of_load(f"{named}ITL P99", valid, "itl_p99", 1000.0))
    over = "users" if found.axis == "users" else "requests/s asked for"
    wide = spread_by_logarithm([at for points in found.series().values() for at, _ in points])
    lost = tuple(lost_points(found))
    return (
        Chart("Throughput", over, "tokens/s", tuple(speed), unit="tokens/s", log_x=wide, lost=lost),
        Chart("Latency, P99", over, "ms", tuple(slow), unit="ms", log_x=wide, log_y=True, from_zero=False, lost=lost),
    )


def _of_load(name: str, points: Sequence[tuple[float, LoadPoint]], figure: str, scale: float) -> ChartSeries:
    known = [(at, value) for at, point in points if (value := point.value(figure)) is not None]
    return ChartSeries(name, tuple(measured_point(at, value, scale=scale) for at, value in known))


def sweep_charts(points: Sequence[SweepPoint]) -> tuple[Chart, ...]:
    """Throughput and, where it is known, peak memory over the swept field."""
    axis, series = drawn_axes(points)
    values = [point.values[axis] for point in points]
    numeric = is_numeric(values)
    labels = () if numeric else tuple(dict.fromkeys(str(value) for value in values))
    xs = [float(value) if numeric else float(labels.index(str(value))) for value in values]
    lost = tuple((xs[i], point.result.status) for i, point in enumerate(points) if not point.result.completed)
    speed, memory = [], []
    for name, members in series.items():
        rates, peaks = [], []
        for place in members:
            result = points[place].result
            if (rate := result.estimate("throughput")) is not None:
                rates.append(measured_point(xs[place], rate, result.values("throughput"), label=points[place].label))
            if result.peak_bytes is not None:
                peaks.append(ChartPoint(xs[place], result.peak_bytes / MIB, label=points[place].label))
        speed.append(ChartSeries(name, tuple(sorted(rates, key=lambda point: point.x))))
        memory.append(ChartSeries(name, tuple(sorted(peaks, key=lambda point: point.x))))
    field, unit = axis.removeprefix("workload.").replace("_", " "), points[0].result.unit
    form: ChartForm = "xy" if numeric else "dots"
    wide = numeric and grows(xs)
    charts = [Chart("Throughput", field, f"throughput, {unit}", tuple(speed), form, unit, labels, wide, lost=lost)]
    if any(each.points for each in memory):
        charts.append(
            Chart("Peak memory, all ranks", field, "peak memory, MiB", tuple(memory), form, "MiB", labels, wide)
        )
    return tuple(charts)


def gain_charts(gains: Sequence[Gain]) -> tuple[Chart, ...]:
    """The gain of each variant over the baseline of the same block."""
    shown = gains[:MAX_ROWS]
    points = tuple(
        measured_point(row, gain.throughput, gain.throughput_by_repeat, label=gain.variant)
        for row, gain in enumerate(shown)
        if gain.throughput is not None
    )
    lost = tuple((float(row), gain.result.status) for row, gain in enumerate(shown) if gain.throughput is None)
    label = "throughput over the baseline's of the same block (1 is no gain)"
    rows = tuple(gain.variant for gain in shown)
    series = (ChartSeries("gain", points, line=False),)
    return (Chart("Gain", "", label, series, "dots", "times", rows, from_zero=False, lost=lost, reference=1.0),)


def compression_charts(result: CompressionResult) -> tuple[Chart, ...]:
    """Speed and size of the weights over what the answers lose."""
    rows, scale = drawn_rows(result), 1.0 if result.encodes else 100.0
    loss = "cosine distance, mean" if result.encodes else "change of perplexity, %"
    speed = []
    for row in rows:
        if row.loss is None or row.speed is None:
            continue
        at = scale * row.loss
        if row.throughput is None:
            speed.append(ChartPoint(at, row.speed, label=row.label))
        else:
            speed.append(measured_point(at, row.throughput, label=row.label))
    size = [
        ChartPoint(scale * row.loss, 100 * row.share, label=row.label)
        for row in rows
        if row.loss is not None and row.share is not None
    ]
    unit = f"times the base's {result.base.result.unit}"
    return (
        Chart(
            "Speed: better is up and left", loss, unit, (ChartSeries("passes", tuple(speed), line=False),), unit="times"
        ),
        Chart(
            "Size: better is down and left",
            loss,
            "weights, % of the base's bytes",
            (ChartSeries("passes", tuple(size), line=False),),
            unit="% of the base's bytes",
        ),
    )


def target_charts(found: SideBySide) -> tuple[Chart, ...]:
    """Throughput by target and point: a row each, a series for each target."""
    series, lost = [], []
    rows: list[str] = []
    drawn = set(drawn_labels(found))
    for side in found.sides:
        points = []
        for point in (point for point in side.points if point.label in drawn):
            place = len(rows)
            rows.append(f"{side.target}: {point.label}")
            if point.throughput is not None:
                repeats = point.result.values("throughput")
                points.append(measured_point(place, point.throughput, repeats, label=f"{side.target}, {point.label}"))
            else:
                lost.append((float(place), point.result.status))
        series.append(ChartSeries(side.name, tuple(points), line=False))
    title, label = "Throughput by target", f"throughput, {found.unit}"
    return (Chart(title, "", label, tuple(series), "dots", found.unit, tuple(rows), lost=tuple(lost)),)


def latency_charts(drawn: LatencyCurves) -> tuple[Chart, ...]:
    """The share of completed work over time, and of what takes longer."""
    done, longer = [], []
    for curve in drawn.curves:
        count = len(curve.seconds)
        kept = np.unique(np.linspace(0, count - 1, min(count, CURVE_POINTS)).round().astype(int))
        pairs = [(1000 * float(curve.seconds[place]), 100 * float(curve.shares[place])) for place in kept]
        points = tuple(ChartPoint(x, y, label=f"{curve.label}, {number(x)} ms") for x, y in pairs)
        done.append(ChartSeries(curve.label, points, marks=False))
        tail = tuple(replace(point, y=100 - point.y) for point in points if point.y < 100)
        longer.append(ChartSeries(curve.label, tail, marks=False))
    times = [point.x for series in done for point in series.points]
    label, what = f"latency of a {drawn.kind}, ms", "passes" if drawn.kind == "pass" else f"{drawn.kind}s"
    wide = bool(times) and min(times) > 0 and max(times) / min(times) >= 8
    rest = any(series.points for series in longer)
    charts = [Chart("Distribution", label, f"share of {what} done, %", tuple(done), unit="%", log_x=wide)]
    if rest:
        told = f"share of {what} that take longer, %"
        charts.append(Chart("Tail", label, told, tuple(longer), unit="%", log_x=wide, log_y=True, from_zero=False))
    return tuple(charts)


def split_charts(result: TimeSplit) -> tuple[Chart, ...]:
    """Parts of a mean pass by number of ranks, in milliseconds."""
    shown = result.points[:MAX_ROWS]
    rows = tuple(f"{point.ranks} rank{'' if point.ranks == 1 else 's'}" for point in shown)
    lost = tuple((float(row), point.result.status) for row, point in enumerate(shown) if point.seconds <= 0)
    bars = [dict(point.parts) for point in shown]
    return (stacked(f"Time of a mean {result.unit}", rows, result.names, bars, lost),)


def stacked(
    title: str,
    rows: Sequence[str],
    names: Sequence[str],
    bars: Sequence[Mapping[str, float]],
    lost: tuple[tuple[float, str], ...] = (),
    scale: float = 1000.0,
    unit: str = "ms",
) -> Chart:
    """A bar for each row, of parts that sum up."""
    series = tuple(
        ChartSeries(
            name,
            tuple(
                ChartPoint(row, scale * parts[name], label=f"{rows[row]}, {name}")
                for row, parts in enumerate(bars)
                if parts.get(name)
            ),
        )
        for name in names
        if any(parts.get(name) for parts in bars)
    )
    return Chart(title, "", f"{title.lower()}, {unit}", series, "stack", unit, tuple(rows), lost=lost)
