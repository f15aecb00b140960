"""What a team stores in the API for all runs holds for the check of a study, too, not only for its measurements."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flows.deployed
from flows.folders import cache_folder
from tasks.prefect_api import credentials


def test_a_study_is_checked_with_the_settings_that_the_api_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose home folder is not writable refused every study, though RANKWISE_CACHE was stored in the API."""
    monkeypatch.delenv("RANKWISE_CACHE", raising=False)
    shared = tmp_path / "shared"
    client = SimpleNamespace(
        read_variable_by_name=lambda _: SimpleNamespace(value={"RANKWISE_CACHE": str(shared)}),
        read_block_document_by_name=lambda *_: SimpleNamespace(data={"value": {}}),
    )
    monkeypatch.setattr(credentials, "quick_client", lambda **_: nullcontext(client))
    monkeypatch.setattr(credentials, "get_run_logger", lambda: SimpleNamespace(info=lambda *_: None))
    checked: list[Path] = []

    def check(spec: Any, base: Path, cache: Path, *_: Any, **__: Any) -> None:
        checked.append(cache)

    for name, replaced in {
        "in_flow_run": lambda: True,
        "flow_run": SimpleNamespace(id=None),
        "check_study": check,
        "measure_study": lambda *_: cache_folder(),
    }.items():
        monkeypatch.setattr(flows.deployed, name, replaced, raising=False)
    spec: Any = SimpleNamespace(study="stored", models=(), targets=())
    measured: Any = flows.deployed._checked_and_measured(spec, tmp_path / "runs", tmp_path, False, False)
    assert (checked, measured) == ([shared], shared)
    assert "RANKWISE_CACHE" not in os.environ
