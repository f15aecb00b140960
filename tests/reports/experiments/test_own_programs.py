"""The table of what each program of the user's was measured by."""

from pathlib import Path
from typing import Any

import pytest

from configs.records.record import Figure
from configs.spec.cell import Cell
from configs.workloads.script import ScriptWorkload
from reports.experiments.own_programs import steps_table
from reports.reading.load import load_run
from tests.support.run_folders.priced_runs import make_plan, write_record, write_run


@pytest.mark.parametrize(
    ("stopped", "answer"), [([None, True], "yes"), ([False, True], "yes"), ([False, False], "no"), ([True], "yes")]
)
def test_a_script_that_any_node_ended_was_ended_by_stop_after(
    stopped: list[Figure], answer: str, tmp_path: Path
) -> None:
    """Only the first node's word counted, whose ranks may end because another node has ended its own."""
    one = Cell(workload=ScriptWorkload(command=("t.py",), unit="step"), layout={"dp": 2}, nodes=2)
    run = write_run(tmp_path, make_plan([one]))
    more: dict[str, Any] = {"rank_figures": {"stopped_early": stopped}} if len(set(stopped)) > 1 else {}
    figures = {"steps": 20, "stopped_early": stopped[0]}
    write_record(run, one, samples={"0/step_seconds": [0.1] * 20}, figures=figures, **more)
    table = steps_table(load_run(run))
    assert table is not None
    assert [row[table.columns.index("ended by stop_after")] for row in table.rows] == [answer]
