"""What Prefect writes into the log of a flow run of this project beside what this program says there.

Loggers belong to the whole process. Records of other flows, such as those of a script that calls a study from Python,
stay as they are.
"""

import logging

from prefect.exceptions import CancelledRun, FailedRun

from tasks.prefect_api.flow_names import FLOWS

_UNKNOWN = "<unknown>"
"""Stands for the flow's name where `_run_flow_from_runtime_entrypoint` of prefect/flow_engine.py (3.8.8), under a
Prefect worker, logs what ended the process of a flow run."""
_FLOW_RUNS, _TASK_RUNS = "prefect.flow_runs", "prefect.task_runs"
_RAISED = ("Encountered exception during execution", "Task run failed with exception")
"""Begin of what `run_context` of prefect/flow_engine.py and `handle_retry` of prefect/task_engine.py (3.8.8) log."""


def _is_of_this_project(record: logging.LogRecord) -> bool:
    flow = getattr(record, "flow_name", _UNKNOWN)
    return flow in FLOWS or (flow == _UNKNOWN and record.name == _FLOW_RUNS)


def _says_more_than_the_state(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, FailedRun | CancelledRun) and _is_of_this_project(record))


def _without_expected_traceback(record: logging.LogRecord) -> bool:
    """Take the traceback from a record of an error that a user or the environment made; its message stays."""
    error, message = record.exc_info[1] if record.exc_info else None, record.getMessage()
    expected = isinstance(error, ValueError | OSError) or message.endswith("Retries are exhausted")
    if not (expected and message.startswith(_RAISED) and _is_of_this_project(record)):
        return True
    if not logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
        record.exc_info = record.exc_text = None
    return True


def hide_tracebacks_of_states() -> None:
    """Keep the traceback out of a run's log where a flow ended by returning a Failed or Cancelled state.

    `run_flow` of prefect/flow_engine.py (3.8.8) asks such a state for its result, which raises, and logs that as an
    unexpected exception with thirty lines of Prefect's own code. The state and its message are in the line before.
    Exceptions that a flow raised are logged as ever.
    """
    # A filter that is there already is not added again: of a function that is known by its identity.
    logging.getLogger(_FLOW_RUNS).addFilter(_says_more_than_the_state)


def hide_tracebacks_of_expected() -> None:
    """Keep tracebacks out of a run's log where a task or a flow raised a ValueError, an OSError or what was retried.

    A fetch that failed logged its message twice, and with each a hundred lines. All are kept at PREFECT_LOGGING_LEVEL
    DEBUG.
    """
    for name in (_FLOW_RUNS, _TASK_RUNS):
        logging.getLogger(name).addFilter(_without_expected_traceback)
