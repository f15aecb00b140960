"""Machine lock: only one launch is measured on a machine at a time, across all users and Prefect APIs.

The launcher holds the lock, not the submitter, so it lasts as long as the measurement even if the submitter
dies, and it applies to all users and all Prefect APIs.

    with launch_lock(give_up=lambda: cancelled) as mine:
        if mine: ...
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from configs.common.system.lock_files import lock_holder, open_lock_file

LOCK_POLL_SECONDS = 0.1


@contextmanager
def launch_lock(give_up: Callable[[], bool]) -> Iterator[bool]:
    """Wait for this machine to be free, and hold it for the block. False if `give_up` said so first.

    Whoever has waited longest is next: only the holder of a second lock, the queue's, tries for the machine.
    """
    with ExitStack() as held:
        with machine_lock("queue", give_up) as next_in_line:
            mine = next_in_line and held.enter_context(machine_lock("turn", give_up))
        yield mine


def machine_holder() -> str:
    """Describe who holds the machine: pid, user and study, as far as can be seen from here."""
    return lock_holder("turn") or "a process that cannot be seen from here"


@contextmanager
def machine_lock(name: str, give_up: Callable[[], bool]) -> Iterator[bool]:
    """Hold one of the machine's locks for the block; `give_up` is asked at each look, and may raise."""
    descriptor = open_lock_file(name)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if give_up():
                    yield False
                    return
                time.sleep(LOCK_POLL_SECONDS)
                continue
            yield True
            return
    finally:
        os.close(descriptor)
