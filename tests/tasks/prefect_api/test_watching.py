"""Which API the watcher of a run asks, and what the artifacts of the run show when it has ended."""

import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Running

from tasks.campaign.progress import ProgressRow, RunProgress
from tasks.prefect_api import cancellation
from tasks.prefect_api.cancellation import ApiWatcher


@pytest.mark.parametrize(
    ("outcome", "state", "away", "shown"),
    [
        ("completed", Running(), False, "Study s: completed, 1 of 4 measurements done"),
        ("interrupted", Cancelling(), False, "Study s: cancelled, 1 of 4 measurements done"),
        ("interrupted", Running(), False, "Study s: interrupted, 1 of 4 measurements done"),
        ("failed", Running(), True, None),
    ],
)
def test_the_last_word_of_the_progress_is_how_the_run_ended(
    outcome: str, state: object, away: bool, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what it did when it was shown last, with a time to go; and no job that runs."""
    told: list[Any] = []
    client = SimpleNamespace(
        read_flow_run=lambda _: SimpleNamespace(state=state), update_artifact=lambda _, update: told.append(update)
    )

    @contextmanager
    def answering(**_: object) -> Iterator[SimpleNamespace]:
        if away:
            raise ConnectionError("refused")
        yield client

    monkeypatch.setattr(cancellation, "quick_client", answering)
    row = ProgressRow("tiny", 1, 1, 1, state="running", note="for another launch on this machine")
    progress = RunProgress("s", total=4, done=1, rows=[row], stage="measuring")
    assert "to go" in progress.description and progress.under_way()
    with ApiWatcher(uuid.uuid4(), progress, uuid.uuid4(), uuid.uuid4()):
        progress.outcome = outcome
    assert [update.data for update in told] == ([] if shown is None else [25.0, "[]"])
    assert [update.description for update in told][:1] == ([] if shown is None else [shown])


def test_a_progress_that_has_just_begun_is_a_whole_sentence() -> None:
    assert RunProgress("s").description == "Study s: starting"


def test_the_api_of_the_callers_settings_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the process: the run was never told that it was cancelled, and Prefect started another server."""
    asked: list[str | None] = []
    looked = threading.Event()

    @contextmanager
    def noted(**_: object) -> Iterator[SimpleNamespace]:
        asked.append(PREFECT_API_URL.value())
        looked.set()
        yield SimpleNamespace()

    monkeypatch.setattr(cancellation, "quick_client", noted)
    with (
        temporary_settings({PREFECT_API_URL: "http://lab.example.org/api"}),
        ApiWatcher(uuid.uuid4(), RunProgress("s"), None),
    ):
        assert looked.wait(10)
    assert set(asked) == {"http://lab.example.org/api"}


def test_requests_of_a_script_are_logged_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the watcher are not. The logger's level was changed for good, and the script's own were gone."""
    logger, looked = logging.getLogger("httpx"), threading.Event()

    @contextmanager
    def asked(**_: object) -> Iterator[SimpleNamespace]:
        logger.info("GET from %s", threading.current_thread().name)
        looked.set()
        yield SimpleNamespace()

    monkeypatch.setattr(cancellation, "quick_client", asked)
    with caplog.at_level(logging.INFO), ApiWatcher(uuid.uuid4(), RunProgress("s"), None):
        assert looked.wait(10)
        logger.info("GET of the script")
    said = [record.getMessage() for record in caplog.records if record.name == "httpx"]
    assert said == ["GET of the script"] and logger.level == logging.NOTSET
