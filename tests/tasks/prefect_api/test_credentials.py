"""What a team stores in the API for all runs: names that no environment can have are said, with where they stand."""

import json
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.prefect_api import credentials
from tasks.prefect_api.credentials import CREDENTIALS_BLOCK, ENVIRONMENT_VARIABLE, api_environment

VALUE = "not-to-be-told"


def stored(monkeypatch: pytest.MonkeyPatch, variable: Any, secret: Any) -> None:
    client = SimpleNamespace(
        read_variable_by_name=lambda name: SimpleNamespace(value=variable) if variable is not None else None,
        read_block_document_by_name=lambda name, kind: SimpleNamespace(data={"value": secret}),
    )
    monkeypatch.setattr(credentials, "quick_client", lambda **_: nullcontext(client))
    monkeypatch.setattr(credentials, "get_run_logger", lambda: SimpleNamespace(info=lambda *_: None))


@pytest.mark.parametrize(
    "wrong", [{"A=B": VALUE}, {"": VALUE}, {"A\0": VALUE}, {"A": f"{VALUE}\0"}, {"A ": VALUE}, {"A": f"{VALUE}\ud800"}]
)
@pytest.mark.parametrize("place", ["variable", "block"])
def test_what_no_environment_can_hold_is_named(
    wrong: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"RANKWISE_TEST_FINE": "1"} | wrong
    stored(monkeypatch, given if place == "variable" else None, json.dumps(given) if place == "block" else {})
    where = (
        f"Prefect variable {ENVIRONMENT_VARIABLE}"
        if place == "variable"
        else f"Prefect Secret block {CREDENTIALS_BLOCK}"
    )
    with pytest.raises(ValueError, match=f"{where}: ") as raised, api_environment():
        pass
    assert VALUE not in str(raised.value)
    assert "RANKWISE_TEST_FINE" not in os.environ, "all or nothing"


def test_what_is_right_holds_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stored(monkeypatch, {"RANKWISE_TEST_FINE": "1"}, json.dumps({"RANKWISE_TEST_SECRET": VALUE}))
    with api_environment():
        assert (os.environ["RANKWISE_TEST_FINE"], os.environ["RANKWISE_TEST_SECRET"]) == ("1", VALUE)
    assert not {"RANKWISE_TEST_FINE", "RANKWISE_TEST_SECRET"} & os.environ.keys()


def test_a_study_that_ends_first_takes_nothing_from_one_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In threads of one script. The second lost the credentials of its cloud, and could not give back its nodes."""
    stored(monkeypatch, {"RANKWISE_TEST_FINE": "1", "PATH": "no"}, json.dumps({"RANKWISE_TEST_SECRET": VALUE}))
    path, first, second = os.environ["PATH"], api_environment(), api_environment()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (os.environ["RANKWISE_TEST_FINE"], os.environ["RANKWISE_TEST_SECRET"]) == ("1", VALUE)
    second.__exit__(None, None, None)
    assert not {"RANKWISE_TEST_FINE", "RANKWISE_TEST_SECRET"} & os.environ.keys() and os.environ["PATH"] == path
