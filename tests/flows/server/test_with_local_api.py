"""A flow called from Python is run whatever the local Prefect server does; Prefect's own call is what fails here."""

import contextlib
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

import flows.with_local_api
from flows.server.local import ApiLease, LocalServerError
from flows.server.process import open_lock
from flows.server.settings import (
    HEARTBEAT_SECONDS,
    LOCAL_API_VARIABLE,
    apply_environment,
    environment_kept,
    prefect_environment,
)
from flows.with_local_api import WithLocalApi, _lacks_api, flow_with_local_api


@pytest.fixture(autouse=True)
def no_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody names one; a local server is at hand; the environment of this process stays as it is."""
    monkeypatch.setattr(flows.with_local_api, "_lacks_api", lambda: True)
    monkeypatch.setattr(flows.with_local_api, "prefect_api", contextlib.nullcontext)
    monkeypatch.setattr(flows.with_local_api, "apply_environment", lambda environment: None)


@pytest.fixture
def calls() -> list[int]:
    return []


@pytest.fixture
def doubled(calls: list[int]) -> WithLocalApi[[int], int]:
    def double(number: int) -> int:
        calls.append(number)
        if number < 0:
            raise ValueError("number: negative")
        return 2 * number

    return flow_with_local_api("double", flow_run_name=lambda: "double")(double)


def fail_before(flow: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("Failed to reach API at http://127.0.0.1:20000/api/")


def fail_after(flow: Any, *args: Any, **kwargs: Any) -> Any:
    flow.fn(*args)
    raise RuntimeError("503 Service Unavailable")


def test_a_server_that_does_not_start_costs_its_history_only(
    doubled: WithLocalApi[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def no_server() -> Iterator[None]:
        raise LocalServerError("Prefect server not ready within 15 s")
        yield

    monkeypatch.setattr(flows.with_local_api, "prefect_api", no_server)
    with pytest.warns(RuntimeWarning, match="measuring without Prefect: Prefect server not ready within 15 s"):
        assert doubled(2) == 4


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (fail_before, "measuring without Prefect: Failed to reach API"),
        (fail_after, "the end of the run is not in Prefect: 503"),
    ],
)
def test_a_server_that_fails_before_or_after_costs_no_result_and_no_second_run(
    doubled: WithLocalApi[[int], int],
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
    call: Any,
    told: str,
) -> None:
    monkeypatch.setattr(Flow, "__call__", call)
    with pytest.warns(RuntimeWarning, match=told):
        assert doubled(2) == 4
    assert calls == [2]


def test_an_error_of_the_flow_itself_is_raised_and_not_tried_again(
    doubled: WithLocalApi[[int], int], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flow, "__call__", fail_after)
    with pytest.raises(ValueError, match="number: negative"):
        doubled(-1)
    assert calls == [-1]


def test_a_flow_with_other_options_uses_the_local_server_too(
    doubled: WithLocalApi[[int], int], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's copy of a flow was one that started an ephemeral server, with a history of its own."""
    monkeypatch.setattr(Flow, "__call__", fail_before)
    tried_again = doubled.with_options(retries=2, name="again")
    with pytest.warns(RuntimeWarning, match="measuring without Prefect: Failed to reach API"):
        assert tried_again(2) == 4
    assert calls == [2] and (tried_again.retries, tried_again.name, doubled.retries) == (2, "again", 0)


