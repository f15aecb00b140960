"""Stage 4: a launch becomes a job folder, and the job folder a submission."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.base import write_atomically
from configs.job import Job
from configs.packing import Launch
from configs.paths import RunPaths
from slurm.local import submit
from tasks.session import Session

_START_SECONDS = 180.0
"""What a launch may take before its first cell and after its last: imports, rendezvous, loading."""
_BETWEEN_CELLS_SECONDS = 5.0


@task(name="submit", task_run_name="submit {name}", cache_policy=NO_CACHE)
def submit_launch(name: str, session: Session) -> None:
    """Hand a job folder, which holds its `job.json`, to the adapter."""
    submit(session.run.job(name).folder)


def write_job(launch: Launch, session: Session) -> Job:
    """Make the job folder with everything that the nodes need to know."""
    plan, run = session.plan, session.run
    name = _job_name(launch, run)
    paths = run.job(name)
    paths.parts.mkdir(parents=True, exist_ok=True)
    cell = launch.visits[0].cell
    manifests = {model.identity: model.manifest for model in plan.models}
    per_visit = plan.measuring.cell_timeout_seconds + _BETWEEN_CELLS_SECONDS
    job = Job(
        name=name,
        study=plan.study,
        measuring_pass=launch.measuring_pass,
        measuring=plan.measuring,
        visits=launch.visits,
        ranks_per_node=cell.layout.ranks // cell.nodes,
        timeout_seconds=_START_SECONDS + len(launch.visits) * per_visit,
        manifest=manifests.get(cell.model or ""),
        inputs=str(run.inputs),
        cache=str(session.cache),
    )
    write_atomically(paths.job, job.model_dump_json())
    return job


def _job_name(launch: Launch, run: RunPaths) -> str:
    """Unique in the run folder, sorts by time: `0007-timed-1a2b3c4d`."""
    numbers = [int(folder.name.split("-")[0]) for folder in run.jobs.glob("[0-9]*-*")]
    return f"{max(numbers, default=0) + 1:04d}-{launch.measuring_pass}-{launch.pack_key}"
