"""Tables of the whole study: resources, failures, and outcomes of the repeats.

Each function takes the study as read and gives a `Table`, or None where there is nothing to show.
`reports.provenance` has those that say where the figures come from.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from configs.common.printable import shortened
from configs.plans.passes import passes_of
from configs.records.record import MeasuringPass, Status, place_set_aside
from reports.reading.load import MISSING, CellResult, StudyResult
from reports.reading.read import Reading
from reports.text import UNKNOWN, Table, code, count, escaped, joined, mebibytes, number, percent, plural

NOISE_LIMIT = 0.10
"""Share of the machine's CPU taken by others from which a cell's figures are called into question."""

MOST_ROWS = 200
"""A longer table is no help to a reader; all of it is in cells.csv and records.parquet."""

_LONG_ROW = 5
_FAILURES_LISTED = "records.parquet and plan.json"
"""Repeats without a record, and points that this version cannot measure, are in the plan alone."""


def first_rows(table: Table, total: int | None = None, where: str = "cells.csv", max_rows: int = MOST_ROWS) -> Table:
    """The first rows, and where there are more a last one that says where all are.

    total: how many rows there would be, where `table` was not given all of them. A table that was cut before goes on
    naming the place that has all.
    """
    rows = table.rows[:-1] if table.left_out else table.rows
    if len(rows) <= max_rows and table.left_out:
        return table
    more = (len(rows) + table.left_out if total is None else total) - max_rows
    if more <= 0:
        return table
    place = table.elsewhere or where
    last = (f"… and {more:,} more: all of them are in {place}", *[""] * (len(table.columns) - 1))
    return Table(table.columns, (*rows[:max_rows], last), table.text_columns, more, place)


def resources_table(study: StudyResult) -> Table | None:
    """Memory of the untimed pass, CPU use, loading time: one row for each cell that has any of it."""
    rows: list[tuple[str, ...]] = []
    for result in study.cells.values():
        if (result.completed or result.memory) and len(rows) < MOST_ROWS:
            row = _resources(result)
            rows += [row] if any(value != UNKNOWN for value in row[2:]) else []
    if not rows:
        return None
    columns = (
        "model",
        "cell",
        "peak memory, MiB, largest rank",
        "peak, all ranks",
        "growth over imports, all ranks",
        "peak while loading, largest rank",
        "weights, MiB a rank",
        "measurement, s",
        "own cores in use",
        "GPU in use",
        "CPU taken by others, most",
        "preprocessing, ms",
        "read from storage, MiB",
        "written, MiB",
        "threads a rank",
    )
    total = sum(1 for result in study.cells.values() if result.completed or result.memory)
    table = Table(columns, tuple(rows), text_columns=2).without_empty_columns()
    return first_rows(table, total if len(rows) == MOST_ROWS else None)


def _resources(result: CellResult) -> tuple[str, ...]:
    measurements = list(result.completed.values())
    peaks = result.peak_by_rank()
    growth = result.memory.numbers_by_rank("memory_growth_bytes") if result.memory and peaks else []
    loading = result.memory.numbers_by_rank("load_peak_memory_bytes") if result.memory and peaks else []
    weights, preprocessing = (
        max_over_ranks(measurements, "weights_bytes"),
        max_over_ranks(measurements, "preprocess_seconds"),
    )
    return (
        escaped(result.model),
        escaped(result.name),
        mebibytes(max(peaks) if peaks else None),
        mebibytes(result.peak_bytes),
        mebibytes(sum(growth) if growth else None),
        mebibytes(max(loading) if loading else None),
        mebibytes(weights),
        number(max_over_ranks(measurements, "measurement_seconds")),
        percent(cpu_use(result)),
        percent(gpu_use(measurements)),
        percent(others_share(result)),
        number(None if preprocessing is None else preprocessing * 1000),
        mebibytes(sum_over_ranks(measurements, "io_read_bytes")),
        mebibytes(sum_over_ranks(measurements, "io_write_bytes")),
        count(max_over_ranks(measurements, "threads")),
    )


def max_over_ranks(measurements: list[Reading], figure: str) -> float | None:
    """Median over repeats of a figure's largest value over ranks."""
    largest = [max(values) for measurement in measurements if (values := measurement.numbers_by_rank(figure))]
    return median(largest) if largest else None


