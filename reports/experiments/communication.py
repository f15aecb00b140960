"""Collectives: time, algorithm and bus bandwidth over sizes, and the latency-bandwidth fit.

    result = communication(study, experiment)            # None where nothing was measured
    communication_table(result), links_table(result), communication_sentence(result)

Bandwidths follow nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md): of the algorithm, size by time; of the bus, that
times what an optimal algorithm moves through each rank's link for every byte of the size, so that it may be compared
with hardware, over operations and numbers of ranks. A call takes as long as on the slowest rank; a repeat's time is the
median of its samples; medians and intervals are over repeats.

The line is  seconds = latency + size / bandwidth,  fitted to each repeat by least squares of relative errors, so that
a small size counts as much as a large one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import get_args

import numpy as np

from configs.plans.plan import PlannedExperiment
from configs.records.rates import Column, by_rank
from configs.workloads.communication import Collective
from reports.numbers.statistics import Estimate, estimate
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading
from reports.tables import first_rows
from reports.text import Table, escaped, estimate_cell, estimate_text, number, percent

OPERATIONS: tuple[Collective, ...] = get_args(Collective)
CALL_COLUMNS = ("operation", "size_bytes", "call_seconds")
_LEAST_SIZES = 3
"""A line through two sizes misses none of them: it says nothing of whether there is a line."""

Times = Mapping[tuple[Collective, int], float]


@dataclass(frozen=True)
class FittedLine:
    """seconds = latency_seconds + bytes / bytes_per_second. `error` is the median share by which it misses."""

    latency_seconds: float
    bytes_per_second: float
    error: float


@dataclass(frozen=True)
class Timed:
    """One operation of one size, in seconds over repeats."""

    operation: Collective
    size_bytes: int
    seconds: Estimate


@dataclass(frozen=True)
class FittedLink:
    """One operation over all its sizes; estimates are over the lines of repeats."""

    operation: Collective
    sizes: tuple[int, int]
    latency_seconds: Estimate
    bytes_per_second: Estimate
    error: float


@dataclass(frozen=True)
class MeasuredCell:
    """One cell: a number of ranks and what connected them."""

    result: CellResult
    ranks: int
    transport: str
    timed: tuple[Timed, ...]
    links: tuple[FittedLink, ...]


def bus_factor(operation: Collective, ranks: int) -> float:
    """Bytes through a rank's link for every byte of the size, by an optimal algorithm."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation in ("all_gather", "reduce_scatter") else 1.0


def slowest_seconds(samples: Mapping[str, Column]) -> Times:
    """Median over samples of the slowest rank's time, of one measurement. Ranks without a part have no number there.

    A time that no clock gives (0, negative, not finite) is left out: it would be an infinite bandwidth, or no line.
    """
    ranks = by_rank(samples, "call_seconds")
    seconds = np.fmax.reduce(np.stack([np.asarray(rank, dtype=np.float64) for rank in ranks]))
    codes, sizes = by_rank(samples, "operation")[0], by_rank(samples, "size_bytes")[0]
    found: dict[tuple[Collective, int], float] = {}
    for code, size in sorted(set(zip(codes.tolist(), sizes.tolist(), strict=True))):
        middle = float(np.median(seconds[(codes == code) & (sizes == size)]))
        if 0 < middle < np.inf:
            found[OPERATIONS[code], size] = middle
    return found


def fit_line(points: Mapping[int, float]) -> FittedLine | None:
    """Through seconds by bytes; None for fewer than three sizes, or where time does not grow with them.

    A latency below 0, which noise may give, becomes 0 and the line is fitted again.
    """
    if len(points) < _LEAST_SIZES:
        return None
    sizes, seconds = np.array(list(points), dtype=np.float64), np.array(list(points.values()))
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    (latency, inverse), *_ = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)
    if latency < 0:
        latency, inverse = 0.0, float((rows[:, 1]).sum() / (rows[:, 1] ** 2).sum())
    if inverse <= 0:
        return None
    errors = np.abs(latency + sizes * inverse - seconds) / seconds
    return FittedLine(float(latency), float(1 / inverse), float(np.median(errors)))


def communication(study: StudyResult, experiment: PlannedExperiment) -> list[MeasuredCell] | None:
    """The points of the experiment that were measured, in its order; None where none was."""
    found = []
    for point in experiment.points:
        result = study.cells[point.cell]
        if result.completed:
            found.append(_measured(study, result))
    return found or None


