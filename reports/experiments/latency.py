"""Latency distributions of the cells of an experiment: percentiles in a table, full curves in a figure.

    result = latency(study, experiment)          # None where nothing in it has a latency
    latency_table(result), latency_sentence(result)
    draw_latency(figure, latency_curves(study, result))      # reports.plots.experiments.latency

What is waited for is a request where the workload answers prompts, a step where it trains (`Descriptor.latency`). The
percentiles are over all samples of the steady part of every completed repeat; a P99 of fewer than 1,000
samples is marked, not hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from configs.common.arrays import Floats
from configs.common.printable import plural_noun
from configs.plans.plan import PlannedExperiment
from configs.records.rates import LATENCY_COLUMNS, MeasurementSamples
from reports.numbers.percentiles import Percentiles
from reports.reading.load import CellResult, StudyResult
from reports.tables import first_rows
from reports.text import UNKNOWN, Table, escaped, number, plural

MOST_CURVES = 6
CURVE_POINTS = 400
"""A curve is drawn through so many of its samples: more would not be seen, and SVG files would be large."""

MARK = "†"


@dataclass(frozen=True)
class LatencyPoint:
    """One cell of the experiment; `percentiles` by kind of latency, empty where it was not measured."""

    label: str
    result: CellResult
    percentiles: Mapping[str, Percentiles]


@dataclass(frozen=True)
class MeasuredLatency:
    """The latencies of an experiment. `kind` is what is waited for; `awaited`: by somebody."""

    kind: str
    awaited: bool
    points: tuple[LatencyPoint, ...]

    @property
    def measured(self) -> list[LatencyPoint]:
        return [point for point in self.points if self.kind in point.percentiles]


@dataclass(frozen=True)
class LatencyCurve:
    """One cell's distribution: `seconds` at rising `shares` (0 to 1) of the samples."""

    label: str
    seconds: Floats
    shares: Floats
    percentiles: Percentiles


@dataclass(frozen=True)
class LatencyCurves:
    """What the figure shows."""

    kind: str
    curves: tuple[LatencyCurve, ...]


def latency(study: StudyResult, experiment: PlannedExperiment) -> MeasuredLatency | None:
    """The points in the order of the experiment; None where none of them has a latency."""
    points = []
    for point in experiment.points:
        result = study.cells[point.cell]
        known = {kind: found for kind in LATENCY_COLUMNS if (found := result.percentiles(kind)) is not None}
        points.append(LatencyPoint(point.label, result, known))
    if not any(point.percentiles for point in points):
        return None
    times = [point.result.kind.latency for point in points if point.percentiles]
    first = next((time for time in times if time is not None), None)
    return None if first is None else MeasuredLatency(first.waited_for, first.awaited, tuple(points))


def latency_table(result: MeasuredLatency) -> Table:
    """One row for each point, in milliseconds, at most as many as a reader bears."""
    columns = ("point", "samples", *(f"P{share} of a {result.kind}, ms" for share in (50, 90)))
    columns += (f"P99 of a {result.kind}, ms (interval)", "P99 to the first token, ms", "P99 between tokens, ms")
    rows = tuple(_row(result.kind, point) for point in result.points)
    return first_rows(Table(columns, rows).without_empty_columns())


def _row(kind: str, point: LatencyPoint) -> tuple[str, ...]:
    main = point.percentiles.get(kind)
    tails = (p99_cell(point.percentiles.get(other)) for other in ("ttft", "token"))
    if main is None:
        return (escaped(point.label), UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, *tails)
    numbers = (f"{main.samples:,}", number(main.p50 * 1000), number(main.p90 * 1000))
    return (escaped(point.label), *numbers, p99_cell(main), *tails)


def p99_cell(value: Percentiles | None) -> str:
    """`41.2 (40.8 to 42.0)` in milliseconds; with a mark where its samples are too few."""
    if value is None:
        return UNKNOWN
    text = number(value.p99 * 1000) + (MARK if value.marked else "")
    if value.p99_interval is None:
        return text
    low, high = (number(bound * 1000) for bound in value.p99_interval)
    return f"{text} ({low} to {high})"


def latency_sentence(result: MeasuredLatency) -> str:
    """The shortest and the longest tail, and what the mark means where there is one."""
    known = [(point, point.percentiles[result.kind]) for point in result.measured]
    if not known:
        return "No point of this experiment has a latency."
    best, worst = (pick(known, key=lambda pair: pair[1].p99) for pick in (min, max))
    text = f"P99 of a {result.kind} is {_milliseconds(best[1])} at {best[0].label}"
    if worst[0] is not best[0]:
        text += f" and {_milliseconds(worst[1])} at {worst[0].label}"
    spread = max(known, key=lambda pair: pair[1].p99 / pair[1].p50 if pair[1].p50 else 0.0)
    if spread[1].p50 > 0:
        tail = f"{number(spread[1].p99 / spread[1].p50)} times P50"
        text += f", {tail}" if len(known) == 1 else f"; the longest tail is that of {spread[0].label} (P99 {tail})"
    text += "."
    marked = sum(percentiles.marked for _, percentiles in known)
    if marked:
        text += (
            f" {MARK} marks a P99 of fewer than 1,000 samples ({marked:,} of {plural(len(known), 'point')}): "
            f"a few slow {plural_noun(result.kind)} decide it."
        )
    if any(percentiles.p99_interval for _, percentiles in known):
        text += " The interval comes from the scatter of the P99 of single repeats."
    return text


def _milliseconds(value: Percentiles) -> str:
    return f"{number(value.p99 * 1000)} ms" + (MARK if value.marked else "")


def latency_curves(study: StudyResult, result: MeasuredLatency) -> LatencyCurves:
    """The distributions to draw, read again from the samples: those of at most MOST_CURVES points, evenly chosen."""
    chosen = result.measured
    if len(chosen) > MOST_CURVES:
        places = np.linspace(0, len(chosen) - 1, MOST_CURVES).round().astype(int)
        chosen = [chosen[place] for place in places]
    return LatencyCurves(result.kind, tuple(_curve(study, result.kind, point) for point in chosen))


def _curve(study: StudyResult, kind: str, point: LatencyPoint) -> LatencyCurve:
    cell, parts = point.result.cell, []
    for measurement in point.result.completed.values():
        if kind in measurement.p99_seconds:
            samples = study.samples(measurement, point.result.kind.columns)
            kept = MeasurementSamples(cell, samples).without_first(
                measurement.steady.first if measurement.steady else 0
            )
            parts.append(kept.latencies()[kind])
    ordered = np.sort(np.concatenate(parts))
    count = len(ordered)
    # Evenly over the ranks, and every one of the slowest, which the tail is made of.
    body = np.linspace(0, count - 1, min(count, CURVE_POINTS)).round().astype(int)
    places = np.union1d(body, np.arange(max(0, count - CURVE_POINTS // 4), count))
    return LatencyCurve(point.label, ordered[places], (places + 1) / count, point.percentiles[kind])
