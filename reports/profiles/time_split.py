"""Time split of a pass over the world size.

    result = time_split(study, experiment)          # None where no point was measured
    time_split_table(result), time_split_sentence(result)
    draw_time_split(figure, result)                 # reports.plots.experiments.time_split

Means over ranks, passes and repeats: means, because parts must sum to the whole, which medians do not.
A training step times what it waits for communication itself, where that can be seen (on CPUs). Elsewhere communication
inside a step (or decoding) is part of it; how much of it only a profile pass tells (`reports.profiles.profiled`);
without one it is unknown, and not drawn as 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from configs.plans.plan import PlannedExperiment
from reports.reading.load import CellResult, StudyResult
from reports.tables import first_rows, max_over_ranks
from reports.text import UNKNOWN, Table, joined, number, percent, plural

PARTS = {
    "prefill_seconds": "prefill",
    "decode_seconds": "decode",
    "data_seconds": "data",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "exposed_communication_seconds": "exposed communication",
    "optimizer_seconds": "optimizer",
    "busy_seconds": "own work",
    "other_seconds": "other",
    "waiting_seconds": "waiting for the slowest rank",
}
"""Field of `configs.records.rates.Rates` -> its name, from the beginning of a pass to its end."""

_EXPOSED = PARTS["exposed_communication_seconds"]
UNKNOWN_PART = "Communication exposed inside the ranks' own time was not measured: its share is unknown."


@dataclass(frozen=True)
class SplitPoint:
    """One number of ranks. `parts`: name -> mean seconds of a pass; empty where it was not measured."""

    ranks: int
    baseline: bool
    result: CellResult
    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Mean wall time of a pass or step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class TimeSplit:
    """The parts of a pass (or step) over the ranks, in order of ranks."""

    unit: str
    points: tuple[SplitPoint, ...]

    @property
    def measured(self) -> list[SplitPoint]:
        return [point for point in self.points if point.seconds > 0]

    @property
    def names(self) -> list[str]:
        """The parts that some point has, in the order of a pass."""
        return [name for name in PARTS.values() if any(name in point.parts for point in self.points)]


def time_split(study: StudyResult, experiment: PlannedExperiment) -> TimeSplit | None:
    """The points of a scaling experiment by ranks; None where none has a figure."""
    points = []
    for point in experiment.points:
        result = study.cells[point.cell]
        points.append(SplitPoint(result.cell.layout.ranks, point.baseline, result, _parts(result)))
    points.sort(key=lambda point: point.ranks)
    if not points:
        return None
    found = TimeSplit(points[0].result.kind.pass_name, tuple(points))
    return found if found.measured else None


def _parts(result: CellResult) -> dict[str, float]:
    """Mean over the completed repeats; each repeat has all parts of its workload or none."""
    found = {}
    for field, name in PARTS.items():
        values = result.values(field).values()
        if values:
            found[name] = fmean(values)
    return found


def time_split_table(result: TimeSplit) -> Table:
    """One row for each number of ranks: milliseconds and share of each part, and what lies outside of a pass."""
    columns = (
        "ranks",
        f"{result.unit}, ms, mean",
        *(f"{name}, ms (share)" for name in result.names),
        "communication",
        "outside: preparing inputs, ms",
        "outside: loading, s",
    )
    return first_rows(Table(columns, tuple(_row(result, point) for point in result.points)).without_empty_columns())


def _row(result: TimeSplit, point: SplitPoint) -> tuple[str, ...]:
    measurements = list(point.result.completed.values())
    preparing, loading = (max_over_ranks(measurements, name) for name in ("preprocess_seconds", "load_seconds"))
    whole = point.seconds
    shares = [
        f"{number(point.parts[name] * 1000)} ({percent(point.parts[name] / whole, 2)})"
        if name in point.parts and whole > 0
        else UNKNOWN
        for name in result.names
    ]
    return (
        f"{point.ranks}{' (baseline)' if point.baseline else ''}",
        number(whole * 1000) if whole > 0 else UNKNOWN,
        *shares,
        _communication(point),
        number(None if preparing is None else preparing * 1000),
        number(loading),
    )


def _communication(point: SplitPoint) -> str:
    """`41.2 %, 38.0 % exposed`, of the recorded pass."""
    if point.ranks == 1:
        return "none: one rank"
    shares = _profiled(point)
    if shares:
        return f"{percent(shares[0])}, {percent(shares[1])} exposed"
    return "timed: see exposed communication" if _EXPOSED in point.parts else "unknown"


def _profiled(point: SplitPoint) -> tuple[float, float] | None:
    """Share of communication and of exposed communication, means over ranks; None without a profile."""
    profile = point.result.profile
    if profile is None or not profile.completed:
        return None
    total, exposed = map(profile.numbers_by_rank, ("communication_share", "exposed_communication_share"))
    return (fmean(total), fmean(exposed)) if total and exposed else None


def exposed_clause(result: TimeSplit) -> str | None:
    """`exposed communication takes 4.0 % of a pass at 2 ranks and 19 % at 16`; None where it is not known."""
    shares = [(point.ranks, share) for point in result.points if (share := _exposed_share(point)) is not None]
    if not shares:
        return None
    (fewest, first), (most, last) = shares[0], shares[-1]
    grown = "" if fewest == most else f" and {percent(last, 2)} at {most:,}"
    return f"exposed communication takes {percent(first, 2)} of a {result.unit} at {plural(fewest, 'rank')}{grown}"


def _exposed_share(point: SplitPoint) -> float | None:
    """As timed, else as profiled; None for one rank, which has none to wait for, and where neither says."""
    if point.ranks == 1:
        return None
    if _EXPOSED in point.parts and point.seconds > 0:
        return point.parts[_EXPOSED] / point.seconds
    shares = _profiled(point)
    return None if shares is None else shares[1]


def time_split_sentence(result: TimeSplit) -> str:
    """The largest part, what waiting takes as ranks grow, and what is not known."""
    first, last = result.measured[0], result.measured[-1]
    largest = max(last.parts, key=lambda name: last.parts[name])
    text = (
        f"At {plural(last.ranks, 'rank')} the largest part of a {result.unit} is {largest} "
        f"({percent(last.parts[largest] / last.seconds, 2)} of {number(last.seconds * 1000)} ms)"
    )
    waiting = PARTS["waiting_seconds"]
    if last.ranks > 1 and waiting in last.parts and waiting != largest:
        text += f"; waiting for the slowest rank takes {percent(last.parts[waiting] / last.seconds, 2)}"
        if first.ranks != last.ranks and first.ranks > 1:
            text += f", {percent(first.parts.get(waiting, 0.0) / first.seconds, 2)} at {plural(first.ranks, 'rank')}"
    text += "."
    shares = _profiled(last) if last.ranks > 1 and _EXPOSED not in last.parts else None
    if shares:
        text += (
            f" Within these parts communication takes {percent(shares[0])} of the recorded pass, waiting for other "
            f"ranks in it included; {percent(shares[1])} of the pass is exposed."
        )
    lost = [plural(point.ranks, "rank") for point in result.points if point.seconds <= 0]
    if lost:
        text += f" Not measured: {joined(lost)}."
    unknown = any(
        point.ranks > 1 and _profiled(point) is None and _EXPOSED not in point.parts for point in result.points
    )
    return f"{text} {UNKNOWN_PART}" if unknown else text
