"""The one place that decides whether a stage of a run is called as a Prefect task or as a plain function.

    @stage("fetch model", "fetch {spec.name}", retry_on=TransientFetchError)
    def fetch_model(spec, ...): ...

Inside a flow run a stage is a Prefect task. Without one (no Prefect API answered when the run began) it is the function
that it decorates, with the same retries: measuring never depends on a server.
"""

import logging
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.tasks import exponential_backoff

_P = ParamSpec("_P")
_R = TypeVar("_R")
_RETRIES = 3
_BACKOFF_SECONDS = 2.0


def in_flow_run() -> bool:
    """Whether the caller is part of a flow run of Prefect."""
    return FlowRunContext.get() is not None


def run_logger() -> Any:
    """The logger of the flow or task run; without one, a logger of this program."""
    return get_run_logger() if in_flow_run() else logging.getLogger("rankwise")


def stage(
    name: str, run_name: str, retry_on: type[Exception] | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Declare a stage of a run. `run_name`: of one call, with its arguments in braces. `retry_on`: what may pass."""

    def declare(function: Callable[_P, _R]) -> Callable[_P, _R]:
        options: dict[str, Any] = {} if retry_on is None else _task_retries(retry_on)
        as_task = task(name=name, task_run_name=run_name, cache_policy=NO_CACHE, **options)(function)

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if in_flow_run():
                return as_task(*args, **kwargs)
            return _retried(lambda: function(*args, **kwargs), retry_on)

        return call

    return declare


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
