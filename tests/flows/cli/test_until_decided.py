"""Repeats are added until they would settle nothing more of the decision, for real."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from configs.spec.study import load_study
from flows.cli.main import app
from flows.cli.run import run_study
from flows.cli.until_decided import run_until_decided
from tasks.campaign.progress import ProgressRow, new_progress
from tests.support.run_folders.studies import rankwise, status, write_study

MEASURING = {"repeats": 1, "memory": False, "min_seconds": 0.0, "min_passes": 1, "cell_timeout_seconds": 60}


def scaling(seconds: float) -> dict[str, object]:
    """One rank against two, each of which sleeps so long for its items."""
    return {"kind": "strong", "grow": "dp", "to": 2, "base": {"items": 2, "seconds": seconds}}


@pytest.mark.parametrize("given", [6, 10])
def test_repeats_that_are_missing_because_they_failed_are_not_asked_for_for_ever(
    given: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path, measuring=MEASURING | {"repeats": given, "max_repeats": 20})
    monkeypatch.setattr("reports.reading.devices.load_comparable", lambda run: run)
    monkeypatch.setattr("reports.json_form.run_answers", lambda run: SimpleNamespace(repeats_to_decide=6))
    rounds: list[list[str]] = []

    def measure(assignments: list[str]) -> int:
        assert not rounds, "measured again, and nothing was missing"
        rounds.append(assignments)
        return 3

    assert run_until_decided(Path(study), [], tmp_path / "runs", measure) == 3
    assert capsys.readouterr().out == f"Undecided after {given} repeats\n"


def test_all_rounds_together_have_the_time_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each round began with all of `budget_minutes` again: ten minutes were as many times ten as there were rounds."""
    study = write_study(tmp_path, measuring=MEASURING | {"max_repeats": 20, "budget_minutes": 10})
    needed = iter(range(6, 20))
    monkeypatch.setattr("reports.reading.devices.load_comparable", lambda run: run)
    monkeypatch.setattr("reports.json_form.run_answers", lambda run: SimpleNamespace(repeats_to_decide=next(needed)))
    rounds: list[float | None] = []

    def measure(assignments: list[str]) -> int:
        rounds.append(load_study(study, assignments).measuring.budget_minutes)
        new_progress().spent_seconds = 240
        return 0

    assert run_until_decided(study, [], tmp_path / "runs", measure) == 0
    assert rounds == [10, 6, 2]
    assert capsys.readouterr().out.splitlines()[-1] == "Undecided after 7 repeats: measuring.budget_minutes 10 is spent"


def test_a_round_shows_no_progress_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until its flow began, its launches were printed once more, and its duration in place of the new one's."""
    study = write_study(tmp_path, measuring=MEASURING)
    before = new_progress()
    before.expect(7200)
    before.rows = [ProgressRow("of before", 1, 1, 1, state="completed")]

    def run_here(*_: object) -> SimpleNamespace:
        time.sleep(0.7)  # in which Prefect is imported
        return SimpleNamespace(result=None, unpublished=None)

    monkeypatch.setattr("flows.running.run_here", run_here)
    monkeypatch.setattr("flows.cli.run._begin_api", lambda _: (None, "there is none"))
    monkeypatch.setattr("tasks.campaign.launches.preparing.prepare_first", lambda *_: None)
    run_study(Path(study), [], tmp_path / "runs", False, False, calibrate=False)
    said = capsys.readouterr().out
    assert "cancelled" in said and "of before" not in said and "measuring takes" not in said


def test_new_repeats_and_only_failed_ones_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan grew by repeats that were said to be measured, and were not: nobody had tried them."""
    monkeypatch.setattr("flows.cli.run.run_study", lambda *_, **__: pytest.fail("the study is run"))
    study = write_study(tmp_path, measuring=MEASURING)
    done = CliRunner().invoke(app, ["run", str(study), "--until-decided", "--only-failed"])
    assert done.exit_code == 2 and "Leave one out" in done.output


@pytest.mark.slow
def test_repeats_are_added_until_nothing_more_would_be_settled(tmp_path: Path) -> None:
    """Two ranks do no more work each than one, and one repeat tells nothing of that: six give an interval."""
    study = write_study(
        tmp_path, experiments={"strong": scaling(0.05)}, measuring=MEASURING | {"max_repeats": 6}, pack=False
    )
    done = rankwise("run", study, "--until-decided", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    repeats = max(row["repeat"] for row in status(tmp_path / "runs" / "s")) + 1
    if "Undecided: measuring 6 repeats instead of 1" in done.stdout:
        assert repeats == 6
        assert done.stdout.rstrip().splitlines()[-1].startswith(("Decided: ", "Undecided after 6 repeats"))
    else:  # the one pair of repeats lay clearly below
        assert repeats == 1 and "Decided: " in done.stdout
    again = rankwise("run", study, "--until-decided", "--set", f"measuring.repeats={repeats}", cwd=tmp_path)
    assert (
        again.returncode == 0 and f"{2 * repeats} of {2 * repeats} measurements were already completed" in again.stdout
    )
