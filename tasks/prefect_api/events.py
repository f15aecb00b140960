"""Events of a run for Prefect's event feed, and for automations on them. An API that is away costs an event only.

    tell(Happened.CELL_FAILED, session.plan.study, "tp=2, batch 8: out_of_memory", cell=key)

Each is about its study (`rankwise.study.<name>`), names its flow run, and has a `message` for people in its payload.
Outside a flow run nothing is told. What automations do with them: `flows.registration.automations`.
"""

from enum import StrEnum

from prefect.events import emit_event

from configs.common.secrets import redacted
from tasks.prefect_api.api import api_error_text
from tasks.prefect_api.stages import run_logger, study_context

STUDY = "rankwise.study."
"""Begin of the id of a study as a resource of Prefect's events."""
_MAX_CHARACTERS = 500


class Happened(StrEnum):
    """Names of the events."""

    CELL_MEASURED = "rankwise.cell.measured"
    CELL_FAILED = "rankwise.cell.failed"
    NODE_AVOIDED = "rankwise.node.avoided"
    BUDGET_NEAR = "rankwise.budget.near"
    REGRESSION_FOUND = "rankwise.regression.found"


def tell(happened: Happened, study: str, message: str, **payload: str | int | float | None) -> None:
    """Send an event; it is on its way in the background when this returns."""
    context = study_context()
    if context is None or context.flow_run is None:
        return
    text = redacted(message)[:_MAX_CHARACTERS]
    try:
        # Prefect adds flow, deployment and tags of the context, which in a group of stages are the group's.
        with context.model_copy():
            emit_event(
                event=str(happened),
                resource={"prefect.resource.id": f"{STUDY}{study}", "prefect.resource.name": study},
                related=[
                    {
                        "prefect.resource.id": f"prefect.flow-run.{context.flow_run.id}",
                        "prefect.resource.name": context.flow_run.name,
                        "prefect.resource.role": "flow-run",
                    }
                ],
                payload={"message": text, "study": study, **payload},
            )
    except Exception as error:  # whatever Prefect raises: the records say the same
        run_logger().debug("event not sent: %s", api_error_text(error))
