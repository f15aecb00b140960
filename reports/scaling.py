"""Strong and weak scaling: throughput at each number of ranks against the named baseline.

    result = scaling(study, experiment)
    speed-up S(n) = throughput(n) / throughput(baseline)
    efficiency E(n) = S(n) x ranks(baseline) / n

The one formula serves both kinds: where the total work is fixed, S/n is the efficiency of strong
scaling; where the work of a rank is fixed, throughput(n) / (n x throughput(1)) is that of weak scaling.
"""

from dataclasses import dataclass

from configs.plan import PlannedExperiment
from reports.load import CellResult, StudyResult
from reports.statistics import Estimate
from reports.text import Table, estimate_cell, number, percent, plural


@dataclass(frozen=True)
class ScalingPoint:
    """One number of ranks; what is None was not measured."""

    ranks: int
    result: CellResult
    baseline: bool
    throughput: Estimate | None
    speedup: float | None
    efficiency: float | None


@dataclass(frozen=True)
class Scaling:
    """One scaling experiment of one model."""

    kind: str
    unit: str
    points: tuple[ScalingPoint, ...]

    @property
    def baseline(self) -> ScalingPoint:
        return next(point for point in self.points if point.baseline)

    @property
    def measured(self) -> list[ScalingPoint]:
        """Points with a speed-up, in order of ranks."""
        return [point for point in self.points if point.speedup is not None]


def scaling(study: StudyResult, experiment: PlannedExperiment) -> Scaling:
    """The points by number of ranks. The baseline is the point so marked, else the one of fewest ranks."""
    assert experiment.points, f"experiment {experiment.name} has no points"
    ordered = sorted(experiment.points, key=lambda point: study.cells[point.cell].cell.layout.ranks)
    named = next((point for point in ordered if point.baseline), ordered[0])
    base = study.cells[named.cell]
    base_value, base_ranks = base.estimate("throughput"), base.cell.layout.ranks
    points = []
    for point in ordered:
        result = study.cells[point.cell]
        value, ranks = result.estimate("throughput"), result.cell.layout.ranks
        speedup = value.median / base_value.median if value and base_value else None
        efficiency = None if speedup is None else speedup * base_ranks / ranks
        points.append(ScalingPoint(ranks, result, point is named, value, speedup, efficiency))
    return Scaling(experiment.kind, base.unit, tuple(points))


def scaling_table(result: Scaling) -> Table:
    """One row for each number of ranks."""
    return Table(
        (
            "ranks",
            "repeats",
            f"{result.unit}, median (interval)",
            "speed-up",
            "efficiency",
            "ms a token, median (interval)",
            "ms to first token",
            "ms a step, median (interval)",
            "state",
        ),
        tuple(_row(point) for point in result.points),
        text_columns=0,
    ).without_empty_columns()


def _row(point: ScalingPoint) -> tuple[str, ...]:
    result = point.result
    return (
        f"{point.ranks}{' (baseline)' if point.baseline else ''}",
        f"{len(result.completed)} of {result.planned}",
        estimate_cell(point.throughput),
        number(point.speedup),
        percent(point.efficiency),
        estimate_cell(result.estimate("time_per_output_token_seconds"), 1000),
        estimate_cell(result.estimate("ttft_seconds"), 1000),
        estimate_cell(result.estimate("step_seconds"), 1000),
        result.status.replace("_", " "),
    )


def scaling_sentence(result: Scaling) -> str:
    """What to see in the figure, in a sentence or two."""
    base, grown = result.baseline, [point for point in result.measured if not point.baseline]
    if base.throughput is None:
        state = base.result.status.replace("_", " ")
        return f"The baseline, {plural(base.ranks, 'rank')}, has no figure ({state}), so no speed-up is given."
    if not grown:
        return f"Only the baseline, {plural(base.ranks, 'rank')}, has a figure, so there is no speed-up to give."
    last = grown[-1]
    assert last.speedup is not None and last.efficiency is not None
    fixed = "with the total work fixed" if result.kind == "strong" else "with the work of each rank fixed"
    text = (
        f"{plural(last.ranks, 'rank')} give {number(last.speedup)} times the throughput of "
        f"{plural(base.ranks, 'rank')} {fixed}: {percent(last.efficiency)} of linear."
    )
    if last.speedup < 1:
        text += " More ranks make it slower."
    tail = next((point for point in grown if (point.efficiency or 0) < 0.8), None)
    if tail is not None and tail is not last:
        text += f" Efficiency is first below 80 % at {plural(tail.ranks, 'rank')}."
    return " ".join([text, *(_more_than_linear(point, base) for point in grown if (point.efficiency or 0) > 1)])


def _more_than_linear(point: ScalingPoint, base: ScalingPoint) -> str:
    """Said aloud, because it is noise or a larger share of caches and memory, and never free."""
    assert point.throughput is not None and base.throughput is not None
    noise = point.throughput.low * base.ranks <= base.throughput.high * point.ranks
    why = (
        "the ranges of the two reach linear, so it may be noise"
        if noise
        else "even the slowest repeat against the fastest of the baseline: look for what a rank gets more of "
        "(cache, memory bandwidth, a smaller batch) before believing it"
    )
    return f"At {plural(point.ranks, 'rank')} the speed-up is more than linear ({percent(point.efficiency)}); {why}."
