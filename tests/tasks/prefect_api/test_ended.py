"""What becomes of stages and groups of a run that somebody cancelled or suspended: they are cancelled, none failed."""

import uuid
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from prefect.client.schemas.objects import State, StateDetails
from prefect.exceptions import Pause
from prefect.states import Completed, Suspended

from tasks.campaign.graph import RunGraph, StageEnd
from tasks.prefect_api import groups, stages
from tasks.prefect_api.ended import RunCancelled, RunSuspended
from tasks.prefect_api.groups import with_group
from tasks.prefect_api.stages import stage


@pytest.mark.parametrize("error", [RunCancelled(), RunSuspended(Suspended())])
def test_a_stage_of_a_run_that_somebody_ended_is_cancelled(
    error: RunCancelled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits() -> NoReturn:
        raise error

    context = SimpleNamespace(task_run=SimpleNamespace(id="t"))
    monkeypatch.setattr(stages, "TaskRunContext", SimpleNamespace(get=lambda: context))
    outcomes: list[Any] = []
    token = stages._OUTCOMES.set(outcomes)
    state = stage("wait", "wait")(waits)._as_task.fn()
    stages._OUTCOMES.reset(token)
    assert isinstance(state, State) and state.is_cancelled() and state.message == str(error) != ""
    assert outcomes == [("t", error)], "the run hears of it"


def test_the_group_of_a_suspended_run_does_not_run_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect raises Pause out of a subflow whose run was suspended, and leaves the subflow's state."""
    identifier, told = uuid.uuid4(), list[Any]()
    this = StageEnd(Completed(data=True, state_details=StateDetails(task_run_id=identifier)))
    client = SimpleNamespace(set_flow_run_state=lambda *given, force: told.append(given))

    def suspended(work: Callable[[], object]) -> Callable[..., NoReturn]:
        def call(**_: object) -> NoReturn:
            work()
            raise Pause

        return call

    for name, replaced in {
        "in_flow_run": lambda: True,
        "tries": lambda: 1,
        "_this_subflow": lambda: this,
        "flow": lambda **_: suspended,
        "within_study": nullcontext,
        "_without_heartbeat": nullcontext,
        "quick_client": lambda: nullcontext(client),
    }.items():
        monkeypatch.setattr(groups, name, replaced)
    session: Any = SimpleNamespace(graph=RunGraph())
    with pytest.raises(Pause):
        with_group(session, "block 1 of 2", lambda: None)
    [(group, state)] = told
    assert group == identifier and state.is_cancelled() and "suspended" in state.message
