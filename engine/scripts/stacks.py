"""Stacks of every rank of a script that hangs: by py-spy where it is installed, else by Python's faulthandler.

    text = stacks_of(pid, rank, folder)

py-spy reads a process from outside (https://github.com/benfred/py-spy). The faulthandler of ranks that run Python was
registered for a signal by `engine/probe/injected`; it is sent only to a process that handles it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from configs.common.files.reading import read_tail
from configs.common.system.proc import read_fields

STACKS_SIGNAL = signal.SIGRTMIN + 9
_LIMIT_SECONDS = 10.0
_WAIT_SECONDS = 0.5
_MAX_BYTES = 256 << 10


def stacks_of(pid: int, rank: int, folder: Path) -> str:
    """The stacks of a rank's threads as text; empty where nobody can see them."""
    found = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if found is not None:
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run([found, "dump", "--pid", str(pid)], capture_output=True, timeout=_LIMIT_SECONDS)
            if done.returncode == 0:
                return done.stdout[:_MAX_BYTES].decode("utf-8", "replace")
    return _by_signal(pid, rank, folder)


def _by_signal(pid: int, rank: int, folder: Path) -> str:
    caught = read_fields(f"/proc/{pid}/status").get("SigCgt", "0")
    if not int(caught, 16) >> (STACKS_SIGNAL - 1) & 1:
        return ""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STACKS_SIGNAL)
        time.sleep(_WAIT_SECONDS)
        with suppress(OSError, ValueError):
            return read_tail(folder / f"stacks_{rank}.{pid}.txt", _MAX_BYTES)
    return ""
