"""Events of a run for Prefect's event feed, and for automations on them. An API that is away costs an event only.

    tell(Happened.CELL_FAILED, session.plan.study, "tp=2, batch 8: out_of_memory", cell=key)

Each is about its study (`rankwise.study.<name>`), names its flow run, and has a `message` for people in its payload.
Outside a flow run nothing is told. What automations do with them: `flows.registration.automations`.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from enum import StrEnum

from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.settings import get_current_settings

from configs.common.printable import shortened
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
    text = shortened(redacted(message), _MAX_CHARACTERS)
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


@contextmanager
def heartbeats(seconds: float) -> Iterator[None]:
    """Send the heartbeats of the flow run this often in the block, where Prefect is set to send them less often.

    That is so in deployments that somebody made without the environment of `prefect.yaml`: the automation for lost runs
    would mark them as crashed while they measure. Where Prefect sends none, nothing is sent, and nothing judged.
    """
    context, every = FlowRunContext.get(), get_current_settings().flows.heartbeat_frequency
    if context is None or context.flow_run is None or every is None or every <= seconds:
        yield
        return
    run, flow = context.flow_run, getattr(context, "flow", None)
    resource = {"prefect.resource.id": f"prefect.flow-run.{run.id}", "prefect.resource.name": run.name}
    related = [
        {
            "prefect.resource.id": f"prefect.flow.{run.flow_id}",
            "prefect.resource.role": "flow",
            "prefect.resource.name": flow.name if flow is not None else "",
        }
    ]
    ended = threading.Event()

    def beat() -> None:
        while not ended.is_set():
            try:
                emit_event(event="prefect.flow-run.heartbeat", resource=resource, related=related)
            except Exception as error:  # as above
                run_logger().debug("heartbeat not sent: %s", api_error_text(error))
            ended.wait(seconds)

    # In the caller's context, which has the settings of its API.
    thread = threading.Thread(target=copy_context().run, args=(beat,), name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=5)
