"""What the watcher of a flow run makes of the state that the API says it is in."""

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Cancelling, Crashed, Paused, Running, Suspended

from tasks.campaign.progress import RunProgress
from tasks.prefect_api.cancellation import ApiWatcher, RunCancelled, RunSuspended


def looked(state: State[Any] | None) -> tuple[ApiWatcher, list[str | None]]:
    """A watcher that has looked once at a run in this state, and the states that it set."""
    told: list[str | None] = []
    client: Any = SimpleNamespace(
        read_flow_run=lambda identifier: SimpleNamespace(state=state),
        set_flow_run_state=lambda identifier, wanted, force: told.append(wanted.name),
    )
    watcher = ApiWatcher(uuid4(), RunProgress(), None)
    watcher._look(client)
    return watcher, told


@pytest.mark.parametrize("state", [Cancelling(), Cancelled()], ids=lambda state: state.name)
def test_a_run_that_is_cancelled_ends(state: State[Any]) -> None:
    watcher, told = looked(state)
    with pytest.raises(RunCancelled) as raised:
        watcher.check()
    assert type(raised.value) is RunCancelled and watcher.cancelled and not told


def test_a_run_that_is_suspended_ends_in_that_state() -> None:
    state = Suspended(timeout_seconds=60)
    watcher, told = looked(state)
    with pytest.raises(RunSuspended) as raised:
        watcher.check()
    assert raised.value.state is state and not told


@pytest.mark.parametrize(
    ("state", "told"),
    [(None, []), (Running(), []), (Paused(timeout_seconds=60), []), (Crashed(), ["Running"])],
    ids=lambda given: given.name if isinstance(given, State) else "",
)
def test_any_other_run_goes_on(state: State[Any] | None, told: list[str]) -> None:
    """One that was taken for lost, since the API was away, says that it runs."""
    watcher, found = looked(state)
    watcher.check()
    assert not watcher.cancelled and found == told
