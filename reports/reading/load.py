"""Read a run folder: the plan, every record, and for each repeat the attempt that decides.

    study = load_study(RunPaths(folder))
    study.cells[key].estimate("throughput")         # median and interval over the repeats
    study.cells[key].percentiles("request")         # P50, P90, P99 of all requests, with their number

Samples are reduced to rates as they are read (`reports.reading.read`), so that a hundred thousand records fit in
little memory; `study.samples` reads those of one record again.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.common.files.reading import read_json_object, reason_of
from configs.common.printable import plural_noun
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedExperiment, read_plan
from configs.records.rates import Column
from configs.records.record import Status, place_set_aside
from configs.records.samples import read_samples
from configs.spec.cell import Cell
from configs.workloads import descriptor_of
from configs.workloads.descriptor import ComparedLatency, Descriptor, ShownTime
from reports.numbers.percentiles import Percentiles, Pooled, percentiles
from reports.numbers.statistics import CONFIDENCE, Estimate, estimate
from reports.numbers.stopping import confidence
from reports.reading.names import cell_names, model_title, title_of_name
from reports.reading.read import Reading, Unreadable, cell_folders, unreadable
from reports.reading.readers import read_cells

MISSING = "missing"
"""Stands where a repeat has left no record at all."""


@dataclass(frozen=True)
class CellResult:
    """What is known of one cell: for each repeat the record that decides."""

    key: str
    cell: Cell
    name: str
    model: str
    planned: int
    measurements: dict[int, Reading]
    memory: Reading | None
    profile: Reading | None = None
    perf: Reading | None = None
    nsys: Reading | None = None
    pooled: Mapping[str, Pooled] = field(default_factory=dict)
    confidence: float = CONFIDENCE
    device: str | None = None
    """Set in a study of several devices (`reports.reading.devices`)."""
    elsewhere: frozenset[int | str] = frozenset()
    """Repeats, and names of passes, that are left out because they were measured on another device."""

    @cached_property
    def completed(self) -> dict[int, Reading]:
        """Repeats that were measured."""
        return {repeat: measurement for repeat, measurement in self.measurements.items() if measurement.completed}

    @property
    def missing(self) -> list[int]:
        """Planned repeats without a record; those that were measured on another device have one."""
        there = self.measurements.keys() | self.elsewhere
        return [repeat for repeat in range(self.planned) if repeat not in there]

    @property
    def passes(self) -> dict[str, Reading | None]:
        """The passes beside the timed repeats, each measured once."""
        return {"memory": self.memory, "profile": self.profile, "perf": self.perf, "nsys": self.nsys}

    def pass_status(self, name: str) -> str:
        """How a pass ended; `missing` where there is no record of it on this device."""
        reading = self.passes[name]
        return MISSING if reading is None else reading.record.status.value

    def values(self, figure: str) -> dict[int, float]:
        """One field of `Rates` by repeat, where it is known."""
        found = {repeat: getattr(measurement.rates, figure, None) for repeat, measurement in self.completed.items()}
        return {repeat: value for repeat, value in found.items() if value is not None}

    def estimate(self, figure: str) -> Estimate | None:
        """Median, range and interval over the repeats of one field of `Rates`."""
        if figure not in self._estimates:
            self._estimates[figure] = estimate(self.values(figure).values(), self.confidence)
        return self._estimates[figure]

    @cached_property
    def _estimates(self) -> dict[str, Estimate | None]:
        """Asked for again and again: by tables, sentences, plots and exports."""
        return {}

    @property
    def kind(self) -> Descriptor:
        """What its kind of workload is measured and compared by."""
        return descriptor_of(self.cell.workload)

    def time(self, shown: ShownTime) -> Estimate | None:
        """One of the times that tables show; None where its kind has no such column."""
        return self.estimate(shown.figure) if shown in self.kind.times else None

    @property
    def latency(self) -> ComparedLatency | None:
        """What its speed is felt by; None where nobody waits for its work."""
        latency = self.kind.latency
        return latency if latency is not None and latency.awaited else None

    @property
    def latency_values(self) -> dict[int, float]:
        """Its latency by repeat; empty where nobody waits for its work."""
        return {} if self.latency is None else self.values(self.latency.figure)

    def percentiles(self, kind: str) -> Percentiles | None:
        """P50, P90 and P99 of its latencies of a kind (keys of `configs.records.rates.LATENCY_COLUMNS`); None: it has
        none."""
        return self._percentiles.get(kind)

    @cached_property
    def _percentiles(self) -> dict[str, Percentiles]:
        tails = {
            kind: [
                measurement.p99_seconds[kind]
                for measurement in self.completed.values()
                if kind in measurement.p99_seconds
            ]
            for kind in self.pooled
        }
        return {kind: percentiles(pooled, tails[kind], self.confidence) for kind, pooled in self.pooled.items()}

    @property
    def title(self) -> str:
        """The cell with its model, where it has one."""
        return self.name if self.cell.model is None else f"{self.model}, {self.name}"

    @property
    def subject(self) -> str:
        """What a sentence is about: the model, else the kind of work."""
        if self.cell.model is not None:
            return self.model
        return f"the {self.cell.workload.kind}" + (f" on {self.device}" if self.device else "")

    @property
    def unit(self) -> str:
        """Unit of `Rates.throughput` for this cell."""
        return f"{plural_noun(self.work_unit)}/s"

    @property
    def work_unit(self) -> str:
        """One of what its throughput counts: a token, an embedding, an item."""
        return self.kind.unit

    @property
    def compared(self) -> bool:
        """Whether its speed may be compared: keeping answers costs time, and communication alone is no work."""
        return self.kind.compared and not self.cell.workload.keeps_answers

    @property
    def altered(self) -> bool:
        """Whether its weights are not the model's own: what that costs the answers is for another section to say."""
        return bool(self.cell.compression)

    @property
    def status(self) -> str:
        """`completed` where at least one repeat is; else how the last repeat with a record ended; else `missing`."""
        if self.completed:
            return Status.COMPLETED.value
        if not self.measurements:
            return MISSING
        return self.measurements[max(self.measurements)].record.status.value

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
    unreadable: tuple[Unreadable, ...] = ()
    set_aside: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    """More than one: what the figures are kept apart by."""
    other_devices: tuple[str, ...] = ()
    """Repeats that are left out, because the others of their cell ran on another device."""

    @cached_property
    def derived(self) -> dict[str, Any]:
        """What takes long to compute of the records and is asked for by several sections, by a name of theirs."""
        return {}

    def points(self, experiment: PlannedExperiment) -> list[CellResult]:
        """The cells of an experiment, in the order of its points."""
        return [self.cells[point.cell] for point in experiment.points]

    def samples(self, measurement: Reading, columns: tuple[str, ...]) -> dict[str, Column]:
        """The named columns of a record of this study. Raises ValueError naming the file."""
        return read_samples((self.folder / measurement.path).with_suffix(".npz"), columns)

    def title(self, experiment: PlannedExperiment) -> str:
        """`strong: llama-110m (random weights)`."""
        return experiment.name + (f": {title_of_name(self.plan, experiment.model)}" if experiment.model else "")


