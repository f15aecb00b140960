"""Jobs on this machine, through submitit's local executor.

submitit starts the launcher and is then only a bystander: its own cancel and time limit leave torchrun's
workers behind (they signal one process, not the tree), so its limit lies far beyond ours, and everything
is ended by the launcher or, if that is gone, by the job folder in the processes' command lines.

submitit's wrappers get a shell that detaches them from the submitter's terminal: Ctrl-C there must not
print their tracebacks, and a pipe that reads the submitter's output must not wait for the job's end.
"""

import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import CommandFunction

from configs.base import utc_now
from configs.job import JobEnd
from configs.paths import JobPaths
from configs.record import Status
from slurm import processes
from slurm.adapter import JobState, read_launcher, visit_under_way, write_end

START_LIMIT_SECONDS = 30.0
_YOUNG_SECONDS = 1.0  # a submission of this age is believed to live without a look at its processes
_LAUNCHER_GRACE_SECONDS = 6.5
_NEVER_MINUTES = 60 * 24 * 365

# submitit's job objects of this process, by job folder: they hold Popen objects, which must be asked for
# the exit code or leave a zombie and a ResourceWarning.
_submitted: dict[Path, Any] = {}


def submit(folder: Path) -> None:
    """Start the job whose `job.json` lies in this folder, and return at once."""
    _reap()
    folder = folder.resolve()
    job_json = JobPaths(folder).job
    if not job_json.is_file():
        raise FileNotFoundError(f"{job_json}: there is no job to submit")
    own = folder / "submitit"
    own.mkdir(exist_ok=True)
    executor = submitit.LocalExecutor(folder=own)
    # `trap` keeps the shell alive as the controller's parent, by whose pid submitit names the job's files;
    # a signal that a shell ignores is ignored by what it starts.
    executor.update_parameters(
        timeout_min=_NEVER_MINUTES,
        setup=[
            "trap '' INT HUP QUIT TSTP",
            "trap : TERM",
            "export PYTHONSAFEPATH=1",
            f"exec </dev/null >>{shlex.quote(str(own / 'controller.log'))} 2>&1",
        ],
    )
    # submitit's executor hides all GPUs from a job that asks it for none.
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    env = ["env", "-u", "CUDA_VISIBLE_DEVICES"] if devices is None else ["env", f"CUDA_VISIBLE_DEVICES={devices}"]
    command = [*env, sys.executable, "-m", "slurm.launch", str(job_json)]
    _submitted[folder] = executor.submit(CommandFunction(command, verbose=False))


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
    _reap()
    paths = JobPaths(folder.resolve())
    if paths.end.exists():
        return "ended"
    launcher = read_launcher(paths)
    if launcher is not None and processes.is_alive(launcher.pid, launcher.pid_started):
        return "running" if launcher.turn_at else "waiting"
    if launcher is None and _may_begin(paths):
        return "waiting"
    if launcher is None and read_launcher(paths) is not None:
        return "running"  # it came up while we looked
    if not paths.end.exists():  # the launcher may have ended properly while we looked
        processes.end_tree(lambda: processes.of_job(paths.folder), grace_seconds=0.5)
        why = "the launcher ended without a word" if launcher else "the launcher never began"
        message = f"{why}; see {paths.launcher_log.name} and the folder submitit"
        _write(paths, Status.LOST, message)
    return "ended"


def cancel(folder: Path) -> None:
    """End the job and return when no process of it is left, within 8 seconds."""
    paths = JobPaths(folder.resolve())
    launcher = read_launcher(paths)
    if launcher is not None and processes.is_alive(launcher.pid, launcher.pid_started):
        with suppress(ProcessLookupError):
            os.kill(launcher.pid, signal.SIGTERM)
        deadline = time.monotonic() + _LAUNCHER_GRACE_SECONDS
        while processes.is_alive(launcher.pid, launcher.pid_started) and time.monotonic() < deadline:
            time.sleep(0.02)
    # The wrappers end by themselves within 0.1 s of the launcher.
    processes.end_tree(lambda: processes.of_job(paths.folder), grace_seconds=0.6, limit_seconds=1.4)
    _reap()
    if not paths.end.exists():
        _write(paths, Status.CANCELLED, "cancelled on request")


def _write(paths: JobPaths, status: Status, message: str) -> None:
    end = JobEnd(status=status, return_code=None, visit=visit_under_way(paths), message=message, finished_at=utc_now())
    write_end(paths, end)


def _may_begin(paths: JobPaths) -> bool:
    """Whether the job was submitted so lately that its launcher can still come up."""
    try:
        age_seconds = time.time() - (paths.folder / "submitit").stat().st_ctime
    except FileNotFoundError:
        return False
    return age_seconds < _YOUNG_SECONDS or (age_seconds < START_LIMIT_SECONDS and bool(processes.of_job(paths.folder)))


def _reap() -> None:
    for folder, job in list(_submitted.items()):
        if job.done():
            _submitted.pop(folder, None)
