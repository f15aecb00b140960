"""What becomes of a launch that a run folder has and no run has collected."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.plans.job import Job
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.spec.measuring import Measuring
from configs.targets.target import LocalTarget, SlurmTarget, Target
from tasks import preflight
from tasks.campaign.launches import leftovers
from tasks.campaign.launches.leftovers import copied_from, resolve_leftovers
from tasks.campaign.progress import RunProgress
from tasks.campaign.session import Session
from tests.support.cluster.launches import noop_measurement

NAME = "0001-timed-ab"


def written(folder: Path, target: Target, inputs: str | None = None) -> RunPaths:
    """A run folder with the job of a launch that goes on."""
    run = RunPaths(folder)
    job = Job(
        name=NAME,
        study="s",
        measuring_pass="timed",
        measuring=Measuring(),
        target=target,
        measurements=(noop_measurement("a"),),
        ranks_per_node=1,
        timeout_seconds=60,
        inputs=inputs or str(run.inputs),
        cache=str(folder / "cache"),
    )
    run.job(NAME).folder.mkdir(parents=True)
    run.job(NAME).job.write_text(job.model_dump_json())
    return run


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders of jobs that were ended; all of them run."""
    folders: list[Path] = []
    adapter = SimpleNamespace(poll=lambda folder: "running", cancel=folders.append, cancel_many=folders.extend)
    for module in (leftovers, preflight):
        monkeypatch.setattr(module, "adapter_for", lambda name: adapter)
    return folders


def session(run: RunPaths, **planned: Any) -> Session:
    fields: dict[str, Any] = {"study": "s", "models": (), "targets": (LocalTarget(),), "measuring": Measuring()}
    fields |= {"pack": True, "experiments": (), "cells": {}, "repeats": {}}
    return Session(run, Plan(**fields | planned), run.folder, RunProgress(), SimpleNamespace(check=lambda: None))


def wants_the_cell() -> dict[str, Any]:
    cell = noop_measurement("a").cell
    return {"cells": {cell.key: cell}, "repeats": {cell.key: 1}}


@pytest.mark.parametrize("target", [LocalTarget(), SlurmTarget()], ids=lambda target: target.kind)
@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_run_in_a_copy_of_a_folder_leaves_the_launches_of_the_original_alone(
    tmp_path: Path, ended: list[Path], target: Target, is_wanted: bool
) -> None:
    """It ended them, and the other run lost what it measured; or waited for them, and called its own cells lost."""
    original = written(tmp_path / "runs" / "s", target)
    copy = RunPaths(tmp_path / "copies" / "s")
    shutil.copytree(original.folder, copy.folder)
    found = resolve_leftovers(session(copy, **(wants_the_cell() if is_wanted else {})))
    assert not found.running and not ended
    assert found.notes == [f"left {NAME} alone: it runs in {original.folder}, which this folder is a copy of"]
    preflight._end_earlier(copy)
    assert not ended
    preflight._end_earlier(original)
    assert ended == [original.job(NAME).folder]


def test_a_run_in_a_folder_that_was_moved_or_is_a_link_adopts_its_launch(tmp_path: Path, ended: list[Path]) -> None:
    original = written(tmp_path / "runs" / "s", LocalTarget())
    link = RunPaths(tmp_path / "link")
    link.folder.symlink_to(original.folder)
    moved = RunPaths(tmp_path / "moved")
    for run in (original, link):
        assert resolve_leftovers(session(run, **wants_the_cell())).running == [NAME]
    original.folder.rename(moved.folder)
    assert resolve_leftovers(session(moved, **wants_the_cell())).running == [NAME] and not ended


def test_jobs_that_lie_elsewhere_are_of_the_folder_that_has_them(tmp_path: Path) -> None:
    """In a cluster's shared folder, or carried to hosts: their paths name no run folder."""
    shared, link = tmp_path / "shared" / "runs" / "s-1", RunPaths(tmp_path / "runs" / "s")
    written(shared, LocalTarget())
    for number, (target, inputs) in enumerate(
        [(SlurmTarget(shared=str(tmp_path / "shared")), str(shared / "inputs")), (SlurmTarget(), "../../inputs")]
    ):
        run = written(link.folder / str(number), target, inputs)
        job = Job.model_validate_json(run.job(NAME).job.read_text())
        assert copied_from(run, NAME, job) is None


def test_what_was_left_is_taken_in_order_of_its_numbers(tmp_path: Path, ended: list[Path]) -> None:
    """As text, the ten thousandth launch stood before the second thousand."""
    run = written(tmp_path, LocalTarget())
    text = run.job(NAME).job.read_text()
    for number in (10000, 9999):
        name = f"{number}-timed-ab"
        run.job(name).folder.mkdir(parents=True)
        run.job(name).job.write_text(text.replace(NAME, name))
    found = resolve_leftovers(session(run, **wants_the_cell()))
    assert found.running == [NAME, "9999-timed-ab", "10000-timed-ab"]
