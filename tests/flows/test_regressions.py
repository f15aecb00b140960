"""A scheduled sweep is compared with the one before it."""

from pathlib import Path

import pytest

from configs.plans.paths import RunPaths
from flows.regressions import regressions_since_last, sweeps_before
from tests.support.run_folders.report_runs import node_run


@pytest.fixture
def sweeps(tmp_path: Path) -> Path:
    """Three sweeps of made-up records: the second of the same speed, the third slower by 10 %."""
    for day, slowness in enumerate([1.0, 1.0, 1 / 0.9], 1):
        run = node_run(tmp_path / f"2026-01-0{day}T02-00-00Z" / "s", "local", slowness)
        run.report.write_text("done")
    return tmp_path


def sweep(sweeps: Path, day: int) -> Path:
    return sweeps / f"2026-01-0{day}T02-00-00Z" / "s"


def test_cells_that_became_slower_are_named_with_their_ratio(sweeps: Path) -> None:
    found = regressions_since_last(sweeps, sweep(sweeps, 3))
    assert len(found) == 2
    assert all("0.90 times" in sentence and str(sweep(sweeps, 2)) in sentence for sentence in found), found


def test_the_same_speed_is_no_regression_nor_is_the_first_sweep(sweeps: Path) -> None:
    assert regressions_since_last(sweeps, sweep(sweeps, 2)) == []
    assert regressions_since_last(sweeps, sweep(sweeps, 1)) == []


def test_the_one_before_is_the_newest_that_has_a_report(sweeps: Path) -> None:
    RunPaths(sweep(sweeps, 2)).report.unlink()
    (sweeps / "2026-01-02T23-00-00Z" / "another").mkdir(parents=True)
    (sweeps / "kept").mkdir()
    assert list(sweeps_before(sweeps, sweep(sweeps, 3))) == [sweep(sweeps, 1)]


def test_a_night_that_measured_nothing_is_passed_over(sweeps: Path) -> None:
    """What became slower in the night after a failed one was compared with that alone, and never told."""
    for record in RunPaths(sweep(sweeps, 2)).records.rglob("*.json"):
        record.unlink()
    found = regressions_since_last(sweeps, sweep(sweeps, 3))
    assert len(found) == 2
    assert all("0.90 times" in sentence and str(sweep(sweeps, 1)) in sentence for sentence in found), found


def test_of_a_night_that_measured_half_the_other_half_is_compared_with_the_one_before(sweeps: Path) -> None:
    records = RunPaths(sweep(sweeps, 2)).records
    half = sorted(folder for folder in records.iterdir() if folder.is_dir())[0]
    for record in half.rglob("*.json"):
        record.unlink()
    found = regressions_since_last(sweeps, sweep(sweeps, 3))
    nights = [sentence.rpartition("(before: ")[2] for sentence in found]
    assert sorted(nights) == [f"{sweep(sweeps, 1)})", f"{sweep(sweeps, 2)})"], found
