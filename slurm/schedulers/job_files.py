"""What adapters read of a job's folder: the job, and what each node says of itself; and the name of a submission."""

import secrets
from functools import lru_cache
from pathlib import Path

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.plans.job import Job, JobEnd, Launcher
from configs.plans.paths import JobPaths
from configs.targets.resources import ScheduledTarget
from slurm.staging.packages import run_digest


def cluster_target(job: Job) -> ScheduledTarget:
    """The job's target, of whose kind the adapter was chosen."""
    assert isinstance(job.target, ScheduledTarget), f"{job.name} is of target kind {job.target.kind}"
    return job.target


@lru_cache(maxsize=16_384)
def job_in(folder: Path) -> Job:
    """A job as it was written; it does not change.

    All jobs in flight are looked at in turn: of more than are kept, each would be read again at every look.
    """
    return read_model(JobPaths(folder).job, Job, PLAN_BYTES)


def name_of_submission(folder: Path, prefix: str | None) -> str:
    """A name that no job bore before: a run folder that is removed and made again has the same job folders."""
    return f"{prefix or 'rw'}-{run_digest(folder.parents[1])}-{folder.name}-{secrets.token_hex(3)}"


def node_end(paths: JobPaths, node_rank: int) -> JobEnd | None:
    """How the job ended on one node; None where it has not said."""
    try:
        return read_model(paths.node_end(node_rank), JobEnd)
    except (OSError, ValueError):  # a shared file system may refuse for a moment what another node replaces
        return None


def node_launcher(paths: JobPaths, node_rank: int) -> Launcher | None:
    """Who runs the job on one node; None where no launcher came up."""
    try:
        return read_model(paths.node_launcher(node_rank), Launcher)
    except (OSError, ValueError):  # a shared file system may refuse for a moment what another node replaces
        return None
