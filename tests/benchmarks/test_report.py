"""The benchmark of the report: what it makes up is a study that renders, and its bar is held against figures."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.report import (
    BAR_BYTES,
    Rendering,
    make_plan,
    missed,
    missed_ratio,
    paired_ratios,
    render_alone,
    write_run,
)
from configs.plans.paths import RunPaths
from reports.reading.load import load_run


@pytest.mark.nightly
def test_the_made_up_study_is_as_large_as_asked_and_like_the_engines(tmp_path: Path) -> None:
    assert sum(make_plan(10_000).repeats.values()) == 10_000
    written = write_run(tmp_path / "run", 300, samples=30)
    run = RunPaths(tmp_path / "run")
    assert written == 300 == len(list(run.records.glob("*/*.json"))) == len(list(run.records.glob("*/*.npz")))
    study = load_run(run)
    assert all(len(result.completed) == 10 for result in study.cells.values())
    assert {experiment.kind for experiment in study.plan.experiments} == {"strong", "weak", "optimization", "sweep"}
    with np.load(next(run.records.glob("*/*.npz"))) as archive:
        columns = {name.partition("/")[2]: len(archive[name]) for name in archive.files}
    assert columns.pop("warmup_pass_seconds") == 1
    assert set(columns.values()) == {30} and {"pass_seconds", "gap_seconds", "batch_sequences"} < set(columns)
    item = render_alone(run.folder, written)
    assert run.report.stat().st_size == item.report_bytes > 0 and item.peak_bytes > 50e6
    (ratio,) = paired_ratios(run.folder, written, 1)
    assert ratio > 0 and run.page.stat().st_size > 0


def test_a_report_that_fails_is_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)7 records: exit code 1.*plan\.json"):
        render_alone(tmp_path, 7)


def test_what_misses_the_bar() -> None:
    good = [Rendering(1000, 3.0, 10**8, 1), Rendering(10_000, 6.0, 10**8, 1), Rendering(100_000, 50.0, 10**9, 1)]
    assert missed(good) == []
    slow, large = Rendering(100_000, 61.0, 10**9, 1), Rendering(100_000, 50.0, BAR_BYTES + 1, 1)
    assert missed([*good[:2], slow]) == ["100,000 records take more than 60 s or 2 GB"]
    assert missed([large]) == ["100,000 records take more than 60 s or 2 GB"]
    steep = [Rendering(1000, 1.0, 1, 1), Rendering(10_000, 20.0, 1, 1)]
    assert missed(steep) == ["10,000 records take more time each than 1,000 do"]


def test_what_misses_the_ratio() -> None:
    assert missed_ratio([]) == [] and missed_ratio([1.2, 1.9, 1.1]) == []
    assert missed_ratio([1.2, 1.4, 1.5]) == [
        "with the page it takes 1.40 times the time of Markdown alone, expected 1.3"
    ]
