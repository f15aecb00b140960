"""Tables and sentences that compare predictions with measurements."""

import re
from collections.abc import Iterable

from configs.common.files.reading import MIB
from configs.plans.prediction import Prediction
from reports.planning.accuracy import (
    MEMORY,
    ErrorGroup,
    JudgedPrediction,
    PredictedFigure,
    accuracy_headline,
    accuracy_summary,
    corrections,
    unjudged,
)
from reports.reading.load import CellResult, StudyResult
from reports.tables import first_rows
from reports.text import UNKNOWN, Table, escaped, estimate_cell, joined, mebibytes, number, percent, plural

UNITS: dict[PredictedFigure, tuple[str, float]] = {
    "tokens_per_second": ("tokens/s", 1.0),
    "embeddings_per_second": ("embeddings/s", 1.0),
    "items_per_second": ("items/s", 1.0),
    "step_seconds": ("ms a step", 1000.0),
    "ttft_seconds": ("ms TTFT", 1000.0),
    "time_per_output_token_seconds": ("ms TPOT", 1000.0),
    "peak_memory_bytes": ("MiB at the peak of the fullest rank", 1 / MIB),
}
"""Figure -> its unit in words, and what to multiply it with."""

NOMINAL = 0.9
"""The share of cells that a stated factor is to hold (configs.plans.prediction)."""

NO_PREDICTIONS = "The plan of this run holds no predictions: it was made by a version that made none."


def prediction_sentence(study: StudyResult, judged: list[JudgedPrediction]) -> str:
    """How far off the planner was."""
    if not study.plan.predictions:
        return NO_PREDICTIONS
    found = accuracy_summary(judged)
    if found is None:
        return "No cell has both a prediction and a measurement of its rate, so the planner is not judged."
    text = (
        f"The planner's rates were off by {percent(found.median, 2)} in the median of {plural(found.cells, 'cell')} "
        f"(P90 {percent(found.p90, 2)}, worst {percent(found.worst, 2)})"
    )
    if found.stated:
        verb = "lies" if found.within == 1 else "lie"
        holds = f"{found.within} of {found.stated} {verb} within the factor that it stated beforehand"
        text += f"; {holds}, of which {percent(NOMINAL, 2)} should"
    over = [item for item in accuracy_headline(judged) if item.ratio > 1]
    way = "too fast" if len(over) * 2 > found.cells else "too slow"
    most = max(len(over), found.cells - len(over))
    return f"{text}. {most} of {found.cells} {'was' if most == 1 else 'were'} predicted {way}."


def prediction_lines(study: StudyResult, judged: list[JudgedPrediction]) -> list[str]:
    """The correction in force, where the hardware's figures come from, and the cells that are not judged."""
    if not study.plan.predictions:
        return []
    lines = [_correction(kind, found) for kind, found in corrections(study).items()]
    if not lines:
        lines.append("No correction was in force: nothing was learnt from past records of this hardware.")
    stand_on = sources(prediction.basis for prediction in study.plan.predictions.values())
    if stand_on:
        lines.append(f"The hardware's figures: {'; '.join(stand_on)}.")
    left = unjudged(study, judged)
    total = sum(left.values())
    if total:
        reasons = "; ".join(f"{count:,}: {reason}" for reason, count in left.most_common())
        lines.append(f"{plural(total, 'cell')} of {len(study.cells):,} not judged by {_a_rate(total)}. {reasons}.")
    return lines


def sources(bases: Iterable[str]) -> list[str]:
    """Distinct parts of what predictions stand on; those that differ in one number only are said once, with each.

    `measured here with 1 of 2 cores busy`, `... with 2 of 2 ...` -> `measured here with 1 and 2 of 2 cores busy`.
    """
    numbers: dict[tuple[str, str], list[str]] = {}
    for part in dict.fromkeys(part for basis in bases for part in basis.split("; ") if part):
        found = re.search(r"(?<= )\d+(?= )", part)
        start, end = found.span() if found else (len(part), len(part))
        numbers.setdefault((part[:start], part[end:]), []).append(part[start:end])
    return [
        before + joined(sorted(found, key=lambda text: int(text or 0))) + after
        for (before, after), found in numbers.items()
    ]


