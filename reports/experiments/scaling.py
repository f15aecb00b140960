"""Strong and weak scaling: throughput at each number of ranks relative to the named baseline, with fitted scaling laws.

    result = scaling(study, experiment)
    speed-up S(n) = throughput(n) / throughput(baseline), of the same block
    efficiency E(n) = S(n) x ranks(baseline) / n

The one formula serves both kinds: where the total work is fixed, S/n is the efficiency of strong
scaling; where the work of a rank is fixed, throughput(n) / (n x throughput(1)) is that of weak scaling.
Intervals of one table hold together: they are corrected for the number of points compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from configs.plans.plan import PlannedExperiment
from configs.spec.cell import Cell
from configs.workloads import descriptor_of
from configs.workloads.descriptor import ShownTime
from reports.laws.laws import MeasuredPoint, ScalingLaws, fit_laws, scaled
from reports.laws.text import changed_text, law_lines, more_than_linear
from reports.numbers.statistics import ROUNDING, Estimate, Ratio, paired_ratio
from reports.provenance import facts_set_by
from reports.reading.load import CellResult, StudyResult, shown_times
from reports.reading.names import flat_environment
from reports.text import UNKNOWN, Table, escaped, estimate_cell, number, percent, plural, ratio_cell, ratio_text


@dataclass(frozen=True)
class ScalingPoint:
    """One number of ranks; what is None was not measured. `changed`: what else differs from the baseline."""

    ranks: int
    result: CellResult
    baseline: bool
    throughput: Estimate | None
    speedup: Ratio | None
    efficiency: Ratio | None
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scaling:
    """One scaling experiment of one model. Laws are in units of the fewest ranks, whatever the baseline."""

    kind: Literal["strong", "weak"]
    unit: str
    points: tuple[ScalingPoint, ...]
    laws: ScalingLaws

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
    assert experiment.kind in ("strong", "weak"), experiment.kind
    kind: Literal["strong", "weak"] = "weak" if experiment.kind == "weak" else "strong"
    ordered = sorted(experiment.points, key=lambda point: study.cells[point.cell].cell.layout.ranks)
    named = next((point for point in ordered if point.baseline), ordered[0])
    base = study.cells[named.cell]
    known = [point for point in ordered if point is not named and study.cells[point.cell].estimate("throughput")]
    compared = max(1, len(known))
    points = []
    for point in ordered:
        result = study.cells[point.cell]
        ranks = result.cell.layout.ranks
        speedup = paired_ratio(result.values("throughput"), base.values("throughput"), compared, base.confidence)
        efficiency = None if speedup is None else scaled(speedup, base.cell.layout.ranks / ranks)
        changed = () if point is named else (*_changed(result.cell, base.cell, kind), *_moved(study, result, base))
        value = result.estimate("throughput")
        points.append(ScalingPoint(ranks, result, point is named, value, speedup, efficiency, changed))
    measured = [MeasuredPoint(point.ranks, _above_zero(point.result), point.changed) for point in points]
    return Scaling(kind, base.unit, tuple(points), fit_laws(measured, kind, confidence=base.confidence))


def _above_zero(result: CellResult) -> dict[int, float]:
    return {repeat: value for repeat, value in result.values("throughput").items() if value > 0}


def _changed(cell: Cell, base: Cell, kind: str) -> list[str]:
    """Fields that the number of ranks does not explain, with both values."""
    ours, theirs = _fields(cell), _fields(base)
    grows = f"workload.{descriptor_of(base.workload).grows}"
    if kind == "weak" and theirs.get(grows) is not None:
        theirs[grows] = theirs[grows] * cell.layout.ranks // base.layout.ranks
    if cell.nodes * base.layout.ranks == base.nodes * cell.layout.ranks:
        theirs["nodes"] = cell.nodes  # each node has as many ranks as before
    differing = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    return [f"{name.rpartition('.')[2]} {ours.get(name)} instead of {theirs.get(name)}" for name in differing]


def _fields(cell: Cell) -> dict[str, Any]:
    """What should stay the same, flat. Batches that cannot be filled count as what fills them."""
    data = cell.model_dump(mode="json", exclude={"workload", "layout", "env"})
    fields = {**data, **{f"env.{name}": value for name, value in cell.env.items()}}
    work = cell.workload.compared_fields(cell.layout.dp)
    return fields | {f"workload.{name}": value for name, value in work.items()}


def _moved(study: StudyResult, result: CellResult, base: CellResult) -> list[str]:
    """Facts of the environment that no record of the baseline has: another machine, version or variable."""
    ours, theirs = _environment(study, result), _environment(study, base)
    own = facts_set_by(study.plan, (result.cell, base.cell))
    names = [name for name in sorted(ours.keys() & theirs.keys()) if not ours[name] & theirs[name] and name not in own]
    return [f"environment: {name}" for name in names]


def _environment(study: StudyResult, result: CellResult) -> Mapping[str, set[str]]:
    digests = {measurement.record.environment for measurement in result.completed.values()} - {None}
    facts: dict[str, set[str]] = {}
    for digest in digests:
        for name, value in flat_environment(study.environments.get(str(digest)) or {}).items():
            facts.setdefault(name, set()).add(value)
    return facts


def scaling_table(result: Scaling) -> Table:
    """One row for each number of ranks."""
    times = shown_times(point.result for point in result.points)
    return Table(
        (
            "ranks",
            "repeats",
            f"{result.unit}, median (interval)",
            "speed-up (interval)",
            "efficiency (interval)",
            *(shown.unit if shown.extra else f"{shown.unit}, median (interval)" for shown in times),
            "also changed",
            "state",
        ),
        tuple(_row(point, times) for point in result.points),
        text_columns=0,
    ).without_empty_columns()


def _row(point: ScalingPoint, times: Sequence[ShownTime]) -> tuple[str, ...]:
    result = point.result
    own = point.baseline and point.speedup is not None
    return (
        f"{point.ranks}{' (baseline)' if point.baseline else ''}",
        f"{len(result.completed)} of {result.planned}",
        estimate_cell(point.throughput),
        "1" if own else ratio_cell(point.speedup),
        "100 %" if own else share_cell(point.efficiency),
        *(estimate_cell(result.time(shown), 1000) for shown in times),
        escaped(", ".join(point.changed)) or UNKNOWN,
        result.status.replace("_", " "),
    )


def share_cell(value: Ratio | None) -> str:
    """A ratio as per cent: `93.7 % (92.0 to 95.1)`; brackets where the pairs are too few for an interval."""
    if value is None:
        return UNKNOWN
    if value.count == 1:
        return percent(value.value)
    low, high = (number(bound * 100) for bound in value.bounds)
    bounds = f"[{low} to {high}]" if value.interval is None else f"({low} to {high})"
    return f"{percent(value.value)} {bounds}"


def scaling_law_lines(result: Scaling) -> list[str]:
    """The laws in short, for a list below the table; empty where fewer than two points were measured."""
    return law_lines(result.laws, result.unit, every=False) if len(result.laws.points) > 1 else []


def scaling_sentence(result: Scaling) -> str:
    """What to see in the figure, in a sentence or two."""
    base, grown = result.baseline, [point for point in result.measured if not point.baseline]
    if base.throughput is None:
        state = base.result.status.replace("_", " ")
        return f"The baseline, {plural(base.ranks, 'rank')}, has no figure ({state}), so no speed-up is given."
    if not grown and any(point.throughput for point in result.points if not point.baseline):
        return (
            f"No block has a throughput above 0 of both the baseline, {plural(base.ranks, 'rank')}, and another point, "
            "so there is no speed-up to give."
        )
    if not grown:
        return f"Only the baseline, {plural(base.ranks, 'rank')}, has a figure, so there is no speed-up to give."
    last = grown[-1]
    assert last.speedup is not None and last.efficiency is not None
    fixed = "with the total work fixed" if result.kind == "strong" else "with the work of each rank fixed"
    verb = "gives" if last.ranks == 1 else "give"
    text = (
        f"{plural(last.ranks, 'rank')} {verb} {ratio_text(last.speedup, 'pair')} the throughput of "
        f"{plural(base.ranks, 'rank')} {fixed}: {percent(last.efficiency.value)} of linear."
    )
    if last.ranks > base.ranks and last.speedup.bounds[1] < 1 - ROUNDING:
        text += " More ranks make it slower."
    tail = next((point for point in grown if point.efficiency and point.efficiency.value < 0.8), None)
    if tail is not None and tail is not last:
        text += f" Efficiency is first below 80 % at {plural(tail.ranks, 'rank')}."
    # Fewer ranks than the baseline do more each as a rule: that is no speed-up above linear.
    more = [(point.ranks, point.efficiency) for point in grown if point.ranks > base.ranks]
    aloud = more_than_linear(more, result.kind, confidence=base.result.confidence)
    marked = changed_text([(point.ranks, point.changed) for point in grown])
    return " ".join([text, *(sentence for sentence in (*aloud, marked) if sentence)])
