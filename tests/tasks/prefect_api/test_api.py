"""Reports to an API that lost the flow run."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.exceptions import ObjectNotFound

from tasks.prefect_api import api
from tasks.prefect_api.api import tag_run


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