def load_run(run: RunPaths) -> StudyResult:
    """Read plan and records; damaged records and environments are listed and left out.

    Raises OSError or ValueError for a plan that cannot be read, and SchemaError for files of another version.
    """
    plan = read_plan(run.plan)
    folders = cell_folders(run.records, plan.repeats)
    found = read_cells(folders, run.folder)
    pooled = {Path(folder.folder).name: read.pooled for folder, read in zip(folders, found, strict=True)}
    readings = tuple(reading for read in found for reading in read.readings)
    environments, damaged = _environments(run, readings)
    cells = _cells(plan, readings, pooled)
    return StudyResult(
        folder=run.folder,
        plan=plan,
        cells=cells,
        readings=readings,
        environments=environments,
        unreadable=(*(item for read in found for item in read.unreadable), *damaged),
        set_aside=tuple(_set_aside(run, cells)),
    )


def shown_times(results: Iterable[CellResult]) -> list[ShownTime]:
    """The times that a table of these cells has columns for, in the order of their kinds."""
    return list(dict.fromkeys(shown for result in results for shown in result.kind.times))


def short_titles(results: Sequence[CellResult]) -> list[str]:
    """Names for a figure: with the model where there are several."""
    several = len({result.model for result in results}) > 1
    return [result.title if several else result.name for result in results]


def unaltered(group: list[CellResult]) -> list[CellResult]:
    """Those with the model's own weights, where there are any: the fastest must not be one that answers otherwise."""
    return [result for result in group if not result.altered] or group


def _cells(
    plan: Plan, readings: Iterable[Reading], pooled: Mapping[str, Mapping[str, Pooled]]
) -> dict[str, CellResult]:
    timed: dict[str, dict[int, Reading]] = defaultdict(dict)
    untimed: dict[tuple[str, str], Reading] = {}
    for reading in readings:
        record = reading.record
        if reading.used and record.measuring_pass == "timed":
            timed[record.key][record.repeat] = reading
        elif reading.used:
            untimed[record.key, record.measuring_pass] = reading
    names, level = cell_names(plan), confidence(plan.measuring)
    return {
        key: CellResult(
            key=key,
            cell=cell,
            name=names[key] + (", GPU throttled" if _throttled(timed[key].values()) else ""),
            model=model_title(plan, cell.model),
            planned=plan.repeats.get(key, 0),
            measurements=dict(sorted(timed[key].items())),
            memory=untimed.get((key, "memory")),
            profile=untimed.get((key, "profile")),
            perf=untimed.get((key, "perf")),
            nsys=untimed.get((key, "nsys")),
            pooled=pooled.get(key, {}),
            confidence=level,
        )
        for key, cell in plan.cells.items()
    }


def _throttled(measurements: Iterable[Reading]) -> bool:
    """Whether heat, the power cap or the hardware slowed a GPU down in a repeat that counts: a mark for every table."""
    return any(True in measurement.by_rank("throttled") for measurement in measurements if measurement.completed)


def _set_aside(run: RunPaths, cells: Mapping[str, CellResult]) -> Iterator[str]:
    """Records that an earlier run set aside, of repeats that were not measured again since: their file names."""
    for path in sorted(run.set_aside.glob("*.json*")):
        place = place_set_aside(path.name)
        if place is None or place[1] != "timed" or place[0] not in cells:
            continue
        if place[2] < cells[place[0]].planned and place[2] not in cells[place[0]].completed:
            yield path.relative_to(run.folder).as_posix()


def _environments(
    run: RunPaths, readings: Iterable[Reading]
) -> tuple[dict[str, dict[str, Any] | None], list[Unreadable]]:
    hashes = {reading.record.environment for reading in readings if reading.used} - {None}
    found: dict[str, dict[str, Any] | None] = {}
    damaged = []
    for digest in sorted(str(item) for item in hashes):
        path = run.environment(digest)
        found[digest] = None
        try:
            found[digest] = read_json_object(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            damaged.append(unreadable(path, reason_of(error), run.folder))
    return found, damaged
