"""Jobs on hosts that are reached by SSH, as an adapter (`slurm.schedulers.adapter`).

    submit_many(folders)      # they get hosts in turn, carried and started by a thread
    poll(folder)              # from that thread; a job of an earlier process is gone on with

A job goes on without this process: see `slurm.schedulers.ssh.job`.
"""

import concurrent.futures
import functools
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from configs.common.base import utc_now, write_atomically
from configs.plans.job import JobEnd, Submission
from configs.plans.paths import JobPaths
from configs.records.record import Status
from slurm.launcher.job_files import write_unlaunched_end
from slurm.schedulers.refusals import JobState, Unavailable
from slurm.schedulers.ssh.job import SshJob
from slurm.schedulers.ssh.turns import Turns
from slurm.schedulers.waiting import note_waiting, overdue
from slurm.ssh.connection import HostAway
from slurm.ssh.loop import run_on_loop, wait_for

_CANCEL_SECONDS = 8.0

_lock = Lock()
_jobs: dict[Path, SshJob] = {}


@functools.cache
def _turns() -> Turns:
    return Turns()


def submit(folder: Path) -> None:
    """Submit one job."""
    submit_many([folder])


def submit_many(folders: Sequence[Path]) -> None:
    """Have jobs run when hosts of their target are free."""
    for folder in folders:
        submission = Submission(job_id=folder.name, submitted_at=utc_now())
        write_atomically(JobPaths(folder).submission, submission.model_dump_json())
        _followed(folder)


def poll(folder: Path) -> JobState:
    """Where the job stands, as the thread saw it last."""
    paths = JobPaths(folder)
    if paths.end.exists():
        _jobs.pop(folder, None)
        return "ended"
    if not paths.submission.exists():
        write_unlaunched_end(paths, Status.LOST, "the job was never submitted")
        return "ended"
    job = _followed(folder)
    if job.state != "waiting":
        return job.state if job.state != "ended" or paths.end.exists() else "running"
    note_waiting(paths, "PENDING", job.note)
    end = overdue(folder, job.target, job.note, others_run=any(each.state == "running" for each in _jobs.values()))
    if end is None:
        return "waiting"
    try:
        _cancel([folder], end)
    except Unavailable:
        return "waiting"  # a host is away: asked again at the next look
    return "ended"


def await_end(folder: Path, seconds: float) -> None:
    """Sleep, or until the job has ended."""
    job = _jobs.get(folder)
    if job is not None:
        job.ended.wait(seconds)


def note(folder: Path) -> str:
    """One line on a job that has not ended: its hosts, or what it waits for."""
    job = _jobs.get(folder)
    return job.note if job is not None else ""


def cancel(folder: Path) -> None:
    """End one job."""
    cancel_many([folder])


def cancel_many(folders: Sequence[Path]) -> None:
    """End jobs, and return when nothing of them is left on their hosts, within 8 s.

    Raises Unavailable where a host cannot be asked.
    """
    _cancel(folders, None)


def _cancel(folders: Sequence[Path], end: JobEnd | None) -> None:
    asked = []
    for folder in folders:
        paths = JobPaths(folder)
        if not paths.job.exists() or paths.end.exists():
            continue
        if not paths.submission.exists():
            write_unlaunched_end(paths, Status.CANCELLED, "cancelled on request, before it was submitted")
            continue
        asked.append(run_on_loop(_cancelled(_followed(folder, go_on=False), end)))
    done, late = concurrent.futures.wait(asked, timeout=_CANCEL_SECONDS)
    problems = [str(future.exception()) for future in done if future.exception() is not None]
    problems += ["a host did not end its job in time"] * bool(late)
    for folder in folders:
        _jobs.pop(folder, None)
    if problems:
        raise Unavailable("; ".join(dict.fromkeys(problems)))


async def _cancelled(job: SshJob, end: JobEnd | None) -> None:
    try:
        await job.cancel(end)
    except HostAway as error:
        raise Unavailable(error.strerror) from error


def _followed(folder: Path, go_on: bool = True) -> SshJob:
    """The job as this process follows it; found by its folder where it did not yet. go_on: begin or go on with it."""
    with _lock:
        job = _jobs.get(folder)
        if job is None:
            job = _jobs[folder] = SshJob(folder, wait_for(_made_turns()))
            if go_on:
                wait_for(_begun(job))
    return job


async def _made_turns() -> Turns:
    return _turns()


async def _begun(job: SshJob) -> None:
    job.begin()
