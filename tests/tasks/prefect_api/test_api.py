"""Reports to an API that lost the flow run, or that knows of it what its process did not do."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Cancelling, Completed, Pending, Running, Suspended

from tasks.prefect_api import api
from tasks.prefect_api.api import end_lost_run, tag_run


def test_a_run_that_the_api_no_longer_knows_is_not_tagged_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its database was replaced, or somebody deleted the run, while models were fetched."""

    def unknown(_: UUID) -> Any:
        raise ObjectNotFound(httpx.HTTPError("404 Not Found"), "flow run not found")

    monkeypatch.setattr(api, "quick_client", lambda: nullcontext(SimpleNamespace(read_flow_run=unknown)))
    with caplog.at_level(logging.WARNING, logger="rankwise"):
        tag_run(uuid4(), {"model:tiny"})
    assert "run not tagged" in caplog.text


@pytest.mark.parametrize(
    ("state", "lost"),
    [
        (Running(), True),
        (Cancelling(), True),
        (Pending(), False),
        (Suspended(timeout_seconds=60), False),
        (AwaitingRetry(), False),
        (Completed(), False),
    ],
    ids=lambda given: given.name if isinstance(given, State) else "",
)
def test_only_a_run_that_is_said_to_run_was_lost(
    monkeypatch: pytest.MonkeyPatch, state: State[Any], lost: bool
) -> None:
    """A suspended run ended as it should, and one that somebody tried again is about to start."""
    ended: list[tuple[UUID, str]] = []
    client = SimpleNamespace(
        read_flow_run=lambda identifier: SimpleNamespace(state=state),
        set_flow_run_state=lambda identifier, wanted, force: ended.append((identifier, wanted.name)),
        read_flow_runs=lambda flow_run_filter: [],
    )
    monkeypatch.setattr(api, "quick_client", lambda: nullcontext(client))
    run = uuid4()
    assert end_lost_run(run) is lost
    assert ended == ([(run, "Crashed")] if lost else [])
