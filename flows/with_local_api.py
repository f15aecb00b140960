"""A flow that is called from Python as `rankwise run` calls it: with the local Prefect server where no API is named.

    @flow_with_local_api("scaling study", flow_run_name=named)
    def scaling_study(study): ...

    scaling_study(Path("study.yaml"))     # leases the local server, which ends with the last run that uses it

Prefect by itself would start an ephemeral server for the call, with a time limit of 20 s, another history, and records
that are lost when the script ends.
"""

import os
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Flow
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from flows.server.local import ApiLease, prefect_api
from flows.server.settings import (
    HEARTBEAT_SECONDS,
    LOCAL_API_VARIABLE,
    apply_environment,
    environment_kept,
    environment_without_api,
)
from tasks.prefect_api.api import api_error_text

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass
class _Outcome:
    """How far the function of a flow came; its result, which Prefect loses where the API goes away at the end."""

    began: bool = False
    result: Any = None


_OUTCOME: ContextVar[_Outcome | None] = ContextVar("outcome", default=None)


class WithLocalApi(Flow[_P, _R]):
    """As a flow of Prefect, which it is."""

    def __init__(self, fn: Callable[_P, _R], **options: Any) -> None:
        @wraps(fn)
        def noted(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            outcome = _OUTCOME.get() or _Outcome()
            outcome.began = True
            outcome.result = fn(*args, **kwargs)
            return cast(_R, outcome.result)

        super().__init__(noted, **options)

    def with_options(self, **options: Any) -> "WithLocalApi[_P, _R]":
        """As of a flow of Prefect, whose copy of itself would be a flow without a local server."""
        changed: Any = super().with_options(**options)
        changed.__class__ = type(self)  # it has no more attributes than any flow
        return cast("WithLocalApi[_P, _R]", changed)

    def __call__(self, *args: Any, return_state: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run the flow. Where the local server fails it is called as a plain function, unless a state is wanted."""
        call = _with_heartbeats(super().__call__)
        if not _lacks_api():
            return call(*args, return_state=return_state, **kwargs)
        with environment_kept():
            if not return_state:
                return self._call_or_without(call, *args, **kwargs)
            with prefect_api():
                return call(*args, return_state=True, **kwargs)

    def _call_or_without(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outcome = _Outcome()
        token = _OUTCOME.set(outcome)
        try:
            with prefect_api():
                return call(*args, **kwargs)
        except Exception as error:
            if outcome.began and (outcome.result is None or isinstance(outcome.result, State)):
                raise  # the function's own error, or that it was cancelled
            why = api_error_text(error)
        finally:
            _OUTCOME.reset(token)
        # No log line: Prefect's settings for the local server silence its console.
        if outcome.began:
            warnings.warn(f"the end of the run is not in Prefect: {why}", RuntimeWarning, stacklevel=3)
            return outcome.result
        warnings.warn(f"measuring without Prefect: {why}", RuntimeWarning, stacklevel=3)
        apply_environment(environment_without_api())
        return self.fn(*args, **kwargs)


def _with_heartbeats(call: Any) -> Callable[..., Any]:
    """The call with heartbeats as often as the automation for lost flow runs wants them, whatever the API is.

    With the local server as its API, too, where settings of the caller alone hide the environment from Prefect.
    """

    def beating(*args: Any, **kwargs: Any) -> Any:
        wanted: dict[Any, Any] = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: HEARTBEAT_SECONDS}
        if ApiLease.held.get() and (url := os.environ.get(LOCAL_API_VARIABLE)):
            wanted[PREFECT_API_URL] = url
        with temporary_settings(wanted):
            return call(*args, **kwargs)

    return beating


def flow_with_local_api(
    name: str, flow_run_name: Callable[[], str]
) -> Callable[[Callable[_P, _R]], WithLocalApi[_P, _R]]:
    """Declare such a flow, whose parameters Prefect does not validate: their types do."""
    return lambda function: WithLocalApi(function, name=name, flow_run_name=flow_run_name, validate_parameters=False)


def _lacks_api() -> bool:
    """Whether nobody named an API, and no lease of the local server is held here."""
    if FlowRunContext.get() is not None:
        return False
    url = PREFECT_API_URL.value()
    return url is None or (url == os.environ.get(LOCAL_API_VARIABLE) and not ApiLease.held.get())
