"""cells.csv has the columns of the kinds of workload that a study measures, and no others."""

import csv
import io
from pathlib import Path

from reports.export import cells_csv
from reports.reading.load import load_run
from tests.support.run_folders.made_studies import cells_of, planned, write_measurements, write_plan

GENERATE = """
workload: {kind: generate, prompt_tokens: 8, new_tokens: 3, batch_size: 4}
experiments:
  sizes: {kind: sweep, over: {batch_size: [1, 2]}}
"""


def test_columns_are_those_of_the_kinds_that_a_study_measures(tmp_path: Path) -> None:
    plan = planned(GENERATE)
    run = write_plan(tmp_path / "run", plan)
    (_, first), *_ = cells_of(plan, 0)
    empty = cells_csv(load_run(run))
    write_measurements(run, first, 0.01)
    measured = cells_csv(load_run(run))
    columns = empty.splitlines()[0].split(",")
    assert columns == measured.splitlines()[0].split(","), "they do not depend on what was measured"
    assert len(columns) == len(set(columns))
    assert {"key", "tokens_per_second_median", "ttft_seconds_low", "token_p99_seconds", "usd_per_hour"} <= set(columns)
    assert {"workload_kind", "workload_batch_size", "workload_new_tokens", "records"} <= set(columns)
    foreign = ("workload_global_batch_size", "step_seconds_median", "MFU", "embeddings_per_second_median")
    assert not set(foreign) & set(columns) and not any("embedding" in column for column in columns)
    rows = list(csv.DictReader(io.StringIO(measured)))
    assert sum(bool(row["tokens_per_second_median"]) for row in rows) == 1 and len(rows) == 2