def sum_over_ranks(measurements: list[Reading], figure: str) -> float | None:
    """Median over repeats of a figure summed over the ranks; of repeats in which every rank has it."""
    sums = [
        sum(values)
        for measurement in measurements
        if len(values := measurement.numbers_by_rank(figure)) == len(measurement.record.hosts)
    ]
    return median(sums) if sums else None


def gpu_use(measurements: list[Reading]) -> float | None:
    """Share of a measurement in which a kernel ran (NVML): mean over ranks, median over repeats."""
    means = [fmean(values) for measurement in measurements if (values := measurement.numbers_by_rank("gpu_busy_share"))]
    return median(means) if means else None


def cpu_use(result: CellResult) -> float | None:
    """CPU seconds of all ranks over the seconds that their cores had, median over repeats.

    A server and its load generator are processes beside the one that measures; where theirs are unknown, the share is.
    """
    shares = []
    for measurement in result.completed.values():
        busy, seconds = measurement.numbers_by_rank("cpu_seconds"), measurement.numbers_by_rank("measurement_seconds")
        if result.kind.starts_server:
            served = measurement.numbers_by_rank("children_cpu_seconds")
            busy = [*busy, *served] if served else []
        cores = result.cell.layout.ranks * result.cell.cores_per_rank
        if busy and seconds and max(seconds) > 0:
            shares.append(sum(busy) / (max(seconds) * cores))
    return median(shares) if shares else None


def others_shares(result: CellResult) -> list[float]:
    """The shares of the machine's CPU that other processes took during the cell's repeats, where known."""
    shares = [measurement.figure("others_cpu_share") for measurement in result.completed.values()]
    return [share for share in shares if share is not None]


def others_share(result: CellResult) -> float | None:
    """The largest of them."""
    return max(others_shares(result), default=None)


def noise_warning(study: StudyResult) -> str | None:
    """A line naming the cells during which others took much of the machine."""
    noisy = [(share, result) for result in study.cells.values() if (share := others_share(result)) is not None]
    noisy = [(share, result) for share, result in noisy if share > NOISE_LIMIT]
    if not noisy:
        return None
    worst_share, worst = max(noisy, key=lambda pair: pair[0])
    which, whose, them = ("; most during", "Their", "them") if len(noisy) > 1 else (",", "Its", "it")
    return (
        f"Other processes took more than {percent(NOISE_LIMIT, 2)} of the machine's CPU during "
        f"{plural(len(noisy), 'cell')}{which} {worst.title} ({percent(worst_share)}). "
        f"{whose} figures are of a machine that was busy with something else: measure {them} again on a quiet one."
    )


def failures_table(study: StudyResult) -> Table | None:
    """Every repeat without a figure: how it ended, why, and where to read more; then what this version has not."""
    damaged = damaged_records(study)
    rows = [
        row for result in study.cells.values() for row in _failures(result, passes_of(study.plan, result.key), damaged)
    ]
    for experiment in study.plan.experiments:
        for item in experiment.refused:
            name = (escaped(experiment.model or UNKNOWN), escaped(f"{experiment.name}: {item.label}"))
            rows.append((*name, "all", "unsupported", "0", escaped(item.reason), UNKNOWN, UNKNOWN))
    for model in study.plan.unusable:
        rows.append((escaped(model.name), "all", "all", "unsupported", "0", escaped(model.reason), UNKNOWN, UNKNOWN))
    columns = ("model", "cell", "repeat", "state", "attempts", "why", "log", "record")
    return first_rows(Table(columns, tuple(rows), text_columns=len(columns)), where=_FAILURES_LISTED) if rows else None


def unreadable_table(study: StudyResult) -> Table | None:
    """Every damaged file that the report leaves out, and why."""
    rows = tuple((code(item.path), escaped(item.reason)) for item in study.unreadable)
    return first_rows(Table(("file", "why"), rows, text_columns=2), where="the JSON form") if rows else None


def damaged_records(study: StudyResult) -> dict[tuple[str, str], int]:
    """The last attempt of each measurement of which no record can be read, by key and name as the table has it: those
    that are damaged, and those that a run has set aside."""
    damaged = [f"{Path(item.path).parent.name}--{Path(item.path).name}" for item in study.unreadable]
    places = [place_set_aside(name) for name in (*damaged, *(Path(path).name for path in study.set_aside))]
    found: dict[tuple[str, str], int] = {}
    for key, measuring_pass, repeat, attempt in filter(None, places):
        result = study.cells.get(key)
        if result is None:
            continue
        lacks = measuring_pass != "timed" and result.passes[measuring_pass] is None
        if lacks and measuring_pass not in result.elsewhere:
            name = f"{measuring_pass} pass"
        elif measuring_pass == "timed" and repeat in result.missing:
            name = str(repeat)
        else:
            continue  # another attempt decides, or the plan has no such repeat any more
        found[key, name] = max(attempt, found.get((key, name), 0))
    return found


