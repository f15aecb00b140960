"""What Prefect's `run_flow` logs of a flow that ended by a state of its own, or by an exception."""

import logging

import pytest
from prefect import flow, flow_engine
from prefect.exceptions import CancelledRun, FailedRun
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

from tasks.prefect_api.run_logs import hide_tracebacks_of_states


@flow
def ending() -> None: ...


@pytest.mark.parametrize(
    ("error", "logged"),
    [(FailedRun("as the state says"), False), (CancelledRun("superseded"), False), (ValueError("bug"), True)],
)
def test_only_what_a_flow_raised_has_a_traceback(
    error: Exception, logged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hide_tracebacks_of_states()
    hide_tracebacks_of_states()

    def ends(**_: object) -> None:
        raise error

    monkeypatch.setattr(flow_engine, "run_flow_sync", ends)
    logger = logging.getLogger("prefect.flow_runs")
    logger.addHandler(caplog.handler)
    try:
        with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}), pytest.raises(type(error)):
            flow_engine.run_flow(ending, error_logger=logger)
    finally:
        logger.removeHandler(caplog.handler)
    assert any(record.exc_info for record in caplog.records) == logged
