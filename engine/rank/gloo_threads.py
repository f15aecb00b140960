"""Waiting until gloo's threads have let go of Python's tensors.

    wait_at_exit()      # where collectives are called for a script; it waits before the interpreter goes

A thread of gloo drops the last reference to a collective's tensors after the collective is complete for its caller,
and needs the GIL for it. If the interpreter is being finalized by then, CPython (until 3.13, `PyThread_exit_thread`)
ends the thread by `pthread_exit`, which C++ answers with `std::terminate`: a script that has done all its work aborts.
Seen with torch 2.13 in two of three runs beside two busy processes.
"""

import atexit
import functools
import time
from contextlib import suppress

import psutil

GLOO_THREAD = "pt_gloo_runloop"
_PAUSE_SECONDS = 0.01


@functools.cache
def wait_at_exit() -> None:
    """Have this process wait for gloo when its script has ended."""
    atexit.register(wait_for_gloo)


def wait_for_gloo(limit_seconds: float = 5.0, name: str = GLOO_THREAD) -> bool:
    """Return once no thread of gloo has anything to do (True), or when time is up (False).

    The GIL is free during a pause, so a thread that waits for it wakes. One that sleeps at both looks, and was not
    switched to in between, waits for work.
    """
    deadline = time.monotonic() + limit_seconds
    before = _asleep(name)
    while time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
        now = _asleep(name)
        if None not in now.values() and now == before:
            return True
        before = now
    return False


def _asleep(name: str) -> dict[int, tuple[int, int] | None]:
    """Return context switches (voluntary, involuntary) by id of the threads of this name; None for one awake."""
    found: dict[int, tuple[int, int] | None] = {}
    for thread in psutil.Process().threads():
        with suppress(psutil.NoSuchProcess):  # it has ended since the listing
            task = psutil.Process(thread.id)
            if task.name() == name:
                asleep = task.status() == psutil.STATUS_SLEEPING
                switches = task.num_ctx_switches()
                found[thread.id] = (switches.voluntary, switches.involuntary) if asleep else None
    return found
