"""Paths in the forms of Prefect's UI, which no shell has read: `~` is the home folder of the worker's user."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flows.deployed
from configs.spec.form import StudyForm
from configs.spec.short_form import ShortStudy
from tests.support.run_folders.studies import write_study


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where the studies that a flow was given would be measured; nothing is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folders: list[Path] = []
    for name, replaced in {
        "flow_run": SimpleNamespace(id=None),
        "cancel_missed": lambda _: None,
        "stored_targets": dict,
        "_checked_and_measured": lambda spec, runs, *_: folders.append(runs),
    }.items():
        monkeypatch.setattr(flows.deployed, name, replaced)
    return folders


@pytest.mark.parametrize(("written", "folder"), [("~/runs", "{home}/runs"), ("runs", "runs"), ("/data/~", "/data/~")])
@pytest.mark.parametrize(
    "call",
    [
        lambda runs: flows.deployed.study_in_short.fn(ShortStudy(), runs),
        lambda runs: flows.deployed.study_from_the_form.fn(StudyForm(), runs),
        lambda runs: flows.deployed.scheduled_sweep.fn("~/mine.yaml", None, runs, False),
    ],
)
def test_runs_below_the_home_folder(
    call: Callable[[Any], Any], written: str, folder: str, measured: list[Path], tmp_path: Path
) -> None:
    """They were measured in a folder named `~` in the working folder, and a study file there was not found."""
    write_study(tmp_path, "mine").rename(tmp_path / "mine.yaml")
    call(written)
    assert measured == [Path(folder.format(home=tmp_path))]
