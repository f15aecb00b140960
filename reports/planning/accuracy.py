"""Errors of the plan's predictions relative to the measurements.

    judged = judge(study)                       # one for each predicted figure of a cell that was measured
    judged[0].error                             # |predicted - measured| / measured
    error_groups(study, judged)                 # the planner's own error table
    unjudged(study, judged)                     # why the other cells are not in it; none is dropped

Figures bear the names of `configs.records.rates.Rates`; `peak_memory_bytes` is that of the fullest rank, from the
memory pass.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from configs.plans.prediction import Prediction
from configs.workloads.descriptor import RateFigure, TimeFigure
from reports.numbers.statistics import Estimate
from reports.reading.load import CellResult, StudyResult

PredictedFigure = RateFigure | TimeFigure | Literal["peak_memory_bytes"]

MEMORY: PredictedFigure = "peak_memory_bytes"
NOT_PREDICTED = "the plan says nothing of it"
ANSWERS = "answers are kept, which takes time that no prediction counts"


@dataclass(frozen=True)
class JudgedPrediction:
    """One figure of one cell: what was said beforehand, and what came of it."""

    result: CellResult
    figure: PredictedFigure
    predicted: float
    measured: Estimate
    factor: float | None

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured.median

    @property
    def error(self) -> float:
        """Relative to what was measured, without its sign."""
        return abs(self.ratio - 1)

    @property
    def within(self) -> bool | None:
        """Whether the truth lies within times or over the stated factor; None where none was stated."""
        return None if self.factor is None else 1 / self.factor <= self.ratio <= self.factor


@dataclass(frozen=True)
class ErrorGroup:
    """Errors of one figure over some cells. `stated`: how many cells a factor was stated for, `within` it how many.

    unit: of a rate, what its kind counts in a second; None for other figures.
    """

    name: str
    figure: PredictedFigure
    unit: str | None
    cells: int
    median: float
    p90: float
    worst: float
    within: int
    stated: int


def judge(study: StudyResult) -> list[JudgedPrediction]:
    """Every predicted figure that was also measured, in the plan's order. A figure of 0 is not a measurement."""
    return [item for result in study.cells.values() for item in judge_cell(study, result)]


def judge_cell(study: StudyResult, result: CellResult) -> list[JudgedPrediction]:
    """The predicted figures of one cell that were also measured."""
    prediction = study.plan.predictions.get(result.key)
    return [] if prediction is None else judge_prediction(result, prediction)


def judge_prediction(result: CellResult, prediction: Prediction) -> list[JudgedPrediction]:
    """A prediction against the records of a cell."""
    found = []
    for figure in result.kind.predicted if result.compared else ():
        predicted, measured = getattr(prediction, figure), result.estimate(figure)
        if predicted is not None and measured is not None and measured.median > 0:
            found.append(JudgedPrediction(result, figure, predicted, measured, prediction.factor))
    peaks = result.peak_by_rank()
    if prediction.peak_memory_bytes is not None and peaks and max(peaks) > 0:
        peak = Estimate(max(peaks), max(peaks), max(peaks), 1)
        found.append(JudgedPrediction(result, MEMORY, prediction.peak_memory_bytes, peak, None))
    return found


def error_groups(study: StudyResult, judged: Sequence[JudgedPrediction]) -> list[ErrorGroup]:
    """By kind of workload every figure, then by experiment the rate that it is judged by."""
    groups: dict[tuple[str, PredictedFigure], list[JudgedPrediction]] = {}
    for item in judged:
        groups.setdefault((item.result.cell.workload.kind, item.figure), []).append(item)
    rates = {item.result.key: item for item in judged if _is_headline(item)}
    by_experiment: dict[tuple[str, PredictedFigure], list[JudgedPrediction]] = {}
    for experiment in study.plan.experiments:
        for key in dict.fromkeys(point.cell for point in experiment.points):
            if key in rates:
                place = (study.title(experiment), rates[key].figure)
                by_experiment.setdefault(place, []).append(rates[key])
    found = [_group(f"all {kind} cells", figure, items) for (kind, figure), items in groups.items()]
    return found + [_group(name, figure, items) for (name, figure), items in by_experiment.items()]


def accuracy_headline(judged: Iterable[JudgedPrediction]) -> list[JudgedPrediction]:
    """Those of the rate that each workload is judged by."""
    return [item for item in judged if _is_headline(item)]


def accuracy_summary(judged: Sequence[JudgedPrediction]) -> ErrorGroup | None:
    """All rates together; None where there is none."""
    rates = accuracy_headline(judged)
    return _group("all cells", rates[0].figure, rates) if rates else None


def unjudged(study: StudyResult, judged: Sequence[JudgedPrediction]) -> Counter[str]:
    """Reason -> how many cells have no rate to hold against a prediction for it."""
    done = {item.result.key for item in accuracy_headline(judged)}
    reasons: Counter[str] = Counter()
    for key, result in study.cells.items():
        if key not in done:
            reasons[_why_not(study.plan.predictions.get(key), result)] += 1
    return reasons


def corrections(study: StudyResult) -> dict[str, list[Prediction]]:
    """Kind of workload -> its predictions that past records have corrected."""
    found: dict[str, list[Prediction]] = {}
    for key, prediction in study.plan.predictions.items():
        if prediction.correction is not None and key in study.cells:
            found.setdefault(study.cells[key].cell.workload.kind, []).append(prediction)
    return found


def _why_not(prediction: Prediction | None, result: CellResult) -> str:
    if prediction is None:
        return NOT_PREDICTED
    if result.cell.workload.keeps_answers:
        return ANSWERS
    if not result.compared:
        return prediction.reason or result.kind.unpredicted or NOT_PREDICTED
    if getattr(prediction, result.kind.throughput) is None:
        return prediction.reason or "no reason is given"
    return f"not measured ({result.status.replace('_', ' ')})"


def _is_headline(item: JudgedPrediction) -> bool:
    return item.figure == item.result.kind.throughput


def _group(name: str, figure: PredictedFigure, items: Sequence[JudgedPrediction]) -> ErrorGroup:
    errors = [item.error for item in items]
    stated = [item.within for item in items if item.within is not None]
    p90 = float(np.quantile(errors, 0.9))
    unit = items[0].result.unit if _is_headline(items[0]) else None
    return ErrorGroup(name, figure, unit, len(items), median(errors), p90, max(errors), sum(stated), len(stated))
