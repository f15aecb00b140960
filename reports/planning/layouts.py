"""Layouts chosen by prediction: the complete ranking, the measured layouts, and the predicted rank of the winner.

result = layout_ranking(study, experiment)
layouts_sentence(result), layouts_table(result), layouts_lines(result)
"""

from collections import Counter
from dataclasses import dataclass

from configs.plans.plan import ConsideredLayout, PlannedExperiment
from reports.numbers.statistics import Estimate, ties
from reports.planning.accuracy import JudgedPrediction, judge_prediction
from reports.planning.text import signed
from reports.reading.load import CellResult, StudyResult
from reports.tables import first_rows
from reports.text import (
    UNKNOWN,
    Table,
    escaped,
    estimate_cell,
    estimate_text,
    joined,
    mebibytes,
    not_apart,
    number,
    plural,
)


@dataclass(frozen=True)
class RankedLayout:
    """A layout with its place in the prediction, counted from 1; `result` is None where it is not measured."""

    place: int
    candidate: ConsideredLayout
    result: CellResult | None
    judged: JudgedPrediction | None

    @property
    def measured(self) -> Estimate | None:
        """The rate that it was measured at."""
        return None if self.result is None else self.result.estimate("throughput")


@dataclass(frozen=True)
class LayoutRanking:
    """All candidates, the one predicted best first."""

    unit: str
    placed: tuple[RankedLayout, ...]

    @property
    def chosen(self) -> list[RankedLayout]:
        """Those that the study measures."""
        return [item for item in self.placed if item.result is not None]

    @property
    def best(self) -> RankedLayout | None:
        """The fastest as measured."""
        known = [(item.measured.median, item) for item in self.placed if item.measured is not None]
        return max(known, key=lambda pair: pair[0])[1] if known else None

    @property
    def ranked(self) -> int:
        """How many candidates were predicted to fit, with a rate."""
        return sum(_rate(item.candidate) is not None and item.candidate.prediction.fits is not False
                   for item in self.placed)  # fmt: skip


def layout_ranking(study: StudyResult, experiment: PlannedExperiment) -> LayoutRanking:
    """The candidates of an experiment beside their records."""
    placed = []
    for place, candidate in enumerate(experiment.candidates, 1):
        result = study.cells[candidate.cell] if candidate.cell is not None else None
        judged = None
        if result is not None:
            figure = result.kind.throughput
            found = judge_prediction(result, candidate.prediction)
            judged = next((item for item in found if item.figure == figure), None)
        placed.append(RankedLayout(place, candidate, result, judged))
    return LayoutRanking(study.cells[experiment.points[0].cell].unit, tuple(placed))


def layouts_sentence(result: LayoutRanking) -> str:
    """Where the best measured layout stood in the prediction."""
    best, chosen = result.best, result.chosen
    if best is None:
        verb = "was" if len(chosen) == 1 else "were"
        return f"No layout has a figure; {plural(len(chosen), 'layout')} {verb} to be measured."
    measured = [item for item in chosen if item.measured is not None]
    assert best.measured is not None
    text = f"The best measured layout, {best.candidate.label}, gives {estimate_text(best.measured, result.unit)}"
    text += f"{not_apart(_tied(best, measured))}. "
    if _rate(best.candidate) is None:
        return f"{text}It has no prediction, so it has no place in the ranking."
    predicted = [item for item in measured if _rate(item.candidate) is not None]
    among = [item.place for item in predicted].index(best.place) + 1
    text += f"It was number {best.place} of {result.ranked} in the prediction"
    if len(predicted) == 1:
        which = "that was measured" if len(measured) == 1 else "of these that was measured"
        return f"{text}, and the only one {which}, so the order of the prediction is not tested."
    which = "that were measured" if len(measured) == len(predicted) else "of these that were measured"
    text += f", number {among} of the {len(predicted)} {which}"
    return f"{text}. {_orders(predicted)}"


def _tied(best: RankedLayout, measured: list[RankedLayout]) -> list[str]:
    """The layouts that the best is not told apart from."""
    others = [(item.candidate.label, item.result) for item in measured if item is not best and item.result is not None]
    assert best.result is not None
    values = [result.values("throughput") for _, result in others]
    return [others[index][0] for index in ties(best.result.values("throughput"), values, best.result.confidence)]


def _orders(measured: list[RankedLayout]) -> str:
    """How many pairs stand in the order that was predicted; each has a prediction."""
    pairs = [(one, two) for index, one in enumerate(measured) for two in measured[index + 1 :]]
    right = sum(
        one.measured.median >= two.measured.median
        for one, two in pairs
        if one.measured is not None and two.measured is not None
    )
    return f"Of {plural(len(pairs), 'pair')} of measured layouts {right} came out in the order that was predicted."


def layouts_lines(result: LayoutRanking) -> list[str]:
    """What was not measured, by reason, each reason with how many."""
    reasons: Counter[str] = Counter()
    first: dict[str, str] = {}
    for item in result.placed:
        if item.candidate.reason is not None:
            why = _short(item.candidate)
            reasons[why] += 1
            first.setdefault(why, item.candidate.label)
    lines = []
    best, rate = result.best, None
    if best is not None and best.judged is not None:
        rate = best.judged.predicted
    ahead = [item for item in result.placed if _ahead(item, rate)]
    if ahead:
        names = [item.candidate.label for item in ahead]
        said = joined([*names[:3], f"{len(names) - 3} more"] if len(names) > 3 else names)
        lines.append(f"Predicted faster than the best measured one, and not measured: {said}.")
    lines += [
        f"Predicted, not measured ({plural(count, 'layout')}, the first {first[why]}): {why}."
        for why, count in reasons.most_common()
    ]
    return lines


def _ahead(item: RankedLayout, rate: float | None) -> bool:
    own = _rate(item.candidate)
    fits = item.candidate.prediction.fits is not False
    return item.result is None and fits and rate is not None and own is not None and own > rate


def _short(candidate: ConsideredLayout) -> str:
    """Layouts that do not fit are one group, whatever each lacks."""
    return "does not fit" if candidate.prediction.fits is False else candidate.reason or ""


def layouts_table(result: LayoutRanking) -> Table:
    """One row for each layout, in the order of the prediction."""
    columns = (
        "place",
        "layout",
        f"{result.unit}, predicted",
        "stated factor",
        f"{result.unit}, measured (interval)",
        "error",
        "memory predicted, MiB, fullest rank",
        "fits",
        "state",
    )
    rows = tuple(_row(item) for item in result.placed)
    return first_rows(Table(columns, rows, text_columns=2).without_empty_columns(), where="plan.json")


def _row(item: RankedLayout) -> tuple[str, ...]:
    prediction, result = item.candidate.prediction, item.result
    if result is not None:
        state = "measured" if item.measured else result.status.replace("_", " ")
    else:
        state = f"not measured: {escaped(item.candidate.reason or '')}"
    return (
        str(item.place),
        escaped(item.candidate.label),
        number(_rate(item.candidate)),
        number(prediction.factor, 2),
        estimate_cell(item.measured),
        signed(item.judged),
        mebibytes(prediction.peak_memory_bytes),
        UNKNOWN if prediction.fits is None else "yes" if prediction.fits else "no",
        state,
    )


def _rate(candidate: ConsideredLayout) -> float | None:
    return candidate.prediction.throughput
