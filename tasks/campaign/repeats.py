"""Number of repeats of each cell: the plan's number, and more while its interval is too wide. Does not import Prefect.

With `measuring.target_interval`, `measuring.repeats` is the minimum. After each round, every cell with too wide an
interval gets further repeats (`reports.numbers.stopping`), until the target, `max_repeats` or a budget is reached.
The plan in the run folder is updated, so that the report, `rankwise status` and a resumed run have the number of
repeats and the stopping reason.
"""

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from configs.common.base import write_atomically
from configs.common.dollars import dollars
from configs.common.files.reading import PLAN_BYTES, read_model
from configs.hardware.prices import TargetPrices
from configs.plans.job import Job
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, Stop
from configs.spec.study import StudyError
from configs.targets.rented import RentedTarget
from configs.targets.target import LocalTarget, Target
from reports.decisions.spending import launch_times
from reports.numbers.stopping import next_look, reason
from reports.reading.load import CellResult, StudyResult, load_run
from tasks.campaign.launch_prices import LaunchPrices
from tasks.campaign.launches.leftovers import collected_marker
from tasks.campaign.ledger import read_ledger, targets_to_measure
from tasks.campaign.session import Session

NEAR_SHARE = 0.8
"""Of a budget, from which on it is told that little is left."""


class Budget:
    """The time and money that a run may use. Time is this run's; money is what all launches of the folder took.

    Also those on targets that the study has no more: raises StudyError where their price is not known. This machine
    costs money as long as the run goes on, a cluster's nodes as long as jobs run on them.
    """

    def __init__(self, session: Session, on_near: Callable[[str], None] = lambda message: None) -> None:
        rules = session.plan.measuring
        self._began = self._here_since = time.monotonic()
        self._seconds = None if rules.budget_minutes is None else rules.budget_minutes * 60
        self._usd, self._on_near = rules.budget_usd, on_near
        self._progress = session.run_progress
        self._prices = LaunchPrices(session.plan, session.run)
        self._priced = _is_priced(session.plan)
        self._here_usd_per_second = self._paid_usd = 0.0
        if self._usd is not None:
            assert self._priced, "checked before anything was started"
            self._paid_usd = launched_usd(session.plan, session.run)
        if self._priced:
            here = [target.name for target in session.plan.targets if isinstance(target, LocalTarget)]
            self._here_usd_per_second = max((self._per_second(name) for name in here), default=0.0)
        self._paid_before_usd = self._paid_usd
        self._left_at: float | None = None
        self._told_near: set[str] = set()

    def waited(self, seconds: float) -> None:
        """Time in which this run had to leave the machine to others is not its own."""
        self._began += seconds
        self._here_since += seconds

    def leave(self) -> None:
        """From now on nothing is measured on this machine, until `elsewhere` says for how long."""
        self._left_at = time.monotonic()

    def elsewhere(self, seconds: float) -> None:
        """Time in which nothing was measured on this machine costs no money of its own."""
        self._here_since += seconds
        self._left_at = None

    def paid(self, target: str, node_seconds: float) -> None:
        """A job of a cluster has ended, which had so many seconds of its nodes."""
        self._paid_usd += node_seconds * self._per_second(target)

    def _per_second(self, target: str) -> float:
        """USD; without a budget of money, where nothing depends on it, 0 where the price is not known."""
        return self._prices.per_second(target) or 0.0

    def spent(self, running: Iterable[tuple[str, float]] = (), here: bool = True) -> Stop | None:
        """Which budget is spent, if one is; the first time that each is nearly so, that is told.

        running: target and node-seconds so far of jobs that have not ended. here: whether this machine is measured on;
        what it cost until the run left it counts either way.
        """
        now = time.monotonic()
        usd, seconds = self._usd_so_far(running, here, now), now - self._began
        self._progress.spent_usd = None if usd is None else usd - self._paid_before_usd
        self._progress.spent_seconds = seconds
        if self._usd is not None:
            assert usd is not None
            self._tell_near("money", usd / self._usd, f"{dollars(usd)} of {self._usd:g} USD")
            if usd > self._usd:
                return "budget of money"
        if self._seconds is not None:
            self._tell_near("time", seconds / self._seconds, f"{seconds / 60:.1f} of {self._seconds / 60:g} minutes")
            if seconds > self._seconds:
                return "budget of time"
        return None

    def _usd_so_far(self, running: Iterable[tuple[str, float]], here: bool, now: float) -> float | None:
        """None where the price of a target is not known."""
        if not self._priced:
            return None
        usd = self._paid_usd + sum(seconds * self._per_second(target) for target, seconds in running)
        until = now if here else self._here_since if self._left_at is None else self._left_at
        return usd + (until - self._here_since) * self._here_usd_per_second

    def _tell_near(self, budget: str, share: float, words: str) -> None:
        if share >= NEAR_SHARE and budget not in self._told_near:
            self._told_near.add(budget)
            self._on_near(f"{words} of the budget are used")


