"""Stage 5: wait for jobs, with an ear for cancellation and a time limit of its own."""

import time
from collections.abc import Callable

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.job import Job
from configs.paths import JobPaths
from slurm.adapter import adapter_for
from slurm.local import cancel, poll
from tasks.board import Row
from tasks.flight import Flight, Flown
from tasks.session import Session

_FASTEST_POLL_SECONDS = 0.05
_SLOWEST_POLL_SECONDS = 0.2
_SWEEP_SECONDS = 0.5
"""Between two looks at all jobs in flight; they are looks at files, the scheduler is asked more seldom."""
_GRACE_SECONDS = 30.0
"""The launcher keeps the job's time limit itself; this much later it is taken for lost."""
_SCHEDULER_GRACE_SECONDS = 300.0
"""The same under a scheduler, which has a limit of its own between the two."""


@task(name="wait", task_run_name="wait for {name}", cache_policy=NO_CACHE)
def wait_for_launch(name: str, row: Row, session: Session) -> None:
    """Return when no process of this machine's job is left. Ends the job if the run is cancelled or interrupted."""
    paths = session.run.job(name)
    job = Job.model_validate_json(paths.job.read_bytes())
    deadline = time.monotonic() + job.timeout_seconds + _GRACE_SECONDS
    pause = _FASTEST_POLL_SECONDS
    try:
        while (state := poll(paths.folder)) != "ended":
            session.watcher.check()
            if state == "waiting" and paths.launcher.exists():
                # Another launch has the machine, perhaps for hours: no limit counts meanwhile.
                deadline += pause
                row.waited_seconds += pause
                row.note = "for another launch on this machine"
            if time.monotonic() > deadline:
                cancel(paths.folder)
            row.state = state
            row.note = row.note if state == "waiting" else ""
            row.done = _visits_done(paths, job)
            time.sleep(pause)
            pause = min(pause * 1.1, _SLOWEST_POLL_SECONDS)
    except BaseException:
        # Whatever ends this wait ends the job: Ctrl-C, a signal of a Prefect worker, the API's cancel.
        row.state = "cancelled"
        cancel(paths.folder)
        raise


@task(name="wait", task_run_name="wait for {what}", cache_policy=NO_CACHE)
def wait_for_jobs(what: str, flight: Flight, session: Session, enough: Callable[[], bool]) -> list[str]:
    """Watch all jobs in flight; return the names of those that ended, as soon as there are any.

    Returns none where `enough` says so first. One task for all: a thread each would be many for nothing.
    Raises RunCancelled; to end the jobs then is the caller's part, who knows of all of them.
    """
    while True:
        session.watcher.check()
        ended = [name for name, flown in flight.jobs.items() if _look(session.run.job(name), flown) == "ended"]
        if ended or enough():
            return ended
        time.sleep(_SWEEP_SECONDS)


def _look(paths: JobPaths, flown: Flown) -> str:
    """Where a job stands; its row says so too. One that outlives all limits is ended."""
    adapter = adapter_for(flown.job.target.kind)
    state = adapter.poll(paths.folder)
    row = flown.row
    if state == "running":
        if flown.running_since is None:
            flown.running_since = time.monotonic()
        row.done = _visits_done(paths, flown.job)
        if time.monotonic() - flown.running_since > flown.job.timeout_seconds + _SCHEDULER_GRACE_SECONDS:
            adapter.cancel(paths.folder)
    if state != "ended":
        row.state, row.note = ("running" if state == "running" else "queued"), adapter.note(paths.folder)
    return state


def _visits_done(paths: JobPaths, job: Job) -> int:
    return min(len(job.visits), sum(1 for _ in paths.parts.glob("*.rank_0.json")))
