"""Time and cost of a study by launch: start-up, measuring, failures, idle time.

    targets = study_costs(study)       # by target, in the plan's order

Times are those that the launchers and the records left (`jobs/<job>/launcher.json`, `end.json`, `started_at`
and `finished_at` of each attempt, superseded and failed ones included). Waiting for a turn on the machine, or in a
cluster's queue, is not a launch's own time. Of a cluster's job the scheduler's accounts say when it had its nodes, and
all its nodes are paid for; between jobs they are others', so nothing there is idle.
"""

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from configs.common.base import Frozen
from configs.common.files.reading import PLAN_BYTES, read_model
from configs.hardware.prices import Price, TargetPrices
from configs.plans.job import Job, JobEnd, Launcher, Submission
from configs.plans.paths import JobPaths, RunPaths
from configs.records.record import PROFILING_PASSES, Accounting, Record, Status
from configs.targets.target import LocalTarget
from reports.reading.load import StudyResult

_Model = TypeVar("_Model", bound=Frozen)

HOUR_SECONDS = 3600.0
PAUSE_SECONDS = 600.0
"""A longer gap between launches is a pause: who pays by the hour gives the machine back, so it has no price."""

PROFILING = tuple(f"{name} pass" for name in PROFILING_PASSES)
PHASES = (
    "start-up",
    "measuring",
    "memory pass",
    *PROFILING,
    "failed attempts",
    "between and after measurements",
    "idle",
)
"""What a launch's time is spent on. `idle` is between launches, while the machine is kept."""


@dataclass
class TargetCost:
    """Where the time of a target's launches went, in seconds by phase (`node_seconds`: times nodes), and its cost."""

    target: str
    machine: str | None
    price: Price | None
    launches: int = 0
    without_times: int = 0
    pause_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    node_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    startups: list[float] = field(default_factory=list)

    @property
    def total_seconds(self) -> float:
        """All phases; pauses are none."""
        return sum(self.seconds.values())

    @property
    def total_node_seconds(self) -> float:
        """The same, each launch times its nodes: what is paid for."""
        return sum(self.node_seconds.values())

    @property
    def usd(self) -> float | None:
        """What all of it cost; None where the price is unknown."""
        return None if self.price is None else self.total_node_seconds / HOUR_SECONDS * self.price.usd_per_hour

    def usd_of(self, phase: str) -> float | None:
        """What a phase cost; None where the price is unknown."""
        return None if self.price is None else self.node_seconds[phase] / HOUR_SECONDS * self.price.usd_per_hour

    def add(self, phase: str, seconds: float, nodes: int = 1) -> None:
        """Time of so many nodes."""
        self.seconds[phase] += seconds
        self.node_seconds[phase] += seconds * nodes


@dataclass(frozen=True)
class LaunchTimes:
    """One launch: when it had the machine, in seconds since the epoch, and what it did. `startup`: where known."""

    target: str
    began: float
    ended: float
    phases: dict[str, float]
    startup: float | None
    nodes: int = 1

    @property
    def node_seconds(self) -> float:
        """What is paid for: its time on each of its nodes."""
        return (self.ended - self.began) * self.nodes


def study_costs(study: StudyResult) -> list[TargetCost]:
    """Time and money of every launch that ran, by target; the last are those that the study has no more."""
    prices = study.plan.prices
    costs = {
        target.name: TargetCost(target.name, target.machine, prices.get(target.name, TargetPrices()).price)
        for target in study.plan.targets
    }
    launches = launch_times(study)
    for launch in launches:
        former = TargetCost(launch.target, None, prices.get(launch.target, TargetPrices()).price)
        cost = costs.setdefault(launch.target, former)
        cost.launches += 1
        for phase, seconds in launch.phases.items():
            cost.add(phase, seconds, launch.nodes)
        if launch.startup is None:
            cost.without_times += 1
        else:
            cost.startups.append(launch.startup)
    here = {target.name for target in study.plan.targets if isinstance(target, LocalTarget)}
    _add_gaps([launch for launch in launches if launch.target in here], costs)
    return [cost for cost in costs.values() if cost.launches]


