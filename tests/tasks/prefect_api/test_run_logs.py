"""What Prefect's `run_flow` logs of a flow that ended by a state of its own, or by an exception."""

import logging

import pytest
from prefect import flow, flow_engine
from prefect.exceptions import CancelledRun, FailedRun
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

from flows.deployed import scheduled_sweep, study_from_the_form, study_in_short
from flows.publishing import publish_study
from flows.scaling_study import scaling_study
from tasks.prefect_api.flow_names import FLOWS, LAUNCHES
from tasks.prefect_api.run_logs import hide_tracebacks_of_expected, hide_tracebacks_of_states


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


@pytest.mark.parametrize(
    ("error", "level", "logged"),
    [
        (OSError(28, "No space left on device"), logging.INFO, False),
        (ValueError("run folder is in use"), logging.INFO, False),
        (ValueError("run folder is in use"), logging.DEBUG, True),
        (KeyError("bug"), logging.INFO, True),
    ],
)
def test_what_a_user_can_correct_has_no_traceback(
    error: Exception, level: int, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The lines of Prefect's `run_context` of a flow and `handle_retry` of a task, with all that they say."""
    hide_tracebacks_of_expected()
    for name, message in (
        ("prefect.flow_runs", f"Encountered exception during execution: {error!r}"),
        ("prefect.task_runs", f"Task run failed with exception: {error!r}"),
    ):
        with caplog.at_level(level, name):
            logger = logging.getLogger(name)
            records = {
                whose: logger.makeRecord(
                    name,
                    logging.ERROR,
                    __file__,
                    1,
                    message,
                    (),
                    (type(error), error, None),
                    extra={"flow_name": whose},
                )
                for whose in ("scaling study", "somebody's own")
            }
            assert all(logger.filter(record) and record.getMessage() == message for record in records.values())
        assert bool(records["scaling study"].exc_info) == logged
        assert records["somebody's own"].exc_info, "a script that imports a study lost the tracebacks of its flows"


def test_the_flows_of_this_project_are_known() -> None:
    made = [scaling_study, publish_study, study_in_short, study_from_the_form, scheduled_sweep]
    assert {one.name for one in made} == FLOWS - {LAUNCHES}
