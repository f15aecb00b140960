"""Reports of a run to Prefect's API beside its tasks. An unavailable API never stops a run.

Task runs carry no tags on purpose: for each tag of a task Prefect asks the API for a concurrency limit
before the task runs, and fails the task where the API does not answer.
"""

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Crashed

from configs.common.secrets import redacted
from tasks.prefect_api.direct import ask_loopback_directly
from tasks.prefect_api.stages import run_logger

NEEDED_SECONDS = 60.0
"""For an answer without which a run would go wrong, not only be shown less well: beside two busy processes a server has
taken 20 s for one."""
_ANSWER_SECONDS = 10.0
_LOOK_SECONDS = 1.0

ask_loopback_directly()


@contextmanager
def quick_client(retries: int = 1, answer_seconds: float = _ANSWER_SECONDS) -> Iterator[SyncPrefectClient]:
    """A client that says soon that the API is away, instead of trying again for a minute."""
    quick = temporary_settings({PREFECT_CLIENT_MAX_RETRIES: retries})
    timeout = httpx.Timeout(answer_seconds, connect=min(answer_seconds, _ANSWER_SECONDS))
    with quick, get_client(httpx_settings={"timeout": timeout}, sync_client=True) as client:
        yield client


def why_unavailable(answer_seconds: float = _ANSWER_SECONDS) -> str | None:
    """Why the API records no run now, in one line; None if it answers a query of its database."""
    try:
        with quick_client(retries=0, answer_seconds=answer_seconds) as client:
            client.read_flows(limit=1)
    except Exception as error:  # whatever answers there need not be an API
        return api_error_text(error)
    return None


def api_error_text(error: Exception, max_characters: int = 200) -> str:
    """What an error of the API says, without secrets and hints of libraries."""
    if isinstance(error, httpx.TimeoutException):  # which says nothing, or `timed out`
        return _waited(error)
    text = redacted(next((line for line in str(error).splitlines() if line.strip()), type(error).__name__))
    return text if len(text) <= max_characters else f"{text[: max_characters - 3]}..."


def _waited(error: httpx.TimeoutException) -> str:
    """That no answer came, and how long it was waited for where the request says so."""
    kind = type(error).__name__.removesuffix("Timeout").lower()  # connect, read, write or pool
    seconds = None
    with suppress(RuntimeError):  # it knows of no request
        seconds = error.request.extensions.get("timeout", {}).get(kind)
    return "no answer in time" if seconds is None else f"no answer within {seconds:g} s"


def await_api(seconds: float, answer_seconds: float = _ANSWER_SECONDS) -> str | None:
    """Wait until the API responds; return why it does not after the time-out.

    Before the end of a run: Prefect tries for about a minute to say how a run ended, and then raises.
    answer_seconds: how long one that has taken the question may think about it.
    """
    deadline = time.monotonic() + seconds
    while (why := why_unavailable(answer_seconds)) is not None and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return why


class Named(Protocol):
    """A model or a target."""

    @property
    def name(self) -> str: ...


def tags_of(models: Iterable[Named], targets: Iterable[Named]) -> set[str]:
    """What the UI can filter the runs of a study by."""
    return {f"model:{model.name}" for model in models} | {f"target:{target.name}" for target in targets}


def tag_run(flow_run_id: UUID | None, tags: set[str], without: Collection[str] = ()) -> None:
    """Let the flow run carry these tags too, and those no more."""
    if flow_run_id is None:
        return
    try:
        with quick_client() as client:
            there = set(client.read_flow_run(flow_run_id).tags)
            wanted = (there | tags) - set(without)
            if wanted != there:
                client.update_flow_run(flow_run_id, tags=sorted(wanted))
    except (ObjectNotFound, httpx.HTTPError) as error:
        run_logger().warning("run not tagged: %s", api_error_text(error))


def end_lost_run(flow_run_id: UUID) -> bool:
    """Say of a run whose process is gone that it crashed, if the API still takes it for running.

    One that was suspended ended as it should and can be resumed; one that was tried again is about to start. Groups of
    its stages, of which nobody else hears that their process is gone, have crashed whatever became of the run.
    """
    try:
        with quick_client() as client:
            state = client.read_flow_run(flow_run_id).state
            lost = state is not None and (state.is_running() or state.is_cancelling())
            if lost:
                client.set_flow_run_state(flow_run_id, _crashed(), force=True)
            _end_groups(client, flow_run_id)
            return lost
    except (ObjectNotFound, httpx.HTTPError):
        return False


def end_lost_groups(flow_run_id: UUID) -> None:
    """The same for the groups of an earlier try of this run, whose process was killed."""
    try:
        with quick_client() as client:
            _end_groups(client, flow_run_id)
    except (ObjectNotFound, httpx.HTTPError) as error:
        run_logger().debug("groups of an earlier try not ended: %s", api_error_text(error))


def _crashed() -> State[Any]:
    return Crashed(message="its process no longer existed when the study was resumed")


def _end_groups(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    """Mark as crashed the subflow runs of a run that have not ended."""
    of_run = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run_id]))
    for group in client.read_flow_runs(flow_run_filter=of_run):
        if group.state is None or not group.state.is_final():
            client.set_flow_run_state(group.id, _crashed(), force=True)
