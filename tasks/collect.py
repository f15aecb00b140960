"""Stage 6: what the ranks left becomes records."""

from configs.records.record import Record, Status
from tasks.campaign.records import Collected, collect_job
from tasks.campaign.session import Session
from tasks.prefect_api.events import Happened, tell
from tasks.prefect_api.stages import run_logger, stage

_MAX_EVENTS = 50
"""Of one launch: each takes some milliseconds of the server."""


@stage("collect", "collect {what}")
def collect_launch(what: str, name: str, session: Session) -> Collected:
    """Merge the parts of a job that has ended, and log what became of each cell. Safe to repeat."""
    collected = collect_job(session.run, name)
    for record in collected.records:
        run_logger().info(_told(record))
    for record in collected.records[:_MAX_EVENTS]:
        completed = record.status is Status.COMPLETED
        tell(
            Happened.CELL_MEASURED if completed else Happened.CELL_FAILED,
            session.plan.study,
            f"{what}: {_told(record)}",
            cell=record.key,
            status=record.status.value,
            repeat=record.repeat + 1,
            attempt=record.attempt,
        )
    return collected


def _told(record: Record) -> str:
    """One line on a measurement: which it is, how it ended, how long it took."""
    about = f"cell {record.key}, {record.cell.place}, repeat {record.repeat + 1}, attempt {record.attempt}"
    seconds = record.figures.get("measurement_seconds")
    took = f" in {seconds:.2f} s" if isinstance(seconds, int | float) else ""
    why = f": {record.failure.message}" if record.failure else ""
    return f"{about}: {record.status.value}{took}{why}"
