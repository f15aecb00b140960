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
