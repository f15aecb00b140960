"""`rankwise run --dry-run`: what is left of a study whose run folder is there."""

import os
from pathlib import Path

import pytest

from configs.plans.paths import RunPaths
from configs.records.record import Failure, Status
from configs.spec.study import StudyError, load_study
from flows.cli.run import dry_run_study
from flows.precheck import check_study
from reports.reading.names import cell_names
from tests.support.run_folders.report_runs import write_record

STUDY = """
study: left
workload: {kind: noop, seconds: 0}
experiments: {items: {kind: sweep, over: {items: [1, 2, 3]}}}
measuring: {repeats: 1, memory: false}
pack: false
"""


def test_only_failed_shows_the_launches_that_a_run_with_it_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One cell is measured, one has failed, one was never begun."""
    path = tmp_path / "left.yaml"
    path.write_text(STUDY)
    plan = check_study(load_study(path, []), tmp_path, tmp_path / "cache", tmp_path / "left")
    run, (done, failed, never) = RunPaths(tmp_path / "left"), plan.cells.values()
    write_record(run, done, samples={"0/pass_seconds": [0.1, 0.1]})
    write_record(run, failed, status=Status.FAILED, failure=Failure(message="no room"))
    for only_failed, told, keys in (
        (False, "2 launches remaining", {failed.key, never.key}),
        (True, "1 launch remaining of failed repeats", {failed.key}),
    ):
        assert dry_run_study(path, [], tmp_path, only_failed) == 0
        lines = capsys.readouterr().out.splitlines()
        launches = lines[lines.index(told) + 1 :]
        assert {line.split()[-1] for line in launches} == keys


def test_the_engine_of_a_cell_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "peer.yaml"
    path.write_text(
        "study: peer\nmodels: [{id: 'synthetic:llama-1m@0'}]\nworkload: {kind: generate}\n"
        "experiments: {one: {kind: sweep, over: {engine: [transformers]}}}\n"
    )
    assert dry_run_study(path, [], tmp_path) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "for one" in line)
    assert line.count("transformers") == 2, line  # of the cell, and of the point in brackets
    plan = check_study(load_study(path, []), tmp_path, tmp_path / "cache", tmp_path / "peer")
    (name,) = cell_names(plan).values()
    assert name.count("transformers") == 1, name


def test_a_folder_whose_path_is_no_utf_8_is_named(tmp_path: Path) -> None:
    """Jobs and plans are JSON: `validate` called such a study valid, and the run ended in a traceback."""
    base = tmp_path / os.fsdecode(b"caf\xe9")
    base.mkdir()
    path = base / "left.yaml"
    path.write_text(STUDY)
    with pytest.raises(StudyError) as caught:
        check_study(load_study(path, []), base, tmp_path / "cache", base / "runs" / "left")
    place = f"{tmp_path}/caf\\udce9"
    assert caught.value.problems == [
        f"run folder {place}/runs/left: the path is not valid UTF-8. Rename the folder",
        f"folder of the study {place}: the path is not valid UTF-8. Rename the folder",
    ]


def test_a_missing_model_is_told_beside_what_is_wrong_in_the_file(tmp_path: Path) -> None:
    """Somebody mended the file, to be told of the folder by the next try."""
    (tmp_path / "llama-7b").mkdir()
    path = tmp_path / "wrong.yaml"
    path.write_text(
        "study: wrong\nmodels: [{id: ./llama}, {id: ./llama-7b}, {id: 'synthetic:llama-1m@0'}, {id: owner/name}, 7, "
        f"{{id: {'x' * 300}}}]\n"  # no file system has such a name: nothing else was told
        "workload: {kind: generate}\nexperiments: {strong: {kind: strong, grow: nodse, to: 2}}\n"
    )
    with pytest.raises(StudyError) as caught:
        dry_run_study(path, [], tmp_path)
    fields = [problem.partition(": ")[0] for problem in caught.value.problems]
    assert sorted(fields) == ["experiments.strong.grow", "models[0].id", "models[4]"]
    assert any("./llama: no such folder (did you mean ./llama-7b?)" in problem for problem in caught.value.problems)
    with pytest.raises(StudyError) as caught:
        dry_run_study(path, ["models=[{id: ./llama-7b}]"], tmp_path)
    assert len(caught.value.problems) == 1
