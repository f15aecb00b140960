"""What each program of the user's was measured by, and whether its losses agree."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs.records.record import Figure
from configs.spec.cell import Cell
from configs.workloads.script import ScriptWorkload
from reports.experiments.own_programs import Agreement, LossCurves, SameLosses, agreement_sentence, steps_table
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


def test_cells_whose_losses_are_apart_are_not_told_as_within() -> None:
    """Of none that agreed it was `0 agree: their relative difference is within the spread of repeats`."""

    def curves(name: str, loss: float) -> LossCurves:
        return LossCurves(SimpleNamespace(name=name), np.full((2, 3), loss))  # type: ignore[arg-type]

    near, far = Agreement(curves("dp=2", 1.0), 3, 0.0, 0.0), Agreement(curves("dp=4", 2.0), 3, 1.0, 0.0)
    told = agreement_sentence(SameLosses(curves("1 rank", 1.0), (far,)))
    assert told == (
        "The reference is 1 rank. 0 of 1 other cell agree with it (relative difference of losses within the spread of "
        "repeats, or 0.001). Beyond that: dp=4."
    )
    told = agreement_sentence(SameLosses(curves("1 rank", 1.0), (near, far)))
    assert "1 of 2 other cells agrees with it" in told and told.endswith("Beyond that: dp=4.")
    assert "Beyond" not in agreement_sentence(SameLosses(curves("1 rank", 1.0), (near,)))
