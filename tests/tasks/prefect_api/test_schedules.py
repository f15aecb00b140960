"""Which of the missed runs of a schedule goes on, asked of a real server."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed, Running, Scheduled

from flows.server.local import lease_server
from tasks.prefect_api import schedules
from tasks.prefect_api.schedules import cancel_missed, own_scheduled_time


class Schedule:
    """A deployment, and the runs that the server's scheduler would have made of it."""

    def __init__(self, client: SyncPrefectClient, database: str) -> None:
        self.client, self._database = client, database
        # Of this test, not of the collection of all: that may be an hour ago.
        self.now = datetime.now(UTC).replace(microsecond=0)
        flow_id = client.create_flow_from_name("a sweep")
        self._deployment = client.create_deployment(flow_id, f"nightly-{uuid4()}")

    def run(self, minutes: float, study: str = "s", made_by_scheduler: bool = True) -> UUID:
        """A run that became due so many minutes ago."""
        at = self.now - timedelta(minutes=minutes)
        run = self.client.create_flow_run_from_deployment(
            self._deployment,
            parameters={"study": study},
            state=Scheduled(scheduled_time=at),
            idempotency_key=f"scheduled {self._deployment} {uuid4()} {at}",
        )
        if made_by_scheduler:  # no client may say so
            with closing(sqlite3.connect(self._database, timeout=600)) as database, database:
                changed = database.execute("UPDATE flow_run SET auto_scheduled = 1 WHERE id = ?", (str(run.id),))
                assert changed.rowcount == 1
        return run.id

    def put(self, run: UUID, state: State) -> None:
        self.client.set_flow_run_state(run, state, force=True)

    def state(self, run: UUID) -> tuple[str, str]:
        state = self.client.read_flow_run(run).state
        assert state is not None
        return state.type.value, state.message or ""


@pytest.fixture
def schedule() -> Iterator[Schedule]:
    with lease_server() as lease:
        lease.wait_until_healthy()
        assert lease.home is not None
        with temporary_settings({PREFECT_API_URL: lease.url}), get_client(sync_client=True) as client:
            yield Schedule(client, str(lease.home / "prefect.db"))


@pytest.mark.slow
def test_the_newest_goes_on_and_stands_for_the_others(schedule: Schedule) -> None:
    oldest, older, newest = (schedule.run(minutes) for minutes in (30, 20, 10))
    schedule.put(oldest, Running())
    told = cancel_missed(oldest)
    at = schedule.now - timedelta(minutes=10)
    assert told == f"superseded by the run scheduled for {at}"
    assert own_scheduled_time(newest) == at
    assert schedule.state(older) == ("CANCELLED", told)
    assert schedule.state(oldest)[0] == "RUNNING", "who asked ends by itself"
    assert schedule.state(newest)[0] == "SCHEDULED"
    schedule.put(newest, Running())
    assert cancel_missed(newest) is None


@pytest.mark.slow
def test_one_that_others_were_cancelled_for_goes_on_whatever_becomes_due(schedule: Schedule) -> None:
    """A schedule that is faster than the start of a process would supersede each run by the next, for ever."""
    older, newest = schedule.run(20), schedule.run(10)
    schedule.put(older, Running())
    told = cancel_missed(older)
    assert told is not None
    schedule.put(older, Cancelled(message=told))  # as its flow does
    schedule.put(newest, Running())
    later = schedule.run(5)
    assert cancel_missed(newest) is None
    assert schedule.state(later)[0] == "SCHEDULED"
    schedule.put(later, Running())
    assert cancel_missed(later) is None


@pytest.mark.slow
def test_runs_of_others_and_of_persons_are_left_alone(schedule: Schedule) -> None:
    another = schedule.run(30, study="another")
    by_hand = schedule.run(30, made_by_scheduler=False)
    again = schedule.run(30)
    schedule.put(again, Completed())
    schedule.put(again, Scheduled())  # as a person does in the UI
    future = schedule.run(-24 * 60)
    missed, mine = schedule.run(20), schedule.run(10)
    schedule.put(mine, Running())
    assert cancel_missed(mine) is None
    assert schedule.state(missed)[0] == "CANCELLED"
    assert [schedule.state(run)[0] for run in (another, by_hand, again, future)] == ["SCHEDULED"] * 4
    assert cancel_missed(by_hand) is None and cancel_missed(None) is None
    schedule.put(again, Running())
    assert cancel_missed(again) is None, "one that was tried again is wanted, however old"


@pytest.mark.parametrize(
    ("before", "after", "superseded"),
    [
        (["measuring.repeats=3"], ["measuring.repeats=10"], True),
        (["study=other"], ["study=mine", "study = other"], True),
        (None, [], True),
        (["study=other"], ["study=mine"], False),
        (["study=other"], None, False),
    ],
)
def test_a_file_under_another_name_is_another_study(
    before: list[str] | None, after: list[str] | None, superseded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two schedules measure one file, each under a name of its own: the later one cancelled the other's missed run."""
    deployment, flow, now = uuid4(), uuid4(), datetime.now(UTC).replace(microsecond=0)

    def made(minutes: int, given: list[str] | None) -> FlowRun:
        at = now - timedelta(minutes=minutes)
        return FlowRun(
            flow_id=flow,
            deployment_id=deployment,
            parameters={"study": "base.yaml", "assignments": given},
            auto_scheduled=True,
            idempotency_key=f"scheduled {deployment} {uuid4()} {at}",
        )

    earlier, later = made(30, before), made(5, after)
    cancelled: list[Any] = []
    client = SimpleNamespace(
        read_flow_run=lambda _: later,
        read_flow_run_states=lambda _: [],
        read_flow_runs=lambda offset=0, **_: [earlier, later] if offset == 0 else [],
        set_flow_run_state=lambda identifier, *_, **__: cancelled.append(identifier),
    )
    monkeypatch.setattr(schedules, "quick_client", lambda **_: nullcontext(client))
    assert cancel_missed(later.id) is None
    assert cancelled == ([earlier.id] if superseded else [])
