"""Collectives in the report: what no clock gives, and experiments without a figure."""

from pathlib import Path

import numpy as np
import pytest

from configs.common.execution import Layout
from configs.plans.paths import RunPaths
from configs.records.record import Failure, Status
from configs.spec.cell import Cell
from configs.workloads.communication import CommunicationWorkload
from reports.experiments.communication import slowest_seconds
from reports.render import render_page, render_report
from tests.support.run_folders.report_runs import experiment, plan_of, write_plan, write_record
from tests.support.run_folders.reports import whole_report

SIZES = (1000, 10_000, 100_000)


def links(folder: Path) -> tuple[RunPaths, Cell]:
    """A run of one cell of all-reduce, not yet measured."""
    work = CommunicationWorkload(operations=("all_reduce",), sizes_bytes=SIZES)
    cell = Cell(workload=work, layout=Layout(tp=2))
    points = [(cell, {"ranks": 2, "transport": "auto"}, "2 ranks")]
    return write_plan(folder, plan_of([cell], [experiment("links", "communication", points, model=None)], 1)), cell


def samples(seconds: list[float]) -> dict[str, object]:
    columns = {"operation": [0] * 3, "size_bytes": list(SIZES), "call_seconds": seconds, "pass_seconds": [1.0]}
    return {f"{rank}/{name}": values for rank in range(2) for name, values in columns.items()}


@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf")])
def test_a_time_that_no_clock_gives_is_left_out(wrong: float, tmp_path: Path) -> None:
    """One of them refused the whole report: SVD did not converge."""
    kept = slowest_seconds({name: np.asarray(values) for name, values in samples([1e-5, wrong, 1e-3]).items()})
    assert kept == {("all_reduce", 1000): 1e-5, ("all_reduce", 100_000): 1e-3}
    run, cell = links(tmp_path / "run")
    write_record(run, cell, samples=samples([wrong] * 3))
    render_report(run)
    assert "No operation has a figure." in whole_report(run) and "No operation has a figure." in render_page(run)


def test_without_a_measurement_there_is_a_sentence_and_no_empty_table(tmp_path: Path) -> None:
    run, cell = links(tmp_path / "run")
    write_record(run, cell, status=Status.FAILED, failure=Failure(message="no route to host"))
    render_report(run)
    assert "No operation has a figure." in run.report.read_text()
    assert "| operation | transport |" not in whole_report(run)
