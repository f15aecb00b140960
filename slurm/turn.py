"""One launch at a time on this machine: measured cells must not disturb each other's timing.

The launcher holds the turn, not whoever submitted it: so it lasts as long as something is measured, also
when the submitter is gone, and it counts for all users and all Prefect APIs. It is a lock of the kernel's,
which nothing can leave behind.

    with machine_turn(give_up=lambda: cancelled) as mine:
        if mine: ...
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

POLL_SECONDS = 0.1


def lock_folder() -> Path:
    """Where the locks of this machine lie. Raises OSError where there is no place for them.

    RANKWISE_LOCKS names it; a machine that is split for good (by cpusets, say) has one for each part.
    """
    named = os.environ.get("RANKWISE_LOCKS")
    folders = [Path(named)] if named else [Path("/run/lock"), Path(tempfile.gettempdir())]
    for folder in folders:
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise OSError(f"{' and '.join(map(str, folders))} cannot be written: no place for the machine's locks")


def _open(path: Path) -> int:
    """Open for reading, which is enough for a lock: the file may be another user's."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CREAT, 0o644)


def machine_turn(give_up: Callable[[], bool]) -> AbstractContextManager[bool]:
    """Wait for this machine to be free, and hold it for the block. False if `give_up` said so first."""
    return machine_lock("turn", give_up)


@contextmanager
def machine_lock(name: str, give_up: Callable[[], bool], poll_seconds: float = POLL_SECONDS) -> Iterator[bool]:
    """Hold one of the machine's locks for the block; `give_up` is asked at each look, and may raise."""
    descriptor = _open(lock_folder() / f"rankwise-{name}.lock")
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if give_up():
                    yield False
                    return
                time.sleep(poll_seconds)
                continue
            yield True
            return
    finally:
        os.close(descriptor)
