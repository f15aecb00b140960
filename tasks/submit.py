"""Stage 4: a job folder (`tasks.jobs`) becomes a submission."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from slurm.local import submit
from tasks.session import Session


@task(name="submit", task_run_name="submit {name}", cache_policy=NO_CACHE)
def submit_launch(name: str, session: Session) -> None:
    """Hand a job folder, which holds its `job.json`, to the adapter."""
    submit(session.run.job(name).folder)
