"""Convert the outputs of a bundle's job into records in its folder. Does not import Prefect.

    collected = collect_bundle(Path("strong"))

No scheduler is available here: the end of a launch is derived from its nodes' files, the reason recorded by
submit.sbatch, and the output of sacct in outputs/, if present.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from configs.common.base import WrongArgument, write_atomically
from configs.common.files.reading import PLAN_BYTES, read_model, read_text
from configs.common.system.lock_files import NoLocks
from configs.plans.job import Job, JobEnd, Launcher, Submission
from configs.plans.paths import JobPaths, RunPaths
from configs.plans.plan import read_plan
from configs.records.record import MeasuringPass, Record, Status, read_record
from configs.spec.measuring import Profiler
from slurm.launcher.job_files import measurement_under_way, write_end
from slurm.sbatch_bundle.retry import began
from slurm.schedulers.commands.accounting import Account, read_accounts, read_step
from slurm.schedulers.commands.states import FinalState, composed, standing
from tasks.campaign.ledger import missing_measurements, set_aside_damaged, told_set_aside
from tasks.campaign.records import collect_job
from tasks.campaign.run_lock import FolderInUse, run_lock


@dataclass
class CollectedBundle:
    """Outcome of a bundle's launches."""

    records: list[Record] = field(default_factory=list)
    """Those made now."""
    notes: list[str] = field(default_factory=list)
    not_begun: int = 0
    """Launches that no node began."""
    missing: int = 0
    """Measurements that the study asks for and that have no measurement yet."""


def collect_bundle(folder: Path) -> CollectedBundle:
    """Convert the ranks' outputs into records. Repeated calls add new results.

    Jobs of `rankwise run` in the folder are left to it: they may be under way. Raises WrongArgument for a folder that
    is not a bundle, FolderInUse where a run or another call works in it, SchemaError for one of a newer version.
    """
    run = RunPaths(folder.absolute())
    if not run.plan.exists() or not run.jobs.is_dir():
        raise WrongArgument(
            f"{folder}: not a bundle (no plan.json and jobs/). Expected a folder written by `rankwise bundle sbatch`"
        )
    with _alone(run):
        names = [path.parent.name for path in sorted(run.jobs.glob("*/job.json"))]
        ours = [name for name in names if not _is_of_a_run(run.job(name))]
        if names and not ours:
            raise WrongArgument(
                f"{folder}: not a bundle. `rankwise run` measures in this folder and collects its jobs itself; run it "
                "again to resume"
            )
        return _collected(run, ours)


@contextmanager
def _alone(run: RunPaths) -> Iterator[None]:
    """Keep runs and other calls off, who would merge the same files. Raises FolderInUse."""
    with ExitStack() as held:
        with suppress(NoLocks):  # as on some clusters' disks, where a bundle can be collected and no run can work
            try:
                held.enter_context(run_lock(run))
            except FolderInUse as error:
                raise FolderInUse(f"{str(error).partition('. Wait')[0]}. Collect when that has ended") from error
        yield


def _is_of_a_run(paths: JobPaths) -> bool:
    """Whether `rankwise run` has submitted a job, and not a bundle's script."""
    return any(path.exists() for path in (paths.submitted, paths.submitting, paths.hosts))


def _collected(run: RunPaths, names: Sequence[str]) -> CollectedBundle:
    plan = read_plan(run.plan)
    result = CollectedBundle()
    for name in names:
        paths = run.job(name)
        job = read_model(paths.job, Job, PLAN_BYTES)
        if not began(paths):
            result.not_begun += job.measuring_pass not in get_args(Profiler)
            continue
        paths.parts.mkdir(exist_ok=True)  # what copies a folder may leave empty ones out
        _take_back(run, paths, job)
        _conclude(run, paths, job)
        collected = collect_job(run, job.name)
        result.records += collected.records
        result.notes += collected.set_aside
    ledger = set_aside_damaged(run)
    result.notes += told_set_aside(ledger.set_aside)
    passes: tuple[MeasuringPass, ...] = get_args(MeasuringPass)
    result.missing = sum(len(missing_measurements(plan, ledger, measuring_pass, False)) for measuring_pass in passes)
    return result


def _take_back(run: RunPaths, paths: JobPaths, job: Job) -> None:
    """Remove what was concluded while the job still ran: a measurement is not lost whose ranks have written since.

    Its parts would be removed as those of a record that is there, and with them what was measured.
    """
    for measurement in job.measurements:
        path = run.record(measurement.cell.key, job.measuring_pass, measurement.repeat, measurement.attempt)
        ranks = range(job.ranks_per_node * job.cell.nodes)
        if not any(paths.part(measurement.name, rank).exists() for rank in ranks):
            continue
        with suppress(OSError, ValueError):  # what cannot be read is set aside
            record = read_record(path)
            if record.job == job.name and record.status is Status.LOST:
                path.unlink()
                path.with_suffix(".npz").unlink(missing_ok=True)
                paths.end.unlink(missing_ok=True)


def _conclude(run: RunPaths, paths: JobPaths, job: Job) -> None:
    """Write the accounts of a launch and how it ended, where they are not there yet."""
    submitted = _submission(paths)
    of_job, of_step = _accounts(run, submitted) if submitted else (None, None)
    if of_step is not None and not paths.accounting.exists():
        write_atomically(paths.accounting, of_step.accounting.model_dump_json())
    if paths.end.exists():
        return
    ranks = range(job.cell.nodes)
    ends = [_node_end(paths, rank) for rank in ranks]
    hosts = [_host(paths, rank) for rank in ranks]
    nodes = [host for host in hosts if host is not None]
    came_up = [host is not None for host in hosts]
    word = _word(paths, [account for account in (of_step, of_job) if account])
    known = nodes if len(nodes) == len(hosts) else list(of_step.accounting.nodes if of_step else ())
    write_end(paths, composed(job, ends, word, known, came_up, measurement_under_way(paths)))


def _submission(paths: JobPaths) -> Submission | None:
    """Which step of which job the launch was, as run.sh noted it."""
    try:
        return read_model(paths.submission, Submission)
    except (OSError, ValueError):
        return None


def _accounts(run: RunPaths, submitted: Submission) -> tuple[Account | None, Account | None]:
    """Of the whole job, and of the launch's own step."""
    job_id = submitted.job_id.partition(".")[0]
    path = run.folder / "outputs" / f"sacct_{job_id}.txt"
    try:
        text = read_text(path, PLAN_BYTES)
        return read_accounts(text).get(job_id), read_step(text, submitted.job_id)
    except (OSError, ValueError):
        return None, None


def _word(paths: JobPaths, accounts: list[Account]) -> FinalState | None:
    """The scheduler's word, where any names a cause: what stopped the job, then the step's state, then the job's."""
    words = [FinalState(account.accounting.state, account.failed_nodes, account.reason) for account in accounts]
    stopped = paths.folder / "stopped"
    if stopped.exists():
        words.insert(0, FinalState(read_text(stopped).strip()))
    return next((word for word in words if standing(word.state).specific), None)


def _node_end(paths: JobPaths, node_rank: int) -> JobEnd | None:
    try:
        return read_model(paths.node_end(node_rank), JobEnd)
    except (OSError, ValueError):
        return None


def _host(paths: JobPaths, node_rank: int) -> str | None:
    try:
        return read_model(paths.node_launcher(node_rank), Launcher).host
    except (OSError, ValueError):
        return None
