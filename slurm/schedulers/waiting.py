"""Why a job waits, kept in its folder for whoever asks later: `queue.json`, written when the reason changes.

note_waiting(paths, "PENDING", "JobHeldUser")
read_waiting(paths)                          # QueueState | None
"""

from contextlib import suppress

from configs.common.base import utc_now, write_atomically
from configs.common.reading import read_model
from configs.plans.job import QueueState
from configs.plans.paths import JobPaths


def note_waiting(paths: JobPaths, state: str, reason: str) -> None:
    """Keep the reason, unless it is the one that is kept. A disk that is full stops nothing."""
    known = read_waiting(paths)
    if known is None or (known.state, known.reason) != (state, reason):
        with suppress(OSError):
            write_atomically(paths.queue, QueueState(state=state, reason=reason, since=utc_now()).model_dump_json())


def read_waiting(paths: JobPaths) -> QueueState | None:
    """The reason that was kept last; None before there was one."""
    try:
        return read_model(paths.queue, QueueState)
    except (OSError, ValueError):
        return None
