"""A flow that is called from Python as `rankwise run` calls it: with the local Prefect server where no API is named.

    @flow_with_local_api("scaling study", flow_run_name=named)
    def scaling_study(study): ...

    scaling_study(Path("study.yaml"))     # leases the local server, which ends with the last run that uses it

Prefect by itself would start an ephemeral server for the call, with a time limit of 20 s, another history, and records
that are lost when the script ends.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL

from flows.server.local import Lease, LocalServerError, prefect_api
from flows.server.settings import LOCAL_API_VARIABLE, apply_environment, environment_without_api

_P = ParamSpec("_P")
_R = TypeVar("_R")


class WithLocalApi(Flow[_P, _R]):
    """As a flow of Prefect, which it is."""

    def __call__(self, *args: Any, return_state: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run the flow. Where no server can be started it is called as a plain function, unless a state is wanted."""
        call: Any = super().__call__
        if not _lacks_api():
            return call(*args, return_state=return_state, **kwargs)
        try:
            with prefect_api():
                return call(*args, return_state=return_state, **kwargs)
        except LocalServerError as error:
            if return_state:
                raise
            apply_environment(environment_without_api())
            logging.getLogger("rankwise").warning("measuring without Prefect: %s", str(error).splitlines()[0])
            return self.fn(*args, **kwargs)


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
    return url is None or (url == os.environ.get(LOCAL_API_VARIABLE) and not Lease.held)
