"""Groups of stages: subflows, which the run's graph draws as one bar each, and opens on request.

    with_group(session, "block 1 of 10", lambda: run_on_this_machine(...))

Without a flow run the work is called as it is. A subflow that Prefect has from an earlier try of the run is not taken
for this one: what is to be done is what records lack.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from uuid import UUID

import httpx
from prefect import flow
from prefect.client.schemas.objects import State, StateDetails
from prefect.context import FlowRunContext, SettingsContext, get_settings_context
from prefect.exceptions import ObjectNotFound, Pause
from prefect.states import Cancelled, Completed

from tasks.campaign.graph import RunGraph, StageEnd
from tasks.campaign.session import Session
from tasks.prefect_api.api import api_error_text, quick_client
from tasks.prefect_api.ended import RunCancelled
from tasks.prefect_api.flow_names import LAUNCHES
from tasks.prefect_api.stages import in_flow_run, run_logger, within_study


def with_group(session: Session, title: str, work: Callable[[], None]) -> None:
    """Do work whose stages are a group of the run's graph; further stages wait for all of it.

    Where the API does not take the group, the stages are drawn without one, and the work is done all the same.
    """
    if not in_flow_run():
        work()
        return
    graph, done, ended = session.graph, list[StageEnd](), list[BaseException | None]()
    upstream = [before.state for before in graph.before_analysis() if before.state is not None]

    def launches() -> State[Any] | None:
        done.append(_this_subflow())
        session.graph = RunGraph()
        try:
            work()
        except BaseException as error:
            ended.append(error)
            if isinstance(error, RunCancelled):
                return Cancelled(message=str(error))
            raise
        ended.append(None)
        return None

    # The task that stands for a subflow is found again by this name when the run is tried again.
    launches.__qualname__ = f"launches_of_try_{tries()}"
    group: Any = flow(name=LAUNCHES, flow_run_name=title.replace("{", "{{").replace("}", "}}"))(launches)
    try:
        with within_study(), _without_heartbeat():
            group(wait_for=upstream or None, return_state=True)
    except Pause:  # Prefect ends a suspended run here, and leaves its subflow as it was
        _end_suspended(done)
        raise
    except Exception as error:
        if not ended or ended[0] is None:  # the API's, not the work's
            run_logger().warning("not grouped in the graph: %s: %s", title, api_error_text(error))
    if not done:
        work()
        return
    if ended and ended[0] is not None:
        raise ended[0]
    session.graph = RunGraph(*done)


def _this_subflow() -> StageEnd:
    """The subflow run that the caller is in, as what further stages wait for.

    Its id stands in the place of a task run's: the API's graph knows a subflow by it (`_build_flow_run_graph_v2_query`
    in prefect/server/database/query_components.py), not by the task that stands for it.
    """
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    return StageEnd(Completed(data=True, state_details=StateDetails(task_run_id=context.flow_run.id)))


def _end_suspended(done: Sequence[StageEnd]) -> None:
    """Say of a group that it ended with its run. When that is resumed, what is missing is a group of its own."""
    message = "ended, as its run was suspended"
    for group in done:
        state = cast(State[Any], group.state)
        try:
            with quick_client() as client:
                client.set_flow_run_state(
                    cast(UUID, state.state_details.task_run_id), Cancelled(message=message), force=True
                )
        except (ObjectNotFound, httpx.HTTPError) as error:
            run_logger().debug("group of the suspended run not ended: %s", api_error_text(error))


def tries() -> int:
    """How often the flow run of the caller was started, this time included. Asks no API."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    return context.flow_run.run_count


@contextlib.contextmanager
def _without_heartbeat() -> Iterator[None]:
    """No heartbeats of subflows: their run has its own, and to end the thread of one takes up to a second.

    The field takes None, but Prefect 3.8.8 reads none such from its environment.
    """
    context = get_settings_context()
    flows = context.settings.flows.model_copy(update={"heartbeat_frequency": None})
    quiet = context.settings.model_copy(update={"flows": flows})
    with SettingsContext(profile=context.profile, settings=quiet):
        yield
