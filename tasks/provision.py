"""Stage 2: are the machines what the plan needs? Local: cores, memory, disk. Slurm: partition, nodes, shared folder.

What lacks is said before anything is started. The fingerprint of machine or cluster is kept in the run folder, so
that a run resumed elsewhere is noticed. Then code and models are brought to the folders that clusters' nodes share.
"""

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks.machine import check_clusters, check_environment, check_plan
from tasks.session import Session
from tasks.staging import stage_targets


@task(name="provision", task_run_name="provision", cache_policy=NO_CACHE)
def provision(session: Session, accept_environment: bool) -> dict[str, Any]:
    """Check the targets against the plan; returns the environment's fingerprint.

    Raises StudyError where the plan asks for more than there is or a scheduler does not answer, EnvironmentChanged
    where the run folder was begun in another environment and `accept_environment` is false.
    """
    check_plan(session.plan, session.run.folder)
    check_clusters(session.plan)
    environment = check_environment(session.run, accept_environment, session.plan.targets)
    stage_targets(session.plan, lambda line: _say(session, line))
    return environment


def _say(session: Session, line: str) -> None:
    """What is brought to a cluster, where people look: it may take minutes."""
    session.board.stage = line
    get_run_logger().info(line)
