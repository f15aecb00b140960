"""Registers this project with a Prefect API: work pool, deployments, automation.

    rankwise deploy-flows --folder /data/studies

Registration is idempotent: existing objects are updated, and changes made in the UI are kept (schedules switched on
or off, a disabled automation). The deployments are those of `prefect.yaml`, registered by `prefect deploy`.
"""

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import httpx
from prefect.automations import AutomationCore, ChangeFlowRunState, EventTrigger, Posture
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_API_URL

from configs.common.files.project_files import project_file
from configs.common.secrets import redacted, shown_url
from tasks.prefect_api.api import api_error_text, quick_client

WORK_POOL = "rankwise"
ZOMBIES = "rankwise: flow runs that went without a word"
HEARTBEATS_MISSED_SECONDS = 90
"""Three heartbeats of 30 s, as `prefect.yaml` sets them."""


class DeployError(ValueError):
    """The API cannot be reached, or refused something."""


@dataclass
class Registered:
    """What the API holds now: lines for people, and ids of the deployments."""

    lines: list[str] = field(default_factory=list)
    deployments: dict[str, UUID] = field(default_factory=dict)


def deploy_flows(folder: Path, switch: dict[str, bool] | None = None) -> Registered:
    """Register everything; flow runs will work in `folder`, which is created.

    `switch` turns schedules on or off by slug; the others stay as they are. Raises DeployError, OSError
    where the folder cannot be made.
    """
    prefect_file = project_file("prefect.yaml")
    if not prefect_file.is_file():
        raise DeployError(f"{prefect_file}: no such file. Reinstall rankwise")
    folder.mkdir(parents=True, exist_ok=True)
    registered = Registered()
    try:
        # A server that has just started may answer 503: SQLite is locked while others register, too.
        with quick_client(retries=5, answer_seconds=60) as client:
            registered.lines += [_ensure_work_pool(client), _ensure_automation(client)]
            switched = {(name, slug): active for name, slug, active in _schedules(client)}
            _prefect_deploy(folder, prefect_file)
            _refuse_unknown_parameters(client)
            _switch(client, switched, switch or {})
            for deployment in _deployments(client):
                registered.deployments[deployment.name] = deployment.id
                registered.lines.append(_described(deployment))
    except httpx.HTTPStatusError as error:
        raise DeployError(f"Prefect API: request refused: {api_error_text(error)}") from error
    except httpx.HTTPError as error:
        url = shown_url(str(PREFECT_API_URL.value()))
        raise DeployError(
            f"Prefect API {url}: cannot be reached ({api_error_text(error)}). Check that it is running"
        ) from error
    return registered


def _ensure_work_pool(client: SyncPrefectClient) -> str:
    try:
        pool = client.read_work_pool(WORK_POOL)
    except ObjectNotFound:
        with contextlib.suppress(ObjectAlreadyExists):  # a Prefect worker that starts now creates it, too
            client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process"))
        return f"work pool {WORK_POOL}: created"
    if pool.type != "process":
        raise DeployError(f"work pool {WORK_POOL}: got type {pool.type}, expected process. Rename that work pool")
    return f"work pool {WORK_POOL}: exists"


def zombie_automation() -> AutomationCore:
    """A flow run whose heartbeats stop without a final state is marked as crashed.

    A state of a run that is to start also ends the watch: the silence of an earlier attempt is not that of the next.
    Its final state alone does not do, since a heartbeat, which the run sends itself, may arrive after that. A run that
    is started and does not come up is the worker's to report.

    Source: https://docs.prefect.io/v3/advanced/detect-zombie-flows
    """
    ended = ("Completed", "Failed", "Cancelled", "Crashed", "Paused", "Suspended")
    starting = ("Scheduled", "AwaitingRetry", "Resuming", "Late", "AwaitingConcurrencySlot", "Pending")
    return AutomationCore(
        name=ZOMBIES,
        description="Its process was killed or its machine failed. Run the study again to resume it.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *(f"prefect.flow-run.{state}" for state in ended + starting)},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=HEARTBEATS_MISSED_SECONDS),
        ),
        actions=[
            ChangeFlowRunState(state=StateType.CRASHED, message=f"no heartbeat for {HEARTBEATS_MISSED_SECONDS} s")
        ],
    )


def _ensure_automation(client: SyncPrefectClient) -> str:
    wanted = zombie_automation()
    found = client.read_automations_by_name(ZOMBIES)
    if not found:
        client.create_automation(wanted)
        return "automation for lost flow runs: created"
    switch = "enabled" if found[0].enabled else "disabled"
    if found[0].trigger.model_dump(exclude={"id"}) != wanted.trigger.model_dump(exclude={"id"}):
        client.update_automation(found[0].id, wanted.model_copy(update={"enabled": found[0].enabled}))
        return f"automation for lost flow runs: updated, {switch}"
    return f"automation for lost flow runs: exists, {switch}"


def _prefect_deploy(folder: Path, prefect_file: Path) -> None:
    """`prefect deploy` of all deployments; `$PWD` in the file is the folder in which flow runs will work."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(prefect_file)]
    environment = os.environ | {"PWD": str(folder.absolute()), "PREFECT_CLI_COLORS": "false"}
    done = subprocess.run(
        command,
        # Prefect reads `.env` and `prefect.toml` of where it is started.
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise DeployError(f"prefect deploy failed:\n{redacted(done.stdout[-2000:] + done.stderr[-2000:])}")


def _deployments(client: SyncPrefectClient) -> list[DeploymentResponse]:
    ours = WorkPoolFilter(name=WorkPoolFilterName(any_=[WORK_POOL]))
    return sorted(client.read_deployments(work_pool_filter=ours), key=lambda deployment: deployment.name)


def _schedules(client: SyncPrefectClient) -> list[tuple[str, str, bool]]:
    """(deployment, slug of the schedule, whether it is on) of all that are registered."""
    return [
        (deployment.name, schedule.slug, bool(schedule.active))
        for deployment in _deployments(client)
        for schedule in deployment.schedules
        if schedule.slug
    ]


def _refuse_unknown_parameters(client: SyncPrefectClient) -> None:
    """Have the server refuse parameters that a flow does not have; else such a run crashes without a word."""
    for deployment in _deployments(client):
        strict = (deployment.parameter_openapi_schema or {}) | {"additionalProperties": False}
        client.update_deployment(deployment.id, DeploymentUpdate(parameter_openapi_schema=strict))


def _switch(client: SyncPrefectClient, before: dict[tuple[str, str], bool], asked: dict[str, bool]) -> None:
    """Schedules as asked; the others as they were: to deploy again must not pause a sweep that somebody started."""
    found = {slug for _, slug, _ in _schedules(client)}
    if unknown := asked.keys() - found:
        raise DeployError(f"unknown schedule {', '.join(sorted(unknown))}; use one of {', '.join(sorted(found))}")
    for deployment in _deployments(client):
        for schedule in deployment.schedules:
            slug = schedule.slug or ""
            active = asked.get(slug, before.get((deployment.name, slug)))
            if active is not None and active != schedule.active:
                # With its parameters: the client of Prefect 3.8.8 resets those that are not given.
                client.update_deployment_schedule(
                    deployment.id, schedule.id, active=active, parameters=schedule.parameters
                )


def _described(deployment: DeploymentResponse) -> str:
    schedules = [f"{schedule.slug} {'on' if schedule.active else 'paused'}" for schedule in deployment.schedules]
    extra = f", schedules: {', '.join(schedules)}" if schedules else ""
    return f"deployment {deployment.name}: {deployment.entrypoint}{extra}"
