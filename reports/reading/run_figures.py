"""Figures of a run for later comparison: figures by repeat, environments and rules, without samples.

    run = run_figures(load_study(RunPaths(folder)), "runs/today")

A comparison and the history need no more than this, and the same statistics come out of it when the run
folder is long gone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from configs.common.base import content_hash
from configs.common.files.reading import MIB
from configs.plans.plan import Plan
from configs.records.record import Status
from configs.workloads import DESCRIPTORS
from reports.numbers.statistics import CONFIDENCE, Estimate, estimate
from reports.reading.load import CellResult, StudyResult
from reports.reading.names import flat_environment
from reports.text import joined

OTHERS_SHARE = "others_cpu_share"
"""Kept beside the figures: the share of the machine's CPU that other processes took, by repeat."""

NOT_MEASURED = frozenset({"missing", Status.CANCELLED, Status.OVER_BUDGET, Status.PREEMPTED, Status.NODE_FAILED})
"""Statuses that say nothing of the cell itself: it was not tried to its end."""


@dataclass(frozen=True)
class FigureKind:
    """A figure that runs are compared by. `scale` makes the kept value one of `unit`."""

    name: str
    title: str
    unit: str
    scale: float
    more_is_better: bool


FIGURE_KINDS = (
    FigureKind("throughput", "throughput", "a second", 1.0, True),
    FigureKind("ttft_seconds", "time to first token", "ms", 1e3, False),
    FigureKind("time_per_output_token_seconds", "time per output token", "ms", 1e3, False),
    FigureKind("step_seconds", "step time", "ms", 1e3, False),
    FigureKind("peak_memory_bytes", "peak memory, all ranks", "MiB", 1 / MIB, False),
)
"""Peak memory comes from a pass of its own, once a run: it has one value and never an interval."""


@dataclass(frozen=True)
class CellFigures:
    """One cell of a run. `figures`: name -> repeat -> value; `environments`: hashes, of the timed repeats.

    `failed`: repeats that were tried to their end and have no figure, as `broken` is said of a whole cell.
    `confidence`: what intervals must be asked for to cover 95 %, above that where one looked before stopping.
    """

    key: str
    title: str
    unit: str
    status: str
    compared: bool
    planned: int
    failed: int
    fields: Mapping[str, str]
    figures: Mapping[str, Mapping[int, float]]
    environments: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    confidence: float = CONFIDENCE

    @property
    def completed(self) -> bool:
        """Whether at least one repeat was measured."""
        return self.status == Status.COMPLETED

    @property
    def broken(self) -> bool:
        """Whether it was tried and failed; what was never tried to its end is not."""
        return not self.completed and self.status not in NOT_MEASURED

    @property
    def keeps_answers(self) -> bool:
        """Whether its speed is not compared because keeping answers takes time, and not because of its kind."""
        known = DESCRIPTORS.get(self.fields.get("workload.kind", ""))
        return not self.compared and (known is None or known.compared)

    def values(self, figure: str) -> list[float]:
        """A figure of every repeat that has it, in order of repeats."""
        found = self.figures.get(figure, {})
        return [found[repeat] for repeat in sorted(found)]

    def estimate(self, figure: str) -> Estimate | None:
        """Median, range and interval of a figure."""
        return estimate(self.values(figure), self.confidence)

    def unit_of(self, kind: FigureKind) -> str:
        """The unit that a figure of this cell is shown in."""
        return self.unit if kind.name == "throughput" else kind.unit