def _is_priced(plan: Plan) -> bool:
    """Whether the price of each target is known."""
    return all(plan.prices.get(target.name, TargetPrices()).price is not None for target in plan.targets)


def launched_usd(plan: Plan, run: RunPaths, targets: Collection[str] | None = None) -> float:
    """What all launches of a run folder cost, waiting for their turn left out; lost ones as far as records tell.

    targets: only launches on these. Raises StudyError naming targets whose price is not known.
    """
    return _launched_usd(plan, load_run(run), targets)


def _launched_usd(plan: Plan, study: StudyResult, targets: Collection[str] | None = None) -> float:
    prices = LaunchPrices(plan, RunPaths(study.folder))
    launches = [launch for launch in launch_times(study) if targets is None or launch.target in targets]
    costs = [(launch, prices.per_second(launch.target, launch.began)) for launch in launches]
    if unknown := sorted({launch.target for launch, price in costs if price is None}):
        raise _unpriced(study.folder, unknown)
    return sum(launch.node_seconds * price for launch, price in costs if price is not None)


def _unpriced(folder: Path, targets: list[str]) -> StudyError:
    return StudyError(
        [f"measuring.budget_usd: {folder} has launches on {', '.join(targets)}, which the study no longer has, at an "
         f"unknown price. Name `target: {targets[0]}` in a file in `prices`, or use another folder with --runs"]
    )  # fmt: skip


def targets_to_rent(plan: Plan, run: RunPaths, only_failed: bool) -> set[str]:
    """Return the names of the rented targets that a run in this folder measures on.

    That is where a measurement is missing, where the interval of a cell asks for further repeats, which are planned
    only once all others are measured, and where a killed run has left jobs. Where earlier launches have spent the
    budget of money, none is begun any more, and the last alone count. Raises as `read_ledger` and `launched_usd`.
    """
    ledger = read_ledger(run)  # also where nothing is rented, for what it raises
    missing = targets_to_measure(plan, ledger, only_failed)
    if plan.measuring.budget_usd is not None:
        prices = LaunchPrices(plan, run)
        measured = {entry.record.cell.target for entries in ledger.entries.values() for entry in entries}
        if unknown := sorted(name for name in measured if prices.per_second(name) is None):
            raise _unpriced(run.folder, unknown)
    rented = {target.name for target in plan.targets if isinstance(target, RentedTarget)}
    if not rented:
        return set()
    rules, left = plan.measuring, _left_going(run)
    grows = rules.target_interval is not None and not only_failed
    if not grows and rules.budget_usd is None:
        return (missing | left) & rented
    try:
        study = load_run(run)
    except (OSError, ValueError):
        return (missing | left) & rented  # of a first run, or of a plan that cannot be read and is made anew
    if rules.budget_usd is not None and _launched_usd(plan, study) > rules.budget_usd:
        return left & rented
    return (missing | left | (_wanting_more(plan, study.cells) if grows else set())) & rented


