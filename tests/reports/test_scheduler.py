"""The report's section on what the scheduler's accounts say of the jobs."""

from pathlib import Path

import pyarrow.parquet

from configs.plans.paths import RunPaths
from configs.records.record import Accounting
from reports.reading.load import load_run
from reports.render import render_report
from reports.scheduler import scheduler_table
from tests.support.run_folders.made_studies import decoded, planned, write_plan, write_record
from tests.support.run_folders.reports import whole_report

STUDY = """
workload: {kind: generate, num_prompts: 4}
targets: [{kind: slurm, name: lab, nodes: 2}]
experiments:
  speed: {kind: sweep, over: {layout.tp: [1, 2]}}
"""


def accounts(job_id: str, **more: object) -> Accounting:
    known = {"state": "COMPLETED", "nodes": ["n1"], "queued_seconds": 4, "elapsed_seconds": 10, "cpu_seconds": 8}
    return Accounting.model_validate({"job_id": job_id, **known, "max_rss_bytes": 2**28, **more})


def made(folder: Path, with_accounts: bool = True) -> Path:
    plan = planned(STUDY, repeats=2)
    run = write_plan(folder, plan)
    for cell in plan.cells.values():
        for repeat in range(2):
            wide = cell.layout.tp == 2
            told = accounts(f"7_{repeat}", nodes=["n1", "n2"] if wide else ["n1"], queued_seconds=4 + 4 * repeat)
            fields = {"accounting": told} if with_accounts else {}
            write_record(run, cell, repeat, samples=decoded(cell, 1.0), figures={"num_prompts": 4}, **fields)
    return render_report(run).path


def test_one_row_for_each_place_and_each_job_once(tmp_path: Path) -> None:
    report = made(tmp_path)
    table = scheduler_table(load_run(RunPaths(report.parent)))
    assert table is not None
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    by_layout = {row["layout"]: row for row in rows}
    assert set(by_layout) == {"1 rank", "tp=2 on 2 nodes"}
    row = by_layout["tp=2 on 2 nodes"]
    assert (row["jobs"], row["ended"], row["nodes"]) == ("2", "2 completed", "n1 and n2")
    assert (row["in the queue, s"], row["longest in the queue, s"]) == ("6.00", "8.00")
    assert (row["CPU, s, all jobs"], row["own cores in use"], row["largest task, MiB"]) == ("16.0", "40.0 %", "256")
    assert "energy, kJ, all jobs" not in row, "nobody metered it"
    assert "## Scheduler" in whole_report(RunPaths(report.parent))
    columns = pyarrow.parquet.read_table(report.with_name("records.parquet"))
    assert set(columns.column("scheduler_job_id").to_pylist()) == {"7_0", "7_1"}


def test_no_section_without_a_scheduler(tmp_path: Path) -> None:
    report = made(tmp_path, with_accounts=False)
    assert "## Scheduler" not in whole_report(RunPaths(report.parent))
    assert not [
        name for name in pyarrow.parquet.read_schema(report.with_name("records.parquet")).names if "sched" in name
    ]
