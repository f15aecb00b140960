"""Stage 2: prepare the machines. Planning has already reported missing resources.

The fingerprint of machine or cluster is stored in the run folder to detect a run resumed elsewhere. Code and models
are then copied to the shared folders of the clusters, and to hosts; what was copied is not copied again by a retry.
"""

from typing import Any

from tasks.campaign.launches.staging import TargetAway, stage_targets
from tasks.campaign.repeats import targets_in_use
from tasks.campaign.session import Session
from tasks.checks.environment import check_environment
from tasks.checks.installed import installed_servers
from tasks.prefect_api.stages import run_logger, stage


@stage("provision", "provision", retry_on=TargetAway)
def provision(session: Session, accept_environment: bool, only_failed: bool) -> dict[str, Any]:
    """Check the environment and bring code and models to the clusters; return the environment's fingerprint.

    Only targets count on which this run may measure. Raises EnvironmentChanged where the run folder was begun in
    another environment and `accept_environment` is false.
    """
    in_use = targets_in_use(session.plan, session.run, only_failed)
    environment = check_environment(
        session.run,
        accept_environment,
        in_use,
        installed_servers(session.plan, session.cache),
    )
    names = {target.name for target in in_use}
    stage_targets(session.targets, session.plan.models, lambda line: _say(session, line), names)
    return environment


def _say(session: Session, line: str) -> None:
    """What is brought to a cluster, where people look: it may take minutes."""
    session.run_progress.stage = line
    run_logger().info(line)
