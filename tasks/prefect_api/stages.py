"""The one place that decides whether a stage of a run is called as a Prefect task or as a plain function.

    @stage("fetch model", "fetch {spec.name}", retry_on=TransientFetchError)
    def fetch_model(spec, ...): ...

    model = fetch_model(spec, ...)
    plan, resolved = resolve_study.after(fetched)(study, ...)     # an edge of the run's graph

Inside a flow run a stage is a Prefect task. Without one (no Prefect API answered when the run began) it is the function
that it decorates, with the same retries: measuring never depends on a server.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper, wraps
from typing import Any, Generic, ParamSpec, TypeVar, cast
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateDetails
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Completed
from prefect.tasks import exponential_backoff

from configs.common.secrets import hide_in_error
from tasks.campaign.graph import StageEnd
from tasks.prefect_api.ended import RunCancelled

_P = ParamSpec("_P")
_R = TypeVar("_R")
_RETRIES = 3
_BACKOFF_SECONDS = 2.0


def in_flow_run() -> bool:
    """Whether the caller is part of a flow run of Prefect."""
    return FlowRunContext.get() is not None


def study_context() -> FlowRunContext | None:
    """Prefect's context of the study's flow run, also inside a group of stages, which is a subflow; None without."""
    return _STUDY.get() or FlowRunContext.get()


@contextmanager
def secrets_hidden() -> Iterator[None]:
    """What the block raises holds no secrets: Prefect keeps it in states, logs and events, and automations send it."""
    try:
        yield
    except BaseException as error:
        hide_in_error(error)
        raise


@contextmanager
def within_study() -> Iterator[None]:
    """Subflows of the block belong to the flow run of the caller's study."""
    token = _STUDY.set(study_context())
    try:
        yield
    finally:
        _STUDY.reset(token)


_STUDY: ContextVar[FlowRunContext | None] = ContextVar("study", default=None)


def run_logger() -> Any:
    """The logger of the flow or task run; without one, a logger of this program."""
    return get_run_logger() if in_flow_run() else logging.getLogger("rankwise")


class Stage(Generic[_P, _R]):
    """A stage, called like the function that it decorates; `after` draws what it waits for."""

    def __init__(self, function: Callable[_P, _R], name: str, run_name: str, retry_on: type[Exception] | None) -> None:
        update_wrapper(self, function)
        self._function, self._retry_on = function, retry_on
        options: dict[str, Any] = {} if retry_on is None else _task_retries(retry_on)
        self._as_task = task(name=name, task_run_name=run_name, cache_policy=NO_CACHE, **options)(_kept(function))

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return self.after()(*args, **kwargs)[0]

    def after(self, *upstream: StageEnd) -> Callable[_P, tuple[_R, StageEnd]]:
        """The stage with edges from others that have ended; a call returns the result, and that it is done."""

        def call(*args: _P.args, **kwargs: _P.kwargs) -> tuple[_R, StageEnd]:
            if not in_flow_run():
                return _retried(lambda: self._function(*args, **kwargs), self._retry_on), StageEnd()
            edges = [done.state for done in upstream if done.state is not None]
            outcomes: list[tuple[UUID, Any]] = []
            token = _OUTCOMES.set(outcomes)
            try:
                cast(Any, self._as_task)(*args, **kwargs, wait_for=edges or None)
            finally:
                _OUTCOMES.reset(token)
            identifier, result = outcomes[-1]
            if isinstance(result, RunCancelled):
                raise result
            return cast(_R, result), StageEnd(_completed(identifier))

        return call


def stage(
    name: str, run_name: str, retry_on: type[Exception] | None = None
) -> Callable[[Callable[_P, _R]], Stage[_P, _R]]:
    """Declare a stage of a run. `run_name`: of one call, with its arguments in braces. `retry_on`: what may pass."""
    return lambda function: Stage(function, name, run_name, retry_on)


_OUTCOMES: ContextVar[list[tuple[UUID, Any]]] = ContextVar("outcomes")
"""Where a call of a task leaves its task run's id and its result."""


def _kept(function: Callable[_P, _R]) -> Callable[_P, State[Any] | None]:
    """The function with its result kept from Prefect.

    Prefect would remember it by its `id()`, also when it is gone, and draw an edge to whatever has that id later. A
    stage of a run that somebody cancelled or suspended is cancelled, and has not failed.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> State[Any] | None:
        outcomes, context = _OUTCOMES.get(), TaskRunContext.get()
        assert context is not None
        with secrets_hidden():
            try:
                outcomes.append((context.task_run.id, function(*args, **kwargs)))
            except RunCancelled as error:
                outcomes.append((context.task_run.id, error))
                return Cancelled(message=str(error))
        return None

    return call


def _completed(task_run_id: UUID) -> State[Any]:
    """A state that names a task run and holds none of its data."""
    return Completed(data=True, state_details=StateDetails(task_run_id=task_run_id))


def _task_retries(retry_on: type[Exception]) -> dict[str, Any]:
    async def can_pass(task: Any, task_run: Any, state: Any) -> bool:
        try:
            await state.aresult()
        except retry_on:
            return True
        except Exception:
            return False
        return False

    return {
        "retries": _RETRIES,
        "retry_delay_seconds": exponential_backoff(backoff_factor=_BACKOFF_SECONDS),
        "retry_jitter_factor": 0.5,
        "retry_condition_fn": can_pass,
    }


def _retried(call: Callable[[], _R], retry_on: type[Exception] | None) -> _R:
    if retry_on is not None:
        for attempt in range(_RETRIES):
            try:
                return call()
            except retry_on:
                time.sleep(_BACKOFF_SECONDS * 2**attempt)
    return call()
