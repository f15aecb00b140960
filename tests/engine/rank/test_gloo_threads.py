"""Threads that still work when a script ends are waited for; idle ones are not."""

import ctypes
import subprocess
import sys
import threading
import time

from configs.common.files.project_files import ROOT
from engine.rank.gloo_threads import wait_for_gloo

NAME = "pt_test_loop"


class Worker:
    """A thread with a kernel's name, which works and then waits for more, as gloo's do."""

    def __init__(self, busy_seconds: float) -> None:
        self.busy_seconds, self.done = busy_seconds, False
        self._begun, self._more = threading.Event(), threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self._begun.wait(600)

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(15, NAME.encode(), 0, 0, 0)  # PR_SET_NAME
        self._begun.set()
        end = time.monotonic() + self.busy_seconds
        while time.monotonic() < end:
            pass
        self.done = True
        self._more.wait()


def test_a_thread_that_still_works_is_waited_for() -> None:
    worker = Worker(0.5)
    assert wait_for_gloo(30, NAME)
    assert worker.done


def test_time_is_up_for_a_thread_that_never_rests() -> None:
    worker = Worker(1.0)
    assert not wait_for_gloo(0.2, NAME) and not worker.done


def test_without_threads_there_is_nothing_to_wait_for() -> None:
    assert wait_for_gloo(30, "pt_nobody")


SCRIPT = """
import ctypes, threading, time
from engine.rank.gloo_threads import wait_at_exit

def work(begun):
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)
    begun.set()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
    print("let go", flush=True)
    threading.Event().wait()

begun = threading.Event()
threading.Thread(target=work, args=(begun,), daemon=True).start()
begun.wait()
wait_at_exit()
"""


def test_a_script_that_has_ended_waits() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "let go\n"
