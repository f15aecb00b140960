"""Reports to an API that lost the flow run, or that knows of it what its process did not do."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelling, Completed, Crashed, Pending, Running, Suspended

from configs.spec.study import StudyError
from tasks.prefect_api import api, credentials, schedules, targets
from tasks.prefect_api.api import end_lost_groups, end_lost_run, tag_run


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


def test_a_tag_of_an_earlier_try_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []
    client = SimpleNamespace(
        read_flow_run=lambda _: SimpleNamespace(tags=["study", "refused"]),
        update_flow_run=lambda _, tags: told.append(tags),
    )
    monkeypatch.setattr(api, "quick_client", lambda: nullcontext(client))
    tag_run(uuid4(), {"model:tiny"}, {"refused"})
    tag_run(uuid4(), {"study"}, {"other"})
    assert told == [["model:tiny", "study"]]


def with_states(
    monkeypatch: pytest.MonkeyPatch, state: State[Any], groups: dict[UUID, State[Any]]
) -> list[tuple[UUID, str | None]]:
    """An API that knows these states of a run and of the groups of its stages. Returns what it is told."""
    told: list[tuple[UUID, str | None]] = []
    client = SimpleNamespace(
        read_flow_run=lambda identifier: SimpleNamespace(state=state),
        set_flow_run_state=lambda identifier, wanted, force: told.append((identifier, wanted.name)),
        read_flow_runs=lambda flow_run_filter: [
            SimpleNamespace(id=identifier, state=of_group) for identifier, of_group in groups.items()
        ],
    )
    monkeypatch.setattr(api, "quick_client", lambda: nullcontext(client))
    return told


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
    run, ended = uuid4(), with_states(monkeypatch, state, {})
    assert end_lost_run(run) is lost
    assert ended == ([(run, "Crashed")] if lost else [])


@pytest.mark.parametrize("again", [False, True], ids=["another-run", "the-same-run"])
def test_groups_of_a_lost_run_do_not_stay_running(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """The run itself was marked as crashed by then, by the worker or the automation, which do not know its groups."""
    ended, under_way = uuid4(), uuid4()
    told = with_states(monkeypatch, Crashed(), {ended: Completed(), under_way: Running()})
    if again:
        end_lost_groups(uuid4())
    else:
        assert not end_lost_run(uuid4())
    assert told == [(under_way, "Crashed")]


def test_an_api_that_does_not_answer_in_time_is_told_with_the_time() -> None:
    """httpx has no words for it: a run was measured without Prefect because of `ReadTimeout`."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: url}):
            assert api.why_unavailable(0.2) == "no answer within 0.2 s"
    assert api.api_error_text(httpx.ReadTimeout("")) == "no answer in time"


def test_one_that_answers_late_is_there_for_whoever_has_the_time() -> None:
    """A server that had just started on a busy machine: `publish` gave it up after ten seconds."""

    class Late(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(422, "CSRF protection is disabled.")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(1.0)
            with suppress(OSError):
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(b"[]")

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Late) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{server.server_port}/api"}):
            assert api.await_api(0, answer_seconds=0.2) == "no answer within 0.2 s"
            assert api.await_api(0, answer_seconds=60) is None
        server.shutdown()


@pytest.mark.parametrize(
    ("module", "asks"),
    [
        (credentials, lambda: credentials.api_environment().__enter__()),
        (targets, targets.stored_targets),
        (schedules, lambda: schedules.own_scheduled_time(uuid4())),
        (schedules, lambda: schedules.cancel_missed(uuid4())),
    ],
    ids=["credentials", "targets", "scheduled-time", "missed"],
)
def test_what_a_run_would_go_wrong_without_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, asks: Callable[[], object]
) -> None:
    """Beside two busy processes a server took 20 s for an answer, and the run went on without it."""
    waited = []

    def late(**given: float) -> NoReturn:
        waited.append(given["answer_seconds"])
        raise httpx.ReadTimeout("")

    monkeypatch.setattr(module, "quick_client", late)
    monkeypatch.setattr(credentials, "get_run_logger", lambda: logging.getLogger(__name__))
    with suppress(StudyError):
        asks()
    assert waited == [api.NEEDED_SECONDS] and api.NEEDED_SECONDS > 20
