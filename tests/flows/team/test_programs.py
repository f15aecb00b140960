"""The Prefect worker of a team keeps its flow runs, whatever the API says to its own requests."""

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import anyio
import httpx
import pytest
from prefect.workers.process import ProcessWorker

from flows.team import programs

BUSY = "a flow run under way"


def refusal(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://127.0.0.1:4200/api/work_pools/rankwise/get_scheduled_flow_runs")
    return httpx.HTTPStatusError(f"error {status}", request=request, response=httpx.Response(status))


def worker_that_meets(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A team's worker whose requests all end so. Call it inside an event loop."""

    async def fail(*_: Any) -> None:
        raise error

    for name in ("get_and_submit_flow_runs", "sync_with_backend", "_submit_run"):
        monkeypatch.setattr(ProcessWorker, name, fail)
    worker: Any = programs._worker(2)
    worker._limiter = anyio.CapacityLimiter(2)
    return worker


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize("status", [401, 404, 408, 429, 503])
def test_only_a_worker_without_flow_runs_gives_up(status: int, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end with it. A wrong key is said at the start."""

    async def ask() -> list[Any]:
        worker = worker_that_meets(refusal(status), monkeypatch)
        if busy:
            worker.limiter.acquire_on_behalf_of_nowait(BUSY)
        await worker.sync_with_backend()
        found: list[Any] = await worker.get_and_submit_flow_runs()
        return found

    if busy or status in (408, 429, 503):
        assert asyncio.run(ask()) == []
    else:
        with pytest.raises(httpx.HTTPStatusError):
            asyncio.run(ask())


@pytest.mark.parametrize("error", [refusal(503), refusal(401), httpx.ConnectError("refused")])
def test_a_run_that_could_not_be_started_leaves_the_others_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefect starts them in one group of tasks, which an error ends."""
    observed: list[UUID] = []
    run = SimpleNamespace(id=uuid4(), name="second")

    async def submit() -> tuple[int, set[UUID]]:
        worker = worker_that_meets(error, monkeypatch)
        worker._cancelling_observer = SimpleNamespace(remove_in_flight_flow_run_id=observed.append)
        for borrower in (BUSY, run.id):
            worker.limiter.acquire_on_behalf_of_nowait(borrower)
        worker._submitting_flow_run_ids.add(run.id)
        async with anyio.create_task_group() as group:
            group.start_soon(worker._submit_run, run)
        return worker.limiter.borrowed_tokens, worker._submitting_flow_run_ids

    assert asyncio.run(submit()) == (1, set())
    assert observed == [run.id]
    assert "flow run second not started, retrying: " in capsys.readouterr().out
