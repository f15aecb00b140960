"""Stage 6: what the ranks left becomes records."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.campaign.records import Collected, collect_job
from tasks.campaign.session import Session


@task(name="collect", task_run_name="collect {name}", cache_policy=NO_CACHE)
def collect_launch(name: str, session: Session) -> Collected:
    """Merge the parts of a job that has ended. Safe to repeat."""
    return collect_job(session.run, name)
