"""Missed runs of a schedule: the newest stands for all of them.

    superseded = cancel_missed(flow_run.id)     # "superseded by the run scheduled for 2026-11-23 02:00:00+00:00"

While a sweep runs, or no Prefect worker does, further runs of its deployment become due and wait. The first of them
that starts cancels all but the newest of its study, whose parameters are those that hold now; that one goes on, even
if another becomes due while it starts. Left alone are runs of other studies, and those that a person started, or had
tried again.

    @flow(on_running=[tell_scheduled])          # what the scheduler left out of the event feed
"""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled

from tasks.prefect_api.api import NEEDED_SECONDS, api_error_text, quick_client
from tasks.prefect_api.stages import run_logger

_PAGE = 200
_KEY_PARTS = 4


def scheduled_time(run: FlowRun) -> datetime | None:
    """For when the scheduler of the server made a run; None for a run that it did not make.

    It stands in the idempotency key alone (`schedule_runs` in prefect/server/models/deployments.py): the expected start
    of a run that waits for its deployment's limit moves on.
    """
    parts = (run.idempotency_key or "").split(" ", _KEY_PARTS - 1)
    if not run.auto_scheduled or len(parts) != _KEY_PARTS or parts[0] != "scheduled":
        return None
    try:
        time = datetime.fromisoformat(parts[-1])
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def tell_scheduled(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    """Send the event of a scheduled run's first state, which the scheduler inserts without one.

    The event of a run's next state follows it (`flow_run_state_change_event` in prefect/server/models/events.py, where
    less than five minutes lie between them), and each further one follows that: while the first is missing, the server
    keeps all of them from every automation for a quarter of an hour. The event has the state's id, so that one that the
    server knows is dropped. A hook of flows. An API that does not answer costs the event only.
    """
    if scheduled_time(flow_run) is None:
        return
    try:
        with quick_client() as client:
            first = min(client.read_flow_run_states(flow_run.id), key=lambda each: each.timestamp)
    except (ObjectNotFound, httpx.HTTPError) as error:
        run_logger().debug("event of the first state not sent: %s", api_error_text(error))
        return
    emit_event(
        event=f"prefect.flow-run.{first.name}",
        occurred=first.timestamp,
        resource={
            "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
            "prefect.resource.name": flow_run.name,
            "prefect.state-name": first.name or "",
            "prefect.state-timestamp": first.timestamp.isoformat(),
            "prefect.state-type": first.type.value,
        },
        id=first.id,
    )


def own_scheduled_time(flow_run_id: UUID | None) -> datetime | None:
    """`scheduled_time` of the run that asks; None also where the API does not answer."""
    if flow_run_id is None:
        return None
    try:
        with quick_client(answer_seconds=NEEDED_SECONDS) as client:
            return scheduled_time(client.read_flow_run(flow_run_id))
    except (ObjectNotFound, httpx.HTTPError):
        return None


def cancel_missed(flow_run_id: UUID | None) -> str | None:
    """Cancel the runs that missed their time, all but the newest.

    Returns why this run is not to go on: it is none of the newest; None where it goes on. An API that does not answer
    cancels nothing.
    """
    if flow_run_id is None:
        return None
    try:
        with quick_client(answer_seconds=NEEDED_SECONDS) as client:
            run = client.read_flow_run(flow_run_id)
            mine = scheduled_time(run)
            if mine is None or _was_tried(client, run):
                return None
            waiting = {each.id: time for each, time in _due(client, run) if each.id != run.id}
            newest = max([mine, *waiting.values()])
            message = _message(newest)
            for identifier, time in waiting.items():
                if time < newest:
                    client.set_flow_run_state(identifier, Cancelled(message=message), force=True)
            return message if mine < newest and not _stands_for_others(client, run, mine) else None
    except (ObjectNotFound, httpx.HTTPError) as error:
        run_logger().warning("missed runs of the schedule not looked for: %s", api_error_text(error))
        return None


def _message(newest: datetime) -> str:
    return f"superseded by the run scheduled for {newest}"


def _stands_for_others(client: SyncPrefectClient, run: FlowRun, mine: datetime) -> bool:
    """Whether earlier runs were cancelled for this one, which then goes on whatever has become due since.

    Otherwise a schedule that is faster than the start of a process would supersede each run by the next, for ever.
    """
    if run.deployment_id is None:
        return False
    cancelled = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CANCELLED]))
        ),
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[run.deployment_id])),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=_PAGE,
    )
    return any(
        _study_of(other) == _study_of(run) and other.state is not None and other.state.message == _message(mine)
        for other in cancelled
    )


def _due(client: SyncPrefectClient, like: FlowRun) -> list[tuple[FlowRun, datetime]]:
    """Runs that the scheduler made of the same deployment and study, whose time has come, and that did not start."""
    if like.deployment_id is None:
        return []
    waiting = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])))
    ours = DeploymentFilter(id=DeploymentFilterId(any_=[like.deployment_id]))
    now, found, offset = datetime.now(UTC), [], 0
    while runs := client.read_flow_runs(
        flow_run_filter=waiting,
        deployment_filter=ours,
        sort=FlowRunSort.EXPECTED_START_TIME_ASC,
        limit=_PAGE,
        offset=offset,
    ):
        found += [
            (run, time)
            for run in runs
            if _study_of(run) == _study_of(like)
            and (time := scheduled_time(run)) is not None
            and time <= now
            and not _was_tried(client, run)
        ]
        offset += len(runs)
    return found


def _study_of(run: FlowRun) -> tuple[str, str]:
    """The file of a run's study, and the name that the last of its assignments gives to it; empty without one."""
    given = run.parameters.get("assignments")
    pairs = [str(each).partition("=") for each in given] if isinstance(given, list) else []
    names = [value.strip() for key, _, value in pairs if key.strip() == "study"]
    return str(run.parameters.get("study")), names[-1] if names else ""


def _was_tried(client: SyncPrefectClient, run: FlowRun) -> bool:
    """Whether a run had started or ended before, so that a person wanted it again."""
    return run.run_count > 1 or any(state.is_final() for state in client.read_flow_run_states(run.id))
