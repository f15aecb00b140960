"""What Prefect writes into the log of a flow run beside what this program says there."""

import logging

from prefect.exceptions import CancelledRun, FailedRun

_FLOW_RUNS = "prefect.flow_runs"


def _says_more_than_the_state(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, FailedRun | CancelledRun)


def hide_tracebacks_of_states() -> None:
    """Keep the traceback out of a run's log where a flow ended by returning a Failed or Cancelled state.

    `run_flow` of prefect/flow_engine.py (3.8.8) asks such a state for its result, which raises, and logs that as an
    unexpected exception with thirty lines of Prefect's own code. The state and its message are in the line before.
    Exceptions that a flow raised are logged as ever.
    """
    # A filter that is there already is not added again: of a function that is known by its identity.
    logging.getLogger(_FLOW_RUNS).addFilter(_says_more_than_the_state)
