"""Events of a study are about its flow run, however its stages are drawn."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

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
