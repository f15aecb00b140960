"""Stage 2: is the machine what the plan needs? Local: cores, memory, disk.

What lacks is said before anything is started. The machine's fingerprint is kept in the run folder, so
that a run resumed elsewhere is noticed.
"""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.machine import check_environment, check_plan
from tasks.session import Session


@task(name="provision", task_run_name="provision local", cache_policy=NO_CACHE)
def provision(session: Session, accept_environment: bool) -> dict[str, Any]:
    """Check the target against the plan; returns the environment's fingerprint.

    Raises StudyError where the plan asks for more than there is, EnvironmentChanged where the run
    folder was begun in another environment and `accept_environment` is false.
    """
    check_plan(session.plan, session.run.folder)
    return check_environment(session.run, accept_environment)
