"""The seam between the orchestrator and whatever starts jobs: submit, poll, cancel; a folder names a job.

Nothing is remembered in the submitting process: all three work from any process of the same user on the
machine that submits, by the files in the job folder, so that a study which was killed can be taken up.
"""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol, cast

from configs.base import write_atomically
from configs.job import JobEnd, Launcher, Progress
from configs.paths import JobPaths

JobState = Literal["waiting", "running", "ended"]

_RESERVED_BYTES = 8192
_ADAPTERS = {"local": "slurm.local", "slurm": "slurm.cluster"}

REFUSED = "Refused"
"""Kind of the end of a job that a scheduler took and will never start: wrong configuration, not to be tried again."""


class Refused(ValueError):
    """The scheduler does not take such a job: wrong configuration, not to be tried again. Names the target's field."""


class Unavailable(OSError):
    """The scheduler cannot take the job now; it may later. Whether it took it after all, `poll` finds out."""


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


def _end(paths: JobPaths, node_rank: int | None) -> Path:
    return paths.end if node_rank is None else paths.node_end(node_rank)


def _reserved(end: Path) -> Path:
    return end.with_name(f".{end.name}.reserved")


class Adapter(Protocol):
    """What every way of starting jobs can do. The folder holds `job.json`; its path is absolute."""

    def submit(self, folder: Path) -> None:
        """Start the job and return at once. Raises OSError where that cannot be, and as `submit_many`."""

    def submit_many(self, folders: Sequence[Path]) -> None:
        """Start jobs of one target; those of one shape together, as one array where the scheduler has such.

        Raises Refused and Unavailable; what was started before that stays.
        """

    def poll(self, folder: Path) -> JobState:
        """Where the job stands; after "ended" there is an `end.json`. Never waits for a scheduler."""

    def note(self, folder: Path) -> str:
        """One line for a person about a job that has not ended: its name at the scheduler, why it waits, its nodes."""

    def cancel(self, folder: Path) -> None:
        """End the job; return when nothing of it is left, within 8 seconds. May be called at any time."""

    def cancel_many(self, folders: Sequence[Path]) -> None:
        """End jobs of one target together, as `cancel` does."""
