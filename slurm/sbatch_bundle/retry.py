"""Create the job folder of a retry in an sbatch bundle, beside that of the first launch.

submit.sbatch runs it in the bundle's folder after a failed launch:

    python -m slurm.sbatch_bundle.retry JOB missing       # all without a measurement in any attempt
    python -m slurm.sbatch_bundle.retry JOB unreached     # not reached by the last attempt because another cell failed

Prints the name of the job folder to start, JOB or JOB-2, JOB-3...; prints nothing if nothing is left, or if a retry
would fail in the same way.
"""

import sys
from contextlib import suppress
from pathlib import Path

from configs.common.base import write_atomically
from configs.common.files.reading import PLAN_BYTES, read_model
from configs.plans.job import Job, JobEnd, Measurement, Progress
from configs.plans.paths import JobPaths, RunPaths
from configs.records.record import Status, read_part, read_record


def next_try(run: RunPaths, first: str, unreached: bool) -> str | None:
    """Return the name of the next job folder, created if missing; None if there is nothing to do."""
    tries = _tries(run, first)
    last = tries[-1]
    if not began(run.job(last)):
        return None if unreached else last  # a launch that just failed to start would fail again
    jobs = {name: _read(run.job(name)) for name in tries}
    if unreached:
        left = [measurement for measurement in jobs[last].measurements if not _reached(run, jobs[last], measurement)]
        if len(left) == len(jobs[last].measurements):
            return None
        again = tuple(left)
    else:
        again = tuple(
            measurement.model_copy(
                update={"attempt": 1 + sum(_reached(run, jobs[name], measurement) for name in tries)}
            )
            for measurement in jobs[first].measurements
            if not any(_measured(run, jobs[name], measurement) for name in tries)
        )
    if not again:
        return None
    job = jobs[first].model_copy(update={"name": f"{first}-{len(tries) + 1}", "measurements": again})
    paths = run.job(job.name)
    paths.parts.mkdir(parents=True, exist_ok=True)
    write_atomically(paths.job, job.model_dump_json())
    return job.name


def began(paths: JobPaths) -> bool:
    """Return whether the launcher of any node of a job started."""
    return paths.end.exists() or next(paths.folder.glob("launcher_*.json"), None) is not None


def _tries(run: RunPaths, first: str) -> list[str]:
    names = [first]
    while run.job(f"{first}-{len(names) + 1}").job.exists():
        names.append(f"{first}-{len(names) + 1}")
    return names


def _read(paths: JobPaths) -> Job:
    return read_model(paths.job, Job, PLAN_BYTES)


def _same(job: Job, measurement: Measurement) -> Measurement | None:
    """Return the measurement of the same repeat in a try, in any attempt."""
    return next(
        (own for own in job.measurements if (own.cell.key, own.repeat) == (measurement.cell.key, measurement.repeat)),
        None,
    )


def _reached(run: RunPaths, job: Job, measurement: Measurement) -> bool:
    """Return whether any rank began the measurement in this try."""
    own, paths = _same(job, measurement), run.job(job.name)
    if own is None:
        return False
    if _record(run, job, own).exists() or next(paths.parts.glob(f"{own.name}.rank_*.json"), None):
        return True
    said: set[str | None] = set()
    for path in paths.folder.glob("progress_*.json"):
        with suppress(ValueError):
            said.add(read_model(path, Progress).measurement)
    for path in paths.folder.glob("end_*.json"):
        with suppress(ValueError):
            said.add(read_model(path, JobEnd).measurement)
    return own.name in said


def _measured(run: RunPaths, job: Job, measurement: Measurement) -> bool:
    """Whether the measurement is completed: each rank left a part that says so, or they were merged into a record
    already."""
    own = _same(job, measurement)
    if own is None:
        return False
    with suppress(OSError, ValueError):
        return read_record(_record(run, job, own)).status is Status.COMPLETED
    paths, ranks = run.job(job.name), job.ranks_per_node * job.cell.nodes
    with suppress(OSError, ValueError):
        return all(read_part(paths.part(own.name, rank)).status is Status.COMPLETED for rank in range(ranks))
    return False


def _record(run: RunPaths, job: Job, measurement: Measurement) -> Path:
    return run.record(measurement.cell.key, job.measuring_pass, measurement.repeat, measurement.attempt)


def main(arguments: list[str]) -> int:
    """Print the name of the next try and return the exit code."""
    if len(arguments) != 2 or arguments[1] not in ("missing", "unreached"):
        print("usage: python -m slurm.sbatch_bundle.retry JOB missing|unreached", file=sys.stderr)
        return 2
    name = next_try(RunPaths(Path.cwd()), arguments[0], unreached=arguments[1] == "unreached")
    if name is not None:
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
