"""Read the records of a cell and reduce each to rates, steady state and percentiles.

    read = read_cell(CellFolder(run.records / key, planned), run.folder)
    read.readings        # one for each record: status, figures, and of those that decide the rates
    read.unreadable      # the files that hold no record, and why
    read.pooled          # {"request": Pooled(5120 samples, p50, p90, p99), ...} over completed repeats

A cell's samples are in memory only while its folder is read. A completed attempt decides over failed
ones, otherwise the last attempt does. A damaged record counts as none: another attempt decides, or the repeat is
missing; `rankwise run` sets it aside.
"""

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from configs.common.arrays import Floats
from configs.common.base import SCHEMA_VERSION
from configs.common.files.reading import parse_model, read_bytes, reason_of
from configs.common.printable import printable
from configs.records.rates import MeasurementSamples, Rates, rates_of, whole_figures
from configs.records.record import (
    Figure,
    Record,
    SchemaError,
    Status,
    check_key,
    check_place,
    read_record,
)
from configs.records.samples import DamagedSamplesError, columns_named, read_archive
from configs.spec.cell import Cell
from configs.workloads import descriptor_of
from reports.numbers.percentiles import P99, Pooled, pool, sorted_quantiles
from reports.numbers.steady import Steady, steady

Floats32 = np.ndarray[tuple[int], np.dtype[np.float32]]
MAX_SAMPLES = 64
_LARGEST = 1e100
_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e9
"""Of all passes of a measurement: a nanosecond to thirty years."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One record as the report sees it. `path` is relative to the run folder.

    `p99_seconds` is the measurement's own 99th percentile of each kind of latency, whatever its number of samples.
    """

    record: Record
    path: str
    used: bool
    rates: Rates | None = None
    steady: Steady | None = None
    p99_seconds: Mapping[str, float] = field(default_factory=dict)
    sample_seconds: Floats32 | None = field(default=None, compare=False)
    """At most MAX_SAMPLES of its latencies, evenly chosen by rank: what a page shows of many records."""

    @property
    def completed(self) -> bool:
        return self.record.status is Status.COMPLETED

    def by_rank(self, figure: str) -> list[Figure]:
        """A figure's value on each rank; the same value for all where ranks did not differ."""
        record = self.record
        return record.rank_figures.get(figure, [record.figures.get(figure)] * record.cell.layout.ranks)

    def numbers_by_rank(self, figure: str) -> list[float]:
        """The values that are numbers."""
        if figure not in self.record.rank_figures:
            value = self.record.figures.get(figure)
            return [float(value)] * self.record.cell.layout.ranks if is_number(value) else []
        return [float(value) for value in self.by_rank(figure) if is_number(value)]

    def figure(self, name: str) -> float | None:
        """A figure of the whole job; None where it is unknown. Of one that ranks have, the first known."""
        if name not in self.record.rank_figures:
            value = self.record.figures.get(name)
            return float(value) if is_number(value) else None
        values = self.numbers_by_rank(name)
        return values[0] if values else None


def is_number(value: Figure) -> TypeGuard[int | float]:
    """Whether a figure is a number that can be one: sums and products of larger ones are none, and NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


@dataclass(frozen=True, slots=True)
class CellFolder:
    """The records of one cell: names of the files within the folder, and how many repeats the plan has."""

    folder: str
    names: tuple[str, ...]
    planned: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file of the run folder that is damaged and left out. `path` is relative to the run folder."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class CellReadings:
    """What a folder holds, in order of file names."""

    readings: tuple[Reading, ...]
    pooled: dict[str, Pooled]
    unreadable: tuple[Unreadable, ...] = ()


def cell_folders(records: Path, planned: Mapping[str, int]) -> list[CellFolder]:
    """The folders below `records`, in order. `planned`: key -> repeats of the plan."""
    if not records.is_dir():
        return []
    found = []
    with os.scandir(records) as folders:
        for folder in sorted(folders, key=lambda entry: entry.name):
            if folder.is_dir():
                names = tuple(sorted(name for name in os.listdir(folder.path) if name.endswith(".json")))
                found.append(CellFolder(folder.path, names, planned.get(folder.name, 0)))
    return found


def read_cell(source: CellFolder, run: Path) -> CellReadings:
    """Read a cell's records. Raises SchemaError for one of another version; damaged ones are listed."""
    found, damaged = _records(source)
    tries: dict[tuple[str, str, int], list[tuple[Record, Path]]] = defaultdict(list)
    for record, path in found:
        tries[record.key, record.measuring_pass, record.repeat].append((record, path))
    samples: dict[str, list[Floats]] = defaultdict(list)
    readings: dict[Path, Reading] = {}
    for group in tries.values():
        group.sort(key=lambda each: _precedence(each[0]), reverse=True)
        decided = group[0][0].repeat >= source.planned
        for record, path in group:
            relative = path.relative_to(run).as_posix()
            if decided:
                readings[path] = Reading(record, relative, False)
                continue
            try:
                readings[path] = decisive_reading(record, path, relative, samples)
            except DamagedSamplesError as error:
                damaged[path] = str(error)
                continue
            decided = True
    return CellReadings(
        tuple(readings[path] for _, path in found if path in readings),
        {kind: pool(parts) for kind, parts in samples.items()},
        tuple(unreadable(path, damaged[path], run) for path in sorted(damaged)),
    )


