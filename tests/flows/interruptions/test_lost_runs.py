"""The automation for flow runs that went without a word: its trigger, judged by the evaluation of Prefect's server."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.server.database import provide_database_interface
from prefect.server.events import triggers
from prefect.server.events.models.automations import create_automation
from prefect.server.events.ordering import EventArrivedEarly
from prefect.server.events.schemas.automations import Automation, EventTrigger, Firing
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL, temporary_settings
from prefect.states import Pending, Scheduled

from flows.registration.automations import zombie_automation
from tasks.prefect_api import schedules

HEARD = "heartbeat"
_TABLES = ("automation", "automation_bucket", "automation_related_resource", "automation_event_follower")


def _event(name: str, occurred: datetime, run: UUID, flow: str = "scaling study", **fields: Any) -> ReceivedEvent:
    resource = {"prefect.resource.id": f"prefect.flow-run.{run}"}
    of_flow = {"prefect.resource.id": "prefect.flow.1", "prefect.resource.role": "flow", "prefect.resource.name": flow}
    about = {"event": f"prefect.flow-run.{name}", "resource": resource, "occurred": occurred, "received": occurred}
    return ReceivedEvent.model_validate({"id": uuid4(), "related": [of_flow]} | about | fields)


async def _fired(heard: Sequence[ReceivedEvent], judged_at: datetime) -> int:
    """How often the automation fires by then, if these events arrive in this order."""
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
    for event in heard:
        with suppress(EventArrivedEarly):
            await triggers.reactive_evaluation(event)
    await triggers.reset_events_clock()
    fired: list[Firing] = []

    async def fire(_: object, firing: Firing) -> None:
        fired.append(firing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triggers, "fire", fire)
        await triggers.proactive_evaluation(trigger, judged_at)
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
    began, run = datetime.now(UTC) - timedelta(hours=1), uuid4()
    events = [_event(name, began + timedelta(seconds=seconds), run) for seconds, name in heard]
    with temporary_settings({PREFECT_SERVER_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{tmp_path}/prefect.db"}):
        assert asyncio.run(_fired(events, began + timedelta(seconds=judged_at))) == int(lost)


@pytest.mark.parametrize(
    ("key", "lost"), [(f"scheduled {UUID(int=1)} {UUID(int=2)} 2026-11-27 02:00:00+00:00", False), (None, True)]
)
def test_a_scheduled_run_that_ends_or_is_tried_again_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, lost: bool
) -> None:
    """The server keeps back all that follows a run's first state, whose event its scheduler does not send."""
    began = datetime.now(UTC) - timedelta(minutes=5)
    first = Scheduled(timestamp=began)
    run = FlowRun(flow_id=uuid4(), auto_scheduled=True, idempotency_key=key)
    states = SimpleNamespace(read_flow_run_states=lambda _: [Pending(timestamp=began + timedelta(seconds=1)), first])
    sent: list[ReceivedEvent] = []
    monkeypatch.setattr(schedules, "quick_client", lambda **_: nullcontext(states))
    monkeypatch.setattr(
        schedules, "emit_event", lambda **told: sent.append(ReceivedEvent(received=datetime.now(UTC), **told))
    )

    heard, before = [], first.id
    for seconds, name in [(1, "Pending"), (2, "Running"), (9, "Cancelled"), (40, "Scheduled"), (41, "Pending")]:
        heard.append(_event(name, began + timedelta(seconds=seconds), run.id, follows=before))
        before = heard[-1].id
    heard.insert(2, _event(HEARD, began + timedelta(seconds=3), run.id))
    schedules.tell_scheduled(None, run, Pending())
    assert len(sent) == (not lost) and all(event.id == first.id for event in sent)
    with temporary_settings({PREFECT_SERVER_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{tmp_path}/prefect.db"}):
        assert asyncio.run(_fired([*heard, *sent], began + timedelta(seconds=95))) == int(lost)


@pytest.mark.parametrize(
    ("flow", "lost"), [("scheduled sweep", True), ("publish a study", True), ("somebody else's", False)]
)
def test_flows_of_others_have_heartbeats_of_their_own(tmp_path: Path, flow: str, lost: bool) -> None:
    """By default every 180 s, so that each would be marked as crashed while it runs."""
    began = datetime.now(UTC) - timedelta(minutes=5)
    with temporary_settings({PREFECT_SERVER_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{tmp_path}/prefect.db"}):
        heard = [_event(HEARD, began, uuid4(), flow)]
        assert asyncio.run(_fired(heard, began + timedelta(seconds=95))) == int(lost)
