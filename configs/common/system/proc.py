"""Processes and counters of Linux: /proc (proc(5)) and prctl(2). Imports the standard library only.

    pid, ticks = os.getpid(), start_ticks(os.getpid())
    is_alive(pid, ticks)                     # this very process, not a later one with the same pid
    end_with_parent(signal.SIGTERM)
    read_fields("/proc/meminfo")["MemAvailable"]

A process is identified by its pid and its start time, because pids are reused.
"""

import ctypes
import os
import signal
from pathlib import Path

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _stat_fields(pid: int) -> list[str]:
    # Field 2 is the name in parentheses and may hold spaces and parentheses; field 3 follows the last one.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot (/proc/<pid>/stat field 22).

    Raises FileNotFoundError or ProcessLookupError where there is no such process.
    """
    return int(_stat_fields(pid)[19])


def is_alive(pid: int, started: int) -> bool:
    """Return whether the process that started at `started` runs; one that ended and was not reaped yet does not.

    Where /proc cannot be read for another reason (no file descriptors left), nothing is known to have ended: True.
    """
    try:
        fields = _stat_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return fields[0] not in "ZX" and int(fields[19]) == started


def parent_of(pid: int) -> int:
    """Return the parent's pid. Raises FileNotFoundError or ProcessLookupError without such a process."""
    return int(_stat_fields(pid)[1])


def process_ids() -> list[int]:
    """Return the pids of all processes in sight, this one excepted."""
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]


def command_line(pid: int) -> bytes:
    """Return a process's arguments, each ended by a zero byte; empty in the midst of execve(2). Raises OSError."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def environment_of(pid: int) -> dict[str, str]:
    """Return a process's environment as it was when its program began; empty for a zombie. Raises OSError."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries if entry)
    return {key: value for key, _, value in pairs}


def network_namespace(pid: int | None = None) -> str | None:
    """Return a process's network namespace (this thread's without a pid), such as `net:[4026531840]`; None: unknown."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net" if pid is not None else "/proc/thread-self/ns/net")
    except OSError:  # it ended, or is another user's
        return None


def end_with_parent(order: signal.Signals, parent: int | None = None) -> None:
    """Ask the kernel for a signal when the parent ends (PR_SET_PDEATHSIG); send it now if the parent has ended.

    parent: pid that the parent must have; the present one's if None. Raises OSError.
    """
    expected = os.getppid() if parent is None else parent
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, int(order))
    if os.getppid() != expected:
        os.kill(os.getpid(), order)


def become_subreaper() -> None:
    """Adopt orphaned descendants (PR_SET_CHILD_SUBREAPER), so that none escapes. Raises OSError."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def _prctl(name: str, option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({name}) failed")


def read_fields(path: str) -> dict[str, str]:
    """Return `name: value` lines of a file of /proc, the first of each name; empty where it cannot be read."""
    fields: dict[str, str] = {}
    try:
        with open(path, errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                fields.setdefault(name.strip(), value.strip())
    except OSError:  # some containers do not allow it
        return {}
    return fields
