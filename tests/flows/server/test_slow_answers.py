"""A local Prefect server that is slow to answer is asked again; an API that the environment names is not waited for."""

from pathlib import Path

import pytest

from flows.cli import run
from flows.server.local import ApiLease
from tasks.prefect_api import api


@pytest.mark.parametrize(("local", "said"), [(True, None), (False, "timed out")])
def test_a_local_server_is_asked_again(
    local: bool, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["timed out", None])
    monkeypatch.setattr(api, "why_unavailable", lambda *_: next(answers))
    monkeypatch.setattr(api, "_LOOK_SECONDS", 0.0)
    lease = ApiLease("http://127.0.0.1:1/api", tmp_path if local else None)
    assert run._why_away(lease) == said


def test_a_run_waits_for_an_answer_as_long_as_the_question_before_it(tmp_path: Path) -> None:
    """A server that answered in 6 s passed that question, and each one of the run then ran out of time after 5."""
    environment = ApiLease("http://127.0.0.1:1/api", tmp_path).environment
    assert float(environment["PREFECT_API_REQUEST_TIMEOUT"]) >= api._ANSWER_SECONDS