def unreadable(path: Path, reason: str, run: Path) -> Unreadable:
    """A damaged file, with what is wrong in one line; without the folders that all files of the run have in common."""
    told = reason.replace(f"{path}: ", "").replace(f"{run}/", "")
    return Unreadable(path.relative_to(run).as_posix(), printable(told, 300))


def _records(source: CellFolder) -> tuple[list[tuple[Record, Path]], dict[Path, str]]:
    """Every record of a folder, and what is damaged. Records of one cell share one `Cell`, half of their size."""
    found: list[tuple[Record, Path]] = []
    damaged: dict[Path, str] = {}
    cell: Cell | None = None
    folder = Path(source.folder)
    for name in source.names:
        path = folder / name
        try:
            record = _record(path)
            if record.cell == cell:
                record = record.model_copy(update={"cell": cell})
            else:
                check_key(record, path)
                cell = cell or record.cell
        except SchemaError:
            raise
        except FileNotFoundError:
            continue  # a run has set it aside since the folder was listed
        except (OSError, ValueError) as error:
            damaged[path] = reason_of(error)
        else:
            found.append((record, path))
    return found, damaged


def _record(path: Path) -> Record:
    """As `configs.records.record.read_record`, and in half its time for a record of today's schema."""
    try:
        record = parse_model(read_bytes(path), Record, str(path))
    except ValueError:
        return read_record(path)  # for an error that knows of schema versions
    if record.schema_version != SCHEMA_VERSION or "schema_version" not in record.model_fields_set:
        return read_record(path)
    check_place(record, path)
    return record


def _precedence(record: Record) -> tuple[bool, int]:
    return record.status is Status.COMPLETED, record.attempt


def decisive_reading(record: Record, path: Path, relative: str, seen: dict[str, list[Floats]]) -> Reading:
    """The reading of a record that decides; its latencies go to `seen`. Cells that keep answers may have none.

    Raises DamagedSamplesError: every column is read, with its checksum, because sections read the others later.
    """
    timed = record.measuring_pass == "timed"
    if record.status is not Status.COMPLETED or not (timed or record.num_columns):
        return Reading(record, relative, True)
    work = record.cell.workload
    samples_path = path.with_suffix(".npz")
    archive = read_archive(samples_path)
    if record.num_columns and len(archive) != record.num_columns:
        raise DamagedSamplesError(f"{samples_path}: {len(archive)} columns, expected {record.num_columns}")
    if not timed:
        return Reading(record, relative, True)
    samples = columns_named(archive, descriptor_of(work).columns, samples_path)
    if work.keeps_answers and not samples:
        return Reading(record, relative, True)
    try:
        measurement = MeasurementSamples(record.cell, samples)
        _check_seconds(measurement.series, measurement.walls)
        if measurement.walls.sum() < _LEAST_SECONDS:
            raise ValueError(f"samples: {measurement.series} sums to {float(measurement.walls.sum()):.3g} s")
        found = steady(measurement.walls)
        measurement = measurement.without_first(found.first)
        whole = whole_figures(record.cell, record.figures, record.rank_figures)
        rates, kinds = rates_of(measurement, whole), measurement.latencies()
        ordered = {kind: np.sort(values) for kind, values in kinds.items()}
        for kind, values in ordered.items():
            _check_ends(f"latencies of a {kind}", values)
    except (ValueError, ArithmeticError) as error:
        raise DamagedSamplesError(f"{samples_path}: {error}") from error
    p99 = {}
    for kind, values in kinds.items():
        p99[kind] = sorted_quantiles(ordered[kind], (P99,))[0]
        seen[kind].append(values)
    latency = descriptor_of(work).latency
    waited = latency.waited_for if latency is not None and latency.waited_for in kinds else next(iter(kinds), None)
    kept = None if waited is None else _thinned(ordered[waited])
    return Reading(record, relative, True, rates, found, p99, kept)


def _thinned(ordered: Floats) -> Floats32:
    """The smallest, the largest, and values at equal distances of rank between them."""
    thin: Floats32 = ordered[_places(len(ordered))].astype(np.float32)
    return thin


@lru_cache(maxsize=1024)
def _places(count: int) -> NDArray[np.intp]:
    return np.linspace(0, count - 1, min(count, MAX_SAMPLES)).round().astype(np.intp)


def _check_seconds(name: str, values: Floats) -> None:
    """Raises ValueError for times that no clock gives, which would end in a rate of infinity or nothing."""
    if not ((values >= 0) & (values < _MOST_SECONDS)).all():  # NaN is neither
        raise ValueError(f"samples: {name}: got a time that is negative, not finite or over {_MOST_SECONDS:.0e} s")


def _check_ends(name: str, ordered: Floats) -> None:
    """The same of values in order; NaN comes last."""
    _check_seconds(name, ordered[[0, -1]])
