"""Jobs of an earlier run that were not collected: adopted, collected or cancelled. No Prefect here."""

from dataclasses import dataclass, field
from pathlib import Path

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.plans.job import Job
from configs.plans.paths import RunPaths, job_order
from configs.records.record import Status
from configs.targets.resources import ClusterTarget
from slurm.launcher.job_files import remove_scripts
from slurm.schedulers.adapter import adapter_for
from tasks.campaign.launches.staging import bring_home
from tasks.campaign.ledger import planned_repeats
from tasks.campaign.records import Collected, collect_job, failed_records
from tasks.campaign.session import Session


@dataclass
class Leftovers:
    """Jobs that still run and are wanted, and lines about everything else that was found."""

    running: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def resolve_leftovers(session: Session) -> Leftovers:
    """Look at every job folder that was not collected. Jobs that still run for this plan are returned."""
    run, found = session.run, Leftovers()
    bring_rest_home(run)
    wanted = set(planned_repeats(session.plan))
    unwanted: dict[str, list[str]] = {}
    for name, job in _uncollected(run):
        mine = {
            (measurement.cell.key, job.measuring_pass, measurement.repeat) for measurement in job.measurements
        } <= wanted
        if adapter_for(job.target.adapter).poll(run.job(name).folder) == "ended":
            collected = collect_job(run, name)
            found.notes += collected.set_aside
            _record_failed_start(run, name, collected)
            mark_collected(run, name)
        elif (original := copied_from(run, name, job)) is not None:
            found.notes.append(f"left {name} alone: it runs in {original}, which this folder is a copy of")
        elif mine:
            found.running.append(name)
            found.notes.append(f"adopted {name}, started by an earlier run")
        else:
            unwanted.setdefault(job.target.adapter, []).append(name)
    for adapter, names in unwanted.items():
        adapter_for(adapter).cancel_many([run.job(name).folder for name in names])
        for name in names:
            found.notes.append(f"ended {name}, left by an earlier run")
            found.notes += collect_job(run, name).set_aside
            mark_collected(run, name)
    return found


def copied_from(run: RunPaths, name: str, job: Job) -> Path | None:
    """The run folder that a job was written for, if that is another one and has the job still: this one is its copy.

    Its processes write there, and are that run's to end. None for jobs whose paths are not of a run folder: those in a
    cluster's shared folder, and those that hosts get carried.
    """
    original = RunPaths(Path(job.inputs).parent)
    if not original.folder.is_absolute() or (isinstance(job.target, ClusterTarget) and job.target.shared is not None):
        return None
    try:
        is_ours = original.job(name).job.samefile(run.job(name).job)
    except OSError:
        return None  # it was moved
    return None if is_ours else original.folder


def _record_failed_start(run: RunPaths, name: str, collected: Collected) -> None:
    """Records of a scheduler's job that was lost before its first measurement while nobody looked."""
    end = collected.end
    if end is None or not collected.start_failure or not run.job(name).submission.exists():
        return
    if end.status is not Status.CANCELLED:
        status = Status.FAILED if end.status is Status.COMPLETED else end.status
        message = f"the launch failed to start: {collected.start_failure}"
        failed_records(run, name, collected.unreached, status, message)


def _uncollected(run: RunPaths) -> list[tuple[str, Job]]:
    """Job folders that may hold what no record holds yet, oldest first."""
    names = sorted((folder.name for folder in run.jobs.glob("[0-9]*-*")), key=job_order)
    left = [name for name in names if not collected_marker(run, name).exists() and run.job(name).job.exists()]
    return [(name, read_model(run.job(name).job, Job, PLAN_BYTES)) for name in left]


def bring_rest_home(run: RunPaths) -> None:
    """Bring home what a killed run had collected and not yet brought, or a full disk had kept away."""
    for copy in sorted(run.jobs.glob(".*.home")):
        folder = run.job(copy.name[1:].removesuffix(".home")).folder
        if not folder.is_symlink() and not folder.exists():
            copy.rename(folder)  # whole: the link to what it is a copy of was gone already
    for folder in sorted(run.jobs.glob("[0-9]*-*")):
        if folder.is_symlink() and collected_marker(run, folder.name).exists():
            bring_home(run, folder.name)


def collected_marker(run: RunPaths, name: str) -> Path:
    """Exists when nothing is left to merge in a job folder."""
    return run.job(name).collected


def mark_collected(run: RunPaths, name: str) -> None:
    """Say that a job's parts are all merged, and remove what a launcher that was killed left of a script."""
    remove_scripts(run.job(name))
    collected_marker(run, name).touch()
    bring_home(run, name)
