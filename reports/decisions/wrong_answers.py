"""Which cells compute answers in a way that a correctness experiment found to be a defect, or learn nothing.

wrong = cells_with_wrong_answers(study, judged)     # keys of cells; none of them is recommended
"""

from collections.abc import Sequence

import numpy as np

from configs.common.base import canonical_json
from configs.spec.cell import Cell
from reports.correctness.section import JudgedCell, judge_experiment
from reports.reading.load import CellResult, StudyResult
from reports.training.cells import trained_cells


def cells_with_wrong_answers(study: StudyResult, judged: Sequence[tuple[str, JudgedCell]]) -> frozenset[str]:
    """Keys of all cells with the model, layout, precision, compression and engine of a defect, and of those that train
    to a loss that is not finite.

    judged: (model, verdict) of every correctness experiment.
    """
    wrong = {_way_of_computing(item.result.cell) for _, item in judged if item.verdict.word == "defect"}
    keys = frozenset(key for key, result in study.cells.items() if _way_of_computing(result.cell) in wrong)
    return keys | {result.key for result in trained_cells(study) if _has_diverged(study, result)}


def wrong_cells(study: StudyResult) -> frozenset[str]:
    """The same, with the verdicts of the study's own correctness experiments."""
    judged: list[tuple[str, JudgedCell]] = []
    for experiment in study.plan.experiments:
        if experiment.kind == "correctness" and experiment.points:
            base, items = judge_experiment(study, experiment)
            judged += [(base.model, item) for item in items]
    return cells_with_wrong_answers(study, judged)


def _has_diverged(study: StudyResult, result: CellResult) -> bool:
    """Whether a completed repeat has a loss that is not finite, on any rank."""
    return any(
        not np.isfinite(np.asarray(losses, dtype=np.float64)).all()
        for measurement in result.completed.values()
        for losses in study.samples(measurement, ("loss",)).values()
    )


def _way_of_computing(cell: Cell) -> str:
    """One text for cells that compute answers in the same way: all but the workload and where it runs."""
    kept = {"model", "layout", "dtype", "compression", "engine"}
    return canonical_json(cell.model_dump(mode="json", include=kept))
