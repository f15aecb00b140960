"""Exclusive lock of a run folder, released by the kernel when its holder ends. Does not import Prefect."""

import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from configs.common.base import utc_now
from configs.plans.paths import RunPaths


class FolderInUse(ValueError):
    """Another run works in this folder."""


@contextmanager
def run_lock(run: RunPaths, flow_run: UUID | None = None) -> Iterator[UUID | None]:
    """Hold the folder, or raise FolderInUse naming the holder. Yields the flow run that held it before."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with run.lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise FolderInUse(f"{run.folder}: {_holder(file.read())}") from error
        file.seek(0)
        before = _flow_run(file.read())
        file.truncate(0)
        holder = {"pid": os.getpid(), "host": platform.node(), "since": utc_now()}
        file.write(json.dumps(holder | ({"flow_run": str(flow_run)} if flow_run else {})))
        file.flush()
        yield before


def _flow_run(text: str) -> UUID | None:
    try:
        return UUID(json.loads(text)["flow_run"])
    except (ValueError, KeyError, TypeError):
        return None


def _holder(text: str) -> str:
    try:
        holder = json.loads(text)
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError):
        who = "another process"
    return f"run folder is in use ({who}). Wait for that run or use another folder with --runs"


def is_locked(run: RunPaths) -> bool:
    """Whether a run works in the folder now."""
    if not run.lock.exists():
        return False
    with run.lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