def _a_rate(total: int) -> str:
    return "its rate" if total == 1 else "their rates"


def _correction(kind: str, found: list[Prediction]) -> str:
    """By how much, learnt from how many records."""
    times = sorted({prediction.correction for prediction in found if prediction.correction is not None})
    records = sorted({prediction.learnt_from for prediction in found})
    size = number(times[0]) if len(times) == 1 else f"{number(times[0])} to {number(times[-1])}"
    count = f"{records[0]:,}" if len(records) == 1 else f"{records[0]:,} to {records[-1]:,}"
    noun = "record" if records[-1] == 1 else "records"
    return (
        f"{kind}: predicted times were multiplied by {size}, learnt from {count} past {noun} of this hardware "
        f"({plural(len(found), 'cell')})."
    )


def error_table(groups: list[ErrorGroup]) -> Table:
    """The planner's own errors."""
    columns = ("of", "figure", "cells", "median error", "P90", "worst", "within the stated factor")
    rows = tuple(
        (
            escaped(group.name),
            group.unit or UNITS[group.figure][0],
            f"{group.cells:,}",
            percent(group.median, 2),
            percent(group.p90, 2),
            percent(group.worst, 2),
            f"{group.within:,} of {group.stated:,} ({percent(group.within / group.stated, 2)})"
            if group.stated
            else UNKNOWN,
        )
        for group in groups
    )
    return first_rows(Table(columns, rows, text_columns=2).without_empty_columns())


def cell_table(study: StudyResult, judged: list[JudgedPrediction]) -> Table | None:
    """One row for each cell of which something was predicted: rate and memory, as predicted and as measured.

    None: no such cell. Why the others have no prediction is told once for all of them (`prediction_lines`).
    """
    by_cell: dict[str, dict[PredictedFigure, JudgedPrediction]] = {}
    for item in judged:
        by_cell.setdefault(item.result.key, {})[item.figure] = item
    predicted = [result for result in study.cells.values() if result.kind.compared and _is_predicted(study, result)]
    if not predicted:
        return None
    rows = [_row(study, result, by_cell.get(result.key, {})) for result in predicted]
    columns = (
        "model",
        "cell",
        "rate",
        "predicted",
        "measured, median (interval)",
        "error",
        "stated factor",
        "within it",
        "memory predicted, MiB",
        "measured, MiB",
        "error of memory",
        "why not",
    )
    return first_rows(Table(columns, tuple(rows), text_columns=3).without_empty_columns())


def _is_predicted(study: StudyResult, result: CellResult) -> bool:
    prediction = study.plan.predictions.get(result.key)
    if prediction is None:
        return False
    return getattr(prediction, result.kind.throughput) is not None or prediction.peak_memory_bytes is not None


def _row(study: StudyResult, result: CellResult, found: dict[PredictedFigure, JudgedPrediction]) -> tuple[str, ...]:
    figure = result.kind.throughput
    prediction = study.plan.predictions.get(result.key)
    rate, memory = found.get(figure), found.get(MEMORY)
    predicted = None if prediction is None else getattr(prediction, figure)
    peaks = result.peak_by_rank()
    reason = None if rate is not None or prediction is None else prediction.reason
    return (
        escaped(result.model),
        escaped(result.name),
        result.unit,
        number(predicted),
        estimate_cell(result.estimate(figure)),
        signed(rate),
        UNKNOWN if prediction is None else number(prediction.factor, 2),
        UNKNOWN if rate is None or rate.within is None else "yes" if rate.within else "**no**",
        mebibytes(None if prediction is None else prediction.peak_memory_bytes),
        mebibytes(max(peaks) if peaks else None),
        signed(memory),
        escaped(reason) if reason else UNKNOWN,
    )


def signed(item: JudgedPrediction | None) -> str:
    """Predicted against measured: `+4.1 %` is too much."""
    return UNKNOWN if item is None else f"{round(100 * (item.ratio - 1), 1) + 0.0:+,.1f} %"  # -0.0 + 0.0 is 0.0
