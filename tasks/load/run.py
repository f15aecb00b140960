"""Start the load generator in a process of its own, once, or again and again to search for the highest rate.

run = run_load(job, folder)                                   # samples are in the folder, and read
found = search_max_rate(job, objectives, goal, folder, tell)  # folder/run-001, run-002, ...
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.common.base import write_atomically
from configs.common.system.lock_files import WITHOUT_LOCKS
from configs.load.arrivals import ConstantArrivals, GammaArrivals, PoissonArrivals
from configs.load.job import LoadJob
from configs.load.objectives import RequestObjectives
from configs.load.samples import FACTS_FILE, JOB_FILE
from reports.load.next_rate import taken
from reports.load.samples import LoadRun, read_load_run
from reports.load.search import FoundRate, ProbedRate, RateSearch, SearchGoal

_WRONG_JOB = 2
_ENDING_SECONDS = 30.0


def run_load(job: LoadJob, folder: Path) -> LoadRun:
    """Run a job; its samples are kept in `folder`, which must not hold a run already.

    An interrupt ends the generator, which writes the samples so far, and is raised again; so does the end of this
    process. Raises ValueError for a job
    that the generator refuses and OSError where it dies.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if (folder / FACTS_FILE).exists():
            raise ValueError(f"{folder}: holds a load run already. Use another folder")
        write_atomically(folder / JOB_FILE, job.model_dump_json(indent=1))
        _generate(folder)
        return read_load_run(folder)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other runs from a folder. Raises ValueError where one writes there; without locks nobody can tell."""
    path = folder / "load.lock"
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{folder}: another load run writes to it now. Use another folder") from error
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _generate(folder: Path) -> None:
    """Run the job of a folder in a process of its own. Raises as `run_load`."""
    command = [sys.executable, "-m", "engine.load", str(folder / JOB_FILE), str(folder), str(os.getpid())]
    # A folder named like one of ours in the working directory is not imported.
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        try:
            _, errors = process.communicate()
        except BaseException:
            process.terminate()
            try:
                process.wait(_ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if process.returncode == _WRONG_JOB:
        raise ValueError(errors.strip().removeprefix(f"{folder / JOB_FILE}: ") or "the load generator refused its job")
    if process.returncode != 0:
        last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise OSError(f"load generator: {last[0]}")


def search_max_rate(
    job: LoadJob,
    objectives: RequestObjectives,
    goal: SearchGoal,
    folder: Path,
    tell: Callable[[ProbedRate, int], None] = lambda probe, run: None,
) -> FoundRate:
    """Search for the highest rate under the objectives with runs of this job; `tell` is called after each run.

    The rate of the job's arrivals is replaced. Each run has a seed of its own. A run in which the generator was the
    bottleneck ends the search, and so does one that a cap ended. Raises as `run_load`.
    """
    search, number = RateSearch(goal), 0
    assert isinstance(job.arrivals, PoissonArrivals | GammaArrivals | ConstantArrivals)
    while (rate := search.next_rate()) is not None:
        number += 1
        arrivals = job.arrivals.model_copy(update={"rate": rate / job.contents.turns})
        one = job.model_copy(update={"arrivals": arrivals, "seed": job.seed + number})
        run = run_load(one, folder / f"run-{number:03d}")
        probe = taken(search, run, rate, objectives)
        if probe is not None:
            tell(probe, number)
    return search.result()
