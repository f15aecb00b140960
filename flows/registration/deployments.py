"""Registers this project with a Prefect API: work pool, deployments, automation.

    rankwise deploy-flows --folder /data/studies

Registration is idempotent: existing objects are updated, and changes made in the UI are kept (schedules switched on
or off, a disabled automation). The deployments are those of `prefect.yaml`, registered by `prefect deploy`.
"""

import contextlib
import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, get_current_settings

from configs.common.files.project_files import project_file
from configs.common.secrets import redacted, shown_url
from configs.spec.short_form import THIS_MACHINE, ShortStudy
from configs.spec.study import StudyError
from flows.registration.automations import ensure_automations
from tasks.prefect_api.api import NEEDED_SECONDS, api_error_text, quick_client
from tasks.prefect_api.targets import read_targets

WORK_POOL = "rankwise"


class DeployError(ValueError):
    """The API cannot be reached, or refused something."""


_RETRIES = 8
"""Of each request, some 8 minutes with Prefect's doubled pauses: on SQLite a server that others started answers 503
while others write, and on a busy machine the 5 of Prefect's default were not enough."""


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
        with quick_client(retries=_RETRIES, answer_seconds=NEEDED_SECONDS) as client:
            registered.lines += [_ensure_work_pool(client), *ensure_automations(client)]
            targets = [THIS_MACHINE, *(name for name in sorted(read_targets(client)) if name != THIS_MACHINE)]
            registered.lines.append(f"targets of the short form: {', '.join(targets)}")
            switched = {(name, slug): active for name, slug, active in _schedules(client)}
            _prefect_deploy(folder, prefect_file)
            _refuse_wrong_parameters(client, targets)
            _switch(client, switched, switch or {})
            for deployment in _deployments(client):
                registered.deployments[deployment.name] = deployment.id
                registered.lines.append(_described(deployment))
    except StudyError as error:
        raise DeployError(str(error)) from error
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


def _prefect_deploy(folder: Path, prefect_file: Path) -> None:
    """`prefect deploy` of all deployments; `$PWD` in the file is the folder in which flow runs will work."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(prefect_file)]
    # Of the folder where the user stands, as the client of this process has them: `.env` may hold the key of the API.
    settings = get_current_settings().to_environment_variables(exclude_unset=True, include_secrets=True)
    own = {
        "PWD": str(folder.absolute()),
        "RANKWISE_VERSION": importlib.metadata.version("rankwise"),
        "PREFECT_CLI_COLORS": "false",
        "PREFECT_CLIENT_MAX_RETRIES": str(max(_RETRIES, PREFECT_CLIENT_MAX_RETRIES.value())),
    }
    done = subprocess.run(
        command,
        # Prefect reads `.env` and `prefect.toml` of where it is started.
        cwd=folder,
        env=settings | os.environ | own,
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


def _refuse_wrong_parameters(client: SyncPrefectClient, targets: list[str]) -> None:
    """Have the server refuse parameters that a flow does not have, and targets that are not stored, at their fields."""
    for deployment in _deployments(client):
        strict = with_target_names(deployment.parameter_openapi_schema or {}, targets) | {"additionalProperties": False}
        client.update_deployment(deployment.id, DeploymentUpdate(parameter_openapi_schema=strict))


def with_target_names(schema: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The schema of a form in which a target of the short form is one of these names; others stay as they are."""
    definitions = schema.get("definitions", {})
    short = definitions.get(ShortStudy.__name__)
    if short is None:
        return schema
    target = short["properties"]["target"] | {"enum": names}
    short = short | {"properties": short["properties"] | {"target": target}}
    return schema | {"definitions": definitions | {ShortStudy.__name__: short}}


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