def _measured(study: StudyResult, result: CellResult) -> MeasuredCell:
    repeats = [slowest_seconds(study.samples(measurement, CALL_COLUMNS)) for measurement in result.completed.values()]
    keys = sorted({key for times in repeats for key in times}, key=lambda key: (OPERATIONS.index(key[0]), key[1]))
    timed = []
    for operation, size in keys:
        seconds = estimate((times.get((operation, size)) for times in repeats), result.confidence)
        assert seconds is not None
        timed.append(Timed(operation, size, seconds))
    operations = list(dict.fromkeys(operation for operation, _ in keys))
    links = [link for operation in operations if (link := _link(operation, repeats, result)) is not None]
    transport = _transport(list(result.completed.values()))
    return MeasuredCell(result, result.cell.layout.ranks, transport, tuple(timed), tuple(links))


def _link(operation: Collective, repeats: Sequence[Times], result: CellResult) -> FittedLink | None:
    by_size = [{size: times[name, size] for name, size in times if name == operation} for times in repeats]
    lines = [line for points in by_size if (line := fit_line(points)) is not None]
    latency = estimate((line.latency_seconds for line in lines), result.confidence)
    bandwidth = estimate((line.bytes_per_second for line in lines), result.confidence)
    if latency is None or bandwidth is None:
        return None
    sizes = [size for points in by_size for size in points]
    return FittedLink(operation, (min(sizes), max(sizes)), latency, bandwidth, median(line.error for line in lines))


def _transport(measurements: list[Reading]) -> str:
    """What connected the ranks; several where repeats differ."""
    found = {
        str(value) for measurement in measurements for value in measurement.by_rank("transport") if value is not None
    }
    return " or ".join(sorted(found)) or "unknown"


def communication_table(result: Sequence[MeasuredCell]) -> Table | None:
    """One row for each operation and size; None where nothing was measured."""
    columns = ("operation", "transport", "ranks", "size", "time, us", "algorithm, GB/s", "bus, GB/s", "repeats")
    rows = []
    for point in result:
        for timed in point.timed:
            speed = timed.size_bytes / timed.seconds.median / 1e9
            rows.append(
                (
                    _title(timed.operation),
                    escaped(point.transport),
                    str(point.ranks),
                    size_text(timed.size_bytes),
                    estimate_cell(timed.seconds, 1e6),
                    number(speed),
                    number(speed * bus_factor(timed.operation, point.ranks)),
                    str(timed.seconds.count),
                )
            )
    return first_rows(Table(columns, tuple(rows), text_columns=2), where="records.parquet") if rows else None


def links_table(result: Sequence[MeasuredCell]) -> Table | None:
    """The fitted lines, one row for each operation; None where no operation has enough sizes."""
    columns = (
        "operation",
        "transport",
        "ranks",
        "sizes",
        "latency, us",
        "algorithm bandwidth, GB/s",
        "bus bandwidth, GB/s",
        "the line misses by, median",
    )
    rows = []
    for point in result:
        for link in point.links:
            bus = link.bytes_per_second.scaled(bus_factor(link.operation, point.ranks))
            rows.append(
                (
                    _title(link.operation),
                    escaped(point.transport),
                    str(point.ranks),
                    " to ".join(size_text(size) for size in link.sizes),
                    estimate_cell(link.latency_seconds, 1e6),
                    estimate_cell(link.bytes_per_second, 1e-9),
                    estimate_cell(bus, 1e-9),
                    percent(link.error, 2),
                )
            )
    return first_rows(Table(columns, tuple(rows), text_columns=2)) if rows else None


def communication_sentence(result: Sequence[MeasuredCell]) -> str:
    """The quickest sum over each transport, and where the bus is used best."""
    sentences = []
    for point in result:
        if not point.timed:
            continue
        first = next((timed for timed in point.timed if timed.operation == "all_reduce"), point.timed[0])
        best = max(point.timed, key=lambda timed: _bus(timed, point.ranks))
        sentences.append(
            f"Over {point.transport}, {_title(first.operation)} of {size_text(first.size_bytes)} among {point.ranks} "
            f"ranks takes {estimate_text(first.seconds, 'us', 1e6)}; the largest bus bandwidth is "
            f"{number(_bus(best, point.ranks) / 1e9)} GB/s, {_title(best.operation)} of {size_text(best.size_bytes)}."
        )
    return " ".join(sentences) or "No operation has a figure."


def _bus(timed: Timed, ranks: int) -> float:
    return timed.size_bytes / timed.seconds.median * bus_factor(timed.operation, ranks)


def _title(operation: Collective) -> str:
    return operation.replace("_", "-")


def size_text(size_bytes: int) -> str:
    """`16 KiB` where that is exact, else bytes."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit and size_bytes % unit == 0:
            return f"{size_bytes // unit:,} {name}"
    return f"{size_bytes:,} B"
