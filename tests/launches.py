"""Real launches of tiny noop jobs, for the tests of the engine and of slurm."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from configs.cell import Cell, Layout, NoopWorkload
from configs.job import Job, JobEnd, Measuring, Progress, Visit
from configs.paths import JobPaths
from configs.record import RankPart, read_part


def noop_visit(label: str, ranks: int = 1, env: dict[str, str] | None = None, attempt: int = 1, **work: Any) -> Visit:
    """A visit of a noop cell that takes a few milliseconds unless told otherwise."""
    workload = NoopWorkload(label=label, **{"seconds": 0.005, **work})
    return Visit(cell=Cell(workload=workload, layout=Layout(dp=ranks), env=env or {}), repeat=0, attempt=attempt)


def write_job(
    run_folder: Path,
    visits: Iterable[Visit],
    name: str = "job",
    memory: bool = False,
    timeout_seconds: float = 90,
    **rules: float,
) -> JobPaths:
    """A job folder in a run folder, with `job.json` in it."""
    visits = tuple(visits)
    paths = JobPaths(run_folder / "jobs" / name)
    paths.folder.mkdir(parents=True)
    job = Job(
        name=name,
        study="test",
        measuring_pass="memory" if memory else "timed",
        measuring=Measuring.model_validate(rules),
        visits=visits,
        ranks_per_node=visits[0].cell.layout.ranks,
        timeout_seconds=timeout_seconds,
        inputs=str(run_folder / "inputs"),
        cache=str(run_folder / "cache"),
    )
    paths.job.write_text(job.model_dump_json())
    return paths


def launch(paths: JobPaths) -> JobEnd:
    """Run the job to its end through the launcher, without a scheduler."""
    subprocess.run([sys.executable, "-m", "slurm.launch", str(paths.job)], check=True, timeout=120)
    return read_end(paths)


def read_end(paths: JobPaths) -> JobEnd:
    """How the launcher says that the job ended."""
    return JobEnd.model_validate_json(paths.end.read_bytes())


def read_progress(paths: JobPaths, rank: int = 0) -> Progress:
    """What the rank said last."""
    return Progress.model_validate_json(paths.progress(rank).read_bytes())


def part(paths: JobPaths, visit: Visit, rank: int = 0) -> RankPart:
    """A rank's part of a visit."""
    return read_part(paths.part(visit.name, rank))


def in_visit(paths: JobPaths, visit: Visit, rank: int = 0) -> Callable[[], bool]:
    """A condition: this rank is making this visit."""

    def condition() -> bool:
        try:
            progress = read_progress(paths, rank)
        except (FileNotFoundError, ValueError):
            return False
        return (progress.phase, progress.visit) == ("visit", visit.name)

    return condition


def wait_until(condition: Callable[[], bool], what: str, limit_seconds: float = 60) -> float:
    """Seconds until the condition held; AssertionError if it did not in time."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_seconds, f"waited {limit_seconds} s in vain for: {what}"
        time.sleep(0.02)
    return time.monotonic() - began


def leftovers(folder: Path) -> list[str]:
    """Living processes that name this folder in their command line or environment, but this one and its parents."""
    mine = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid in mine or process.status() == psutil.STATUS_ZOMBIE:
                continue
            command = process.cmdline()
            named = [*command, *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(str(folder) in text for text in named):
            found.append(f"{process.pid}: {' '.join(command)}")
    return found


def assert_nothing_left(folder: Path, limit_seconds: float = 2) -> None:
    """Every process of the job is gone, at the latest after the limit."""
    deadline = time.monotonic() + limit_seconds
    while left := leftovers(folder):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)