def _failures(
    result: CellResult, passes: tuple[MeasuringPass, ...], damaged: Mapping[tuple[str, str], int]
) -> list[tuple[str, ...]]:
    failed = [
        (str(repeat), measurement) for repeat, measurement in result.measurements.items() if not measurement.completed
    ]
    for measuring_pass, untimed in result.passes.items():
        if untimed is not None and not untimed.completed:
            failed.append((f"{measuring_pass} pass", untimed))
    rows: list[tuple[str, ...]] = []
    for repeat, measurement in failed:
        failure = measurement.record.failure
        rows.append(
            (
                escaped(result.model),
                escaped(result.name),
                repeat,
                measurement.record.status.value.replace("_", " "),
                str(measurement.record.attempt),
                escaped(shortened(failure.message, 300)) if failure else UNKNOWN,
                code(failure.log) if failure and failure.log else UNKNOWN,
                code(measurement.path),
            )
        )
    missing = [str(repeat) for repeat in result.missing]
    lacking = [name for name in passes if result.passes[name] is None and name not in result.elsewhere]
    missing += [f"{name} pass" for name in lacking if result.completed]
    unread = [name for name in missing if (result.key, name) in damaged]
    name = (escaped(result.model), escaped(result.name))
    why = "no attempt has left a record"
    if unread:
        attempts = max(damaged[result.key, each] for each in unread)
        told = f"{why} that can be read"
        rows.append((*name, joined(_in_rows(unread)), MISSING, str(attempts), told, UNKNOWN, UNKNOWN))
    if left := [each for each in missing if (result.key, each) not in damaged]:
        rows.append((*name, joined(_in_rows(left)), MISSING, "0", why, UNKNOWN, UNKNOWN))
    return rows


def _in_rows(names: Sequence[str]) -> list[str]:
    """The names, with _LONG_ROW and more repeats that follow each other as one: `0 to 99`."""
    found: list[list[str]] = []
    for name in names:
        follows = found and name.isdecimal() and found[-1][-1].isdecimal() and int(name) == int(found[-1][-1]) + 1
        if follows:
            found[-1].append(name)
        else:
            found.append([name])
    rows = ([f"{row[0]} to {row[-1]}"] if len(row) >= _LONG_ROW else row for row in found)
    return [name for row in rows for name in row]


def status_counts(study: StudyResult) -> dict[str, int]:
    """How many planned repeats ended in each way, on whatever device; `missing` are those without a record.

    Then passes that left no figures of cells that were measured, as `memory pass failed`.
    """
    counts: dict[str, int] = {}
    for result in study.cells.values():
        for measurement in result.measurements.values():
            name = measurement.record.status.value
            counts[name] = counts.get(name, 0) + 1
        if elsewhere := sum(isinstance(repeat, int) for repeat in result.elsewhere):
            counts[Status.COMPLETED.value] = counts.get(Status.COMPLETED.value, 0) + elsewhere
        if result.missing:
            counts[MISSING] = counts.get(MISSING, 0) + len(result.missing)
    order = [*(status.value for status in Status), MISSING]
    return {name: counts[name] for name in order if name in counts} | lost_passes(study)


def lost_passes(study: StudyResult) -> dict[str, int]:
    """Cells by planned pass that has left no figures and how that ended, of those that were measured:
    `memory pass missing`."""
    found = Counter(
        f"{name} pass {result.pass_status(name)}"
        for result in study.cells.values()
        for name in passes_of(study.plan, result.key)
        if result.completed and name not in result.elsewhere and result.pass_status(name) != Status.COMPLETED.value
    )
    return dict(found)


def leftover_sentence(study: StudyResult) -> str | None:
    """Records that lie in the folder and are no part of this plan; earlier attempts are not meant."""
    others = [reading for reading in study.readings if not _planned(study, reading)]
    if not others:
        return None
    keys = {reading.record.key for reading in others}
    return (
        f"{plural(len(others), 'record')} of {plural(len(keys), 'cell')} in this folder "
        "are no part of this plan and are left out."
    )


def _planned(study: StudyResult, reading: Reading) -> bool:
    return reading.record.repeat < study.plan.repeats.get(reading.record.key, 0)
