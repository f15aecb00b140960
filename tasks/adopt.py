"""Recover an earlier run before new launches are planned: adopt, collect or cancel its launches.

So no repeat is measured twice or lost.
"""

from tasks.campaign.launches.leftovers import Leftovers, resolve_leftovers
from tasks.campaign.session import Session
from tasks.prefect_api.stages import stage


@stage("adopt", "adopt what an earlier run left")
def adopt_jobs(session: Session) -> Leftovers:
    """Resolve every job folder that was not collected. Jobs that still run for this plan are returned."""
    return resolve_leftovers(session)
