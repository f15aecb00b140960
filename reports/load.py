"""Read a run folder: the plan, every record, and for each repeat the attempt that decides.

    study = load_study(RunPaths(folder))

A completed attempt decides over failed ones, otherwise the last attempt does. Samples are reduced to
rates as they are read, so that a thousand records fit in little memory.
"""

import json
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from configs.cell import Cell, GenerateWorkload
from configs.paths import RunPaths
from configs.plan import Plan, PlannedExperiment, PlannedModel
from configs.rates import RATE_COLUMNS, Column, Rates, visit_rates
from configs.record import Figure, Record, Status, migrate, read_json_object, read_record
from reports.statistics import Estimate, estimate

MISSING = "missing"
"""Stands where a repeat has left no record at all."""


@dataclass(frozen=True)
class Reading:
    """One record as the report sees it. `path` is relative to the run folder."""

    record: Record
    path: str
    used: bool
    rates: Rates | None = None

    @property
    def completed(self) -> bool:
        return self.record.status is Status.COMPLETED

    def by_rank(self, figure: str) -> list[Figure]:
        """A figure's value on each rank; the same value for all where ranks did not differ."""
        record = self.record
        return record.rank_figures.get(figure, [record.figures.get(figure)] * record.cell.layout.ranks)

    def numbers_by_rank(self, figure: str) -> list[float]:
        """The values that are numbers."""
        values = self.by_rank(figure)
        return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]

    def figure(self, name: str) -> float | None:
        """A figure of the whole job; None where it is unknown."""
        values = self.numbers_by_rank(name)
        return values[0] if values else None


@dataclass(frozen=True)
class CellResult:
    """What is known of one cell: for each repeat the record that decides."""

    key: str
    cell: Cell
    name: str
    model: str
    planned: int
    visits: dict[int, Reading]
    memory: Reading | None

    @cached_property
    def completed(self) -> dict[int, Reading]:
        """Repeats that were measured."""
        return {repeat: visit for repeat, visit in self.visits.items() if visit.completed}

    def values(self, figure: str) -> dict[int, float]:
        """One field of `Rates` by repeat, where it is known."""
        found = {repeat: getattr(visit.rates, figure, None) for repeat, visit in self.completed.items()}
        return {repeat: value for repeat, value in found.items() if value is not None}

    def estimate(self, figure: str) -> Estimate | None:
        """Median and range over the repeats of one field of `Rates`."""
        return estimate(self.values(figure).values())

    @property
    def title(self) -> str:
        """The cell with its model, where it has one."""
        return self.name if self.cell.model is None else f"{self.model}, {self.name}"

    @property
    def unit(self) -> str:
        """Unit of `Rates.throughput` for this cell."""
        return "items/s" if self.cell.workload.kind == "noop" else "tokens/s"

    @property
    def compared(self) -> bool:
        """Whether its speed may be compared: keeping answers costs time, so those cells are left out."""
        return not (isinstance(self.cell.workload, GenerateWorkload) and self.cell.workload.answers)

    @property
    def status(self) -> str:
        """`completed` where at least one repeat is; else how the last repeat with a record ended; else `missing`."""
        if self.completed:
            return Status.COMPLETED.value
        if not self.visits:
            return MISSING
        return self.visits[max(self.visits)].record.status.value

    def peak_by_rank(self) -> list[float]:
        """Peak memory of each rank in the untimed pass, in bytes; empty where it is unknown."""
        if self.memory is None or not self.memory.completed:
            return []
        return self.memory.numbers_by_rank("peak_memory_bytes")

    @property
    def peak_bytes(self) -> float | None:
        """Peak memory summed over the ranks: what the machine must have."""
        peaks = self.peak_by_rank()
        return sum(peaks) if peaks else None


@dataclass(frozen=True)
class StudyResult:
    """A run folder, read."""

    folder: Path
    plan: Plan
    cells: dict[str, CellResult]
    readings: tuple[Reading, ...]
    environments: dict[str, dict[str, Any] | None]

    def points(self, experiment: PlannedExperiment) -> list[CellResult]:
        """The cells of an experiment, in the order of its points."""
        return [self.cells[point.cell] for point in experiment.points]

    def title(self, experiment: PlannedExperiment) -> str:
        """`strong: llama-110m (random weights)`."""
        return experiment.name + (f": {_title_of_name(self.plan, experiment.model)}" if experiment.model else "")


