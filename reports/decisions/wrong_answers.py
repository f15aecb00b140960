"""Which cells compute answers in a way that a correctness experiment found to be a defect.

wrong = cells_with_wrong_answers(study, judged)     # keys of cells; none of them is recommended
"""

from collections.abc import Sequence

from configs.common.base import canonical_json
from configs.spec.cell import Cell
from reports.correctness.section import JudgedCell
from reports.reading.load import StudyResult


def cells_with_wrong_answers(study: StudyResult, judged: Sequence[tuple[str, JudgedCell]]) -> frozenset[str]:
    """Keys of all cells with the model, layout, precision, compression and engine of a defect.

    judged: (model, verdict) of every correctness experiment.
    """
    wrong = {_way_of_computing(item.result.cell) for _, item in judged if item.verdict.word == "defect"}
    return frozenset(key for key, result in study.cells.items() if _way_of_computing(result.cell) in wrong)


def _way_of_computing(cell: Cell) -> str:
    """One text for cells that compute answers in the same way: all but the workload and where it runs."""
    kept = {"model", "layout", "dtype", "compression", "engine"}
    return canonical_json(cell.model_dump(mode="json", include=kept))
