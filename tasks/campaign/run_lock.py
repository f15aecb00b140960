"""Exclusive lock of a run folder, released by the kernel when its holder ends. Does not import Prefect."""

import fcntl
import json
import os
import platform
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from uuid import UUID

from configs.common.base import utc_now, write_atomically
from configs.common.files.reading import check_regular, open_regular, parse_json
from configs.common.printable import printable
from configs.common.system.lock_files import WITHOUT_LOCKS, locks_needed
from configs.common.system.proc import is_alive, start_ticks
from configs.plans.paths import RunPaths

_MAX_CHARACTERS = 10_000
_TRIES, _PAUSE_SECONDS = 5, 0.02
"""`is_locked` holds the lock for a moment too: who only looks must not keep a run from its folder."""


class FolderInUse(ValueError):
    """Another run works in this folder."""


@contextmanager
def run_lock(run: RunPaths, flow_run: UUID | None = None) -> Iterator[UUID | None]:
    """Hold the folder, or raise FolderInUse naming the holder. Yields the flow run that held it before.

    None where that is the same one: a flow run that is tried again in its folder. A new folder gets the identity by
    which clusters know it. Raises ValueError where the file system has no locks.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    is_new = not run.lock.exists()
    if not is_new:
        check_regular(run.lock)
    with run.lock.open("a+", errors="replace") as file:
        for tries_left in reversed(range(_TRIES)):
            try:
                with locks_needed(run.folder, "use a folder of another one with --runs"):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not tries_left:
                    file.seek(0)
                    raise FolderInUse(f"{run.folder}: {_holder(file.read(_MAX_CHARACTERS))}") from error
                time.sleep(_PAUSE_SECONDS)
        if is_new and not run.id.exists():  # an older folder is known without
            write_atomically(run.id, secrets.token_hex(8))
        file.seek(0)
        before = _flow_run(file.read(_MAX_CHARACTERS))
        file.truncate(0)
        pid = os.getpid()
        holder = {"pid": pid, "pid_started": start_ticks(pid), "host": platform.node(), "since": utc_now()}
        # One without Prefect leaves to the next to say of the flow run before it that it is lost.
        told = flow_run or before
        file.write(json.dumps(holder | ({"flow_run": str(told)} if told else {})))
        file.flush()
        yield before if before != flow_run else None


def _flow_run(text: str) -> UUID | None:
    """The flow run that held the folder; None where its process lives: this is a copy of the folder that it holds."""
    try:
        holder = parse_json(text.encode(), "run.lock")
        flow_run = UUID(holder["flow_run"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    with suppress(ValueError, KeyError, TypeError):
        pid, here = int(holder["pid"]), holder["host"] == platform.node()
        if here and pid != os.getpid() and is_alive(pid, int(holder["pid_started"])):
            return None
    return flow_run


def _holder(text: str) -> str:
    try:
        holder = parse_json(text.encode(), "run.lock")
        who = printable(f"process {holder['pid']} on {holder['host']}, since {holder['since']}", 200)
    except (ValueError, KeyError, TypeError):
        who = "another process"
    return f"run folder is in use ({who}). Wait for that run or use another folder with --runs"


def is_locked(run: RunPaths) -> bool:
    """Whether a run works in the folder now; changes nothing in it."""
    try:
        with open_regular(run.lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:  # where there are none no run can work
            raise
    return False


def held_since(run: RunPaths) -> float | None:
    """When the run that works in the folder now began, in seconds since the epoch; None where there is none."""
    try:
        if not is_locked(run):
            return None
        with open_regular(run.lock) as file:
            holder = parse_json(file.read(_MAX_CHARACTERS), "run.lock")
        return datetime.fromisoformat(holder["since"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it is just being written
