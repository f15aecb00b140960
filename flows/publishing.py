"""Publish the report of a run that was measured without the Prefect API, or whose API went away.

    rankwise publish runs/quickstart

A flow run named after the study carries the tags and artifacts that the run would have.
"""

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from configs.plans.paths import RunPaths
from configs.plans.plan import read_plan
from tasks.prefect_api.api import NEEDED_SECONDS, api_error_text, await_api, tag_run, tags_of
from tasks.prefect_api.flow_names import PUBLISHING
from tasks.publish import publish


def _flow_run_name() -> str:
    return Path(str(flow_run.parameters.get("folder"))).name


@flow(name=PUBLISHING, flow_run_name=_flow_run_name, validate_parameters=False)
def publish_study(folder: Path) -> None:
    """Copy the report of a run folder to the API: report, cell table and link, with the tags of its plan."""
    run = RunPaths(folder)
    plan = read_plan(run.plan)
    tag_run(flow_run.id, tags_of(plan.models, plan.targets))
    publish(plan.study, run)


def publish_run(folder: Path, wait_seconds: float = 0.0) -> str | None:
    """Publish the run folder. Returns why the API did not take it; None where it did.

    wait_seconds: how long an API that cannot be reached is tried again. One that is reached has longer to answer: on a
    busy machine a server that has just started takes more than ten seconds for its first question.
    """
    why = await_api(wait_seconds, NEEDED_SECONDS)
    if why is None:
        try:
            publish_study(folder)
        except Exception as error:  # whatever Prefect raises: the files stand without it
            return api_error_text(error)
    return why
