"""Quality of measurements: what the report says of repeats that go on until an interval is narrow."""

from pathlib import Path

import pytest

from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.noop import NoopWorkload
from reports.quality import quality_lines
from reports.reading.load import load_run
from tests.support.run_folders.report_runs import plan_of, write_plan, write_record


@pytest.mark.parametrize(
    ("repeats", "said"),
    [
        (3, "at least 6 and at most 60 times"),  # fewer hold no interval to look at
        (7, "at least 7 and at most 60 times"),
        (70, "at least 70 and at most 70"),
    ],
)
def test_the_most_repeats_are_no_fewer_than_the_least(tmp_path: Path, repeats: int, said: str) -> None:
    """More repeats than the default of `max_repeats` were "at least 70 and at most 60 times"."""
    cell, rules = Cell(workload=NoopWorkload()), Measuring(repeats=repeats, target_interval=0.01)
    run = write_plan(tmp_path, plan_of([cell], [], repeats=repeats).model_copy(update={"measuring": rules}))
    for repeat in range(7):
        write_record(run, cell, repeat, samples={"0/pass_seconds": [1.0 + repeat]})
    assert said in " ".join(quality_lines(load_run(run)))


def test_pairs_that_were_not_measured_near_each_other_are_named(tmp_path: Path) -> None:
    """A cell that a later run added was paired with the others of its block as if both were measured together."""
    first, added = (Cell(workload=NoopWorkload(label=label)) for label in "ab")
    run = write_plan(tmp_path, plan_of([first, added], [], repeats=6))

    for repeat in range(6):
        for cell in (first, added):
            write_record(run, cell, repeat, samples={"0/pass_seconds": [1.0]})
    assert not any("nothing was measured" in line for line in quality_lines(load_run(run)))
    for repeat in (4, 5):
        record = run.record(added.key, "timed", repeat, 1)
        record.write_text(record.read_text().replace("2026-01-01", "2026-01-03"))
    told = [line for line in quality_lines(load_run(run)) if "nothing was measured" in line]
    assert len(told) == 1 and told[0].startswith("In 2 of 6 blocks nothing was measured for up to 48 hours between"), (
        told
    )
