"""Events of a study are about its flow run, however its stages are drawn."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from tasks.campaign.graph import RunGraph
from tasks.prefect_api import events, groups
from tasks.prefect_api.events import Happened, tell
from tasks.prefect_api.groups import with_group


def context_of(name: str) -> FlowRunContext:
    return FlowRunContext.model_construct(flow_run=FlowRun(flow_id=uuid4(), name=name))


def subflow(**_: Any) -> Callable[[Callable[[], Any]], Callable[..., None]]:
    """A decorator as Prefect's, of a flow that runs inside a flow run of its own."""

    def declared(function: Callable[[], Any]) -> Callable[..., None]:
        def call(**_: Any) -> None:
            with context_of("block 1 of 10"):
                function()

        return call

    return declared


def test_events_of_a_group_are_related_to_the_studys_flow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever filters by the run, its flow or its tags finds those of a large study, too."""
    told: list[tuple[str, str]] = []

    def emit(event: str, related: list[dict[str, str]], **_: Any) -> None:
        context = FlowRunContext.get()
        assert context is not None and context.flow_run is not None
        told.append((related[0]["prefect.resource.name"], context.flow_run.name))

    monkeypatch.setattr(events, "emit_event", emit)
    monkeypatch.setattr(groups, "flow", subflow)
    session: Any = SimpleNamespace(graph=RunGraph())

    def work() -> None:
        tell(Happened.BUDGET_NEAR, "large", "80 % are used")

    work()
    with context_of("large"):
        work()
        with_group(session, "block 1 of 10", work)
        work()
    work()
    assert told == [("large", "large")] * 3


@pytest.mark.parametrize(("every", "sent"), [(180, True), (30, False), (None, False)])
def test_a_run_beats_as_often_as_it_is_judged_by(
    every: int | None, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment without the environment of prefect.yaml has Prefect's 180 s, and was called crashed after 90."""
    beats: list[dict[str, Any]] = []
    third = threading.Event()

    def emit(**beat: Any) -> None:
        beats.append(beat)
        if len(beats) == 3:
            third.set()

    monkeypatch.setattr(events, "emit_event", emit)
    flow = SimpleNamespace(name="scheduled sweep")
    context = FlowRunContext.model_construct(flow_run=FlowRun(flow_id=uuid4(), name="nightly"), flow=flow)
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: every}):
        with events.heartbeats(0.001):
            assert not beats  # not in a flow run
        with context, events.heartbeats(0.001 if sent else 30):
            assert not sent or third.wait(600)
    count, names = len(beats), {thread.name for thread in threading.enumerate()}
    assert bool(beats) == sent and "heartbeats" not in names
    for beat in beats:
        assert beat["event"] == "prefect.flow-run.heartbeat"
        assert beat["resource"]["prefect.resource.id"] == f"prefect.flow-run.{context.flow_run.id}"
        assert beat["related"][0]["prefect.resource.role"] == "flow"
        assert beat["related"][0]["prefect.resource.name"] == "scheduled sweep"
    assert len(beats) == count
