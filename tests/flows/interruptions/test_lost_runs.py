"""The automation for flow runs that went without a word: its trigger, judged by the evaluation of Prefect's server."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.server.database import provide_database_interface
from prefect.server.events import triggers
from prefect.server.events.models.automations import create_automation
from prefect.server.events.schemas.automations import Automation, EventTrigger, Firing
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL, temporary_settings

from flows.registration.automations import zombie_automation

HEARD = "heartbeat"
_TABLES = ("automation", "automation_bucket", "automation_related_resource", "automation_event_follower")


async def _fired(heard: Sequence[tuple[float, str]], judged_at: float) -> int:
    """How often the automation fires if these events (seconds, name) arrive in this order, by `judged_at` seconds."""
    database = provide_database_interface()
    engine = await database.engine()
    async with engine.begin() as connection:
        tables = [database.Base.metadata.tables[name] for name in _TABLES]
        await connection.run_sync(lambda sync: database.Base.metadata.create_all(sync, tables))
    wanted = Automation.model_validate(zombie_automation().model_dump(mode="json"))
    async with database.session_context(begin_transaction=True) as session:
        automation = await create_automation(session, wanted)
    triggers.clear_loaded_automations()
    triggers.load_automation(automation)
    trigger = automation.trigger
    assert isinstance(trigger, EventTrigger)
    began, resource = datetime.now(UTC) - timedelta(hours=1), {"prefect.resource.id": f"prefect.flow-run.{uuid4()}"}
    for seconds, name in heard:
        at = began + timedelta(seconds=seconds)
        event = ReceivedEvent.model_validate(
            {"id": uuid4(), "occurred": at, "event": f"prefect.flow-run.{name}", "resource": resource, "received": at}
        )
        await triggers.reactive_evaluation(event)
    await triggers.reset_events_clock()
    fired: list[Firing] = []

    async def fire(_: object, firing: Firing) -> None:
        fired.append(firing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triggers, "fire", fire)
        await triggers.proactive_evaluation(trigger, began + timedelta(seconds=judged_at))
    triggers.clear_loaded_automations()
    return len(fired)


@pytest.mark.parametrize(
    ("heard", "judged_at", "lost"),
    [
        ([(0, HEARD), (30, HEARD)], 121, True),
        ([(0, HEARD), (30, HEARD)], 119, False),
        ([(0, HEARD), (5, "Completed")], 200, False),
        ([(0, HEARD), (5, "Cancelling")], 200, True),
        # What a run says goes another way than what the server says: a short run's only heartbeat may come last.
        ([(1, "Cancelled"), (0, HEARD), (60, "Scheduled"), (61, "Pending")], 91, False),
        ([(1, "Failed"), (0, HEARD), (60, "AwaitingRetry")], 91, False),
        ([(1, "Crashed"), (0, HEARD), (60, "Scheduled"), (75, "Late")], 91, False),
        ([(1, "Cancelled"), (0, HEARD), (60, "Scheduled"), (61, "Pending"), (85, HEARD)], 174, False),
        ([(1, "Cancelled"), (0, HEARD), (60, "Scheduled"), (61, "Pending"), (85, HEARD)], 176, True),
    ],
)
def test_silence_counts_from_the_last_heartbeat_of_this_attempt(
    tmp_path: Path, heard: Sequence[tuple[float, str]], judged_at: float, lost: bool
) -> None:
    with temporary_settings({PREFECT_SERVER_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{tmp_path}/prefect.db"}):
        assert asyncio.run(_fired(heard, judged_at)) == int(lost)
