"""What an earlier run left behind: launches that still run are adopted or ended, parts are merged.

Called before anything new is planned, so that no repeat is measured twice and none is lost.
"""

from dataclasses import dataclass, field
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.job import Job
from configs.paths import RunPaths
from slurm.local import cancel, poll
from tasks.ledger import places
from tasks.merge import collect_job
from tasks.session import Session


@dataclass
class Leftovers:
    """Jobs that still run and are wanted, and lines about everything else that was found."""

    running: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@task(name="adopt", task_run_name="adopt what an earlier run left", cache_policy=NO_CACHE)
def adopt_jobs(session: Session) -> Leftovers:
    """Look at every job folder that was not collected. Jobs that still run for this plan are returned."""
    run, found = session.run, Leftovers()
    wanted = set(places(session.plan))
    for folder in sorted(run.jobs.glob("[0-9]*-*")):
        paths = run.job(folder.name)
        if collected_marker(run, folder.name).exists() or not paths.job.exists():
            continue
        job = Job.model_validate_json(paths.job.read_bytes())
        mine = {(visit.cell.key, job.measuring_pass, visit.repeat) for visit in job.visits} <= wanted
        if poll(folder) != "ended" and mine:
            found.running.append(folder.name)
            found.notes.append(f"adopted {folder.name}, which an earlier run had started")
            continue
        if poll(folder) != "ended":
            cancel(folder)
            found.notes.append(f"ended {folder.name}, which an earlier run had left")
        found.notes += collect_job(run, folder.name).set_aside
        mark_collected(run, folder.name)
    return found


def collected_marker(run: RunPaths, name: str) -> Path:
    """Exists when nothing is left to merge in a job folder."""
    return run.job(name).folder / "collected"


def mark_collected(run: RunPaths, name: str) -> None:
    """Say that a job's parts are all merged."""
    collected_marker(run, name).touch()
