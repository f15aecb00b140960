"""Read the records of a cell and reduce each to rates, steady state and percentiles.

    read = read_cell(CellFolder(run.records / key, planned), run.folder)
    read.readings        # one for each record: status, figures, and of those that decide the rates
    read.pooled          # {"request": Pooled(5120 samples, p50, p90, p99), ...} over completed repeats

A cell's samples are in memory only while its folder is read. A completed attempt decides over failed
ones, otherwise the last attempt does.
"""

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from configs.common.base import SCHEMA_VERSION
from configs.plans.plan import Plan
from configs.plans.rates import Floats, MeasurementSamples, Rates, rates_of, whole_figures
from configs.plans.record import Figure, Record, SchemaError, Status, check_schema, read_json_object, read_record
from configs.spec.cell import Cell
from configs.workloads import descriptor_of
from reports.numbers.percentiles import P99, Pooled, pool, quantiles
from reports.numbers.steady import Steady, steady
from reports.reading.samples import read_samples


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
            return [float(value)] * self.record.cell.layout.ranks if _is_number(value) else []
        return [float(value) for value in self.by_rank(figure) if _is_number(value)]

    def figure(self, name: str) -> float | None:
        """A figure of the whole job; None where it is unknown."""
        values = self.numbers_by_rank(name)
        return values[0] if values else None


def _is_number(value: Figure) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class CellFolder:
    """The records of one cell: names of the files within the folder, and how many repeats the plan has."""

    folder: str
    names: tuple[str, ...]
    planned: int


@dataclass(frozen=True, slots=True)
class CellReadings:
    """What a folder holds, in order of file names."""

    readings: tuple[Reading, ...]
    pooled: dict[str, Pooled]


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
    """Read a cell's records. Raises SchemaError, or ValueError naming the file that cannot be read."""
    found = _records(source)
    tries: dict[tuple[str, str, int], list[Record]] = defaultdict(list)
    for record, _ in found:
        tries[record.key, record.measuring_pass, record.repeat].append(record)
    deciding = {id(max(group, key=_precedence)) for group in tries.values()}
    samples: dict[str, list[Floats]] = defaultdict(list)
    readings = []
    for record, path in found:
        used = id(record) in deciding and record.repeat < source.planned
        relative = path.relative_to(run).as_posix()
        readings.append(_measured(record, path, relative, samples) if used else Reading(record, relative, used))
    return CellReadings(tuple(readings), {kind: pool(parts) for kind, parts in samples.items()})


def read_plan(path: Path) -> Plan:
    """Load `plan.json`. Raises as `configs.plans.record.read_record`."""
    return Plan.model_validate(check_schema(read_json_object(path), path))


def _records(source: CellFolder) -> list[tuple[Record, Path]]:
    """Every record of a folder. Records of one cell share one `Cell`, which is half of their size."""
    found: list[tuple[Record, Path]] = []
    cell: Cell | None = None
    folder = Path(source.folder)
    for name in source.names:
        path = folder / name
        record = _record(path)
        if cell is None:
            cell = record.cell
        elif record.cell == cell:
            record = record.model_copy(update={"cell": cell})
        found.append((record, path))
    return found


def _record(path: Path) -> Record:
    """As `configs.plans.record.read_record`, and in half its time for a record of today's schema."""
    try:
        record = Record.model_validate_json(path.read_bytes())
        if record.schema_version == SCHEMA_VERSION and "schema_version" in record.model_fields_set:
            return record
    except ValueError:
        pass  # read again below, for an error that names the file
    try:
        return read_record(path)
    except SchemaError:
        raise
    except ValueError as error:
        raise error if str(path) in str(error) else ValueError(f"{path}: not a record ({error})") from error


def _precedence(record: Record) -> tuple[bool, int]:
    return record.status is Status.COMPLETED, record.attempt


def _measured(record: Record, path: Path, relative: str, seen: dict[str, list[Floats]]) -> Reading:
    """The reading of a record that decides; its latencies go to `seen`. Cells that keep answers may have none."""
    if record.status is not Status.COMPLETED or record.measuring_pass != "timed":
        return Reading(record, relative, True)
    work = record.cell.workload
    samples_path = path.with_suffix(".npz")
    samples = read_samples(samples_path, descriptor_of(work).columns)
    if work.keeps_answers and not samples:
        return Reading(record, relative, True)
    try:
        measurement = MeasurementSamples(record.cell, samples)
        found = steady(measurement.walls)
        measurement = measurement.without_first(found.first)
        whole = whole_figures(record.cell, record.figures, record.rank_figures)
        rates, kinds = rates_of(measurement, whole), measurement.latencies()
    except ValueError as error:
        raise ValueError(f"{samples_path}: {error}") from error
    p99 = {}
    for kind, values in kinds.items():
        p99[kind] = quantiles(values, (P99,))[0]
        seen[kind].append(values)
    return Reading(record, relative, True, rates, found, p99)
