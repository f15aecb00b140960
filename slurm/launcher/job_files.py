"""Files of a job folder that the launcher and its ranks write, and that schedulers' adapters read.

    measurement_under_way(paths)                          # from the ranks' progress files
    reserve_end(paths); write_end(paths, JobEnd(...))

The end of a job is written into a block that was allocated when the job began.
"""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from configs.common.base import utc_now, write_atomically
from configs.common.files.reading import read_model
from configs.plans.job import JobEnd, Launcher, Progress
from configs.plans.paths import JobPaths
from configs.records.record import Status

_RESERVED_BYTES = 8192


def read_launcher(paths: JobPaths) -> Launcher | None:
    """Who runs the job; None before the launcher said so, and where the file is damaged."""
    try:
        return read_model(paths.launcher, Launcher)
    except (OSError, ValueError):
        return None


def read_progress(paths: JobPaths, rank: int) -> Progress | None:
    """What a rank does now; None before it began, or in the instant in which it writes."""
    try:
        return read_model(paths.progress(rank), Progress)
    except (OSError, ValueError):
        return None


def measurement_under_way(paths: JobPaths) -> str | None:
    """The measurement that some rank was making when it last said something; None if it was between two."""
    for file in sorted(paths.folder.glob("progress_*.json")):
        progress = read_progress(paths, int(file.stem.rpartition("_")[2]))
        if progress and progress.phase in ("measurement", "failed") and progress.measurement:
            return progress.measurement
    return None


def remove_scripts(paths: JobPaths, node_rank: int | None = None) -> None:
    """Remove the folders of scripts that were killed, of one node or of all: nothing of the job runs there any more.

    With their inputs and checkpoints they would stay for good, and pipes and links to data are no files to be copied.
    """
    for folder in paths.scripts(node_rank):
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # other nodes' folders are in it
            folder.parent.rmdir()


def stamp(path: Path) -> None:
    """Give a file this machine's time as its own: by a file server's clock it may be minutes old when it is written."""
    now = time.time()
    with suppress(OSError):
        os.utime(path, (now, now))


def reserve_end(paths: JobPaths, node_rank: int | None = None) -> None:
    """Allocate the block for the end, of the job or of one node, so that a full disk cannot silence it."""
    with _reserved(_end(paths, node_rank)).open("wb") as file:
        file.write(b" " * _RESERVED_BYTES)
        file.flush()
        os.fsync(file.fileno())


def write_end(paths: JobPaths, end: JobEnd, node_rank: int | None = None) -> None:
    """Say how the job ended, or its part on one node; the first to say so is believed. Raises OSError."""
    path = _end(paths, node_rank)
    if path.exists():
        return
    content = end.model_dump_json().encode()
    reserved = _reserved(path)
    if not reserved.exists():
        write_atomically(path, content)
        return
    with reserved.open("r+b") as file:
        file.write(content.ljust(_RESERVED_BYTES))
        file.flush()
        os.fsync(file.fileno())
    reserved.replace(path)


def write_unlaunched_end(paths: JobPaths, status: Status, message: str) -> None:
    """Say how a job ended whose launcher did not: nobody has a return code. Raises OSError."""
    end = JobEnd(
        status=status,
        return_code=None,
        measurement=measurement_under_way(paths),
        message=message,
        finished_at=utc_now(),
    )
    write_end(paths, end)


def _end(paths: JobPaths, node_rank: int | None) -> Path:
    return paths.end if node_rank is None else paths.node_end(node_rank)


def _reserved(end: Path) -> Path:
    return end.with_name(f".{end.name}.reserved")