def load_study(run: RunPaths) -> StudyResult:
    """Read plan and records. Raises the errors of `configs.record`, naming the file that cannot be read."""
    plan = read_plan(run.plan)
    found: list[tuple[Record, Path]] = []
    if run.records.is_dir():
        found = [(read_record(path), path) for path in sorted(run.records.glob("*/*.json"))]
    tries: dict[tuple[str, str, int], list[Record]] = defaultdict(list)
    for record, _ in found:
        tries[record.key, record.measuring_pass, record.repeat].append(record)
    deciding = {id(max(group, key=_precedence)) for group in tries.values()}
    readings = []
    for record, path in found:
        used = id(record) in deciding and record.repeat < plan.repeats.get(record.key, 0)
        rates = _rates(record, path) if used else None
        readings.append(Reading(record, path.relative_to(run.folder).as_posix(), used, rates))
    return StudyResult(run.folder, plan, _cells(plan, readings), tuple(readings), _environments(run, readings))


def read_plan(path: Path) -> Plan:
    """Load `plan.json`. Raises as `configs.record.read_record`."""
    return Plan.model_validate(migrate(read_json_object(path), path))


def read_samples(path: Path, columns: tuple[str, ...]) -> dict[str, Column]:
    """The named columns of every rank, keyed `<rank>/<column>`. Raises ValueError naming the file."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files if key.partition("/")[2] in columns}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: the record's samples cannot be read ({error}); set the record aside") from error


def model_title(plan: Plan, identity: str | None) -> str:
    """The name that a study gives a model, marked where its weights are random."""
    if identity is None:
        return "no model"
    named = next((model for model in plan.models if model.identity == identity), None)
    return _marked(named) if named else identity


def _title_of_name(plan: Plan, name: str) -> str:
    named = next((model for model in plan.models if model.name == name), None)
    return _marked(named) if named else name


def _marked(model: PlannedModel) -> str:
    return f"{model.name} (random weights)" if model.synthetic else model.name


def _precedence(record: Record) -> tuple[bool, int]:
    return record.status is Status.COMPLETED, record.attempt


def _rates(record: Record, path: Path) -> Rates | None:
    """Rates of a completed, timed visit. Cells that keep answers may have left none."""
    if record.status is not Status.COMPLETED or record.measuring_pass != "timed":
        return None
    work = record.cell.workload
    samples_path = path.with_suffix(".npz")
    samples = read_samples(samples_path, RATE_COLUMNS[work.kind])
    if isinstance(work, GenerateWorkload) and work.answers and not samples:
        return None
    try:
        return visit_rates(record.cell, record.figures, samples)
    except ValueError as error:
        raise ValueError(f"{samples_path}: {error}") from error


def _cells(plan: Plan, readings: list[Reading]) -> dict[str, CellResult]:
    timed: dict[str, dict[int, Reading]] = defaultdict(dict)
    memory: dict[str, Reading] = {}
    for reading in readings:
        record = reading.record
        if reading.used and record.measuring_pass == "timed":
            timed[record.key][record.repeat] = reading
        elif reading.used:
            memory[record.key] = reading
    names = cell_names(plan)
    return {
        key: CellResult(
            key=key,
            cell=cell,
            name=names[key],
            model=model_title(plan, cell.model),
            planned=plan.repeats.get(key, 0),
            visits=dict(sorted(timed[key].items())),
            memory=memory.get(key),
        )
        for key, cell in plan.cells.items()
    }


def cell_names(plan: Plan) -> dict[str, str]:
    """A name for each cell by key: its label, with what tells it from others of the same label."""
    groups: dict[tuple[str | None, str], list[str]] = defaultdict(list)
    for key, cell in plan.cells.items():
        groups[cell.model, _label(cell)].append(key)
    names = {}
    for (_, label), keys in groups.items():
        fields = {key: _flat(plan.cells[key].model_dump(mode="json")) for key in keys}
        every = sorted({name for flat in fields.values() for name in flat})
        telling = [name for name in every if len({repr(flat.get(name)) for flat in fields.values()}) > 1]
        for key in keys:
            extra = [f"{name.rpartition('.')[2]} {fields[key].get(name)}" for name in telling]
            names[key] = ", ".join([label, *extra])
    return names


def _label(cell: Cell) -> str:
    label = cell.label if cell.engine == "rankwise" else f"{cell.engine}, {cell.label}"
    answers = isinstance(cell.workload, GenerateWorkload) and cell.workload.answers
    return f"{label}, answers kept" if answers else label


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def flat_environment(environment: dict[str, Any]) -> dict[str, str]:
    """An environment as dotted names and text, sorted by name."""
    flat = _flat(environment)
    texts = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in flat.items()
    }
    return dict(sorted(texts.items()))


def _environments(run: RunPaths, readings: list[Reading]) -> dict[str, dict[str, Any] | None]:
    hashes = {reading.record.environment for reading in readings if reading.used} - {None}
    found: dict[str, dict[str, Any] | None] = {}
    for digest in sorted(str(item) for item in hashes):
        path = run.environment(digest)
        try:
            data = json.loads(path.read_bytes()) if path.is_file() else None
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error})") from error
        found[digest] = data if isinstance(data, dict) else None
    return found