@pytest.mark.parametrize("api_named", [True, False])
def test_heartbeats_are_as_many_as_the_automation_for_lost_runs_wants(
    doubled: WithLocalApi[[int], int], monkeypatch: pytest.MonkeyPatch, api_named: bool
) -> None:
    """Prefect's default is one in 180 s: a run from Python would be marked as crashed while it runs."""
    sent: list[int | None] = []

    def call(flow: Any, number: int, return_state: bool = False) -> int:
        sent.append(get_current_settings().flows.heartbeat_frequency)
        return number

    monkeypatch.setattr(flows.with_local_api, "_lacks_api", lambda: not api_named)
    monkeypatch.setattr(Flow, "__call__", call)
    doubled(2)
    doubled(2, return_state=True)
    assert sent == [HEARTBEAT_SECONDS, HEARTBEAT_SECONDS]
    assert prefect_environment("http://api/api")["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_SECONDS)


def test_a_study_in_another_thread_takes_a_lease_of_the_server_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It relied on that of the first: the server ended with it, and the second study raised after its report."""
    url = "http://127.0.0.1:1/api"
    monkeypatch.setenv(LOCAL_API_VARIABLE, url)

    def lacks() -> bool:
        with temporary_settings({PREFECT_API_URL: url}):
            return _lacks_api()

    assert lacks()
    with ThreadPoolExecutor(1) as threads:
        with ApiLease(url, tmp_path, open_lock(tmp_path / "lease.lock")):
            assert not lacks() and threads.submit(lacks).result()
        with ApiLease("http://lab/api"):  # of an API that the environment names
            assert lacks()
    assert lacks()


LOCAL_URL = "http://127.0.0.1:1/api"


@contextlib.contextmanager
def local_api(folder: Path, fails: bool = False) -> Iterator[None]:
    """A lease of a local server that answers nobody, with the environment of this process set for it."""
    with ApiLease(LOCAL_URL, folder, open_lock(folder / "lease.lock")) as lease:
        apply_environment(lease.environment)
        if fails:
            raise LocalServerError("Prefect server not ready within 15 s")
        yield


@pytest.mark.parametrize("fails", [False, True], ids=["with Prefect", "without Prefect"])
@pytest.mark.filterwarnings("ignore:measuring without Prefect:RuntimeWarning")
def test_flows_of_the_script_go_to_its_own_api_afterwards(
    doubled: WithLocalApi[[int], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """They were refused: the environment went on to name the local server, which had ended with the study."""
    monkeypatch.delenv("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", raising=False)
    apply_environment({})  # an earlier test may have had Prefect read another
    before, api = dict(os.environ), PREFECT_API_URL.value()
    seen: list[str | None] = []

    def call(flow: Any, number: int, return_state: bool = False) -> int:
        seen.append(os.environ.get("PREFECT_API_URL"))
        return number

    monkeypatch.setattr(Flow, "__call__", call)
    monkeypatch.setattr(flows.with_local_api, "apply_environment", apply_environment)
    monkeypatch.setattr(flows.with_local_api, "prefect_api", lambda: local_api(tmp_path, fails))
    doubled(2)
    assert dict(os.environ) == before and PREFECT_API_URL.value() == api
    assert {handler.level for handler in logging.getLogger().handlers if "Console" in type(handler).__name__} <= {0}
    if not fails:
        doubled(2, return_state=True)
        assert dict(os.environ) == before and seen == [LOCAL_URL, LOCAL_URL]


def test_the_environment_is_put_back_when_the_last_of_several_studies_has_ended() -> None:
    before = dict(os.environ)
    first, second = environment_kept(), environment_kept()
    first.__enter__()
    apply_environment({"PREFECT_API_URL": LOCAL_URL})
    second.__enter__()
    apply_environment({"PREFECT_API_URL": "http://127.0.0.1:2/api"})
    first.__exit__(None, None, None)
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:2/api" == PREFECT_API_URL.value()
    second.__exit__(None, None, None)
    assert dict(os.environ) == before


def test_settings_of_the_caller_alone_do_not_hide_the_local_server(
    doubled: WithLocalApi[[int], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect started an ephemeral server beside it, whose records were lost with the script."""
    seen: list[str | None] = []

    def call(flow: Any, number: int, return_state: bool = False) -> int:
        seen.append(PREFECT_API_URL.value())
        return number

    monkeypatch.setattr(Flow, "__call__", call)
    monkeypatch.setattr(flows.with_local_api, "prefect_api", lambda: local_api(tmp_path))
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        doubled(2)
    assert seen == [LOCAL_URL]