def targets_in_use(plan: Plan, run: RunPaths, only_failed: bool = False) -> list[Target]:
    """Return the targets on which a run in this folder may measure.

    Of the others nothing is asked: one that is away or was changed does not keep the rest from being measured. Raises
    as `read_ledger`.
    """
    if len(plan.targets) < 2 or (plan.measuring.target_interval is not None and not only_failed):
        return list(plan.targets)  # an interval may ask for further repeats of any
    names = targets_to_measure(plan, read_ledger(run), only_failed) | _left_going(run)
    return [target for target in plan.targets if target.name in names]


def _wanting_more(plan: Plan, cells: dict[str, CellResult]) -> set[str]:
    """Targets of cells whose measured values ask for more repeats than are planned."""
    known = {key: result for key, result in cells.items() if key in plan.cells}
    further = planned_with_repeats(plan, known, None).repeats
    return {plan.cells[key].target for key in known if further[key] > plan.repeats[key]}


def _left_going(run: RunPaths) -> set[str]:
    """Return the targets on which a killed run may have left jobs that go on."""
    found = set()
    for folder in run.jobs.glob("[0-9]*-*"):
        paths = run.job(folder.name)
        if not paths.end.exists() and not collected_marker(run, folder.name).exists():
            with suppress(OSError, ValueError):  # it was killed before it wrote the job
                found.add(read_model(paths.job, Job, PLAN_BYTES).target.name)
    return found


def carried_on(plan: Plan, before: Plan) -> Plan:
    """The plan with the repeats that an earlier run of the same study, with a target too, had grown to.

    No more than the study's `max_repeats`, which may have been lowered since.
    """
    rules = plan.measuring
    if rules.target_interval is None or before.measuring.target_interval is None:
        return plan
    grown = {key: max(count, min(before.repeats.get(key, 0), rules.max_repeats)) for key, count in plan.repeats.items()}
    stopped = {key: ended for key, ended in before.stopped.items() if key in plan.cells}
    return plan.model_copy(update={"repeats": grown, "stopped": stopped})


def grow_repeats(session: Session, ended_by: Stop | None) -> bool:
    """Plan further repeats where the target asks for them; whether there are any.

    ended_by: the budget that is spent, after which nothing is planned any more and the plan shrinks to
    what was measured. Writes the plan where it changed.
    """
    if session.plan.measuring.target_interval is None:
        return False
    plan = planned_with_repeats(session.plan, load_run(session.run).cells, ended_by)
    more = sum(plan.repeats.values()) > sum(session.plan.repeats.values())
    if plan != session.plan:
        session.plan = plan
        write_atomically(session.run.plan, plan.model_dump_json(indent=1))
    return more and ended_by is None


def planned_with_repeats(plan: Plan, cells: dict[str, CellResult], ended_by: Stop | None) -> Plan:
    """The plan with as many repeats of each cell as its measured values ask for."""
    repeats, stopped = dict(plan.repeats), dict(plan.stopped)
    for key, result in cells.items():
        if not result.compared:
            continue  # answers are deterministic and are asked for once
        wanted, ended = _wanted(plan, result)
        if wanted > plan.repeats[key] and ended_by is not None:
            wanted, ended = plan.repeats[key], ended_by
        if ended_by is not None:
            wanted = max(min(plan.measuring.repeats, wanted), _measured(result))
            ended = ended or ended_by
        repeats[key] = wanted
        stopped.pop(key, None)
        if ended is not None:
            stopped[key] = ended
    return plan.model_copy(update={"repeats": repeats, "stopped": stopped})


def _measured(result: CellResult) -> int:
    """Repeats of a cell up to its last one that has a record."""
    return max(result.measurements, default=-1) + 1


def _wanted(plan: Plan, result: CellResult) -> tuple[int, Stop | None]:
    """How many repeats a cell should have, and what ended them; None while it is not known yet."""
    planned = plan.repeats[result.key]
    if len(result.measurements) < planned:
        return planned, None
    values = list(result.values("throughput").values())
    if len(values) < min(plan.measuring.repeats, planned):
        return planned, None  # repeats fail: more of them would too
    look, most = next_look(values, plan.measuring), plan.measuring.max_repeats
    if look is None:
        return planned, reason(values, plan.measuring)
    if planned >= most:
        return planned, "most repeats"  # some failed, and those count
    return min(most, planned + look - len(values)), None
