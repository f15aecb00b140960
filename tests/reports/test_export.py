"""cells.csv has the columns of the kinds of workload that a study measures, no others, and figures that are numbers."""

import csv
import io
import json
from pathlib import Path

import pytest

from configs.plans.plan import PlannedModel
from reports.export import cells_csv, records_parquet
from reports.reading.load import load_run
from reports.render import render_page
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


@pytest.mark.parametrize("number", ["1e308", "-1e308"])
def test_a_number_that_no_memory_and_no_time_can_be_is_unknown(tmp_path: Path, number: str) -> None:
    """One that was forged, or overflowed: over two ranks it has no sum, and the report ended in an OverflowError."""
    plan = planned(GENERATE.replace("batch_size: 4}", "num_prompts: 4}\nlayout: {dp: 2}"))
    run = write_plan(tmp_path / "run", plan)
    for _, cell in cells_of(plan, 0):
        write_measurements(run, cell, 0.01, peak_mib=100)
    for path in run.records.glob("*/*.json"):
        record = json.loads(path.read_text())
        record["figures"] |= dict.fromkeys(("peak_memory_bytes", "cpu_seconds", "load_seconds"), 12345)
        path.write_text(json.dumps(record).replace("12345", number))
    study = load_run(run)
    rows = list(csv.DictReader(io.StringIO(cells_csv(study))))
    assert {row["peak_memory_bytes_all_ranks"] for row in rows} == {""}
    assert all(row["tokens_per_second_median"] for row in rows)
    assert records_parquet(study) and "10^308" not in render_page(run)


def test_a_name_is_no_formula_of_a_spreadsheet(tmp_path: Path) -> None:
    text = GENERATE.replace("sizes:", "'=HYPERLINK(\"http://a.example\")':")
    plan = planned(text)
    run = write_plan(tmp_path / "run", plan.model_copy(update={"models": (named(plan.models[0], "@cmd"),)}))
    rows = list(csv.DictReader(io.StringIO(cells_csv(load_run(run)))))
    assert {(row["experiments"], row["model"]) for row in rows} == {('\'=HYPERLINK("http://a.example")', "'@cmd")}


def named(model: PlannedModel, name: str) -> PlannedModel:
    return model.model_copy(update={"name": name})
