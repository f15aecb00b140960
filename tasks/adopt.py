"""Recover an earlier run before new launches are planned: adopt, collect or cancel its launches.

So no repeat is measured twice or lost.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.campaign.leftovers import Leftovers, resolve_leftovers
from tasks.campaign.session import Session


@task(name="adopt", task_run_name="adopt what an earlier run left", cache_policy=NO_CACHE)
def adopt_jobs(session: Session) -> Leftovers:
    """Resolve every job folder that was not collected. Jobs that still run for this plan are returned."""
    return resolve_leftovers(session)
