"""Stage 6: what the ranks left becomes records."""

from tasks.campaign.records import Collected, collect_job
from tasks.campaign.session import Session
from tasks.prefect_api.stages import stage


@stage("collect", "collect {name}")
def collect_launch(name: str, session: Session) -> Collected:
    """Merge the parts of a job that has ended. Safe to repeat."""
    return collect_job(session.run, name)