@dataclass(frozen=True)
class RunFigures:
    """One run. `environments`: hash -> dotted name -> text, None where the file was lost; `rules`: of measuring."""

    name: str
    study: str
    started_at: str | None
    finished_at: str | None
    rules: Mapping[str, str]
    cells: Mapping[str, CellFigures]
    environments: Mapping[str, Mapping[str, str] | None]

    def facts(self, names: Iterable[str], keys: Iterable[str] | None = None) -> dict[str, set[str]]:
        """Each named fact of the environments that the cells (all, or those of `keys`) were measured in."""
        wanted = self.cells if keys is None else keys
        used = {digest for key in wanted for digest in self.cells[key].environments}
        known = [flat for digest in sorted(used) if (flat := self.environments.get(digest)) is not None]
        return {name: {flat[name] for flat in known if name in flat} for name in names}

    @property
    def commit(self) -> str | None:
        """The code's commit, with `+` where it was changed since or may have been; None: it is unknown, or not one."""
        facts = self.facts(("commit", "dirty"))
        commits = facts["commit"] - {"None"}
        return commits.pop() + ("+" if facts["dirty"] & {"True", "None"} else "") if len(commits) == 1 else None

    @property
    def environment(self) -> str | None:
        """One hash over all environments that the run was measured in; None where no record names one."""
        used = sorted({digest for cell in self.cells.values() for digest in cell.environments})
        return content_hash(used, digits=8) if used else None


def run_figures(study: StudyResult, name: str) -> RunFigures:
    """Reduce a run folder as read. `name` is what texts call the run.

    `started_at` is that of the first record of the folder, also of one that a later attempt replaced or that the study
    lost since: by it a history knows the run again after failed repeats were measured anew, or the study was edited.
    """
    used = [reading.record for reading in study.readings if reading.used]
    known = {digest: None if data is None else flat_environment(data) for digest, data in study.environments.items()}
    for digest, devices in _devices(study).items():
        flat = known.get(digest)
        if flat is not None:
            flat["device"] = joined(sorted(devices))
    return RunFigures(
        name=name,
        study=study.plan.study,
        started_at=min((start for each in study.readings if (start := each.record.started_at)), default=None),
        finished_at=max((record.finished_at for record in used if record.finished_at), default=None),
        rules=_rules(study.plan),
        cells={key: _cell(result) for key, result in study.cells.items()},
        environments=known,
    )


def _devices(study: StudyResult) -> dict[str, set[str]]:
    """What ranks say that they computed on, by environment: that of a script names no device, others rank 0's alone."""
    found: dict[str, set[str]] = {}
    for result in study.cells.values():
        for reading in result.completed.values():
            names = {name for name in reading.by_rank("device") if isinstance(name, str)}
            if names and reading.record.environment is not None:
                found.setdefault(reading.record.environment, set()).update(names)
    return found


def _rules(plan: Plan) -> dict[str, str]:
    """How was measured, as dotted names and text."""
    rules: dict[str, Any] = {"measuring": plan.measuring.model_dump(mode="json"), "pack": plan.pack}
    settings = {target.name: target.unkeyed_settings for target in plan.targets if target.unkeyed_settings}
    return flat_environment(rules | ({"targets": settings} if settings else {}))


def _cell(result: CellResult) -> CellFigures:
    figures: dict[str, Mapping[int, float]] = {kind.name: result.values(kind.name) for kind in FIGURE_KINDS}
    if result.peak_bytes is not None:
        figures["peak_memory_bytes"] = {0: result.peak_bytes}
    shares = {repeat: measurement.figure(OTHERS_SHARE) for repeat, measurement in result.completed.items()}
    figures[OTHERS_SHARE] = {repeat: share for repeat, share in shares.items() if share is not None}
    records = [measurement.record for measurement in result.completed.values()]
    return CellFigures(
        key=result.key,
        title=result.title,
        unit=result.unit,
        status=result.status,
        compared=result.compared,
        planned=result.planned,
        failed=sum(
            not reading.completed and reading.record.status not in NOT_MEASURED
            for reading in result.measurements.values()
        ),
        fields=flat_environment(result.cell.model_dump(mode="json")),
        figures={name: values for name, values in figures.items() if values},
        environments=tuple(sorted({record.environment for record in records if record.environment})),
        hosts=tuple(sorted({host for record in records for host in record.hosts})),
        confidence=result.confidence,
    )
