"""Jobs on this machine: launchers forked from a process that has imported what they need (`slurm.forking.parents`).

Whoever submits is then only a bystander. A launcher goes on when its submitter or the process that it was forked from
ends. Everything is ended by the launcher or, if that is gone, by the job folder in the processes' command lines.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from configs.common.files.reading import PLAN_BYTES, read_model, read_text
from configs.common.system.forking import wait_for_exit
from configs.common.system.proc import is_alive
from configs.plans.job import Job
from configs.plans.paths import JobPaths
from configs.records.record import Status
from slurm.forking import parents
from slurm.launcher import processes
from slurm.launcher.job_files import read_launcher, write_unlaunched_end
from slurm.schedulers.refusals import JobState

START_LIMIT_SECONDS = 30.0
_YOUNG_SECONDS = 1.0  # a submission of this age is believed to live without a look at its processes
_LAUNCHER_GRACE_SECONDS = 6.5
_CANCEL_SECONDS, _LEAST_LIMIT_SECONDS = 8.0, 1.4


def submit(folder: Path) -> None:
    """Start the job whose `job.json` lies in this folder, and return at once."""
    paths = JobPaths(folder.resolve())
    if not paths.job.is_file():
        raise FileNotFoundError(f"{paths.job}: no such job")
    job = read_model(paths.job, Job, PLAN_BYTES)
    _note_submission(paths)
    parents.launch(job, paths.job)
    _note_submission(paths)  # a parent may have had to import first


def submit_many(folders: Sequence[Path]) -> None:
    """Start jobs; on this machine they measure one after the other, each when it is its turn."""
    for folder in folders:
        submit(folder)


def note(folder: Path) -> str:
    """This machine has no names for jobs, and why one waits is known to whoever polls."""
    return ""


def cancel_many(folders: Sequence[Path]) -> None:
    """End jobs, one after the other."""
    for folder in folders:
        cancel(folder)


def poll(folder: Path) -> JobState:
    """Where the job stands. A job whose launcher is gone without a word is given an `end.json`: lost."""
    paths = JobPaths(folder.resolve())
    if paths.end.exists():
        return "ended"
    launcher = read_launcher(paths)
    if launcher is not None and is_alive(launcher.pid, launcher.pid_started):
        return "running" if launcher.lock_acquired_at else "waiting"
    if launcher is None and _may_begin(paths):
        return "waiting"
    if launcher is None and read_launcher(paths) is not None:
        return "running"  # it came up while we looked
    if not paths.end.exists():  # the launcher may have ended properly while we looked
        processes.end_tree(lambda: processes.of_job(paths.folder), grace_seconds=0.5)
        why = "the launcher exited without a result" if launcher else "the launcher never started"
        message = f"{why}; see {paths.launcher_log.name}"
        write_unlaunched_end(paths, Status.LOST, message)
    return "ended"


def await_end(folder: Path, seconds: float) -> None:
    """Return as soon as the job's launcher has ended, and after so many seconds at the latest."""
    launcher = read_launcher(JobPaths(folder.resolve()))
    if launcher is None or not is_alive(launcher.pid, launcher.pid_started):
        time.sleep(min(seconds, _YOUNG_SECONDS / 20))
    else:
        wait_for_exit(launcher.pid, seconds)


def cancel(folder: Path) -> None:
    """End the job and return when no process of it is left, within 8 seconds."""
    paths, began = JobPaths(folder.resolve()), time.monotonic()
    launcher = read_launcher(paths)
    if launcher is not None and is_alive(launcher.pid, launcher.pid_started):
        with suppress(ProcessLookupError):
            os.kill(launcher.pid, signal.SIGTERM)
        deadline = time.monotonic() + _LAUNCHER_GRACE_SECONDS
        while is_alive(launcher.pid, launcher.pid_started) and time.monotonic() < deadline:
            time.sleep(0.02)
    # A killed process needs the processor once more to go, which on a busy machine takes more than a second.
    left = _CANCEL_SECONDS - (time.monotonic() - began)
    limit = max(left, _LEAST_LIMIT_SECONDS)
    processes.end_tree(lambda: processes.of_job(paths.folder), grace_seconds=0.6, limit_seconds=limit)
    if not paths.end.exists():
        write_unlaunched_end(paths, Status.CANCELLED, "cancelled on request")


def _note_submission(paths: JobPaths) -> None:
    """Write when the job was submitted, by a clock that nobody sets: its reading, and the boot that it counts from."""
    written = paths.submitted.with_name(f".{paths.submitted.name}.{os.getpid()}")
    written.write_text(f"{time.monotonic()} {_boot()}")
    os.replace(written, paths.submitted)


def _may_begin(paths: JobPaths) -> bool:
    """Whether the job was submitted so lately that its launcher can still come up."""
    try:
        submitted, _, boot = read_text(paths.submitted).partition(" ")
        age_seconds = time.monotonic() - float(submitted)
    except (FileNotFoundError, ValueError):
        return False
    if boot != _boot():
        return False
    return age_seconds < _YOUNG_SECONDS or (age_seconds < START_LIMIT_SECONDS and bool(processes.of_job(paths.folder)))


def _boot() -> str:
    """Return the id of this machine's boot; empty where the kernel tells none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
