"""How far the plan's predictions lie from what was measured.

    judged = judge(study)                       # one for each predicted figure of a cell that was measured
    judged[0].error                             # |predicted - measured| / measured
    error_groups(study, judged)                 # the planner's own error table
    unjudged(study, judged)                     # why the other cells are not in it; none is dropped

Figures bear the names of `configs.rates.Rates`; `peak_memory_bytes` is that of the fullest rank, from the memory pass.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from configs.prediction import Prediction
from reports.numbers.statistics import Estimate
from reports.reading.load import CellResult, StudyResult

Figure = Literal[
    "tokens_per_second",
    "embeddings_per_second",
    "items_per_second",
    "step_seconds",
    "ttft_seconds",
    "time_per_output_token_seconds",
    "peak_memory_bytes",
]

HEADLINES: dict[str, Figure] = {
    "generate": "tokens_per_second",
    "seq2seq": "tokens_per_second",
    "encode": "embeddings_per_second",
    "train": "tokens_per_second",
    "noop": "items_per_second",
}
"""The rate that a workload is judged by."""

SPEEDS: dict[str, tuple[Figure, ...]] = {
    "generate": ("tokens_per_second", "ttft_seconds", "time_per_output_token_seconds"),
    "seq2seq": ("tokens_per_second", "ttft_seconds", "time_per_output_token_seconds"),
    "encode": ("embeddings_per_second",),
    "train": ("tokens_per_second",),  # the step takes the inverse of it: it would count twice
    "noop": ("items_per_second",),
}

MEMORY: Figure = "peak_memory_bytes"
NOT_PREDICTED = "the plan says nothing of it"
ANSWERS = "answers are kept, which takes time that no prediction counts"


@dataclass(frozen=True)
class Judged:
    """One figure of one cell: what was said beforehand, and what came of it."""

    result: CellResult
    figure: Figure
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
    """Errors of one figure over some cells. `stated`: how many cells a factor was stated for, `within` it how many."""

    name: str
    figure: Figure
    cells: int
    median: float
    p90: float
    worst: float
    within: int
    stated: int


def judge(study: StudyResult) -> list[Judged]:
    """Every predicted figure that was also measured, in the plan's order. A figure of 0 is not a measurement."""
    return [item for result in study.cells.values() for item in judge_cell(study, result)]


def judge_cell(study: StudyResult, result: CellResult) -> list[Judged]:
    """The predicted figures of one cell that were also measured."""
    prediction = study.plan.predictions.get(result.key)
    return [] if prediction is None else judge_prediction(result, prediction)


def judge_prediction(result: CellResult, prediction: Prediction) -> list[Judged]:
    """A prediction against the records of a cell."""
    found = []
    for figure in SPEEDS[result.cell.workload.kind] if result.compared else ():
        predicted, measured = getattr(prediction, figure), result.estimate(figure)
        if predicted is not None and measured is not None and measured.median > 0:
            found.append(Judged(result, figure, predicted, measured, prediction.factor))
    peaks = result.peak_by_rank()
    if prediction.peak_memory_bytes is not None and peaks and max(peaks) > 0:
        peak = Estimate(max(peaks), max(peaks), max(peaks), 1)
        found.append(Judged(result, MEMORY, prediction.peak_memory_bytes, peak, None))
    return found


def error_groups(study: StudyResult, judged: Sequence[Judged]) -> list[ErrorGroup]:
    """By kind of workload every figure, then by experiment the rate that it is judged by."""
    groups: dict[tuple[str, Figure], list[Judged]] = {}
    for item in judged:
        groups.setdefault((item.result.cell.workload.kind, item.figure), []).append(item)
    rates = {item.result.key: item for item in judged if _is_headline(item)}
    by_experiment: dict[tuple[str, Figure], list[Judged]] = {}
    for experiment in study.plan.experiments:
        for key in dict.fromkeys(point.cell for point in experiment.points):
            if key in rates:
                place = (study.title(experiment), rates[key].figure)
                by_experiment.setdefault(place, []).append(rates[key])
    found = [_group(f"all {kind} cells", figure, items) for (kind, figure), items in groups.items()]
    return found + [_group(name, figure, items) for (name, figure), items in by_experiment.items()]


def headline(judged: Iterable[Judged]) -> list[Judged]:
    """Those of the rate that each workload is judged by."""
    return [item for item in judged if _is_headline(item)]


def summary(judged: Sequence[Judged]) -> ErrorGroup | None:
    """All rates together; None where there is none."""
    rates = headline(judged)
    return _group("all cells", rates[0].figure, rates) if rates else None


def unjudged(study: StudyResult, judged: Sequence[Judged]) -> Counter[str]:
    """Reason -> how many cells have no rate to hold against a prediction for it."""
    done = {item.result.key for item in headline(judged)}
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
    if not result.compared:
        return ANSWERS
    if getattr(prediction, HEADLINES[result.cell.workload.kind]) is None:
        return prediction.reason or "no reason is given"
    return f"not measured ({result.status.replace('_', ' ')})"


def _is_headline(item: Judged) -> bool:
    return item.figure == HEADLINES[item.result.cell.workload.kind]


def _group(name: str, figure: Figure, items: Sequence[Judged]) -> ErrorGroup:
    errors = [item.error for item in items]
    stated = [item.within for item in items if item.within is not None]
    p90 = float(np.quantile(errors, 0.9))
    return ErrorGroup(name, figure, len(items), median(errors), p90, max(errors), sum(stated), len(stated))
