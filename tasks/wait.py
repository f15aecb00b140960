"""Stage 5: wait for jobs, with an ear for cancellation and a time limit of its own."""

import time
from collections.abc import Callable
from contextlib import suppress

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.plans.job import Job
from slurm.schedulers.adapter import adapter_for
from slurm.schedulers.refusals import JobState, Unavailable
from slurm.schedulers.waiting import read_waiting
from tasks.campaign.launches.active_jobs import ActiveJobs, Flown
from tasks.campaign.launches.jobs import end_overdue, follow_job, measured_so_far, waits_for
from tasks.campaign.progress import ProgressRow
from tasks.campaign.session import Session
from tasks.prefect_api.stages import stage

_SWEEP_SECONDS = 0.5
"""Between two looks at all jobs in flight; they are looks at files, the scheduler is asked more seldom."""
_HOLDER_SECONDS = 2.0
"""Between two looks at who has this machine."""
_SCHEDULER_GRACE_SECONDS = 300.0
"""So much later than its limit a job is taken for lost; the launcher's and the scheduler's limits come before."""


@stage("wait", "wait for {row.title}")
def wait_for_launch(name: str, row: ProgressRow, session: Session) -> None:
    """Return when no process of this machine's job is left. Ends the job if the run is cancelled or interrupted."""
    job = read_model(session.run.job(name).job, Job, PLAN_BYTES)
    told_at = 0.0

    def look(state: JobState, waited_seconds: float) -> None:
        nonlocal told_at
        session.watcher.check()
        row.state, row.done, row.waited_seconds = state, measured_so_far(job, session.run, row.done), waited_seconds
        if state != "waiting" or waited_seconds == 0:
            row.note = ""
        elif not row.note or waited_seconds - told_at >= _HOLDER_SECONDS:
            row.note, told_at = waits_for(), waited_seconds

    try:
        follow_job(job, session.run, look)
    except BaseException:
        row.state = "cancelled"
        raise


@stage("wait", "wait for {what}")
def wait_for_jobs(what: str, active_jobs: ActiveJobs, session: Session, enough: Callable[[], bool]) -> list[str]:
    """Watch all jobs in flight; return the names of those that ended, as soon as there are any.

    Returns none where `enough` says so first. One task for all: a thread each would be many for nothing.
    Raises RunCancelled; to end the jobs then is the caller's part, who knows of all of them.
    """
    while True:
        session.watcher.check()
        ended = [name for name, flown in active_jobs.jobs.items() if _look(session, name, flown) == "ended"]
        if ended or enough():
            return ended
        time.sleep(_SWEEP_SECONDS)


def _look(session: Session, name: str, flown: Flown) -> str:
    """Where a job stands; its row says so too. One that outlives all limits is ended."""
    adapter, folder = adapter_for(flown.job.target.adapter), session.run.job(name).folder
    state = adapter.poll(folder)
    row = flown.row
    flown.saw(state, time.monotonic())
    if state == "running":
        assert flown.running_since is not None
        row.done = measured_so_far(flown.job, session.run, row.done)
        if time.monotonic() - flown.running_since > flown.job.timeout_seconds + _SCHEDULER_GRACE_SECONDS:
            with suppress(Unavailable):  # asked again at the next look: the run goes on without its scheduler
                end_overdue(flown.job, session.run.job(name), adapter)
    if state != "ended":
        waits = read_waiting(session.run.job(name)) if state == "waiting" else None
        row.reason = waits.reason if waits else ""
        row.state, row.note = ("queued" if state == "waiting" else state), adapter.note(folder)
    return state
