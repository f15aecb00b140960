"""What of a launch of a manifest is still to be made: a job folder for it, beside the first one.

Run by submit.sbatch, in the manifest's folder, after a launch that did not end well:

    python -m slurm.manifests.again JOB missing       # all that has no measurement yet, in whatever try
    python -m slurm.manifests.again JOB unvisited     # what the last try left unvisited because another cell failed

Prints the name of the job folder to start, JOB or JOB-2, JOB-3...; nothing where nothing is left, or where going on
would do the same again.
"""

import sys
from contextlib import suppress
from pathlib import Path

from configs.base import write_atomically
from configs.job import Job, JobEnd, Progress, Visit
from configs.paths import JobPaths, RunPaths
from configs.record import Status, read_part, read_record


def next_try(run: RunPaths, first: str, unvisited: bool) -> str | None:
    """The name of the job folder to start next, which is made where it is not there; None: there is nothing to do."""
    tries = _tries(run, first)
    last = tries[-1]
    if not began(run.job(last)):
        return None if unvisited else last  # what could not be started just now would not start again
    jobs = {name: _read(run.job(name)) for name in tries}
    if unvisited:
        left = [visit for visit in jobs[last].visits if not _visited(run, jobs[last], visit)]
        if len(left) == len(jobs[last].visits):
            return None
        again = tuple(left)
    else:
        again = tuple(
            visit.model_copy(update={"attempt": 1 + sum(_visited(run, jobs[name], visit) for name in tries)})
            for visit in jobs[first].visits
            if not any(_measured(run, jobs[name], visit) for name in tries)
        )
    if not again:
        return None
    job = jobs[first].model_copy(update={"name": f"{first}-{len(tries) + 1}", "visits": again})
    paths = run.job(job.name)
    paths.parts.mkdir(parents=True, exist_ok=True)
    write_atomically(paths.job, job.model_dump_json())
    return job.name


def began(paths: JobPaths) -> bool:
    """Whether any node of a job got so far as to say so."""
    return paths.end.exists() or next(paths.folder.glob("launcher_*.json"), None) is not None


def _tries(run: RunPaths, first: str) -> list[str]:
    names = [first]
    while run.job(f"{first}-{len(names) + 1}").job.exists():
        names.append(f"{first}-{len(names) + 1}")
    return names


def _read(paths: JobPaths) -> Job:
    return Job.model_validate_json(paths.job.read_bytes())


def _same(job: Job, visit: Visit) -> Visit | None:
    """The visit of the same repeat in a try, whatever its attempt."""
    return next((own for own in job.visits if (own.cell.key, own.repeat) == (visit.cell.key, visit.repeat)), None)


def _visited(run: RunPaths, job: Job, visit: Visit) -> bool:
    """Whether any rank began the visit in this try."""
    own, paths = _same(job, visit), run.job(job.name)
    if own is None:
        return False
    if _record(run, job, own).exists() or next(paths.parts.glob(f"{own.name}.rank_*.json"), None):
        return True
    said: set[str | None] = set()
    for path in paths.folder.glob("progress_*.json"):
        with suppress(ValueError):
            said.add(Progress.model_validate_json(path.read_bytes().rstrip(b" \0")).visit)
    for path in paths.folder.glob("end_*.json"):
        with suppress(ValueError):
            said.add(JobEnd.model_validate_json(path.read_bytes()).visit)
    return own.name in said


def _measured(run: RunPaths, job: Job, visit: Visit) -> bool:
    """Whether the visit is completed: each rank left a part that says so, or they were merged into a record already."""
    own = _same(job, visit)
    if own is None:
        return False
    with suppress(OSError, ValueError):
        return read_record(_record(run, job, own)).status is Status.COMPLETED
    paths, ranks = run.job(job.name), job.ranks_per_node * job.cell.nodes
    with suppress(OSError, ValueError):
        return all(read_part(paths.part(own.name, rank)).status is Status.COMPLETED for rank in range(ranks))
    return False


def _record(run: RunPaths, job: Job, visit: Visit) -> Path:
    return run.record(visit.cell.key, job.measuring_pass, visit.repeat, visit.attempt)


def main(arguments: list[str]) -> int:
    """Print the next try's name. Returns the exit code."""
    if len(arguments) != 2 or arguments[1] not in ("missing", "unvisited"):
        print("usage: python -m slurm.manifests.again JOB missing|unvisited", file=sys.stderr)
        return 2
    name = next_try(RunPaths(Path.cwd()), arguments[0], unvisited=arguments[1] == "unvisited")
    if name is not None:
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