def _add_gaps(launches: list[LaunchTimes], costs: dict[str, TargetCost]) -> None:
    """Time in which no launch of this machine ran, given to the target of the launch that ends it."""
    busy_until: float | None = None
    for launch in sorted(launches, key=lambda item: (item.began, item.ended)):
        if busy_until is not None and launch.began > busy_until:
            gap = launch.began - busy_until
            if gap > PAUSE_SECONDS:
                costs[launch.target].pause_seconds += gap
            else:
                costs[launch.target].add("idle", gap)
        busy_until = launch.ended if busy_until is None else max(busy_until, launch.ended)


def launch_times(study: StudyResult) -> list[LaunchTimes]:
    """Every launch of the run folder that ran, those that left no record included."""
    run = RunPaths(study.folder)
    records: dict[str, list[Record]] = {path.name: [] for path in (run.jobs.iterdir() if run.jobs.is_dir() else [])}
    for reading in study.readings:
        records.setdefault(reading.record.job, []).append(reading.record)
    found = (_times(run.job(name), records[name]) for name in sorted(records))
    return [launch for launch in found if launch is not None]


def _times(paths: JobPaths, records: list[Record]) -> LaunchTimes | None:
    """None for a launch that never ran: its measurements were given up before it began."""
    began, ended = _had_its_machine(paths)
    measurements = sorted(
        (_seconds(record.started_at), _seconds(record.finished_at), _phase(record))
        for record in records
        if record.started_at is not None and record.finished_at is not None
    )
    if not measurements:
        return None if began is None or ended is None else _without_measurements(paths, records, began, ended)
    first = measurements[0][0] if began is None else began
    phases = dict.fromkeys(PHASES, 0.0)
    cursor = first
    for position, (started, finished, phase) in enumerate(measurements):
        phases["start-up" if position == 0 else "between and after measurements"] += max(0.0, started - cursor)
        phases[phase] += max(0.0, finished - max(started, cursor))
        cursor = max(cursor, finished)
    last = cursor if ended is None else max(cursor, ended)
    phases["between and after measurements"] += last - cursor
    startup = None if began is None else max(0.0, measurements[0][0] - began)
    cell = records[0].cell
    return LaunchTimes(cell.target, first, last, phases, startup, cell.nodes)


def _had_its_machine(paths: JobPaths) -> tuple[float | None, float | None]:
    """From when until when a launch had its machine or its nodes; None where nothing says so."""
    end = _read(paths.end, JobEnd)
    ended = _seconds(end.finished_at) if end else None
    launcher = _read(paths.launcher, Launcher)
    if launcher is not None:
        return _seconds(launcher.lock_acquired_at or launcher.started_at), ended
    submission, accounts = _read(paths.submission, Submission), _read(paths.accounting, Accounting)
    if submission is not None and accounts is not None and accounts.queued_seconds is not None:
        began = _seconds(submission.submitted_at) + accounts.queued_seconds
        return began, ended if accounts.elapsed_seconds is None else began + accounts.elapsed_seconds
    names = paths.folder.glob(paths.node_launcher(0).name.replace("0", "*"))
    started = [_seconds(found.started_at) for path in names if (found := _read(path, Launcher)) is not None]
    return min(started, default=None), ended


def _without_measurements(paths: JobPaths, records: list[Record], began: float, ended: float) -> LaunchTimes | None:
    """A launch that ended before its first measurement: all of it is lost."""
    job = None if records else _read(paths.job, Job)
    cell = records[0].cell if records else (job.cell if job else None)
    if cell is None:
        return None
    phases = dict.fromkeys(PHASES, 0.0) | {"failed attempts": max(0.0, ended - began)}
    return LaunchTimes(cell.target, began, max(began, ended), phases, None, cell.nodes)


def _phase(record: Record) -> str:
    if record.status is not Status.COMPLETED:
        return "failed attempts"
    return "measuring" if record.measuring_pass == "timed" else f"{record.measuring_pass} pass"


def _read(path: Path, model: type[_Model]) -> _Model | None:
    """A file of a job folder; None where there is none, or it was never finished."""
    try:
        return read_model(path, model, PLAN_BYTES)  # a launch of many cells has a long job.json
    except (OSError, ValueError):
        return None


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
