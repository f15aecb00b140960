"""A study that goes on until its intervals are narrow enough, for real; and one that is stopped before."""

import json
from pathlib import Path

import pytest

from configs.plans.paths import RunPaths
from tests.support.run_folders.reports import whole_report
from tests.support.run_folders.studies import job_count, rankwise, status, write_study

STUDY = {"memory": False, "min_seconds": 0.0, "min_passes": 1, "cell_timeout_seconds": 60}


def plan_of(run: Path) -> dict[str, object]:
    plan: dict[str, object] = json.loads((run / "plan.json").read_text())
    return plan


@pytest.mark.nightly
def test_a_target_that_is_met_at_once_costs_nothing_more(tmp_path: Path) -> None:
    """Six repeats of a sleep lie within half of their median, two more confirm it; a rerun measures nothing again."""
    study = write_study(tmp_path, measuring=STUDY | {"repeats": 6, "target_interval": 0.5})
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "s"
    assert set(plan_of(run)["stopped"].values()) == {"target reached"}  # type: ignore[attr-defined]
    assert [row["status"] for row in status(run)] == ["completed"] * 16
    assert "target reached: 2 cells" in whole_report(RunPaths(run))
    assert job_count(run) == 8
    assert rankwise("run", study, cwd=tmp_path).returncode == 0 and job_count(run) == 8


@pytest.mark.nightly
def test_a_target_out_of_reach_ends_at_the_most_repeats_and_goes_on_when_those_are_raised(tmp_path: Path) -> None:
    rules = STUDY | {"repeats": 6, "target_interval": 0.0000001, "max_repeats": 7}
    grid = {"grid": {"kind": "sweep", "over": {"label": ["a"]}}}
    study = write_study(tmp_path, measuring=rules, experiments=grid)
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "s"
    assert (job_count(run), set(plan_of(run)["stopped"].values())) == (7, {"most repeats"})  # type: ignore[attr-defined]
    report = whole_report(RunPaths(run))
    assert "most repeats: 1 cell" in report and "| most repeats | 7 |" in report
    more = rankwise("run", study, "--set", "measuring.max_repeats=8", cwd=tmp_path)
    assert more.returncode == 0 and job_count(run) == 8
    assert "7 of 8 measurements were already completed" in more.stdout


@pytest.mark.nightly
def test_a_spent_budget_drops_only_what_was_not_promised(tmp_path: Path) -> None:
    """No time pays for nothing: the six promised repeats are over budget, no seventh is missed."""
    rules = STUDY | {"repeats": 6, "target_interval": 0.001, "budget_minutes": 1e-9}
    grid = {"grid": {"kind": "sweep", "over": {"label": ["a"]}}}
    study = write_study(tmp_path, measuring=rules, experiments=grid)
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    run = tmp_path / "runs" / "s"
    assert [row["status"] for row in status(run)] == ["over_budget"] * 6
    more = ("--set", "measuring.budget_minutes=30", "--set", "measuring.max_repeats=6")
    again = rankwise("run", study, *more, cwd=tmp_path)
    assert {row["status"] for row in status(run)} == {"completed"}, again.stdout
    assert set(plan_of(run)["stopped"].values()) <= {"most repeats", "target reached"}  # type: ignore[attr-defined]
