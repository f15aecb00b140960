"""`rankwise logs`: print the logs of all ranks, launchers and schedulers of a run, prefixed by job and writer.

Files are re-read by name; a truncated, replaced or moved file is detected by its last bytes.
"""

import heapq
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from configs.common.base import WrongArgument
from configs.common.files.reading import brief, open_regular
from configs.common.printable import printable
from configs.plans.paths import JobPaths, RunPaths, job_order
from flows.cli.results.inspect import open_run

_POLL_SECONDS = 0.5
_REMEMBERED_BYTES = 64
_PIECE_BYTES = 8 << 20
"""Read of a file at a look, at most."""
_LOOK_BYTES = 64 << 20
"""Read of all files of a job at a look, which are in memory together: a job may have thousands of ranks."""
_LINE_CHARACTERS = 10_000
_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+\+00:00 ")


@dataclass
class _Reading:
    """How far a file was read: its position and the last bytes before it, which identify the file.

    mark: inode, size and modification time; an unchanged file is not opened again. cut: there was more of it than a
    piece.
    """

    mark: tuple[int, int, int] = (0, 0, 0)
    position: int = 0
    tail: bytes = b""
    stamp: str = ""
    cut: bool = False


def print_logs(folder: Path, follow: bool, rank: int | None = None, job: str = "") -> int:
    """Print the logs of a run, ordered by time within each job; with `follow` until the run ends.

    rank: only this rank. job: only jobs with this name prefix. Raises WrongArgument for a folder without a run, and
    where the run has no log of them.
    """
    run, _ = open_run(folder)
    readings: dict[Path, _Reading] = {}
    over: set[Path] = set()
    try:
        while True:
            last = not follow or not _is_worked_on(run)
            for job_folder in _job_folders(run, job):
                if job_folder in over and not last:
                    continue  # to look at thousands again and again disturbs what is measured
                paths = JobPaths(job_folder)
                is_collected = paths.collected.exists()
                while (more := _print_new(_files(paths, rank), readings, last)) and last:
                    pass
                if is_collected and not more:
                    over.add(job_folder)
            if last:
                _check_there(run, rank, job)
                return 0
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        return 0  # Ctrl-C ends --follow


def _check_there(run: RunPaths, rank: int | None, job: str) -> None:
    """Raises WrongArgument where a rank or a job is asked for of which there is no log."""
    chosen = _job_folders(run, job)
    if job and not chosen:
        names = [folder.name for folder in _job_folders(run, "")]
        there = f"The run has {names[0]} to {names[-1]}" if names else "The run has no jobs"
        raise WrongArgument(f"--job: no job whose name starts with {brief(job)}. {printable(there)}")
    logs = [path for folder in chosen for path in folder.glob("rank_*.log")]
    if rank is not None and logs and not any(JobPaths(path.parent).rank_log(rank) == path for path in logs):
        ranks = len({path.name for path in logs})
        raise WrongArgument(f"--rank: no log of rank {rank}. There are logs of {ranks} rank{'s' if ranks > 1 else ''}")


def _is_worked_on(run: RunPaths) -> bool:
    from tasks.campaign.run_lock import is_locked

    return is_locked(run)


def _job_folders(run: RunPaths, job: str) -> list[Path]:
    """Return the job folders of a run and of its preflight checks, in order of creation."""
    folders = [*run.folder.glob("preflight/jobs/[0-9]*-*"), *run.jobs.glob("[0-9]*-*")]
    chosen = (folder for folder in folders if folder.name.startswith(job))
    return sorted(chosen, key=lambda folder: (folder.parents[1] == run.folder, job_order(folder.name)))


def _files(paths: JobPaths, rank: int | None) -> list[Path]:
    """Return all log files of a job folder: of ranks, launchers and Slurm."""
    return [paths.rank_log(rank)] if rank is not None else sorted(paths.folder.glob("*.log"))


def _print_new(files: Iterable[Path], readings: dict[Path, _Reading], last: bool) -> bool:
    """Print new lines of all files in order of time; whether one has more than was read of it.

    Not whether there was anything new: a run that writes all the time would never be done with.
    """
    files = list(files)
    piece_bytes = max(1, min(_PIECE_BYTES, _LOOK_BYTES // max(1, len(files))))
    lines = [_stamped(path, readings.setdefault(path, _Reading()), last, piece_bytes) for path in files]
    for _, path, line in heapq.merge(*lines, key=lambda found: found[0]):
        print(printable(f"{path.parent.name}/{path.stem}: {line}", _LINE_CHARACTERS))
    sys.stdout.flush()
    return any(readings[path].cut for path in files)


def _stamped(path: Path, reading: _Reading, last: bool, piece_bytes: int) -> Iterator[tuple[str, Path, str]]:
    """Return new lines of a file with their times; a line without a time gets that of the line before it."""
    lines = _new_lines(path, reading, last, piece_bytes)
    if lines and not reading.stamp:
        reading.stamp = next(filter(None, map(_stamp_of, lines)), "") or _modified(path)
    for line in lines:
        reading.stamp = _stamp_of(line) or reading.stamp
        yield reading.stamp, path, line


def _stamp_of(line: str) -> str:
    found = _STAMP.match(line)
    return found.group().strip() if found else ""


def _modified(path: Path) -> str:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="microseconds")
    except OSError:
        return ""  # moved just now


def _new_lines(path: Path, reading: _Reading, last: bool, piece_bytes: int) -> list[str]:
    """Return the complete lines after the last position; a line without an end only if the file is final."""
    reading.cut = False
    try:
        status = path.stat()
        mark = (status.st_ino, status.st_size, status.st_mtime_ns)
        if mark == reading.mark and not last:
            return []
        with open_regular(path) as file:
            file.seek(max(0, reading.position - len(reading.tail)))
            if file.read(len(reading.tail)) != reading.tail:
                reading.position, reading.tail, reading.stamp = 0, b"", ""  # replaced or truncated
                file.seek(0)
            data = file.read(piece_bytes)
    except (OSError, ValueError):
        return []  # not written yet, moved just now, or no regular file
    reading.cut = len(data) == piece_bytes
    reading.mark = (0, 0, 0) if reading.cut else mark  # there is more of it
    whole = data if last and not reading.cut else data[: data.rfind(b"\n") + 1]
    if reading.cut and not whole:
        whole = data  # one line longer than a piece
    reading.position += len(whole)
    reading.tail = (reading.tail + whole)[-_REMEMBERED_BYTES:]
    return whole.decode(errors="replace").splitlines()
