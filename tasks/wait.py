"""Stage 5: wait for a job, with an ear for cancellation and a time limit of its own."""

import time

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.job import Job
from configs.paths import JobPaths
from slurm.local import cancel, poll
from tasks.board import Row
from tasks.session import Session

_FASTEST_POLL_SECONDS = 0.05
_SLOWEST_POLL_SECONDS = 0.2
_GRACE_SECONDS = 30.0
"""The launcher keeps the job's time limit itself; this much later it is taken for lost."""


@task(name="wait", task_run_name="wait for {name}", cache_policy=NO_CACHE)
def wait_for_launch(name: str, row: Row, session: Session) -> None:
    """Return when no process of the job is left. Ends the job if the run is cancelled or interrupted."""
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


def _visits_done(paths: JobPaths, job: Job) -> int:
    return min(len(job.visits), sum(1 for _ in paths.parts.glob("*.rank_0.json")))
