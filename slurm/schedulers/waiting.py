"""Why a job waits, kept in its folder for whoever asks later: `queue.json`, written when the reason changes.

note_waiting(paths, "PENDING", "JobHeldUser")
note_pause(paths, "SUSPENDED", True)         # of a job that has begun
read_waiting(paths)                          # QueueState | None
is_suspended(paths)
overdue(folder, target, "Priority", others_run=False)    # the end of a job that waited for too long
"""

import time
from contextlib import suppress
from pathlib import Path

from configs.common.base import utc_now, write_atomically
from configs.common.files.reading import read_model
from configs.plans.job import JobEnd, QueueState
from configs.plans.paths import JobPaths
from configs.records.record import Status
from configs.targets.resources import ClusterTarget
from slurm.schedulers.commands.states import SUSPENDED, bare

_pending: dict[Path, float] = {}  # job folder -> since when it waits and nothing of this process runs
_paused: dict[Path, bool] = {}  # job folder -> whether the scheduler had stopped it at the last look


def note_waiting(paths: JobPaths, state: str, reason: str) -> None:
    """Keep the reason, unless it is the one that is kept. A disk that is full stops nothing."""
    known = read_waiting(paths)
    if known is None or (known.state, known.reason) != (state, reason):
        with suppress(OSError):
            write_atomically(paths.queue, QueueState(state=state, reason=reason, since=utc_now()).model_dump_json())


def note_pause(paths: JobPaths, state: str, suspended: bool) -> None:
    """Keep that the scheduler has stopped a job that runs, and that it goes on; nothing of one never stopped."""
    if _paused.get(paths.folder) == suspended:
        return
    if suspended or is_suspended(paths):  # an earlier process may have kept it
        note_waiting(paths, state, "")
    _paused[paths.folder] = suspended


def is_suspended(paths: JobPaths) -> bool:
    """Whether the scheduler had stopped the job when it was last asked."""
    known = read_waiting(paths)
    return known is not None and bare(known.state) in SUSPENDED


def read_waiting(paths: JobPaths) -> QueueState | None:
    """The reason that was kept last; None before there was one."""
    try:
        return read_model(paths.queue, QueueState)
    except (OSError, ValueError):
        return None


def overdue(folder: Path, target: ClusterTarget, reason: str, others_run: bool) -> JobEnd | None:
    """The end of a job that waits for longer than its target allows, while nothing of this run runs; None before."""
    if others_run:
        _pending.pop(folder, None)
    waited = time.monotonic() - _pending.setdefault(folder, time.monotonic())
    if target.max_queue_minutes is None or waited <= 60 * target.max_queue_minutes:
        return None
    limit = f"target.max_queue_minutes {target.max_queue_minutes:g} of {target.name}"
    message = f"{limit}: {target.scheduler} did not start the job in time: {reason or 'no reason given'}"
    return JobEnd(status=Status.CANCELLED, return_code=None, message=message, finished_at=utc_now())
