"""The seam between the orchestrator and whatever starts jobs: submit, poll, cancel; a folder names a job.

Nothing is remembered in the submitting process: all three work from any process of the same user on the
machine that submits, by the files in the job folder, so that a study which was killed can be taken up.
"""

import importlib
import os
from pathlib import Path
from typing import Literal, Protocol, cast

from configs.base import write_atomically
from configs.job import JobEnd, Launcher, Progress
from configs.paths import JobPaths

JobState = Literal["waiting", "running", "ended"]

_RESERVED_BYTES = 8192
_ADAPTERS = {"local": "slurm.local"}


def adapter_for(kind: str) -> "Adapter":
    """The adapter of a target's kind. Raises ValueError for a kind that has none."""
    if kind not in _ADAPTERS:
        raise ValueError(f"target.kind: {kind!r} cannot be submitted to; use one of {sorted(_ADAPTERS)}")
    return cast(Adapter, importlib.import_module(_ADAPTERS[kind]))


def read_launcher(paths: JobPaths) -> Launcher | None:
    """Who runs the job; None before the launcher said so."""
    try:
        return Launcher.model_validate_json(paths.launcher.read_bytes())
    except FileNotFoundError:
        return None


def read_progress(paths: JobPaths, rank: int) -> Progress | None:
    """What a rank does now; None before it began, or in the instant in which it writes."""
    try:
        return Progress.model_validate_json(paths.progress(rank).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def visit_under_way(paths: JobPaths) -> str | None:
    """The visit that some rank was making when it last said something; None if it was between two."""
    for file in sorted(paths.folder.glob("progress_*.json")):
        progress = read_progress(paths, int(file.stem.rpartition("_")[2]))
        if progress and progress.phase in ("visit", "failed") and progress.visit:
            return progress.visit
    return None


def reserve_end(paths: JobPaths) -> None:
    """Allocate the block in which the job's end will be written, so that a full disk cannot silence it."""
    with _reserved(paths).open("wb") as file:
        file.write(b" " * _RESERVED_BYTES)
        file.flush()
        os.fsync(file.fileno())


def write_end(paths: JobPaths, end: JobEnd) -> None:
    """Say how the job ended; the first to say so is believed. Raises OSError."""
    if paths.end.exists():
        return
    content = end.model_dump_json().encode()
    reserved = _reserved(paths)
    if not reserved.exists():
        write_atomically(paths.end, content)
        return
    with reserved.open("r+b") as file:
        file.write(content.ljust(_RESERVED_BYTES))
        file.flush()
        os.fsync(file.fileno())
    reserved.replace(paths.end)


def _reserved(paths: JobPaths) -> Path:
    return paths.folder / ".end.json.reserved"


class Adapter(Protocol):
    """What every way of starting jobs can do. The folder holds `job.json`; its path is absolute."""

    def submit(self, folder: Path) -> None:
        """Start the job and return at once. Raises OSError where that cannot be."""

    def poll(self, folder: Path) -> JobState:
        """Where the job stands; after "ended" there is an `end.json`."""

    def cancel(self, folder: Path) -> None:
        """End the job; return when nothing of it is left, within 8 seconds. May be called at any time."""
